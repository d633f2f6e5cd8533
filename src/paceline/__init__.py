"""paceline: train any PyTorch model data-parallel over workers that are far apart, slow to reach, unequal or unreliable."""

from typing import TYPE_CHECKING, Any

from paceline import registry
from paceline.averaging import Averaging, Met, NonFiniteReplica, Rounds
from paceline.codecs import (
    DGC,
    QSGD,
    AdaptiveThreshold,
    BFloat16,
    Chunked,
    Codec,
    Entropy,
    ErrorFeedback,
    Fp8,
    Fp16,
    Fp32,
    NBit,
    OneBit,
    PerTensor,
    PowerSGD,
    TernGrad,
    Threshold,
    TopK,
)
from paceline.errors import ClusterError, PeerLost
from paceline.memory import Memory, resized
from paceline.op import Op
from paceline.plan import Plan
from paceline.replica import NonFiniteGradient, Replica
from paceline.run import Run
from paceline.server import (
    Adagrad,
    Adam,
    Attract,
    Bound,
    Compensated,
    Every,
    Free,
    Gate,
    Momentum,
    Push,
    Quorum,
    RoundRobin,
    Rule,
    Scaled,
    Served,
    Sgd,
    Shard,
    Store,
    Turns,
)
from paceline.sim import Cluster, Compute, Constant, Faults, Link, LogNormal, Measured, Stragglers, simulate
from paceline.stages import Split, split
from paceline.strategies import (
    ASGD,
    EAMSGD,
    EASGD,
    AdaComm,
    AdaptiveAveraging,
    AllReduceSGD,
    AsyncDiLoCo,
    AsyncEASGD,
    AsyncMomentum,
    BlockMomentum,
    DecreasingAveraging,
    DelayCompensated,
    DiLoCo,
    Downpour,
    EAWild,
    Gossip,
    Hogwild,
    ParameterServer,
    PeriodicAveraging,
    Replicated,
    RoundRobinEASGD,
    Sandblaster,
    SlowMo,
    SoftSync,
    StaleSynchronous,
    Strom,
    Then,
)
from paceline.strategy import Strategy
from paceline.task import Task
from paceline.topology import Exponential, RandomPairs, Ring
from paceline.trace import Trace

if TYPE_CHECKING:
    from paceline.dist.attach import Session, attach
    from paceline.dist.ddp import ddp_hook
    from paceline.dist.train import train

__version__ = "0.1.0"

__all__ = [
    "ASGD",
    "DGC",
    "EAMSGD",
    "EASGD",
    "QSGD",
    "AdaComm",
    "Adagrad",
    "Adam",
    "AdaptiveAveraging",
    "AdaptiveThreshold",
    "AllReduceSGD",
    "AsyncDiLoCo",
    "AsyncEASGD",
    "AsyncMomentum",
    "Attract",
    "Averaging",
    "BFloat16",
    "BlockMomentum",
    "Bound",
    "Chunked",
    "Cluster",
    "ClusterError",
    "Codec",
    "Compensated",
    "Compute",
    "Constant",
    "DecreasingAveraging",
    "DelayCompensated",
    "DiLoCo",
    "Downpour",
    "EAWild",
    "Entropy",
    "ErrorFeedback",
    "Every",
    "Exponential",
    "Faults",
    "Fp8",
    "Fp16",
    "Fp32",
    "Free",
    "Gate",
    "Gossip",
    "Hogwild",
    "Link",
    "LogNormal",
    "Measured",
    "Memory",
    "Met",
    "Momentum",
    "NBit",
    "NonFiniteGradient",
    "NonFiniteReplica",
    "OneBit",
    "Op",
    "ParameterServer",
    "PeerLost",
    "PerTensor",
    "PeriodicAveraging",
    "Plan",
    "PowerSGD",
    "Push",
    "Quorum",
    "RandomPairs",
    "Replica",
    "Replicated",
    "Ring",
    "RoundRobin",
    "RoundRobinEASGD",
    "Rounds",
    "Rule",
    "Run",
    "Sandblaster",
    "Scaled",
    "Served",
    "Session",
    "Sgd",
    "Shard",
    "SlowMo",
    "SoftSync",
    "Split",
    "StaleSynchronous",
    "Store",
    "Stragglers",
    "Strategy",
    "Strom",
    "Task",
    "TernGrad",
    "Then",
    "Threshold",
    "TopK",
    "Trace",
    "Turns",
    "attach",
    "ddp_hook",
    "registry",
    "resized",
    "simulate",
    "split",
    "train",
]

_LATER = {
    "Session": "paceline.dist.attach",
    "attach": "paceline.dist.attach",
    "ddp_hook": "paceline.dist.ddp",
    "train": "paceline.dist.train",
}


def __getattr__(name: str) -> Any:
    """Real processes need more than torch and numpy: what they need is imported when they are asked for."""
    import importlib

    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
