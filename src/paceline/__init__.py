"""paceline: train any PyTorch model data-parallel over workers that are far apart, slow to reach, unequal or unreliable."""

from typing import TYPE_CHECKING, Any

from paceline import registry
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
from paceline.families.averaging import Averaging, NonFiniteReplica, SyncRounds
from paceline.families.sync import SyncResult
from paceline.families.topology import Exponential, RandomPairs, Ring
from paceline.needs import Needs
from paceline.op import Op
from paceline.pipeline.split import Split, split
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
    ServerStrategy,
    Sgd,
    Shard,
    Store,
    Turns,
)
from paceline.sim import Cluster, Compute, Constant, Faults, Link, LogNormal, Measured, Stragglers, simulate
from paceline.state import Slot, resized
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
from paceline.trace import Trace
from paceline.worker.batch import NonFiniteGradient
from paceline.worker.plan import Plan
from paceline.worker.replica import Replica

if TYPE_CHECKING:
    from paceline.session.attach import attach
    from paceline.session.ddp import ddp_hook
    from paceline.session.session import Session
    from paceline.session.train import train

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
    "Momentum",
    "NBit",
    "Needs",
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
    "Rule",
    "Run",
    "Sandblaster",
    "Scaled",
    "ServerStrategy",
    "Session",
    "Sgd",
    "Shard",
    "Slot",
    "SlowMo",
    "SoftSync",
    "Split",
    "StaleSynchronous",
    "Store",
    "Stragglers",
    "Strategy",
    "Strom",
    "SyncResult",
    "SyncRounds",
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
    "Session": "paceline.session.session",
    "attach": "paceline.session.attach",
    "ddp_hook": "paceline.session.ddp",
    "train": "paceline.session.train",
}


def __getattr__(name: str) -> Any:
    """Real processes need more than torch and numpy: what they need is imported when they are asked for."""
    import importlib

    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
