"""split: a model as several stages of consecutive layers, for a replica on several machines (DistBelief, 2012).

A stage can start at a layer if all later layers need only one tensor from the layers before it.  Only this tensor is
sent between stages.  The stages in sequence are the whole model: they have the same outputs and gradients, and their
parameters have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Split:
    """A model and its stages, which share its parameters; each stage's first layer (`begins`) and its cost."""

    model: nn.Module
    stages: tuple[nn.Module, ...]
    begins: tuple[str, ...]
    costs: tuple[int, ...]

    def passed(self, x: Tensor) -> list[Tensor]:
        """The output of each stage for an input like `x`, as tensors without memory."""
        return list(_passed(self.stages, x))


def split(model: nn.Module, parts: int | Sequence[str], sample: Tensor | None = None) -> Split:
    """Cut `model` into stages: a number of balanced ones, or with a new stage at each layer named in `parts`.

    Balanced stages have about the same number of parameters.  With a `sample` of the model's input, they have about the
    same number of floating-point operations, and then as few bytes as possible pass between them.

    >>> split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)), 2).begins
    ('0', '2')
    """
    call = f"split({type(model).__name__}, {parts!r})"
    layers = _layers(model, call)
    if isinstance(parts, int):
        if parts < 1:
            raise ValueError(f"{call}: there must be at least 1 stage")
        trainable = [any(p.requires_grad for p in layer.module(model).parameters()) for layer in layers]
        if parts > sum(trainable):
            raise ValueError(
                f"{call}: only {sum(trainable)} of the layers at which a stage can start have parameters to train, "
                "and each stage needs one of them; "
                f"they are {_listed([y.name for y, t in zip(layers, trainable, strict=True) if t])}"
            )
        costs, cuts = _weights(model, layers, sample)
        begins = balanced(costs, cuts, parts, trainable)
    else:
        begins = [0, *(_place(name, layers, call) for name in parts)]
        if any(a >= b for a, b in pairwise(begins)):
            raise ValueError(
                f"{call}: name the layers in the order in which the model calls them, "
                f"{_listed([y.name for y in layers])}"
            )
        costs, _ = _weights(model, layers, sample)
    ends = [*begins[1:], len(layers)]
    stages = tuple(_joined(layers[a:b]).module(model) for a, b in zip(begins, ends, strict=True))
    names = tuple(layers[b].name for b in begins)
    _check(stages, names, call)
    if sample is not None:
        _compare(model, stages, sample, call)
    return Split(model, stages, names, tuple(sum(costs[a:b]) for a, b in zip(begins, ends, strict=True)))


def balanced(costs: Sequence[int], cuts: Sequence[int], parts: int, trainable: Sequence[bool]) -> list[int]:
    """The first layers of `parts` stages: with the smallest maximal cost of a stage, then the smallest sum of `cuts`.

    Every stage has a layer that is `trainable`.  Among equal choices stages start late, so that an activation function
    stays with the layer before it.

    >>> balanced([1, 1, 1, 3], [0, 8, 8, 8], 2, [True] * 4)
    [0, 3]
    """
    sums = [0, *accumulate(costs)]
    counts = [0, *accumulate(trainable)]

    def best(cost_of: Callable[[int, int], float], join: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """The smallest joined cost of all stages, by dynamic programming over the stages and the layers."""
        least: list[tuple[float, list[int]]] = [(cost_of(0, stop), [0]) for stop in range(len(costs) + 1)]
        for _ in range(parts - 1):
            least = [
                min(
                    ((join(least[b][0], cost_of(b, stop)), [*least[b][1], b]) for b in range(1, stop)),
                    key=lambda found: (found[0], [-b for b in found[1]]),
                    default=(inf, []),
                )
                for stop in range(len(costs) + 1)
            ]
        return least[-1]

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] if counts[stop] > counts[start] else inf

    most, _ = best(cost, max)
    return best(lambda start, stop: cuts[start] if cost(start, stop) <= most else inf, lambda a, b: a + b)[1]


@dataclass(frozen=True)
class _Layer:
    """A part of a model's graph: its input, its nodes and its output."""

    name: str
    entering: fx.Node
    nodes: Sequence[fx.Node]
    leaving: fx.Node

    def module(self, model: nn.Module) -> fx.GraphModule:
        """This part as a module, with the model's own layers in it."""
        graph = fx.Graph()
        copies = {self.entering: graph.placeholder("x")}

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in self.nodes:
            copy(node)
        graph.output(graph.call_method("contiguous", (copy(self.leaving),)))  # It is sent, so it must be contiguous.
        return fx.GraphModule(model, graph, type(model).__name__)


class _Tracer(fx.Tracer):
    """Traces the model's own forward and those of nn.Sequential.  Every other module is a layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def _layers(model: nn.Module, call: str) -> list[_Layer]:
    """The parts of the model between the places at which it can be cut."""
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # A forward may raise any error when it gets a proxy instead of a tensor.
        raise ValueError(
            f"{call}: its forward cannot be read as a graph of layers ({error}); "
            "write it as a chain of modules, or train it with one stage"
        ) from error
    inputs = [n for n in graph.nodes if n.op == "placeholder" and (n.users or not n.args)]
    [output] = [n for n in graph.nodes if n.op == "output"]
    if len(inputs) != 1 or not isinstance(output.args[0], fx.Node):
        raise ValueError(
            f"{call}: its forward takes {[str(n.target) for n in inputs]} and returns {output.args[0]}; "
            "a model that is split must take one tensor and return one"
        )
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    place = {n: i for i, n in enumerate(nodes)} | {inputs[0]: -1, output: len(nodes)}
    last_use = {n: max((place[u] for u in n.users if u in place), default=-1) for n in (inputs[0], *nodes)}
    places = [0]
    entering = [inputs[0]]
    is_begun = False  # Whether there was a layer.  Operations before the first layer belong to the first part.
    for i, node in enumerate(nodes):
        if node.op == "call_module":
            crossing = [n for n in (inputs[0], *nodes[:i]) if last_use[n] >= i]
            if is_begun and len(crossing) == 1:
                places.append(i)
                entering.append(crossing[0])
            is_begun = True
    if not is_begun:
        raise ValueError(f"{call}: its forward calls no layers, so it cannot be cut between layers")
    ends = [*places[1:], len(nodes)]
    leaving = [*entering[1:], output.args[0]]
    return [
        _Layer(next(str(n.target) for n in nodes[a:b] if n.op == "call_module"), x, nodes[a:b], y)
        for a, b, x, y in zip(places, ends, entering, leaving, strict=True)
    ]


def _joined(layers: Sequence[_Layer]) -> _Layer:
    return _Layer(layers[0].name, layers[0].entering, [n for y in layers for n in y.nodes], layers[-1].leaving)


def _place(name: str, layers: Sequence[_Layer], call: str) -> int:
    names = [y.name for y in layers]
    if name in names[1:]:
        return names.index(name)
    if name == names[0]:
        raise ValueError(
            f"{call}: the first stage always starts at '{name}'; name the layers at which the others start"
        )
    if any(n.op == "call_module" and n.target == name for y in layers for n in y.nodes):
        raise ValueError(
            f"{call}: no stage can start at '{name}', because more than one tensor would have to pass to it; "
            f"a stage can start at {_listed(names[1:])}"
        )
    near = get_close_matches(name, names[1:], n=1, cutoff=0.0)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"{call}: there is no layer '{name}'; {hint}a stage can start at {_listed(names[1:])}")


def _weights(model: nn.Module, layers: Sequence[_Layer], sample: Tensor | None) -> tuple[list[int], list[int]]:
    """The cost of each layer, and the bytes that pass to it."""
    modules = [layer.module(model) for layer in layers]
    parameters = [sum(p.numel() for p in m.parameters()) for m in modules]
    if sample is None:
        return parameters, [0] * len(modules)
    from torch.utils.flop_counter import FlopCounterMode

    costs: list[int] = []
    passed = _passed(modules, sample)
    for _ in modules:
        with FlopCounterMode(display=False) as counter:
            next(passed)
        costs.append(counter.get_total_flops())
    # The counter ignores embeddings and additions.  For a model with nothing else, the cost is that of parameters.
    return costs if any(costs) else parameters, [0, *(y.nbytes for y in _passed(modules[:-1], sample))]


def _passed(modules: Sequence[nn.Module], x: Tensor) -> Iterator[Tensor]:
    """The outputs of modules in sequence for the input `x`, as shapes only."""
    from torch._subclasses import FakeTensorMode

    # Not on the meta device: layers may create tensors, for example masks, and these must be on the device of `x`.
    shapes = FakeTensorMode(allow_non_fake_inputs=True)
    device = x.device

    def like(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    with shapes:
        x = like(x)
    for module in modules:
        try:
            with shapes, torch.no_grad():
                state = {n: like(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
                y: object = functional_call(module, state, (x,))
        except Exception as error:
            raise ValueError(f"the shape of a layer's output cannot be found without computing it: {error}") from error
        if not isinstance(y, Tensor):
            raise ValueError(
                f"a layer of the model returns {type(y).__name__}, but only a tensor can pass to the next stage"
            )
        yield (x := y)


def _check(stages: Sequence[nn.Module], names: Sequence[str], call: str) -> None:
    """Raise ValueError if a stage has nothing to train, or if two stages share a parameter."""
    owners: dict[int, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        if not any(p.requires_grad for p in stage.parameters()):
            raise ValueError(
                f"{call}: the stage that starts at '{names[k]}' has no parameter to train; join it with a neighbour"
            )
        for name, p in stage.named_parameters():
            other, its = owners.setdefault(id(p), (k, name))
            if other != k:
                raise ValueError(
                    f"{call}: '{its}' in the stage that starts at '{names[other]}' and '{name}' in the stage that "
                    f"starts at '{names[k]}' are one parameter, but only one stage can own it; "
                    "cut elsewhere, or untie them"
                )


def _compare(model: nn.Module, stages: Sequence[nn.Module], x: Tensor, call: str) -> None:
    """Raise ValueError if the stages do not give the model's output: a graph does not show autocast, for example."""
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []), torch.no_grad():
        state = torch.get_rng_state()
        wanted = _called(model, x)
        torch.set_rng_state(state)
        y = x
        for stage in stages:
            y = _called(stage, y)
    if not isinstance(wanted, Tensor) or wanted.dtype != y.dtype or not torch.allclose(wanted, y, equal_nan=True):
        raise ValueError(
            f"{call}: its stages in sequence do not give its output; its forward does more than call layers"
        )


def _called(module: nn.Module, x: Tensor) -> Any:
    """The module's output for `x`, without a change of its buffers."""
    return functional_call(module, {n: b.clone() for n, b in module.named_buffers()}, (x,))


def _listed(names: Sequence[str]) -> str:
    few = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return ", ".join(f"'{n}'" if n != "..." else n for n in few) or "none"
