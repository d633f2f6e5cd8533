"""Memory after and during training: parameters have their own, a file holds no more than was saved, traces end."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.errors import ClusterError
from paceline.session.returned import take_model

LAYER = 4 * (64 * 64 + 64)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def saved_nbytes(state: object) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """The condition on which safetensors refuses: two tensors in one storage, or one in a storage larger than it is."""
    storages = [t.untyped_storage() for t in tensors]
    nbytes = [t.nbytes for t in tensors]
    are_parts = any(s.nbytes() != n for s, n in zip(storages, nbytes, strict=True))
    return are_parts or len({s.data_ptr() for s in storages}) < len(storages)


def trained() -> nn.Sequential:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
        for x in session.shard([torch.randn(4, 64)] * 2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            session.step()
        assert share_memory(list(model.parameters()))
        state = session.model_state_dict()
        assert not share_memory(list(state.values()))
        assert saved_nbytes({name: state[name] for name in ("2.weight", "2.bias")}) < LAYER + 4096
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    return model


def test_after_the_block_a_layer_is_saved_without_the_rest_of_the_model():
    model = trained()
    assert not share_memory(list(model.parameters()))
    assert not share_memory([p.grad for p in model.parameters() if p.grad is not None])
    assert saved_nbytes(model[2].state_dict()) < LAYER + 4096
    assert 3 * LAYER <= saved_nbytes(model.state_dict()) < 3 * LAYER + 8192


def test_the_optimizer_still_trains_the_parameters_after_the_block():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer, pl.AllReduceSGD()):
        pass
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    for p, was in zip(model.parameters(), before, strict=True):
        assert p.grad is not None and torch.allclose(p, was - 0.1 * p.grad)


def test_tied_parameters_stay_tied():
    model = network()
    model[2].weight = model[0].weight
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), pl.AllReduceSGD()):
        pass
    assert model[2].weight is model[0].weight
    assert not share_memory(list(model.parameters()))


def test_parameters_have_their_own_memory_after_a_failure_too():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="the user's own mistake"), pl.attach(model, optimizer, pl.AllReduceSGD()):
        raise RuntimeError("the user's own mistake")
    assert not share_memory(list(model.parameters()))


RUNS = {
    "simulate": lambda task: pl.simulate(task, pl.AllReduceSGD(), pl.Cluster(workers=2)),
    "train": lambda task: pl.train(task, pl.AllReduceSGD(), workers=2),
}


@pytest.mark.dist
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_model_of_a_run_has_its_own_memory(run):
    task = pl.Task(
        network,
        lambda model, batch: model(batch[0]).square().mean(),
        [torch.randn(8, 64)],
        4,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=2,
    )
    done = run(task)
    assert not share_memory(list(done.model.parameters()))
    assert torch.equal(done.params, torch.cat([p.detach().reshape(-1) for p in done.model.parameters()]))


def test_trace_of_a_session_does_not_grow_without_bound():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer, pl.AllReduceSGD()) as session:
        session.trace.keep = 10  # Instead of 100 000.
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            session.step(0.5)
        assert len(session.trace.spans) <= 20 and len(session.trace.points) <= 20


def test_a_run_that_no_worker_has_ended_says_so(tmp_path):
    """Workers that were stopped at the same time can declare each other dead."""
    with pytest.raises(ClusterError, match=r"no worker took part until the end: .* silent for 10 s; .*silent_s="):
        take_model(nn.Linear(1, 1), tmp_path, silent_s=10)
