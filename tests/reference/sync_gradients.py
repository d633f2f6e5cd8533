"""Methods that exchange gradients at every step: plain sums, sums by groups, and compressed ones.

Sources: CNTK's manual and Seide et al. 2014 (1-bit, two levels), Strom 2015 and DL4J (thresholds), Lin et al. 2018
(DGC), Vogels et al. 2019 (PowerSGD), Tang et al. 2021 (1-bit Adam).  What a message decodes to is in sync_codes.py.
"""

from __future__ import annotations

import numpy as np

from tests.reference.sync_codes import largest_of, only, threshold
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


def clipped_sgd(w, batches, gradient, optimizer, clip):
    """The mean gradient is scaled down to a norm of `clip`."""
    for parts in batches:
        g = weighted_mean([gradient(w, x, y) for x, y in parts], [len(x) for x, _ in parts])
        w = optimizer.step(w, g * min(1.0, clip / (np.linalg.norm(g) + 1e-6)))
    return w


def two_levels(w, batches, gradient, optimizer, code):
    """Workers quantise gradient + residual; the owner of a stripe quantises the mean, plus its own residual.

    `code(u)` is what a message with the values u decodes to.  A stripe is whole units of the code, so all stripes
    together are one vector here, and so are the owners' residuals.
    """
    residuals = [np.zeros_like(w) for _ in batches[0]]
    of_owners = np.zeros_like(w)
    for parts in batches:
        decoded = []
        for i, (x, y) in enumerate(parts):
            u = gradient(w, x, y) + residuals[i]
            decoded.append(code(u))
            residuals[i] = u - decoded[i]
        u = weighted_mean(decoded, [len(x) for x, _ in parts]) + of_owners
        sent = code(u)
        of_owners = u - sent
        w = optimizer.step(w, sent)
    return w


def gathered(w, batches, gradient, optimizer, code):
    """Every worker sends gradient + residual, encoded once, to all others."""
    residuals = [np.zeros_like(w) for _ in batches[0]]
    for parts in batches:
        messages = []
        for i, (x, y) in enumerate(parts):
            u = gradient(w, x, y) + residuals[i]
            messages.append(code(u))
            residuals[i] = u - messages[i]
        w = optimizer.step(w, weighted_mean(messages, [len(x) for x, _ in parts]))
    return w


def summed(w, batches, gradient, optimizer, half):
    """Every worker rounds its share of the mean to 16 bits, and the sums are rounded to 16 bits too.

    Powers of two only move the values into the range of the format.
    """
    for parts in batches:
        total = sum(len(x) for x, _ in parts)
        k = np.ceil(np.log2(total))
        sent = [half(gradient(w, x, y) * (len(x) / 2**k)) for x, y in parts]
        added = sent[0]
        for values in sent[1:]:
            added = half(added + values)
        w = optimizer.step(w, added * (2**k / total))
    return w


def strom_adaptive(w, batches, gradient, optimizer, *, tau, low, high, decay):
    """Strom 2015, with the threshold of each worker following the share of values that it sends, as in DL4J."""
    residuals = [np.zeros_like(w) for _ in batches[0]]
    taus = [tau for _ in batches[0]]
    for parts in batches:
        messages = []
        for i, (x, y) in enumerate(parts):
            u = gradient(w, x, y) + residuals[i]
            messages.append(threshold(u, taus[i]))
            residuals[i] = u - messages[i]
            share = np.count_nonzero(messages[i]) / len(u)
            taus[i] *= decay if share < low else 1 / decay if share > high else 1.0
        w = optimizer.step(w, weighted_mean(messages, [len(x) for x, _ in parts]))
    return w


def one_bit_adam(w, batches, gradient, *, lr, betas, eps, decay, warmup, code, factor_at):
    """Tang et al. 2021: AdamW for `warmup` steps; then the variance stays, and workers exchange their momentum by a
    code with feedback on two levels."""
    b1, b2 = betas
    m = np.zeros_like(w)
    v = np.zeros_like(w)
    residuals = [np.zeros_like(w) for _ in batches[0]]
    of_owners = np.zeros_like(w)
    for k, parts in enumerate(batches):
        counts = [len(x) for x, _ in parts]
        gradients = [gradient(w, x, y) for x, y in parts]
        if k < warmup:
            g = weighted_mean(gradients, counts)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            settled = v / (1 - b2 ** (k + 1))
        else:
            wanted = [b1 * m + (1 - b1) * g + r for g, r in zip(gradients, residuals, strict=True)]
            sent = [code(u) for u in wanted]
            residuals = [u - s for u, s in zip(wanted, sent, strict=True)]
            u = weighted_mean(sent, counts) + of_owners
            m = code(u)
            of_owners = u - m
        rate = lr * factor_at(k)
        w = w * (1 - rate * decay) - rate * (m / (1 - b1 ** (k + 1))) / (np.sqrt(settled) + eps)
    return w


def dgc(w, batches, gradient, *, lr, ratio, momentum, nesterov=False, masking=True, clip=None, ratios=()):
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
            kept = largest_of(v[i], k)
            sent = only(v[i], kept)
            messages.append(sent)
            v[i] = v[i] - sent
            if masking:
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
