"""Methods that exchange gradients at every step: plain sums, sums by groups, and compressed ones.

Sources: CNTK's manual and Seide et al. 2014 (1-bit, two levels), Lin et al. 2018 (DGC), Vogels et al. 2019 (PowerSGD),
Alistarh et al. 2017 (QSGD), Wen et al. 2017 (TernGrad).
"""

from __future__ import annotations

import numpy as np

from tests.reference.sync_problem import weighted_mean


def all_reduce_sgd(w, batches, gradient, optimizer):
    """Gradients are averaged with the weights of their samples; then all workers take the same step."""
    for parts in batches:
        counts = [len(x) for x, _ in parts]
        w = optimizer.step(w, weighted_mean([gradient(w, x, y) for x, y in parts], counts))
    return w


def one_machine(w, batches, gradient, optimizer):
    """One machine on the union of the minibatches."""
    for parts in batches:
        x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
        w = optimizer.step(w, gradient(w, x, y))
    return w


def sum_by_groups(vectors, group):
    """Sum within groups, then the leaders' sums, then back: sums travel, never means of means."""
    leaders = [sum(vectors[i : i + group]) for i in range(0, len(vectors), group)]
    return sum(leaders)


def hierarchical_sgd(w, batches, gradient, optimizer, group):
    for parts in batches:
        sums = [len(x) * gradient(w, x, y) for x, y in parts]
        w = optimizer.step(w, sum_by_groups(sums, group) / sum(len(x) for x, _ in parts))
    return w


def one_bit(u):
    """The decoded bits of one bucket: the mean of the values from 0 on, and the mean of those below.  Both are sent in
    single precision."""
    high = u >= 0
    up = np.float32(u[high].mean()) if high.any() else 0.0
    down = np.float32(u[~high].mean()) if (~high).any() else 0.0
    return np.where(high, float(up), float(down))


def by_buckets(code, u, bucket):
    return np.concatenate([code(u[i : i + bucket]) for i in range(0, len(u), bucket)])


def one_bit_sgd(w, batches, gradient, optimizer, bucket):
    """Workers quantise gradient + residual; the owner of a stripe of buckets quantises the mean, plus its own residual.

    A stripe is whole buckets, so all stripes together are one vector here, and so are the owners' residuals.
    """
    residuals = [np.zeros_like(w) for _ in batches[0]]
    of_owners = np.zeros_like(w)
    for parts in batches:
        decoded = []
        for i, (x, y) in enumerate(parts):
            u = gradient(w, x, y) + residuals[i]
            decoded.append(by_buckets(one_bit, u, bucket))
            residuals[i] = u - decoded[i]
        u = weighted_mean(decoded, [len(x) for x, _ in parts]) + of_owners
        sent = by_buckets(one_bit, u, bucket)
        of_owners = u - sent
        w = optimizer.step(w, sent)
    return w


def largest(u, k):
    """The k largest values, sent in single precision, and zeros."""
    kept = np.argsort(-np.abs(u), kind="stable")[:k]
    sent = np.zeros_like(u)
    sent[kept] = np.float32(u[kept])
    return sent, kept


def top_k_sgd(w, batches, gradient, optimizer, ratio):
    residuals = [np.zeros_like(w) for _ in batches[0]]
    k = max(1, int(ratio * len(w)))
    for parts in batches:
        messages = []
        for i, (x, y) in enumerate(parts):
            u = gradient(w, x, y) + residuals[i]
            messages.append(largest(u, k)[0])
            residuals[i] = u - messages[i]
        w = optimizer.step(w, weighted_mean(messages, [len(x) for x, _ in parts]))
    return w


def dgc(w, batches, gradient, *, lr, ratio, momentum, nesterov=False, clip=None, ratios=()):
    """Momentum correction, masking, local clipping, and a warm-up with other ratios for the first messages."""
    workers = len(batches[0])
    u = [np.zeros_like(w) for _ in range(workers)]
    v = [np.zeros_like(w) for _ in range(workers)]
    for step, parts in enumerate(batches):
        k = max(1, int((ratios[step] if step < len(ratios) else ratio) * len(w)))
        messages = []
        for i, (x, y) in enumerate(parts):
            g = gradient(w, x, y)
            if clip is not None:
                g = g * min(1.0, clip / np.sqrt(workers) / np.linalg.norm(g))
            if nesterov:
                u[i] = momentum * (u[i] + g)
                v[i] = v[i] + u[i] + g
            else:
                u[i] = momentum * u[i] + g
                v[i] = v[i] + u[i]
            sent, kept = largest(v[i], k)
            messages.append(sent)
            v[i] = v[i] - sent
            u[i][kept] = 0.0
        w = w - lr * weighted_mean(messages, [len(x) for x, _ in parts])
    return w


def power_sgd(w, batches, gradient, optimizer, shape, q):
    """The first rows x columns values are a matrix, sent as two factors; the rest is sent as it is.

    `q` (columns x rank) is the first guess.  Each worker keeps what the common basis P leaves out of its own matrix.
    """
    rows, columns = shape
    residuals = [np.zeros(shape) for _ in batches[0]]
    for parts in batches:
        counts = [len(x) for x, _ in parts]
        gradients = [gradient(w, x, y) for x, y in parts]
        matrices = [g[: rows * columns].reshape(shape) + r for g, r in zip(gradients, residuals, strict=True)]
        p, _ = np.linalg.qr(weighted_mean([m @ q for m in matrices], counts))
        residuals = [m - p @ (p.T @ m) for m in matrices]
        q = weighted_mean([m.T @ p for m in matrices], counts)
        rest = weighted_mean([g[rows * columns :] for g in gradients], counts)
        w = optimizer.step(w, np.concatenate([(p @ q.T).ravel(), rest]))
    return w


def qsgd_moments(v, levels, norm):
    """The mean and the variance of what a random rounding to `levels` levels of the norm decodes to."""
    scale = np.abs(v).max() if norm == "max" else np.linalg.norm(v)
    part = levels * np.abs(v) / scale % 1
    return v, (scale / levels) ** 2 * part * (1 - part)


def terngrad_moments(g, clip):
    """Values are -s, 0 or s with the right mean; s is the largest value, after clipping to `clip` deviations from 0."""
    if clip is not None:
        bound = clip * np.sqrt((g**2).mean())
        g = np.clip(g, -bound, bound)
    s = np.abs(g).max()
    return g, s * np.abs(g) - g**2
