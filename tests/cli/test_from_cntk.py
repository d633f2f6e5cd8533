"""The page for users of CNTK: the keys, names and defaults in its tables are ours, and its examples run."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.checked import spelled
from paceline.settings import Recipe, load
from paceline.settings.header import header
from paceline.settings.read import settings_of
from paceline.strategy import Strategy
from tests.tables import REQUIRED, Row, blocks, key, named, read, rows, spans, value_of

PAGE = read("from-cntk.md")
EXAMPLES = {body.split()[1]: body for body in blocks(PAGE, "toml")}
ROWS = [row for row in rows(PAGE) if "settings file" in row.columns]
HEADINGS = list(dict.fromkeys(row.heading for row in ROWS))
KEYS = """
modelPath trainCriterionNodeName evalCriterionNodeName maxEpochs epochSize minibatchSize numSubminibatches truncated
maxSamplesInRAM dropoutRate maxTempMemSizeInSamplesForCNN keepCheckPointFiles disableWkInBatchNormal
saveBestModelPerCriterion learningRatesPerSample learningRatesPerMB minLearningRatePerSample momentumAsTimeConstant
momentumPerMB momentumPerSample useNAG gradientClippingWithTruncation clippingThresholdPerSample L2RegWeight L1RegWeight
gaussianNoiseInjectStd gradUpdateType normWithAveMultiplier rms_wgt_inc rms_wgt_dec rms_wgt_max rms_wgt_min rms_gamma
varianceTimeConstant traceLevel firstMBsToShowResult numMBsToShowResult numMBsToCUDAProfile
tensorBoardNumMBsToLogResult useAllDataForPreComputedNode gradientCheck sigFigs
autoAdjustLR autoAdjustMinibatch reduceLearnRateIfImproveLessThan continueReduce learnRateDecreaseFactor
increaseLearnRateIfImproveMoreThan learnRateIncreaseFactor loadBestModel learnRateAdjustInterval
useCVSetControlLRIfCVExists useEvalCriterionControlLR numMiniBatch4LRSearch numSamples4Search numPrevLearnRates
numBestSearchEpoch minibatchSizeTuningFrequency minibatchSizeTuningMax minibatchSearchCriterionErrorMargin
parallelTrain parallelizationMethod parallelizationStartEpoch distributedMBReading syncPerfStats gradientBits
useZeroThresholdFor1BitQuantization useBufferedAsyncGradientAggregation blockSize blockSizePerWorker syncPeriod
blockMomentumAsTimeConstant blockMomentumPerSync resetSGDMomentum useNesterovMomentum blockLearningRate
syncPeriodPerWorker usePipeline SimModelAverage AdjustLearningRateAtBeginning adjustType adjustCoefficient
adjustNBMiniBatch adjustPerMinibatches
data_parallel_distributed_learner num_quantization_bits distributed_after use_async_buffered_parameter_update
block_momentum_distributed_learner block_size block_momentum_as_time_constant use_nestrov_momentum
reset_sgd_momentum_after_aggregation block_learning_rate num_data_partitions partition_index finalize
"""
ASSIGNMENT = re.compile(r"[a-z-]+\.[a-z.-]+ = .+")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def recipe(text: str, *flags: str) -> Recipe:
    path = Path("settings.toml")
    path.write_text(text)
    settings = load(path, flags)
    return Recipe(settings, settings.workers, Path.cwd())


def small(given: dict[str, Any], strategy: type[Strategy] = pl.AllReduceSGD) -> Recipe:
    """A small training with these tables."""
    size = {} if {"batch", "grow", "auto"} & set(given.get("data", {})) else {"batch": 64}
    rate = {} if "lr" in given.get("optimizer", {}) else {"lr-per-sample": 0.001}
    table = {
        "model": "perceptron",
        "epochs": 40,  # Longer than any warm start on the page.
        **given,
        "data": {"name": "digits"} | size | given.get("data", {}),
        "optimizer": rate | given.get("optimizer", {}),
        "strategy": {"name": spelled(strategy)} | given.get("strategy", {}),
    }
    return Recipe(settings_of(table), 2, Path.cwd())


def strategy_of(row: Row) -> type[Strategy]:
    """The strategy that a row is about."""
    found = [named(span)[0] for span in spans(row.cell("Python")) if not span[0].islower()]
    methods = [cls for cls in found if isinstance(cls, type) and issubclass(cls, Strategy) and cls is not pl.Then]
    return methods[0] if methods else pl.AllReduceSGD


def in_python(row: Row) -> Any:
    """The default of the setting in the row's Python, if it is one; torch's settings are those of its SGD."""
    cell = row.cell("Python")
    if cell.startswith("torch's"):
        assert set(spans(cell)) <= set(inspect.signature(torch.optim.SGD).parameters), row
        return None
    found = [named(span) for span in spans(cell)]
    if len(found) != 1 or len(found[0][1]) != 1:
        return None
    default = inspect.signature(found[0][0]).parameters[found[0][1][0]].default
    return REQUIRED if default is inspect.Parameter.empty else default


def test_every_key_of_cntk_is_on_the_page():
    assert [name for name in KEYS.split() if not re.search(rf"\b{name}\b", PAGE)] == []


def test_all_blocks_of_cntk_are_on_the_page():
    blocks_of_cntk = {"DataParallelSGD", "ModelAveragingSGD", "BlockMomentumSGD", "DataParallelASGD"}
    assert set(HEADINGS) > {*blocks_of_cntk, "The ParallelTrain block", "The AutoAdjust block", "The Python learners"}
    assert len(ROWS) > 80 and len(EXAMPLES) == 5


@pytest.mark.parametrize("heading", HEADINGS)
def test_keys_and_names_exist_and_have_the_defaults_of_the_table(heading: str):
    for row in (row for row in ROWS if row.heading == heading):
        keys = [span for span in spans(row.cell("settings file")) if " = " not in span]
        defaults = [*(key(path, strategy_of(row)) for path in keys), in_python(row)]
        if said := spans(row.cell("our default")):
            assert defaults[0] == value_of(said[0]), row


@pytest.mark.parametrize("heading", HEADINGS)
def test_what_a_table_shows_for_a_file_is_accepted(heading: str):
    for row in (row for row in ROWS if row.heading == heading):
        together = [span for span in spans(row.cell("settings file")) if " = " in span]
        alone = [span for span in spans(row.cell("what differs")) if ASSIGNMENT.fullmatch(span)]
        for lines in (together, *([span] for span in alone)):
            made = small(tomllib.loads("\n".join(lines)), strategy_of(row))
            assert made.task() and made.strategy, row


def plain(text: str) -> dict[str, Any]:
    """The names that the Python examples define, without their runs."""
    found: dict[str, Any] = {}
    kept = [node for node in ast.parse(text).body if not {"run", "returns"} & _names(node)]
    exec(compile(ast.Module(kept, []), "from-cntk.md", "exec"), found)
    return found


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def test_an_example_is_the_same_training_in_a_file_and_in_python():
    common, *others = blocks(PAGE, "python")[1:]
    for (name, text), block in zip(EXAMPLES.items(), others, strict=False):
        made = recipe(text)
        task, found = made.task(), plain("import paceline as pl\n" + common + block)
        assert made.strategy == found["strategy"], name
        for setting in ("batch", "epochs", "scaling", "schedule", "adjust"):
            assert getattr(task, setting) == getattr(found["task"], setting), f"{name}: {setting}"
        both = [t.optimizer([torch.nn.Parameter(torch.zeros(1))]) for t in (task, found["task"])]
        first, second = ({n: v for n, v in o.param_groups[0].items() if n != "params"} for o in both)
        assert (type(both[0]), first) == (type(both[1]), second), name
        first, second = (torch.nn.utils.parameters_to_vector(t.build().parameters()) for t in (task, found["task"]))
        assert torch.equal(first, second), name


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str):
    made = recipe(EXAMPLES[name], "--epochs", "1")
    assert header(made, made.task())["strategy"]
    assert pl.simulate(made.task(), made.strategy, made.cluster()).params.isfinite().all()


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[\w.-]+ [\w.]+)`", PAGE))))
def test_a_flag_in_the_text_is_a_key(flag: str):
    recipe(EXAMPLES["model-averaging.toml"], *flag.split()).task()


def test_cntks_names_of_the_methods_are_understood():
    names = {
        "DataParallelSGD": pl.AllReduceSGD,
        "ModelAveragingSGD": pl.PeriodicAveraging,
        "BlockMomentumSGD": pl.BlockMomentum,
        "DataParallelASGD": pl.ASGD,
    }
    for name, cls in names.items():
        assert f"`{name}`" in PAGE
        assert type(small({"strategy": {"name": name}}).strategy) is cls
        assert type(small({"strategy": {"name": name[0].lower() + name[1:]}}).strategy) is cls


def test_every_file_of_the_page_is_toml_with_its_name_first():
    for name, text in EXAMPLES.items():
        assert text.startswith(f"# {name}\n") and tomllib.loads(text)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", ["clip-value", "clip-norm"])
def test_a_step_is_that_of_cntks_formulas(nesterov: bool, clip: str):
    rate, constant, decay, limit, samples = 0.003, 500.0, 0.01, 0.4, 64
    table = {"lr-per-sample": rate, "momentum-time-constant": constant, "weight-decay": decay, clip: limit}
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(5, generator=generator, dtype=torch.float64)
    p = torch.nn.Parameter(w.clone())
    optimizer = small({"optimizer": table | {"nesterov": nesterov}}).optimizer.make([p])
    m = exp(-samples / constant)
    v = torch.zeros_like(w)
    for _ in range(4):
        mean = torch.randn(5, generator=generator, dtype=torch.float64)
        p.grad = mean.clone()
        optimizer.step()
        g = mean * samples  # CNTK's gradient of a minibatch is a sum.
        most = limit * samples
        g = g.clamp(-most, most) if clip == "clip-value" else g * min(1.0, most / float(g.norm()))
        g = rate * (1 - m) * (g + decay * samples * w)
        v = m * v + g
        w = w - (m * v + g if nesterov else v)
    assert torch.allclose(p.detach(), w, rtol=1e-5)
