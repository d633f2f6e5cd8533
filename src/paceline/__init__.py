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
from paceline.server import Rule, Sgd, Shard, Store
from paceline.sim import Cluster, Compute, Constant, Link, LogNormal, Measured, Stragglers, simulate
from paceline.strategies import (
    AdaComm,
    AdaptiveAveraging,
    AllReduceSGD,
    BlockMomentum,
    DecreasingAveraging,
    DiLoCo,
    ParameterServer,
    PeriodicAveraging,
    Replicated,
    SlowMo,
    Then,
)
from paceline.strategy import Strategy
from paceline.task import Task
from paceline.trace import Trace

if TYPE_CHECKING:
    from paceline.dist.attach import Session, attach
    from paceline.dist.ddp import ddp_hook
    from paceline.dist.train import train

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "QSGD",
    "AdaComm",
    "AdaptiveAveraging",
    "AdaptiveThreshold",
    "AllReduceSGD",
    "Averaging",
    "BFloat16",
    "BlockMomentum",
    "Chunked",
    "Cluster",
    "ClusterError",
    "Codec",
    "Compute",
    "Constant",
    "DecreasingAveraging",
    "DiLoCo",
    "Entropy",
    "ErrorFeedback",
    "Fp8",
    "Fp16",
    "Fp32",
    "Link",
    "LogNormal",
    "Measured",
    "Memory",
    "Met",
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
    "Replica",
    "Replicated",
    "Rounds",
    "Rule",
    "Run",
    "Session",
    "Sgd",
    "Shard",
    "SlowMo",
    "Store",
    "Stragglers",
    "Strategy",
    "Task",
    "TernGrad",
    "Then",
    "Threshold",
    "TopK",
    "Trace",
    "attach",
    "ddp_hook",
    "registry",
    "resized",
    "simulate",
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
