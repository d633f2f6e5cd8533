"""Hogwild! (Recht, Re, Wright, Niu 2011): the workers of one host train one shared vector without a lock.

Each worker reads the parameters, computes its gradient and writes its step, while others do the same.  Steps with
sparse gradients rarely touch the same values; of steps with dense gradients a few are lost.  With one worker it is
plain training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.families.centre import note_write
from paceline.families.company import Company
from paceline.needs import Needs
from paceline.strategy import Strategy
from paceline.worker.replica import Replica


@dataclass(frozen=True)
class Hogwild(Strategy):
    """All workers update one parameter vector in their host's shared memory, each with its own optimizer.

    Sparse gradients (nn.Embedding(sparse=True), with SGD or another optimizer that supports them) touch only their
    rows.  Workers with their models on GPUs, or with parameters of several dtypes, copy the vector before each step,
    and add the step's change to it.
    """

    needs: ClassVar[Needs] = Needs(collectives=False, shared_memory=True, rests=True)
    WITHOUT_CODEC: ClassVar = (
        "its workers share memory and send nothing; ParameterServer(codec=...) sends encoded gradients"
    )

    async def worker(self, w: Replica) -> None:
        company = await Company.of(w)
        shared = company.vector
        if shared.values.device == w.params.device and not w.learner.flat.narrow:
            w.learner.flat.rebind(shared.values, is_shared=True)
            await train_in_place(w, company)
        else:
            await train_on_copies(w, company)
        await company.wait_for_all()
        w.learner.flat.rebind(shared.values.to(w.params.device, copy=True), is_shared=False)


async def train_in_place(w: Replica, company: Company) -> None:
    """Steps on the shared memory itself."""
    shared = company.vector
    for _ in w.steps_alone():
        others = shared.writes.of_others()
        await company.look_around()
        await w.local_step()
        if w.batch.samples:
            note_write(w.endpoint, shared.writes, others, int(w.batch.samples))


async def train_on_copies(w: Replica, company: Company) -> None:
    """Steps on a copy of the shared memory, on this worker's device; the change is added to the memory."""
    shared = company.vector
    before = torch.empty_like(w.params)
    for _ in w.steps_alone():
        others = shared.writes.of_others()
        await company.look_around()
        w.params.copy_(w.learner.flat.round(await shared.read(before)))
        await w.local_step()
        if w.batch.samples:
            await shared.add(torch.sub(w.params, before, out=before))
            note_write(w.endpoint, shared.writes, others, int(w.batch.samples))
