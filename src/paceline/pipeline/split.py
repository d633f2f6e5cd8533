"""split: a model as several stages of consecutive layers, for a replica that several workers hold together (DistBelief, 2012).

A stage can begin at any layer before which one tensor is all that later layers need, so that tensor is all that travels; its
parameters, under the names they had, stay where it is.  The stages one after the other are the whole model: the same outputs and
gradients.
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
    """A model and its stages, which share its parameters; each `begins` with a layer and has a cost, in the unit of `split`."""

    model: nn.Module
    stages: tuple[nn.Module, ...]
    begins: tuple[str, ...]
    costs: tuple[int, ...]

    def passed(self, x: Tensor) -> list[Tensor]:
        """What each stage would hand on of an input like `x`, as tensors without memory; the last one's is the output."""
        return list(_passed(self.stages, x))


def split(model: nn.Module, parts: int | Sequence[str], sample: Tensor | None = None) -> Split:
    """Cut `model` into so many stages, as equal as can be, or at the layers with these names, each of which begins a new stage.

    Equal is what has as many parameters; or, with a `sample` of the model's input, takes as many floating-point operations, and
    then the fewest bytes pass from stage to stage.

    >>> split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)), 2).begins
    ('0', '2')
    """
    call = f"split({type(model).__name__}, {parts!r})"
    layers = _layers(model, call)
    if isinstance(parts, int):
        if parts < 1:
            raise ValueError(f"{call}: a model has at least 1 stage")
        trainable = [any(p.requires_grad for p in layer.module(model).parameters()) for layer in layers]
        if parts > sum(trainable):
            raise ValueError(
                f"{call}: only {sum(trainable)} of the layers that a stage can begin with have parameters to train, and each stage needs "
                f"one of them; they are {_listed([y.name for y, t in zip(layers, trainable, strict=True) if t])}"
            )
        costs, cuts = _weights(model, layers, sample)
        begins = balanced(costs, cuts, parts, trainable)
    else:
        begins = [0, *(_place(name, layers, call) for name in parts)]
        if any(a >= b for a, b in pairwise(begins)):
            raise ValueError(
                f"{call}: name the layers in the order in which the model calls them, {_listed([y.name for y in layers])}"
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
    """With which layers to begin `parts` stages, so that the most costly is the least, and then the sum of `cuts` at their beginnings.

    Every stage gets a layer that is `trainable`.  What remains alike begins late: an activation stays with the layer before it.

    >>> balanced([1, 1, 1, 3], [0, 8, 8, 8], 2, [True] * 4)
    [0, 3]
    """
    sums, counts = [0, *accumulate(costs)], [0, *accumulate(trainable)]

    def best(cost_of: Callable[[int, int], float], join: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """The least that the stages' costs can be joined to; found for one stage more at a time, up to each layer."""
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
    """A stretch of a model's graph: what comes in, what is computed, what goes out."""

    name: str
    entering: fx.Node
    nodes: Sequence[fx.Node]
    leaving: fx.Node

    def module(self, model: nn.Module) -> fx.GraphModule:
        """It as a module of its own, with the model's own layers in it."""
        graph = fx.Graph()
        copies = {self.entering: graph.placeholder("x")}

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in self.nodes:
            copy(node)
        graph.output(graph.call_method("contiguous", (copy(self.leaving),)))  # As it is sent.
        return fx.GraphModule(model, graph, type(model).__name__)


class _Tracer(fx.Tracer):
    """Looks into the model's own forward and those of plain containers; every other module is a layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def _layers(model: nn.Module, call: str) -> list[_Layer]:
    """The stretches of the model between the places at which it can be cut."""
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # Whatever a forward does with what is not a tensor yet.
        raise ValueError(
            f"{call}: its forward cannot be read as a graph of layers ({error}); write it as a chain of modules, or train it whole"
        ) from error
    inputs = [n for n in graph.nodes if n.op == "placeholder" and (n.users or not n.args)]
    [output] = [n for n in graph.nodes if n.op == "output"]
    if len(inputs) != 1 or not isinstance(output.args[0], fx.Node):
        raise ValueError(
            f"{call}: its forward takes {[str(n.target) for n in inputs]} and returns {output.args[0]}; a model that is split takes one "
            "tensor and returns one"
        )
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    place = {n: i for i, n in enumerate(nodes)} | {inputs[0]: -1, output: len(nodes)}
    last_use = {n: max((place[u] for u in n.users if u in place), default=-1) for n in (inputs[0], *nodes)}
    places, entering = [0], [inputs[0]]
    is_begun = False  # Whether there is a layer already: what is done to the input before the first belongs to it.
    for i, node in enumerate(nodes):
        if node.op == "call_module":
            crossing = [n for n in (inputs[0], *nodes[:i]) if last_use[n] >= i]
            if is_begun and len(crossing) == 1:
                places.append(i)
                entering.append(crossing[0])
            is_begun = True
    if not is_begun:
        raise ValueError(f"{call}: its forward calls no layers, and there is nothing to cut between")
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
        raise ValueError(f"{call}: the first stage begins at '{name}' anyway; name the layers at which the others do")
    if any(n.op == "call_module" and n.target == name for y in layers for n in y.nodes):
        raise ValueError(
            f"{call}: no stage can begin at '{name}', as more than one tensor would have to pass to it; one can at {_listed(names[1:])}"
        )
    near = get_close_matches(name, names[1:], n=1, cutoff=0.0)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"{call}: there is no layer '{name}'; {hint}a stage can begin at {_listed(names[1:])}")


def _weights(model: nn.Module, layers: Sequence[_Layer], sample: Tensor | None) -> tuple[list[int], list[int]]:
    """What each layer costs, and the bytes that pass to it."""
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
    # Looking up and adding count for nothing there; a model that does no more is weighed by its parameters after all.
    return costs if any(costs) else parameters, [0, *(y.nbytes for y in _passed(modules[:-1], sample))]


def _passed(modules: Sequence[nn.Module], x: Tensor) -> Iterator[Tensor]:
    """What modules one after the other make of `x`, in shapes alone."""
    from torch._subclasses import FakeTensorMode

    # Not on the meta device: layers may make tensors of their own, masks say, and these are where `x` is.
    shapes, device = FakeTensorMode(allow_non_fake_inputs=True), x.device

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
            raise ValueError(f"what a layer hands on cannot be known without computing it: {error}") from error
        if not isinstance(y, Tensor):
            raise ValueError(
                f"a layer of the model returns {type(y).__name__}, and only a tensor can pass to the next stage"
            )
        yield (x := y)


def _check(stages: Sequence[nn.Module], names: Sequence[str], call: str) -> None:
    """Every stage has something to train, and nothing is in two of them."""
    owners: dict[int, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        if not any(p.requires_grad for p in stage.parameters()):
            raise ValueError(
                f"{call}: the stage that begins at '{names[k]}' has no parameter to train; join it with a neighbour"
            )
        for name, p in stage.named_parameters():
            other, its = owners.setdefault(id(p), (k, name))
            if other != k:
                raise ValueError(
                    f"{call}: '{its}' in the stage that begins at '{names[other]}' and '{name}' in the one that begins at '{names[k]}' are "
                    "one parameter, which has one owner; cut elsewhere, or untie them"
                )


def _compare(model: nn.Module, stages: Sequence[nn.Module], x: Tensor, call: str) -> None:
    """A graph has no more than what a forward does to tensors: what it does beside that, such as entering autocast, is missing."""
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []), torch.no_grad():
        state = torch.get_rng_state()
        wanted = _called(model, x)
        torch.set_rng_state(state)
        y = x
        for stage in stages:
            y = _called(stage, y)
    if not isinstance(wanted, Tensor) or wanted.dtype != y.dtype or not torch.allclose(wanted, y, equal_nan=True):
        raise ValueError(
            f"{call}: its stages one after the other do not give its output; its forward does more than call layers"
        )


def _called(module: nn.Module, x: Tensor) -> Any:
    """What it makes of `x`, and remembers nothing of."""
    return functional_call(module, {n: b.clone() for n, b in module.named_buffers()}, (x,))


def _listed(names: Sequence[str]) -> str:
    few = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return ", ".join(f"'{n}'" if n != "..." else n for n in few) or "none"
