"""What `benchmarks.accuracy` runs: methods as a user would write them, in groups, each with an inner optimizer and its rate."""

from __future__ import annotations

from dataclasses import dataclass, field

import paceline as pl

EPOCHS = 8
EPOCH = 235  # Steps of an epoch of 60,000 samples, 256 a step.
SWEEP_EPOCHS, SWEEP_SEED = 4, 100


# The best of `sweep`: for a gradient of 256 samples, for replicas with 32 samples each that are averaged, for one machine with 32
# samples (the rate that block momentum is meant to be used with), and for averaged replicas with AdamW.
GRADIENT_RATE, AVERAGING_RATE, SINGLE_RATE, ADAM_RATE = 0.1, 0.05, 0.02, 0.005


@dataclass(frozen=True)
class Case:
    """A method with an inner optimizer.  With `held_out` the last 10,000 training images are not trained on, but tested on."""

    method: str
    optimizer: str = "SGD"
    rate: float = AVERAGING_RATE
    workers: int = 8
    held_out: bool = False
    strategy: pl.Strategy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", eval(self.method, dict(vars(pl))))

    @property
    def key(self) -> str:
        """All that tells its runs from others', defaults included."""
        where = f"{self.workers} workers{', held out' if self.held_out else ''}"
        return f"{self.strategy}, {self.optimizer}, rate {self.rate:g}, {where}"


def sweep() -> list[Case]:
    """Rates for one gradient of 256 samples, for replicas that are averaged, and for a machine of its own with 32 samples."""
    tried = [
        *(("AllReduceSGD()", "SGD", rate, 8) for rate in (0.02, 0.05, 0.1, 0.2)),
        *(("PeriodicAveraging(period=8)", "SGD", rate, 8) for rate in (0.02, 0.05, 0.1, 0.2)),
        *(("AllReduceSGD()", "SGD", rate, 1) for rate in (0.01, 0.02, 0.05)),
        *(("PeriodicAveraging(period=8)", "AdamW", rate, 8) for rate in (0.0005, 0.001, 0.002, 0.005, 0.01)),
    ]
    return [Case(*each, held_out=True) for each in tried]


def cases(*methods: str, optimizer: str = "SGD", rate: float = AVERAGING_RATE) -> list[Case]:
    return [Case(method, optimizer, rate) for method in methods]


POLICIES = [f"optimizer_state='{policy}'" for policy in ("keep", "average", "reset")]
GROUPS: dict[str, list[Case]] = {
    "policies": [
        *cases(*(f"PeriodicAveraging(period=8, {policy})" for policy in POLICIES)),
        *cases(*(f"AdaptiveAveraging({policy})" for policy in POLICIES)),
        *cases(*(f"PeriodicAveraging(period=8, {policy})" for policy in POLICIES), optimizer="AdamW", rate=ADAM_RATE),
    ],
    "gradients": [
        *cases("AllReduceSGD()", "AllReduceSGD(OneBit())", rate=GRADIENT_RATE),
        *cases("Then(AllReduceSGD(), AllReduceSGD(OneBit()), epochs=1)", rate=GRADIENT_RATE),
        *cases("AllReduceSGD(PowerSGD(rank=4))", "AllReduceSGD(TopK(ratio=0.01))", rate=GRADIENT_RATE),
        *cases("AllReduceSGD(QSGD())", "AllReduceSGD(Fp16())", rate=GRADIENT_RATE),
        *cases("AllReduceSGD()", "AllReduceSGD(OneBit())"),
        *cases("AllReduceSGD()", "AllReduceSGD(OneBit())", rate=SINGLE_RATE),
    ],
    "averaging": [
        *cases(*(f"PeriodicAveraging(period={period})" for period in (4, 6, 8, 16, 64))),
        *cases("AdaptiveAveraging()", "AdaptiveAveraging(warmup=25)", "AdaptiveAveraging(period=6, warmup=25)"),
        *cases("DecreasingAveraging((20, 5))", f"AdaComm(period=16, steps={EPOCH})"),
        *cases("PeriodicAveraging(period=8, codec=OneBit())", "PeriodicAveraging(period=8, codec=QSGD())"),
        *cases("AdaptiveAveraging(codec=OneBit())", "AdaptiveAveraging(codec=QSGD())"),
        *cases("PeriodicAveraging(period=8, delay=4)"),
    ],
    "blocks": [
        *cases("PeriodicAveraging(period=8)", "PeriodicAveraging(period=16)", "PeriodicAveraging(period=64)", rate=SINGLE_RATE),
        *cases("BlockMomentum(period=8)", "BlockMomentum(period=16)", "BlockMomentum(period=64)", rate=SINGLE_RATE),
        *cases("BlockMomentum(period=16, nesterov=False)", "BlockMomentum(period=16, form='cntk')", rate=SINGLE_RATE),
        *cases("SlowMo(period=16)", "DiLoCo(period=16)", rate=SINGLE_RATE),
        *cases("BlockMomentum(period=16, codec=OneBit())", "BlockMomentum(period=16, codec=QSGD())", rate=SINGLE_RATE),
        *cases("DiLoCo(period=16, codec=OneBit())", "DiLoCo(period=16, codec=QSGD())", rate=SINGLE_RATE),
        *cases("BlockMomentum(period=16, delay=8)", "DiLoCo(period=16, fragments=4, delay=2)", rate=SINGLE_RATE),
        *cases("Then(AllReduceSGD(), BlockMomentum(period=16), epochs=1)", rate=SINGLE_RATE),
    ],
    "rates": cases("BlockMomentum(period=8)", "BlockMomentum(period=16)", "SlowMo(period=16)", "DiLoCo(period=16)"),
    "adamw": cases("PeriodicAveraging(period=8)", "DiLoCo(period=16)", optimizer="AdamW", rate=ADAM_RATE),
}

TITLES = {
    "policies": "what becomes of momentum and Adam's moments when replicas are averaged",
    "gradients": "gradients averaged at every step",
    "averaging": "models averaged now and then",
    "blocks": "averaging and block methods at the rate of one machine",
    "rates": "block methods at the rate of averaging",
    "adamw": "AdamW as the inner optimizer",
}
