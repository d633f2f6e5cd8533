"""Two small problems in numpy, with their gradients written out, and torch's optimizers in a few lines.

`batches[k][i]` is worker i's part (x, y) of the minibatch of step k.
"""

from __future__ import annotations

import numpy as np


def logistic_loss(w, x, y):
    """The mean of log(1 + exp(-y w.x)), for y = +1 or -1."""
    return np.logaddexp(0, -y * (x @ w)).mean()


def logistic_gradient(w, x, y):
    return -(x * (y / (1 + np.exp(y * (x @ w))))[:, None]).mean(0)


def linear_loss(w, x, y):
    """Half of the squared error of y = W x + b, summed over outputs.  w is W by rows, then b."""
    outputs = y.shape[1]
    weight = w[:-outputs].reshape(outputs, -1)
    return 0.5 * ((x @ weight.T + w[-outputs:] - y) ** 2).sum(1).mean()


def linear_gradient(w, x, y):
    outputs = y.shape[1]
    weight = w[:-outputs].reshape(outputs, -1)
    error = (x @ weight.T + w[-outputs:] - y) / len(x)
    return np.concatenate([(error.T @ x).ravel(), error.sum(0)])


class Sgd:
    """w -= lr v, with v = momentum v + (g + decay w); Nesterov: w -= lr (g + momentum v)."""

    def __init__(self, lr, momentum=0.0, decay=0.0, nesterov=False):
        self.lr = lr
        self.momentum = momentum
        self.decay = decay
        self.nesterov = nesterov
        self.v = None

    def step(self, w, g, factor=1.0):
        g = g + self.decay * w
        self.v = g if self.v is None else self.momentum * self.v + g
        return w - factor * self.lr * (g + self.momentum * self.v if self.nesterov else self.v)

    def reset(self):
        self.v = None


class Adagrad:
    """Duchi et al. 2011: the rate of each value falls with the sum of its squared gradients."""

    def __init__(self, lr, eps=1e-10, decay=0.0):
        self.lr = lr
        self.eps = eps
        self.decay = decay
        self.squares = 0.0

    def step(self, w, g, factor=1.0):
        g = g + self.decay * w
        self.squares = self.squares + g * g
        return w - factor * self.lr * g / (np.sqrt(self.squares) + self.eps)


class AdamW:
    """Loshchilov and Hutter 2019, with torch's place for eps; with `l2` the decay of Adam, a part of the gradient."""

    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8, decay=0.01, l2=0.0):
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.decay = decay
        self.l2 = l2
        self.reset()

    def step(self, w, g, factor=1.0):
        self.t += 1
        g = g + self.l2 * w
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.s = b2 * self.s + (1 - b2) * g * g
        w = w * (1 - factor * self.lr * self.decay)
        return w - factor * self.lr * (self.m / (1 - b1**self.t)) / (np.sqrt(self.s / (1 - b2**self.t)) + self.eps)

    def reset(self):
        self.t = 0
        self.m = 0.0
        self.s = 0.0


def weighted_mean(vectors, counts):
    return sum(n * v for n, v in zip(counts, vectors, strict=True)) / sum(counts)
