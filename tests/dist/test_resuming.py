"""A session resumes only from states that belong together; otherwise the error names what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it with the first optimizer; once here is faster than in every rank.
from torch import nn

import paceline as pl
from tests.dist import forked

pytestmark = pytest.mark.dist

BATCHES = list(torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(1)))


def attached(strategy: pl.Strategy, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, pl.attach(model, kind(model.parameters(), lr=0.1), strategy)


def states(strategy: pl.Strategy) -> list[dict[str, Any]]:
    """This rank's states after 4 and after 6 steps."""
    found: list[dict[str, Any]] = []
    model, session = attached(strategy)
    with session:
        for i, batch in enumerate(session.shard(BATCHES)):
            session.optimizer.zero_grad()
            model(batch).square().mean().backward()
            session.step()
            if i in (3, 5):
                found.append(session.state_dict())
    return found


WRONG = {
    "different steps": (
        lambda rank, saved: saved[rank],
        "rank 0 loads a state of step 4, and rank 1 one of step 6: load states that the ranks saved at the same step",
    ),
    "swapped": (lambda rank, saved: {**saved[0], "rank": 1 - rank}, "rank 0 loads the state of rank 1: save one state"),
    "the first rank's": (
        lambda rank, saved: {**saved[0], "rank": 0},
        "rank 1 loads the state of rank 0: save one state",
    ),
    "of four workers": (
        lambda rank, saved: {**saved[0], "workers": 4},
        "rank 0 loads a state that was saved with 4 workers, and this run has 2: give the states of all ranks to "
        "paceline.resized(states, 2)",
    ),
}


@pytest.mark.parametrize("strategy", [pl.AllReduceSGD(), pl.EASGD()], ids=lambda s: type(s).__name__)
def test_states_that_do_not_belong_together_are_refused_on_every_rank(strategy, tmp_path):
    def work(rank: int) -> list[str]:
        saved = states(strategy)
        texts: list[str] = []
        for wrong, _ in WRONG.values():
            with pytest.raises(ValueError) as error, attached(strategy)[1] as session:
                session.load_state_dict(wrong(rank, saved))
            texts.append(str(error.value))
        return texts

    for texts in forked.run(2, work, tmp_path):
        for text, (_, expected) in zip(texts, WRONG.values(), strict=True):
            assert text.startswith(f"session.load_state_dict: {expected}")


def test_a_rank_that_loads_nothing_is_named(tmp_path):
    def work(rank: int) -> None:
        [saved, _] = states(pl.EASGD())
        model, session = attached(pl.EASGD())
        with session:
            if rank == 0:
                session.load_state_dict(saved)
            for batch in session.shard(BATCHES, skip=4):
                model(batch).square().mean().backward()
                session.step()

    first, _ = forked.run(2, work, tmp_path)
    assert first["error"].startswith(
        "ClusterError: the loops of the ranks have diverged: rank 0 was in session.load_state_dict(), at step 0 of "
        "EASGD"
    )


def test_the_state_of_another_kind_of_optimizer_is_refused():
    [saved, _] = states(pl.AllReduceSGD())
    refusal = r"has the settings \['dampening', 'momentum', 'nesterov'\] and lacks .*: another kind of optimizer"
    with attached(pl.AllReduceSGD(), torch.optim.AdamW)[1] as session, pytest.raises(ValueError, match=refusal):
        session.load_state_dict(saved)
