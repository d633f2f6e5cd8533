"""Checks that the ranks of a session resume from states that belong together: each its own, all of the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import Store

from paceline.endpoint import Endpoint
from paceline.session.loop import Loop
from paceline.session.watching import LoopWatch
from paceline.state import check_header
from paceline.strategy import Strategy

CALL = "session.load_state_dict"


def check_states(state: Mapping[str, Any], strategy: str, endpoint: Endpoint, store: Store | None = None) -> None:
    """Raise the same ValueError on every rank unless each loads its own state of one run, saved at one step.

    All ranks call this with the state that they load.  They compare it through the `store` if they have no collectives;
    their steps may then differ.
    """
    check_header(state, strategy)
    ranks = endpoint.ranks
    own = ranks.index(endpoint.rank)
    mine = [float(state["step"]), float(state.get("rank", own)), float(state.get("workers", len(ranks)))]
    found = [mine]
    if len(ranks) > 1 and store is None:
        found = [t.tolist() for t in endpoint.all_gather(torch.tensor(mine, dtype=torch.float64)).wait()]
    elif store is not None and len(ranks) > 1:
        number = store.add(f"loads/{endpoint.rank}", 1)
        store.set(f"loads/{endpoint.rank}/{number}", json.dumps(mine))
        found = [json.loads(store.get(f"loads/{rank}/{number}")) for rank in ranks]
    first = int(found[0][0])
    for index, (rank, (step, of, workers)) in enumerate(zip(ranks, found, strict=True)):
        if workers != len(ranks):
            raise ValueError(
                f"{CALL}: rank {rank} loads a state that was saved with {int(workers)} workers, and this run has "
                f"{len(ranks)}: give the states of all ranks to paceline.resized(states, {len(ranks)}), and load its "
                "result for each rank"
            )
        if of != index:
            raise ValueError(
                f"{CALL}: rank {rank} loads the state of rank {int(of)}: save one state for each rank, and let each "
                "rank load its own"
            )
        if step != first and store is None:
            raise ValueError(
                f"{CALL}: rank {ranks[0]} loads a state of step {first}, and rank {rank} one of step {int(step)}: load "
                "states that the ranks saved at the same step"
            )


def refuse_served(strategy: Strategy, call: str) -> None:
    """Raise ValueError if the strategy has servers, which have started before the call."""
    if strategy.needs.servers:
        raise ValueError(
            f"{call} under {type(strategy).__name__}: its servers have a state of their own, and have started already; "
            "give attach(checkpoint=pl.Checkpoints(folder))"
        )


def load_and_start(loop: Loop, watch: LoopWatch, store: Store, state: dict[str, Any]) -> None:
    """Continue from a checkpoint of a method with servers, which starts now: the servers are told so first."""
    run = loop.run
    check_states(state, type(run.strategy).__name__, run.replica.endpoint, store)
    run.load_state_dict(state)
    watch.restart()
    loop.start()
    run.states.check_complete()
