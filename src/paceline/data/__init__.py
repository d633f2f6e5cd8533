"""The optical handwritten digits of E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, CC BY 4.0).

1,797 images of 8x8 pixels, the test part of the original; scikit-learn distributes the same ones.  They are small
enough to be part of the package, and real enough that a worse method has a worse accuracy.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

TEST_SAMPLES = 360


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pixels and labels for training, then those for testing: always the same 1,437 and 360 images.

    >>> x, y, test_x, test_y = digits()
    >>> x.shape, test_x.shape, float(x.max()), y.dtype
    (torch.Size([1437, 64]), torch.Size([360, 64]), 1.0, torch.int64)
    >>> test_y.bincount().tolist()
    [31, 35, 39, 33, 44, 29, 40, 40, 28, 41]
    """
    with as_file(files(__name__) / "digits.npz") as path, np.load(path, allow_pickle=False) as stored:
        pixels = stored["pixels"]
        labels = stored["labels"]
    # The file has the original order, in which neighbours are by the same writer, so shuffle.  RandomState gives the
    # same numbers in all versions of numpy; torch promises no such thing.
    order = np.random.RandomState(0).permutation(len(labels))
    x = torch.from_numpy(pixels[order].astype(np.float32) / np.float32(16.0))
    y = torch.from_numpy(labels[order].astype(np.int64))
    return x[:-TEST_SAMPLES], y[:-TEST_SAMPLES], x[-TEST_SAMPLES:], y[-TEST_SAMPLES:]
