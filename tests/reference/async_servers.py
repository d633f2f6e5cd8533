"""Asynchronous SGD on a parameter server, and without one, in numpy: each method from its paper or manual.

A run is a list of events.  Worker j finishes its minibatch k at (k + 1) * seconds[j], if it never waits; what it then
sends arrives at once.  `gradient(w, j, k)` is the mean gradient of that minibatch, `rate(k)` the factor on the learning
rate at step k.  Every function returns the final model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Vector = np.ndarray[Any, np.dtype[np.float64]]
Gradient = Callable[[Vector, int, int], Vector]
Rate = Callable[[int], float]


def constant(step: int) -> float:
    return 1.0


def finished(seconds: Sequence[float], steps: int) -> Iterator[tuple[int, int]]:
    """The worker and the step of every minibatch, in the order in which workers finish them."""
    ends = sorted(((k + 1) * s, j, k) for j, s in enumerate(seconds) for k in range(steps))
    return ((j, k) for _, j, k in ends)


def served(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    optimizer: Callable[[], Any],
    rate: Rate = constant,
) -> Vector:
    """Asynchronous SGD: push the gradient, which the server's only optimizer applies at once; pull the model."""
    of_server = optimizer()
    read = [w for _ in seconds]
    for j, k in finished(seconds, steps):
        w = of_server.step(w, gradient(read[j], j, k), rate(k))
        read[j] = w
    return w


def in_turns(
    w: Vector, gradient: Gradient, seconds: Sequence[float], steps: int, *, lr: float, rate: Rate = constant
) -> Vector:
    """The server applies one gradient of each worker after the other, in a fixed order."""
    read = [w for _ in seconds]
    for k in range(steps):
        for j in range(len(seconds)):
            w = w - lr * rate(k) * gradient(read[j], j, k)
            read[j] = w
    return w


def by_clock(
    w: Vector, gradient: Gradient, seconds: Sequence[float], steps: int, *, lr: float, rate: Rate = constant
) -> Vector:
    """Updates become visible when every worker has sent its own: synchronous SGD."""
    for k in range(steps):
        w = w - lr * rate(k) * np.mean([gradient(w, j, k) for j in range(len(seconds))], axis=0)
    return w


def coded(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    code: Callable[[Vector], Vector],
    rate: Rate = constant,
) -> Vector:
    """Pushes are gradient + residual, encoded; a pull is the encoded difference to what the worker knows."""
    known = [w for _ in seconds]
    residual = [np.zeros_like(w) for _ in seconds]
    for j, k in finished(seconds, steps):
        u = gradient(known[j], j, k) + residual[j]
        sent = code(u)
        residual[j] = u - sent
        w = w - lr * rate(k) * sent
        known[j] = known[j] + code(w - known[j])
    return w


def from_one(staleness: int) -> float:
    return 1 / max(1, staleness)


def softsync(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    s: int,
    scale: Callable[[int], float] = from_one,
    rate: Rate = constant,
) -> Vector:
    """Zhang et al. 2016: the mean of every s gradients, each divided by its staleness from a staleness of 1 on.

    At the end the mean of the rest.  The factors of gradients that are applied together are averaged.
    """
    read = [(w, 0) for _ in seconds]
    version = 0
    held: list[Vector] = []
    factors: list[float] = []
    for j, k in finished(seconds, steps):
        value, at = read[j]
        held.append(gradient(value, j, k) * scale(version - at))
        factors.append(rate(k))
        if len(held) == s:
            w = w - lr * float(np.mean(factors)) * np.mean(held, axis=0)
            version += 1
            held, factors = [], []
        read[j] = (w, version)
    return w - lr * float(np.mean(factors)) * np.mean(held, axis=0) if held else w


def delay_compensated(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    lam: float,
    m: float | None = None,
    eps: float = 1e-7,
    rate: Rate = constant,
) -> Vector:
    """Zheng et al. 2017: DC-ASGD-c, or with the decay m of the mean square DC-ASGD-a."""
    backup = [w for _ in seconds]
    square = np.zeros_like(w)
    for j, k in finished(seconds, steps):
        g = gradient(backup[j], j, k)
        strength: float | Vector = lam
        if m is not None:
            square = m * square + (1 - m) * g * g
            strength = lam / np.sqrt(square + eps)
        w = w - lr * rate(k) * (g + strength * g * g * (w - backup[j]))
        backup[j] = w
    return w


def stale_synchronous(
    w: Vector, gradient: Gradient, seconds: Sequence[float], steps: int, *, lr: float, bound: int, rate: Rate = constant
) -> Vector:
    """Ho et al. 2013: a worker begins a step only if it is at most `bound` steps ahead of the slowest."""
    clock = [0 for _ in seconds]
    read = [w for _ in seconds]
    ends: dict[int, float] = {j: s for j, s in enumerate(seconds)}  # Of the workers that compute.
    waiting: list[int] = []
    while ends:
        j = min(ends, key=lambda j: ends[j])
        now = ends.pop(j)
        w = w - lr * rate(clock[j]) * gradient(read[j], j, clock[j])
        clock[j] += 1
        waiting.append(j)
        slowest = min((c for c in clock if c < steps), default=steps)  # A worker that has finished holds up no other.
        for i in [i for i in waiting if clock[i] < steps and clock[i] - slowest <= bound]:
            waiting.remove(i)
            read[i] = w
            ends[i] = now + seconds[i]
    return w


def downpour(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    local_lr: float,
    push: int,
    fetch: int,
    eps: float = 1e-10,
    rate: Rate = constant,
) -> Vector:
    """Dean et al. 2012: push the sum of every `push` gradients, fetch every `fetch` steps; Adagrad on the server."""
    x = [w for _ in seconds]
    total = [np.zeros_like(w) for _ in seconds]
    factors: list[list[float]] = [[] for _ in seconds]
    squares = np.zeros_like(w)
    for j, k in finished(seconds, steps):
        g = gradient(x[j], j, k)
        total[j] = total[j] + g
        factors[j].append(rate(k))
        x[j] = x[j] - local_lr * rate(k) * g
        if (k + 1) % push == 0 or k + 1 == steps:
            squares = squares + total[j] ** 2
            w = w - lr * float(np.mean(factors[j])) * total[j] / (np.sqrt(squares) + eps)
            total[j] = np.zeros_like(w)
            factors[j] = []
        if (k + 1) % fetch == 0:
            x[j] = w
    return w


def asgd(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    period: int,
    mu: float = 0.0,
    pipeline: bool = False,
    rate_of_minibatch: Rate = constant,
    share_of_exchange: Rate = constant,
    rate: Rate = constant,
) -> Vector:
    """CNTK's DataParallelASGD: local (momentum) SGD, push of the change, pull of the model.

    `rate_of_minibatch` is the factor on the learning rate at a worker's minibatch, counted from 0: its manual's ramp.
    `share_of_exchange` is the factor on what is pushed at a worker's exchange, counted from 1: its code's ramp.
    """
    x = [w for _ in seconds]
    base = [w for _ in seconds]
    fetched = [w for _ in seconds]
    v = [np.zeros_like(w) for _ in seconds]
    exchanges = [0 for _ in seconds]
    for j, k in finished(seconds, steps):
        v[j] = mu * v[j] + gradient(x[j], j, k)
        x[j] = x[j] - lr * rate(k) * rate_of_minibatch(k) * v[j]
        if (k + 1) % period == 0 or k + 1 == steps:
            exchanges[j] += 1
            w = w - share_of_exchange(exchanges[j]) * (base[j] - x[j])
            base[j] = fetched[j] if pipeline else w
            fetched[j] = w
            x[j] = base[j]
    return w


def staircase(coefficient: float, nb: int) -> Rate:
    """It rises by the coefficient every nb, up to 1."""
    return lambda passed: min(1.0, coefficient * (passed // nb + 1))


def hogwild(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    mu: float = 0.0,
    rate: Rate = constant,
) -> Vector:
    """Recht et al. 2011: workers read and write one shared vector; here no write is lost."""
    read = [w for _ in seconds]
    v = [np.zeros_like(w) for _ in seconds]
    for j, k in finished(seconds, steps):
        v[j] = mu * v[j] + gradient(read[j], j, k)
        w = w - lr * rate(k) * v[j]
        read[j] = w
    return w


def strom(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    tau: float,
    mu: float | None = None,
    rate: Rate = constant,
) -> Vector:
    """Strom 2015: every worker sends the values of gradient plus residual that reach tau, as +tau or -tau, to all.

    With `mu` it sends its own momentum steps instead, which contain the learning rate.
    """
    x = [w for _ in seconds]
    v = [np.zeros_like(w) for _ in seconds]
    residual = [np.zeros_like(w) for _ in seconds]
    inbox: list[list[Vector]] = [[] for _ in seconds]
    for j, k in finished(seconds, steps):
        update = gradient(x[j], j, k)
        factor = lr * rate(k)
        if mu is not None:
            v[j] = mu * v[j] + update
            update = factor * v[j]
            factor = 1.0
        residual[j] = residual[j] + update
        sent = tau * np.sign(residual[j]) * (np.abs(residual[j]) >= tau)
        residual[j] = residual[j] - sent
        for i in range(len(seconds)):
            inbox[i].append(factor * sent)
        for step in inbox[j]:
            x[j] = x[j] - step
        inbox[j] = []
    return x[0] - sum(inbox[0], np.zeros_like(w))


def ad_psgd(
    w: Vector, gradient: Gradient, seconds: Sequence[float], steps: int, *, lr: float, rate: Rate = constant
) -> Vector:
    """Lian et al. 2018, two workers: after a step a worker offers a copy of its model, and goes on.

    The other answers when its own step ends: it moves by half of the difference, and the first worker adds the other
    half to its model, whatever that is by then.  One offer of each is open at a time.  At the end the mean of both.
    """
    x = [w, w]
    inbox: list[list[tuple[str, Vector]]] = [[], []]
    is_open = [False, False]
    has_ended = [False, False]

    def read(j: int) -> None:
        for kind, values in inbox[j]:
            if kind == "offer":
                half = (x[j] - values) / 2
                x[j] = x[j] - half
                inbox[1 - j].append(("answer", half))
            else:
                x[j] = x[j] + values
                is_open[j] = False
        inbox[j] = []

    for j, k in finished(seconds, steps):
        x[j] = x[j] - lr * rate(k) * gradient(x[j], j, k)
        read(j)
        if not is_open[j]:
            is_open[j] = True
            inbox[1 - j].append(("offer", x[j]))
        has_ended[j] = k + 1 == steps
        while any(ended and box for ended, box in zip(has_ended, inbox, strict=True)):
            for i in (0, 1):
                if has_ended[i]:
                    read(i)
    return (x[0] + x[1]) / 2


def async_diloco(
    w: Vector,
    gradient: Gradient,
    seconds: Sequence[float],
    steps: int,
    *,
    lr: float,
    period: int,
    outer: Callable[[], Any],
    quorum: int,
    grace: float,
) -> Vector:
    """Decoupled DiLoCo, 2026: a worker pushes what `period` local steps have changed, and waits for the answer.

    The server waits for a quorum and then some time more, or for all that still train.  The mean is the gradient of the
    outer optimizer's step; then all that have pushed get the model.
    """
    of_server = outer()
    base = [w for _ in seconds]
    done = [0 for _ in seconds]
    ends = {j: period * s for j, s in enumerate(seconds)}  # Of the blocks of steps of the workers that train.
    held: dict[int, Vector] = {}
    until = np.inf
    while ends or held:
        now = min(until, *ends.values()) if ends else until
        if now < until:
            j = min(ends, key=lambda j: ends[j])
            del ends[j]
            x = base[j]
            for k in range(done[j], done[j] + period):
                x = x - lr * gradient(x, j, k)
            done[j] += period
            held[j] = base[j] - x
            if len(held) >= min(quorum, len(held) + len(ends)):
                until = min(until, now + grace)
        if now == until or not ends:
            w = of_server.step(w, np.mean(list(held.values()), axis=0))
            for j in held:
                base[j] = w
                if done[j] < steps:
                    ends[j] = now + period * seconds[j]
            held = {}
            until = np.inf
    return w
