"""Methods whose workers train alone and average their models now and then.

Sources: the DL4J overview and CNTK's manual (model averaging, block momentum), Chen and Huo 2016 (BMUF), Jiang and
Agrawal (ADPSGD), Wang and Joshi 2019 (AdaComm), Douillard et al. 2023 (DiLoCo), Wang et al. 2020 (SlowMo).
"""

from __future__ import annotations

from math import ceil, exp, sqrt

import numpy as np

from tests.reference.sync_problem import weighted_mean


class Workers:
    """Replicas that take local steps; `counts` are the samples of each since the last average."""

    def __init__(self, w, workers, gradient, optimizer, loss=None):
        self.w = [w.copy() for _ in range(workers)]
        self.optimizers = [optimizer() for _ in range(workers)]
        self.gradient = gradient
        self.loss = loss
        self.counts = [0] * workers
        self.losses = []

    def step(self, parts, factor=1.0):
        for i, (x, y) in enumerate(parts):
            if self.loss is not None:
                self.losses.append(self.loss(self.w[i], x, y))
            self.w[i] = self.optimizers[i].step(self.w[i], self.gradient(self.w[i], x, y), factor)
            self.counts[i] += len(x)

    def mean(self):
        return weighted_mean(self.w, self.counts)

    def spread(self):
        """The mean squared distance of the replicas from their mean."""
        mean = self.mean()
        return weighted_mean([((w - mean) ** 2).sum() for w in self.w], self.counts)

    def restart(self, w, reset=False):
        self.w = [w.copy() for _ in self.w]
        self.counts = [0] * len(self.w)
        self.losses = []
        if reset:
            for optimizer in self.optimizers:
                optimizer.reset()


def model_averaging(w, batches, gradient, optimizer, period, *, of_state=False):
    """The average is after every `period` steps, and at the end; with `of_state` also of the optimizers' momenta."""
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    for k, parts in enumerate(batches):
        workers.step(parts)
        if (k + 1) % period == 0 or k + 1 == len(batches):
            if of_state:
                v = weighted_mean([own.v for own in workers.optimizers], workers.counts)
                for own in workers.optimizers:
                    own.v = v
            workers.restart(workers.mean())
    return workers.w[0]


def delayed_averaging(w, batches, gradient, optimizer, period, delay):
    """The mean of the models after every `period` steps arrives `delay` steps later; the steps since then are kept."""
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    mean = w
    sent = [w for _ in workers.w]
    for k, parts in enumerate(batches):
        workers.step(parts)
        if k >= period and (k + 1) % period == delay:
            workers.w = [mean + v - old for v, old in zip(workers.w, sent, strict=True)]
        if (k + 1) % period == 0:
            sent = list(workers.w)
            mean = workers.mean()
    return mean


class Nesterov:
    """An outer step: what a displacement makes of the model."""

    def __init__(self, rate, momentum):
        self.rate = rate
        self.momentum = momentum
        self.u = 0.0

    def step(self, delta):
        self.u = self.momentum * self.u + delta
        return self.rate * (delta + self.momentum * self.u)


def coded_averaging(w, batches, gradient, optimizer, period, code, stripes, *, rate=1.0, momentum=0.0):
    """Workers send their displacements by a code with feedback on two levels.

    The mean moves the common model, by an outer Nesterov step if there is a momentum.  Worker i then starts from the
    common model plus `ahead[i]`: what the outer steps would have made of what it has not sent, its own residual and
    that of the stripe that it owns, in units of its own model.
    """
    n = len(batches[0])
    workers = Workers(w, n, gradient, optimizer)
    outer = Nesterov(rate, momentum)
    own = [Nesterov(rate, momentum) for _ in range(n)]
    of_owners, *residuals = (np.zeros_like(w) for _ in range(n + 1))
    unsent, effects, ahead = ([np.zeros_like(w) for _ in range(n)] for _ in range(3))
    for k, parts in enumerate(batches):
        workers.step(parts)
        if (k + 1) % period:
            continue
        wanted = [v - w - a + r for v, a, r in zip(workers.w, ahead, residuals, strict=True)]
        sent = [code(d) for d in wanted]
        mean = weighted_mean(sent, workers.counts) + of_owners
        delta = code(mean)
        of_owners = mean - delta
        w = w + outer.step(delta)
        for i, count in enumerate(workers.counts):
            share = count / sum(workers.counts)
            residuals[i] = wanted[i] - sent[i]
            now = share * residuals[i]
            now[stripes[i]] += of_owners[stripes[i]]
            effects[i] = effects[i] + own[i].step(now - unsent[i])
            unsent[i] = now
            ahead[i] = effects[i] / share
        workers.restart(w)
        workers.w = [w + a for a in ahead]
    return w


def by_schedule(w, batches, gradient, optimizer, period_at):
    """The period may change at every step; a sync is due when as many steps have passed since the last."""
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    syncs = []
    since = 0
    for k, parts in enumerate(batches):
        since += 1
        workers.step(parts)
        if since >= period_at(k) or k + 1 == len(batches):
            workers.restart(workers.mean())
            syncs.append(k)
            since = 0
    return workers.w[0], syncs


def bmuf(
    w, batches, gradient, optimizer, *, period, rate=1.0, momentum=None, time_constant=None, nesterov, reset, form
):
    """W is the model, W_g the start of the next block, D the filtered displacement."""
    n = len(batches[0])
    workers = Workers(w, n, gradient, optimizer)
    start = w.copy()
    model = w.copy()
    moved = np.zeros_like(w)
    for k, parts in enumerate(batches):
        workers.step(parts)
        if (k + 1) % period and k + 1 < len(batches):
            continue
        eta = 1 - 1 / n if momentum is None else momentum
        if time_constant is not None:
            eta = exp(-sum(workers.counts) / n / time_constant)
        if form == "cntk":  # Displacements are summed, and every look-ahead stays.
            moved = eta * moved + (1 - eta) * rate * sum(start - v for v in workers.w)
            start = start - moved - (eta * moved if nesterov else 0)
            model = start
        else:
            moved = eta * moved + rate * (workers.mean() - start)
            model = model + moved
            start = model + eta * moved if nesterov else model
        workers.restart(start, reset)
    return model


def outer_step(w, mean, u, *, rate, momentum, nesterov=True):
    """DiLoCo: the mean displacement of the workers is the gradient of an outer momentum step."""
    delta = w - mean
    u = momentum * u + delta
    return w - rate * (delta + momentum * u if nesterov else u), u


def diloco(w, batches, gradient, optimizer, *, period, **outer):
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    u = np.zeros_like(w)
    for k, parts in enumerate(batches):
        workers.step(parts)
        if (k + 1) % period == 0 or k + 1 == len(batches):
            w, u = outer_step(w, workers.mean(), u, **outer)
            workers.restart(w)
    return w


def streaming_diloco(w, batches, gradient, optimizer, *, period, fragments, **outer):
    """Each fragment has its own outer step every `period` steps, one after the other; at the end all have one."""
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    parts_of_model = np.array_split(np.arange(len(w)), fragments)
    w = w.copy()
    u = np.zeros_like(w)
    due = 0
    for k, parts in enumerate(batches):
        workers.step(parts)
        if (k + 1) % (period // fragments) == 0:
            for _ in range(1 if k + 1 < len(batches) else fragments):
                f = parts_of_model[due % fragments]
                due += 1
                w[f], u[f] = outer_step(w[f], workers.mean()[f], u[f], **outer)
                for v in workers.w:
                    v[f] = w[f]
    return w


def slow_mo(w, batches, gradient, optimizer, *, period, rate, momentum, lr, factor_at):
    """u is in units of the learning rate of the block's last step."""
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    u = np.zeros_like(w)
    for k, parts in enumerate(batches):
        workers.step(parts, factor_at(k))
        if (k + 1) % period == 0 or k + 1 == len(batches):
            gamma = lr * factor_at(k)
            u = momentum * u + (w - workers.mean()) / gamma
            w = w - rate * gamma * u
            workers.restart(w, reset=True)
    return w


def adpsgd(w, batches, gradient, optimizer, *, period, warmup, sampling, lr, factor_at, low=0.7, high=1.3):
    """The period follows the spread; the result, the steps with a sync, and the spreads there."""
    workers = Workers(w, len(batches[0]), gradient, optimizer)
    count = 0
    c2 = 0.0
    m = 0
    syncs = []
    spreads = []
    for k, parts in enumerate(batches):
        workers.step(parts, factor_at(k))
        count += 1
        if count < (1 if k < warmup else period) and k + 1 < len(batches):
            continue
        count = 0
        spread = workers.spread()
        gamma = lr * factor_at(k)
        workers.restart(workers.mean())
        syncs.append(k)
        spreads.append(spread)
        if k < warmup:
            continue
        if k < sampling:
            m += 1
            c2 += (spread / gamma - c2) / m
        elif spread < low * gamma * c2:
            period += 1
        elif spread > high * gamma * c2:
            period = max(1, period - 1)
    return workers.w[0], syncs, spreads


def ada_comm(w, batches, gradient, optimizer, loss, *, period, steps, lr, factor_at):
    """Every `steps` steps the period becomes ceil(sqrt(lr_0 F / (lr F_0)) p_0); half of the last one if that would not
    be shorter at the same rate.  The first sync measures F_0."""
    workers = Workers(w, len(batches[0]), gradient, optimizer, loss)
    chosen = period
    f0 = None
    since = 0
    syncs = []
    for k, parts in enumerate(batches):
        workers.step(parts, factor_at(k))
        since += 1
        if since < chosen and k + 1 < len(batches):
            continue
        f = sum(workers.losses) / len(workers.losses)
        gamma = lr * factor_at(k)
        workers.restart(workers.mean())
        syncs.append(k)
        if f0 is None:
            f0 = f
            lr0 = gamma
            last_lr = gamma
            elapsed = 0
        else:
            elapsed += since
            if elapsed >= steps:
                proposed = ceil(sqrt(lr0 / gamma * f / f0) * period)
                chosen = ceil(chosen / 2) if proposed >= chosen and gamma == last_lr else max(1, proposed)
                last_lr = gamma
                elapsed = 0
        since = 0
    return workers.w[0], syncs


def d_psgd(w, batches, gradient, optimizer, partner, *, period=1, rounds=1):
    """Decentralised SGD in pairs: after every `period` steps each worker averages with one partner after the other, in
    `rounds` rounds; the mean of all at the end.  The partner in a round r is partner(i, n, r)."""
    n = len(batches[0])
    workers = Workers(w, n, gradient, optimizer)
    for k, parts in enumerate(batches):
        workers.step(parts)
        for r in range(rounds if (k + 1) % period == 0 else 0):
            peers = [partner(i, n, k // period * rounds + r) for i in range(n)]
            workers.w = [(v + workers.w[j]) / 2 for v, j in zip(workers.w, peers, strict=True)]
    return sum(workers.w) / n


def exponential_partner(i, n, k):
    """Distances 1, 2, 4, ... in turn, for 2**m workers."""
    return i ^ (1 << k % (n.bit_length() - 1))


def ring_partner(i, n, k):
    """Neighbours on a circle of an even number of workers, left and right in turn."""
    return (i + (1 if (i - k) % 2 == 0 else -1)) % n
