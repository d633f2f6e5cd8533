"""Plain: a state as a tree that JSON can hold, and its tensors beside it.

A tree has lists, text, numbers, True, False and None as they are.  Everything else is a dict with one key that says
what it is: `{"dict": ...}`, `{"pairs": ...}` (a dict with other keys than text), `{"tuple": ...}`, `{"float": "nan"}`,
`{"tensor": name}`.  So a state comes back with the types that it had, and nothing in it is ever run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def flattened(value: Any) -> tuple[Any, Tensors]:
    """The tree of a value, and its tensors by name.

    >>> flattened({"lr": 0.1, "betas": (0.9, 0.99), 3: None})
    ({'pairs': [['lr', 0.1], ['betas', {'tuple': [0.9, 0.99]}], [3, None]]}, {})
    """
    tensors: Tensors = {}
    return _tree(value, "", tensors), tensors


def _tree(value: Any, path: str, tensors: Tensors) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        name = _new_name(path, tensors)
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, (list, tuple)):
        items = [_tree(v, f"{path}/{i}", tensors) for i, v in enumerate(cast("list[Any]", value))]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        if all(isinstance(key, str) for key, _ in entries):
            return {"dict": {key: _tree(v, f"{path}/{key}", tensors) for key, v in entries}}
        return {"pairs": [[_tree(key, path, tensors), _tree(v, f"{path}/{key}", tensors)] for key, v in entries]}
    raise ValueError(
        f"a checkpoint cannot hold {path.removeprefix('/') or 'this'}, of type {type(value).__name__}: it holds "
        "tensors, numbers, text, None, and lists, tuples and dicts of these"
    )


def _new_name(path: str, tensors: Tensors) -> str:
    name = path.removeprefix("/") or "value"
    count = 1
    while name in tensors:  # The keys 1 and "1" have the same path.
        count += 1
        name = f"{path.removeprefix('/')}~{count}"
    return name


def restored(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value of a tree; `tensor` gives a tensor by its name.

    >>> tree, tensors = flattened([1, (2, float("inf")), {"a": torch.ones(2)}, {0: "zero"}])
    >>> restored(tree, tensors.__getitem__)
    [1, (2, inf), {'a': tensor([1., 1.])}, {0: 'zero'}]
    """
    if isinstance(tree, list):
        return [restored(v, tensor) for v in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    [(kind, value)] = cast("dict[str, Any]", tree).items()
    match kind:
        case "dict":
            return {key: restored(v, tensor) for key, v in value.items()}
        case "pairs":
            return {_key(restored(key, tensor)): restored(v, tensor) for key, v in value}
        case "tuple":
            return tuple(restored(v, tensor) for v in value)
        case "float":
            return float(value)
        case "tensor":
            return tensor(value)
        case _:
            raise ValueError(f"the tree has {kind!r}, which this version of paceline does not know")


def _key(key: Any) -> Any:
    if isinstance(key, (list, dict, Tensor)):
        raise ValueError(f"the tree has a key of type {type(key).__name__}; keys are text, numbers and tuples")
    return key


def dtype_of(name: str) -> torch.dtype:
    """A dtype by the name that safetensors has for it.

    >>> dtype_of("BF16"), dtype_of("F64")
    (torch.bfloat16, torch.float64)
    """
    if name not in DTYPES:
        raise ValueError(f"there is no tensor type {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names that safetensors has for torch's types."""
