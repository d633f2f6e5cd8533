"""What must hold on a GPU, as a script for torchrun: one process with NCCL, or several that share one GPU through gloo.

Methods that use messages are simulated there, because they need no group.
"""

from __future__ import annotations

import os
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import paceline as pl

STRATEGIES = {
    "all-reduce": pl.AllReduceSGD(),
    "fp16": pl.AllReduceSGD(codec=pl.codecs.Fp16()),
    "one-bit": pl.AllReduceSGD(codec=pl.codecs.OneBit()),
    "averaging": pl.PeriodicAveraging(period=4),
    "block-momentum": pl.BlockMomentum(period=4),
    "elastic": pl.EASGD(period=4),
}
SHARED = {"ea-wild": pl.EAWild(), "hogwild": pl.Hogwild()}  # The centre, or the parameters, are in the host's memory.
SIMULATED = (
    pl.ASGD(),
    pl.ASGD(codec=pl.codecs.OneBit()),
    pl.Downpour(),
    pl.DelayCompensated(),
    pl.AsyncDiLoCo(),
    pl.ParameterServer(rule=pl.rules.Sgd(lr=0.05), sparse=True),
    pl.AsyncEASGD(),
    pl.EAMSGD(),
    pl.RoundRobinEASGD(),
    pl.EAWild(group=2),
    pl.EAWild(group=2, servers=2),
    pl.Hogwild(),
    pl.Gossip(),
    pl.Strom(pl.codecs.Threshold(0.001)),
    pl.Sandblaster(),
)


def data(step: int, rank: int, workers: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(64, 32, generator=generator), torch.randint(0, 10, (64,), generator=generator)
    return x[rank::workers].to(device), y[rank::workers].to(device)


def loop(strategy: pl.Strategy, device: str, *, scaled: bool, poison: int | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=scaled)
    with pl.attach(model, optimizer, strategy, bucket_bytes=20_000) as session:
        for step in range(18):
            x, y = data(step, session.rank, session.workers, device)
            session.optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16, enabled=scaled):
                loss = F.cross_entropy(model(x), y)
            if step == poison and session.rank == session.workers - 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(session.optimizer)
            scaler.update()
        workers = session.workers
    if poison is not None:
        local = not isinstance(strategy, pl.AllReduceSGD)
        was_mine = int(os.environ.get("RANK", "0")) == workers - 1
        assert scaler.get_scale() == (2.0**9 if was_mine or not local else 2.0**10), scaler.get_scale()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu()


def simulated(strategy: pl.Strategy, device: str) -> torch.Tensor:
    words = torch.randint(0, 100, (256, 4), generator=torch.Generator().manual_seed(0))
    task = pl.Task(
        model=lambda: nn.Sequential(
            nn.Embedding(100, 8, sparse=isinstance(strategy, pl.Hogwild) or getattr(strategy, "sparse", False)),
            nn.Flatten(),
            nn.Linear(32, 2),
        ).to(device),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        data=(words.to(device), (words[:, 0] > 50).long().to(device)),
        batch=32,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        epochs=2,
    )
    cluster = pl.Cluster(workers=4, compute=pl.LogNormal("10ms", sigma=0.4))
    return pl.simulate(task, strategy, cluster, strict=False).params.cpu()


def main() -> None:
    warnings.simplefilter("ignore", pl.NonFiniteGradient)
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > torch.cuda.device_count():
        dist.init_process_group("gloo")  # NCCL refuses two ranks on one GPU.
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    for name, strategy in STRATEGIES.items():
        here, there = loop(strategy, "cuda", scaled=False), loop(strategy, "cpu", scaled=False)
        drift = (here - there).abs().max().item()
        # The same mathematics on other hardware: sums have another order, and OneBit may flip a sign that is almost
        # zero.
        assert drift < (0.2 if name == "one-bit" else 2e-3), (name, drift)
        for poison in (None, 5):
            vector = loop(strategy, "cuda", scaled=True, poison=poison)
            assert vector.isfinite().all(), name
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {workers} workers, cuda against cpu differs by {drift:.2g}", flush=True)
    for name, strategy in SHARED.items():
        here, there = loop(strategy, "cuda", scaled=False), loop(strategy, "cpu", scaled=False)
        drift = (here - there).abs().max().item()
        # The order of writes is not the same in two runs.
        assert here.isfinite().all() and drift < (2e-3 if workers == 1 else 0.5), (name, drift)
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: {workers} workers, cuda against cpu differs by {drift:.2g}", flush=True)
    for strategy in SIMULATED if workers == 1 else ():
        drift = (simulated(strategy, "cuda") - simulated(strategy, "cpu")).abs().max().item()
        assert drift < 1e-4, (strategy, drift)
        print(f"{strategy}: simulated, cuda against cpu differs by {drift:.2g}", flush=True)


if __name__ == "__main__":
    main()
