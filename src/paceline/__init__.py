"""paceline: data-parallel training over workers that are far apart, slow to reach, unequal or unreliable.

The verbs are here (`attach`, `train`, `simulate`, `tune`, `ddp_hook`, `split`), the strategies, what a Task and a
Cluster are made of, and the monitors that watch a run.  Other names live in small namespaces: `codecs` (wire
formats), `rules` and `gates` (of parameter servers), `faults` (of the simulator), `topologies` (of gossip), `state`
(slots and resize rules), `registry` (strategies and codecs by name).
"""

from typing import TYPE_CHECKING, Any

from paceline import codecs, registry, state, strategies
from paceline.checkpoint import Checkpoints
from paceline.errors import ClusterError, PeerLost
from paceline.families import topology as topologies
from paceline.families.averaging import Averaging, NonFiniteReplica, SyncRounds
from paceline.families.server_strategy import ServerStrategy
from paceline.families.sync import SyncResult
from paceline.monitor import Monitor, ProgressBar, Recorder, Statistics
from paceline.needs import Needs
from paceline.op import Op
from paceline.pipeline.split import Split, split
from paceline.protocol.messages import Message, Reply, Request
from paceline.run import Run
from paceline.server import gates, rules
from paceline.server.shard import Shard
from paceline.server.store import Store
from paceline.sim import Cluster, Compute, Constant, Faults, Link, LogNormal, Measured, Stragglers, simulate
from paceline.sim import faults as faults
from paceline.state import Slot, resized
from paceline.strategies import *  # noqa: F403
from paceline.strategy import Strategy
from paceline.task import Task
from paceline.trace import Trace
from paceline.training import AutoAdjust, AutoBatch, GrowingBatch, PerSample, Scaling, Schedule
from paceline.worker.batch import NonFiniteGradient
from paceline.worker.plan import Plan
from paceline.worker.replica import Replica

if TYPE_CHECKING:
    from paceline.session.attach import attach
    from paceline.session.ddp import ddp_hook
    from paceline.session.partition import Partition
    from paceline.session.session import Session
    from paceline.session.train import train
    from paceline.study.rates import RateRange
    from paceline.study.torture import Tortured, torture
    from paceline.study.tune import tune
    from paceline.study.tuned import Tuned

__version__ = "0.1.0"

__all__ = [
    "AutoAdjust",
    "AutoBatch",
    "Averaging",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Compute",
    "Constant",
    "Faults",
    "GrowingBatch",
    "Link",
    "LogNormal",
    "Measured",
    "Message",
    "Monitor",
    "Needs",
    "NonFiniteGradient",
    "NonFiniteReplica",
    "Op",
    "Partition",
    "PeerLost",
    "PerSample",
    "Plan",
    "ProgressBar",
    "RateRange",
    "Recorder",
    "Replica",
    "Reply",
    "Request",
    "Run",
    "Scaling",
    "Schedule",
    "ServerStrategy",
    "Session",
    "Shard",
    "Slot",
    "Split",
    "Statistics",
    "Store",
    "Stragglers",
    "Strategy",
    "SyncResult",
    "SyncRounds",
    "Task",
    "Tortured",
    "Trace",
    "Tuned",
    "attach",
    "codecs",
    "ddp_hook",
    "faults",
    "gates",
    "registry",
    "resized",
    "rules",
    "simulate",
    "split",
    "state",
    "strategies",
    "topologies",
    "torture",
    "train",
    "tune",
]
__all__ += strategies.__all__

_LATER = {
    "Partition": "paceline.session.partition",
    "RateRange": "paceline.study.rates",
    "Session": "paceline.session.session",
    "Tortured": "paceline.study.torture",
    "Tuned": "paceline.study.tuned",
    "attach": "paceline.session.attach",
    "ddp_hook": "paceline.session.ddp",
    "torture": "paceline.study.torture",
    "train": "paceline.session.train",
    "tune": "paceline.study.tune",
}


def __getattr__(name: str) -> Any:
    """Real processes need more than torch, numpy and msgspec: import what they need when it is first used."""
    import importlib

    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
