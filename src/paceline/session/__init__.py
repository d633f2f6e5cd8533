"""attach, train and ddp_hook: strategies on real processes."""

import warnings

import torch

NEWEST_TORCH = (2, 13)  # The newest that this version was tested with; pyproject.toml says the same.

if tuple(int(part) for part in torch.__version__.split(".")[:2]) > NEWEST_TORCH:
    warnings.warn(
        f"torch {torch.__version__} is newer than {'.'.join(map(str, NEWEST_TORCH))}, the newest that this version of "
        "paceline was tested with",
        stacklevel=2,
    )
