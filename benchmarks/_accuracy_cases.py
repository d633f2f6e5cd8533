"""The runs of `benchmarks.accuracy`: methods as a user would write them, in groups, with an optimizer and a rate."""

from __future__ import annotations

from dataclasses import dataclass, field

import paceline as pl

EPOCHS = 60
EPOCH = 59  # Steps of an epoch of 60,000 samples, 1024 a step.
SWEEP_EPOCHS, SWEEP_SEED = 30, 100


# The best rate of `sweep` for each kind of method: averaged gradients, one-bit gradients, averaged models, blocks, and
# averages with AdamW.
GRADIENT_RATE, ONE_BIT_RATE, AVERAGING_RATE, BLOCK_RATE, ADAM_RATE = 0.1, 0.05, 0.05, 0.02, 0.01
PLAIN_RATE = 0.05  # The best of three rates for averaged gradients in the long runs.
LOW_RATE = 0.03  # One bit suffers most from high rates; in a longer run its best rate is lower.


@dataclass(frozen=True)
class Case:
    """A method with an inner optimizer. With `held_out`, the last 10,000 training images are the test set, and not
    trained on."""

    method: str
    optimizer: str = "SGD"
    rate: float = AVERAGING_RATE
    workers: int = 8
    held_out: bool = False
    strategy: pl.Strategy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", eval(self.method, {**vars(pl), **vars(pl.codecs)}))

    @property
    def key(self) -> str:
        """Everything that distinguishes its runs from others, with defaults."""
        where = f"{self.workers} workers{', held out' if self.held_out else ''}"
        return f"{self.strategy}, {self.optimizer}, rate {self.rate:g}, {where}"


def sweep() -> list[Case]:
    """The rates that `sweep` tries for each kind of method."""
    tried: list[tuple[str, str, tuple[float, ...]]] = [
        ("AllReduceSGD()", "SGD", (0.03, 0.05, 0.1, 0.2)),
        ("AllReduceSGD(OneBit(512, 'zero'))", "SGD", (0.01, 0.02, 0.03, 0.05)),
        ("PeriodicAveraging(period=8)", "SGD", (0.03, 0.05, 0.1, 0.2)),
        ("BlockMomentum(period=16)", "SGD", (0.005, 0.01, 0.02, 0.05)),
        ("PeriodicAveraging(period=8)", "AdamW", (0.002, 0.005, 0.01, 0.02)),
    ]
    return [Case(method, optimizer, rate, held_out=True) for method, optimizer, rates in tried for rate in rates]


def cases(*methods: str, optimizer: str = "SGD", rate: float = AVERAGING_RATE) -> list[Case]:
    return [Case(method, optimizer, rate) for method in methods]


POLICIES = [f"optimizer_state='{policy}'" for policy in ("keep", "average", "reset")]
GROUPS: dict[str, list[Case]] = {
    "gradients": [
        *cases("AllReduceSGD()", rate=GRADIENT_RATE),
        *cases(
            "AllReduceSGD(QSGD())",
            "AllReduceSGD(PowerSGD(rank=4))",
            "AllReduceSGD(TopK(ratio=0.01))",
            rate=GRADIENT_RATE,
        ),
        *cases("AllReduceSGD()", rate=PLAIN_RATE),
        *cases(
            "AllReduceSGD(OneBit())",
            "AllReduceSGD(OneBit(threshold='zero'))",
            "AllReduceSGD(OneBit(512, 'zero'))",
            "AllReduceSGD(OneBit(64, 'zero'))",
            "Then(AllReduceSGD(), AllReduceSGD(OneBit()), epochs=3)",
            "Then(AllReduceSGD(), AllReduceSGD(OneBit(64, 'zero')), epochs=3)",
            rate=ONE_BIT_RATE,
        ),
        *cases(
            "AllReduceSGD()",
            "AllReduceSGD(OneBit())",
            "AllReduceSGD(OneBit(threshold='zero'))",
            "AllReduceSGD(OneBit(512, 'zero'))",
            "AllReduceSGD(OneBit(64, 'zero'))",
            rate=LOW_RATE,
        ),
    ],
    "averaging": [
        *cases("PeriodicAveraging(period=8)", "PeriodicAveraging(period=16)"),
        *cases("AdaptiveAveraging()", "AdaptiveAveraging(period=6, warmup=25)"),
        *cases("DecreasingAveraging((20, 5))", f"AdaComm(period=16, steps={EPOCH})"),
        *cases("PeriodicAveraging(period=8, codec=OneBit())", "PeriodicAveraging(period=8, codec=QSGD())"),
        *cases("AdaptiveAveraging(codec=OneBit())", "PeriodicAveraging(period=8, delay=4)"),
    ],
    "blocks": [
        *cases(
            "PeriodicAveraging(period=16)",
            "BlockMomentum(period=16)",
            "SlowMo(period=16)",
            "DiLoCo(period=16)",
            rate=BLOCK_RATE,
        ),
        *cases("BlockMomentum(period=16, nesterov=False)", "BlockMomentum(period=16, form='cntk')", rate=BLOCK_RATE),
        *cases(
            "BlockMomentum(period=16, codec=OneBit())",
            "DiLoCo(period=16, codec=OneBit())",
            rate=BLOCK_RATE,
        ),
        *cases("BlockMomentum(period=16, delay=8)", "DiLoCo(period=16, fragments=4, delay=2)", rate=BLOCK_RATE),
    ],
    "policies": [
        *cases(*(f"PeriodicAveraging(period=8, {policy})" for policy in POLICIES)),
        *cases(*(f"BlockMomentum(period=16, {policy})" for policy in POLICIES), rate=BLOCK_RATE),
        *cases(*(f"PeriodicAveraging(period=8, {policy})" for policy in POLICIES), optimizer="AdamW", rate=ADAM_RATE),
    ],
}

TITLES = {
    "gradients": "gradients averaged at every step",
    "averaging": "models averaged now and then",
    "blocks": "block methods",
    "policies": "what becomes of momentum and Adam's moments when replicas are averaged",
}
