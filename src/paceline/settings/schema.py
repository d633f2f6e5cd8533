"""The JSON schema of settings files, made from the dataclasses that decode them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from paceline.checked import Checked, settings_of, spelled
from paceline.models import MODELS
from paceline.registry import KINDS
from paceline.settings.decode import dashed
from paceline.settings.optimizers import OPTIMIZERS
from paceline.settings.read import OPEN
from paceline.settings.recipe import DATA, LOSSES
from paceline.settings.sections import Settings
from paceline.training.length import Length

Json = dict[str, Any]
SCALARS: dict[Any, Json] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    Length: {"type": "string", "pattern": r"^\s*\d[\d_]*\.?\d*(e\d+)?\s*(step|sample|epoch)s?\s*$"},
}
NAMES = {"model": MODELS, "data": DATA, "optimizer": OPTIMIZERS, "loss": LOSSES}


def settings_schema() -> Json:
    """The schema of a whole file."""
    made = _Schema()
    top = made.record(Settings)
    for name in OPEN:
        table = top["properties"][name]
        table["additionalProperties"] = True  # Arguments of the function that the name means.
        del table["properties"]["arguments"]
        table["properties"]["name"] = {"type": "string", "examples": list(NAMES[name])}
        top["properties"][name] = {"anyOf": [dict(table["properties"]["name"]), table]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of paceline",
        **top,
        "$defs": made.definitions,
    }


class _Schema:
    """Schemas of types; those of strategies, codecs, rules and gates are definitions, since they contain each other."""

    def __init__(self) -> None:
        self.definitions: Json = {}

    def record(self, cls: type, name: str | None = None) -> Json:
        kinds = settings_of(cls)
        properties: Json = {} if name is None else {"name": {"const": name}}
        required = [] if name is None else ["name"]
        for f in dataclasses.fields(cls):
            if f.name in kinds:
                properties[dashed(f.name)] = self.type(kinds[f.name])
                if f.default is f.default_factory is dataclasses.MISSING and f.name != "arguments":
                    required.append(dashed(f.name))
        doc = (cls.__doc__ or "").strip().splitlines()
        return {
            "type": "object",
            "description": doc[0] if doc else cls.__name__,
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def type(self, kind: Any) -> Json:
        options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        made = [self._option(option) for option in options if option is not type(None)]
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _option(self, kind: Any) -> Json:
        if kind in SCALARS:
            return dict(SCALARS[kind])
        if get_origin(kind) is Literal:
            return {"enum": list(get_args(kind))}
        if get_origin(kind) in (tuple, list, Sequence):
            items = [k for k in get_args(kind) if k is not Ellipsis]
            return {"type": "array", "items": self.type(items[0]) if len(items) == 1 else {}}
        if isinstance(kind, type) and issubclass(kind, Checked):
            return self._kind(kind.KIND)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self.record(kind)
        return {}

    def _kind(self, kind: str) -> Json:
        if kind not in self.definitions:
            self.definitions[kind] = {}
            names = [spelled(cls) for cls in KINDS[kind]]
            tables = [self.record(cls, spelled(cls)) for cls in KINDS[kind]]
            self.definitions[kind] = {"anyOf": [{"type": "string", "examples": names}, *tables]}
        return {"$ref": f"#/$defs/{kind}"}
