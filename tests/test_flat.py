"""A model as one vector: every parameter, once, in the order in which backward fills it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.worker.flat import FlatModel


def model_of(sizes: list[int], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.arange(float(n), dtype=dtype) + 100 * i) for i, n in enumerate(sizes)])


def test_parameters_become_views_of_one_vector_and_keep_their_values():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    before = [p.detach().clone() for p in model.parameters()]
    flat = FlatModel(model)
    assert flat.numel == sum(p.numel() for p in before) == flat.params.numel() == flat.grads.numel()
    assert torch.equal(flat.params, torch.cat([p.reshape(-1) for p in before]))
    assert [p.shape for p in flat.parameters] == [p.shape for p in before]
    flat.params.zero_()
    assert all(not p.count_nonzero() for p in model.parameters())
    with torch.no_grad():
        model[1].bias.fill_(7.0)
    assert flat.params[flat.where(3)].tolist() == [7.0]


def test_frozen_parameters_of_any_type_are_not_changed():
    model = nn.ModuleDict({"frozen": nn.Linear(2, 2).half().requires_grad_(False), "free": nn.Linear(2, 2)})
    assert FlatModel(model).names == ["free.weight", "free.bias"]


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["without parameters", "frozen"]
)
def test_a_model_with_nothing_to_train_is_refused_by_name(model: nn.Module):
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no parameter that requires a gradient"):
        FlatModel(model)


def test_complex_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'0' is torch.complex64"):
        FlatModel(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), bucket_bytes=st.integers(1, 300))
def test_buckets_cover_the_vector_once_from_its_end_to_its_start(sizes: list[int], bucket_bytes: int):
    flat = FlatModel(model_of(sizes), bucket_bytes=bucket_bytes)
    stops = flat.numel
    for i, bucket in enumerate(flat.buckets):
        assert bucket.index == i
        assert bucket.where.stop == stops
        assert (
            bucket.grad.data_ptr() == flat.grads[bucket.where].data_ptr()
            and bucket.grad.numel() == bucket.where.stop - bucket.where.start
        )
        numels = [sizes[p] for p in bucket.parameters]
        assert 4 * sum(numels) >= bucket_bytes or bucket is flat.buckets[-1], "only the last may be smaller"
        assert 4 * sum(numels[1:]) < bucket_bytes, "it was not full before"
        stops = bucket.where.start
    assert stops == 0
    held = [p for bucket in flat.buckets for p in reversed(bucket.parameters)]
    assert held == list(range(len(sizes)))[::-1]
    assert all(index in flat.bucket_of[index].parameters for index in range(len(sizes)))


def test_a_bucket_is_closed_as_soon_as_it_is_full_and_the_first_one_early():
    flat = FlatModel(model_of([10, 20, 5, 5, 30, 1]), bucket_bytes=4 * 30)
    assert [b.parameters for b in flat.buckets] == [(4, 5), (1, 2, 3), (0,)]
    mib = (1 << 20) // 4
    flat = FlatModel(model_of([mib] * 12))
    assert [b.parameters for b in flat.buckets] == [(11,), tuple(range(3, 11)), (0, 1, 2)]


def test_tied_parameters_are_stored_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Embedding(5, 3)
            self.decode = nn.Linear(3, 5, bias=False)
            self.decode.weight = self.encode.weight

    model = Tied()
    flat = FlatModel(model)
    assert flat.numel == 15 and flat.names == ["encode.weight"]
    model.decode(model.encode(torch.tensor([1]))).sum().backward()
    flat.collect_all()
    assert flat.grads.count_nonzero() == 15  # Through both of its uses.
    flat.params.fill_(2.0)
    assert model.decode.weight is model.encode.weight and bool((model.decode.weight == 2).all())


def test_gradients_are_collected_and_given_to_the_optimizer():
    model = model_of([3, 2])
    flat = FlatModel(model)
    (model[0] * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    flat.grads.fill_(9.0)
    flat.collect_all()
    assert flat.grads.tolist() == [1, 2, 3, 0, 0], "a parameter without a gradient has zeros"
    flat.expose(1)
    assert model[1].grad is not None and model[1].grad.data_ptr() == flat.grads[3:].data_ptr()
    flat.grads[4] = 5.0
    flat.collect(1)
    assert flat.grads.tolist() == [1, 2, 3, 0, 5], "what is already there stays"


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Embedding(4, 2, sparse=True)
    flat = FlatModel(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="'weight' has a sparse gradient"):
        flat.collect_all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("at", "name"), [(0, "0"), (2, "0"), (3, "1"), (7, "2"), (8, "2")])
def test_the_parameter_with_the_first_bad_value_is_named(bad: float, at: int, name: str):
    flat = FlatModel(model_of([3, 4, 2]))
    assert flat.first_nonfinite() is None
    flat.grads[at] = bad
    assert flat.first_nonfinite() == flat.first_nonfinite(slice(at, None)) == flat.locate(at) == name
    assert flat.first_nonfinite(slice(at + 1, None)) is None and flat.first_nonfinite(slice(0, at)) is None


def test_infinities_of_both_signs_do_not_cancel_and_large_values_are_not_bad():
    flat = FlatModel(model_of([4]))
    flat.grads.fill_(3e38)
    assert flat.first_nonfinite() is None
    flat.grads[1], flat.grads[2] = math.inf, -math.inf
    assert flat.first_nonfinite() == "0"


def test_tensors_that_have_values_in_common_are_refused_and_interleaved_ones_are_not():
    class Model(nn.Module):
        def __init__(self, a: torch.Tensor, b: torch.Tensor, *, is_buffer: bool = False) -> None:
            super().__init__()
            self.a = nn.Parameter(a)
            self.register_buffer("b", b) if is_buffer else self.register_parameter("b", nn.Parameter(b))

    w = torch.randn(6, 4)
    FlatModel(Model(w[:3].clone(), w[3:].clone()))
    FlatModel(Model(w[:3], w[3:]))
    FlatModel(Model(w[:, :2], w[:, 2:]))
    for a, b, is_buffer in ((w, w, False), (w, w.t(), False), (w[:, :2], w[1], False), (w, w[:2], True)):
        with pytest.raises(ValueError, match=r"'[ab]' and '[ab]' have memory in common"):
            FlatModel(Model(a, b, is_buffer=is_buffer))


def test_a_parameter_without_values_is_refused():
    with pytest.raises(ValueError, match="'weight' has no shape yet: run a minibatch through the model first"):
        FlatModel(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="'weight' is on the device 'meta', so it has no values"):
        FlatModel(nn.Linear(3, 3, device="meta"))
