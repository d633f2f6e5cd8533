"""paceline: train any PyTorch model data-parallel over workers that are far apart, slow to reach, unequal or unreliable."""

from paceline.codecs import Codec, ErrorFeedback, Fp16, Fp32, OneBit
from paceline.errors import ClusterError, PeerLost
from paceline.op import Op
from paceline.replica import Memory, NonFiniteGradient, Replica
from paceline.server import Rule, Sgd, Shard, Store
from paceline.sim import Cluster, Compute, Constant, Link, LogNormal, Measured, Run, Stragglers, simulate
from paceline.strategies import AllReduceSGD, BlockMomentum, ParameterServer, PeriodicAveraging
from paceline.strategy import Strategy
from paceline.task import Task
from paceline.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "AllReduceSGD",
    "BlockMomentum",
    "Cluster",
    "ClusterError",
    "Codec",
    "Compute",
    "Constant",
    "ErrorFeedback",
    "Fp16",
    "Fp32",
    "Link",
    "LogNormal",
    "Measured",
    "Memory",
    "NonFiniteGradient",
    "OneBit",
    "Op",
    "ParameterServer",
    "PeerLost",
    "PeriodicAveraging",
    "Replica",
    "Rule",
    "Run",
    "Sgd",
    "Shard",
    "Store",
    "Stragglers",
    "Strategy",
    "Task",
    "Trace",
    "simulate",
]
