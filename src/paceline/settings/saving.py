"""A model in a safetensors file, written as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn


def check_writable(path: Path, key: str) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ValueError(f"{key} = '{path}': it is a folder; give the name of a file")
    if not folder.is_dir():
        raise ValueError(f"{key} = '{path}': there is no folder {folder}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{key} = '{path}': it is there and cannot be written")
    partial = _partial(path)
    try:
        partial.open("ab").close()
        partial.unlink(missing_ok=True)  # Another rank may have removed it.
    except OSError as error:
        raise ValueError(f"{key} = '{path}': it cannot be written: {error.strerror}") from None


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def save_model(model: nn.Module, path: Path) -> None:
    """Write a model's parameters and buffers.  Tensors that the model has under several names are written once."""
    from safetensors.torch import save_file

    tensors = {name: t.detach().contiguous().clone() for name, t in model.state_dict(keep_vars=True).items()}
    shared: dict[int, str] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        first = shared.setdefault(id(t), name)
        if first != name:
            del tensors[name]
    partial = _partial(path)
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, path)
