"""Write the lists of strategies and codecs: `strategies/__init__.py` and `codecs/__init__.py`.

A new strategy or codec is one file; `make format` then adds it here, and `make check` fails if that was forgotten.
The files are plain imports, so that type checkers and readers find every name.

    python -m tools.exports           writes the files
    python -m tools.exports --check   exit code 1 if a file is not up to date
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
NOTE = "# Written by `python -m tools.exports`, which `make format` runs.  Do not edit."


def classes(module: str, base: type) -> list[str]:
    """The final classes of a module: each dataclass that is no base is a strategy, or a codec."""
    found = vars(importlib.import_module(module)).values()
    own = [c for c in found if isinstance(c, type) and c.__module__ == module and issubclass(c, base)]
    final = [c for c in own if "__dataclass_params__" in vars(c) and not inspect.isabstract(c)]
    return [c.__name__ for c in final if not c.__name__.startswith("_")]


def listing(folder: str, doc: str, base: type, constant: str, more: dict[str, list[str]]) -> str:
    """The text of a folder's `__init__.py`: imports, the tuple of all classes, and `__all__`."""
    modules: dict[str, list[str]] = {}
    for path in sorted((PACKAGE / folder).glob("*.py")):
        module = f"paceline.{folder}.{path.stem}"
        if not path.name.startswith("_") and (found := classes(module, base)):
            modules[module] = found
    members = [name for found in modules.values() for name in found]
    imports = {module: sorted(names) for module, names in [*modules.items(), *more.items()]}
    lines = [f'"""{doc}"""', "", NOTE, ""]
    lines += [f"from {module} import {', '.join(names)}" for module, names in sorted(imports.items())]
    lines += ["", f"{constant}: tuple[type[{base.__name__}], ...] = ("]
    lines += [f"    {name}," for name in members]
    lines += [")", "", "__all__ = ["]
    public = {constant, *members, *(name for names in more.values() for name in names)}
    lines += [f'    "{name}",' for name in sorted(public)]
    return "\n".join([*lines, "]", ""])


def files() -> dict[Path, str]:
    from paceline.codecs.codec import Codec
    from paceline.strategy import Strategy

    strategy = {"paceline.strategy": ["Strategy"]}
    codec = {"paceline.codecs.codec": ["Codec", "CodecState", "ErrorFeedback", "Unencodable"]}
    return {
        PACKAGE / "strategies" / "__init__.py": listing(
            "strategies", "Training methods, one paper a file.", Strategy, "STRATEGIES", strategy
        ),
        PACKAGE / "codecs" / "__init__.py": listing("codecs", "Wire formats, one a file.", Codec, "CODECS", codec),
    }


def formatted(path: Path, text: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    for command in (["check", "--fix", "--quiet", "--select", "I,RUF022"], ["format", "--quiet"]):
        done = subprocess.run(
            [str(ruff), *command, "--stdin-filename", str(path), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return text


def main() -> None:
    outdated: list[str] = []
    for path, text in files().items():
        new = formatted(path, text)
        if path.read_text() != new:
            outdated.append(str(path.relative_to(PACKAGE.parents[1])))
            if "--check" not in sys.argv:
                path.write_text(new)
    if outdated and "--check" in sys.argv:
        raise SystemExit(f"not up to date: {', '.join(outdated)}; run `make format`")


if __name__ == "__main__":
    main()
