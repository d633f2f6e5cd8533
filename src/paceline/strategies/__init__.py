"""Training methods, one paper a file."""

# Written by `python -m tools.exports`, which `make format` runs.  Do not edit.

from paceline.strategies.adaptive_averaging import AdaptiveAveraging
from paceline.strategies.all_reduce_sgd import AllReduceSGD
from paceline.strategies.asgd import ASGD
from paceline.strategies.async_diloco import AsyncDiLoCo
from paceline.strategies.async_momentum import AsyncMomentum
from paceline.strategies.block_momentum import BlockMomentum
from paceline.strategies.decreasing_averaging import AdaComm, DecreasingAveraging
from paceline.strategies.delay_compensated import DelayCompensated
from paceline.strategies.diloco import DiLoCo
from paceline.strategies.downpour import Downpour
from paceline.strategies.ea_wild import EAWild
from paceline.strategies.easgd import EAMSGD, EASGD, AsyncEASGD, RoundRobinEASGD
from paceline.strategies.gossip import Gossip
from paceline.strategies.hogwild import Hogwild
from paceline.strategies.one_bit_adam import OneBitAdam
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.periodic_averaging import PeriodicAveraging
from paceline.strategies.sandblaster import Sandblaster
from paceline.strategies.slow_mo import SlowMo
from paceline.strategies.soft_sync import SoftSync
from paceline.strategies.stale_synchronous import StaleSynchronous
from paceline.strategies.strom import Strom
from paceline.strategies.then import Replicated, Then
from paceline.strategy import Strategy

STRATEGIES: tuple[type[Strategy], ...] = (
    AdaptiveAveraging,
    AllReduceSGD,
    ASGD,
    AsyncDiLoCo,
    AsyncMomentum,
    BlockMomentum,
    DecreasingAveraging,
    AdaComm,
    DelayCompensated,
    DiLoCo,
    Downpour,
    EAWild,
    EASGD,
    AsyncEASGD,
    RoundRobinEASGD,
    EAMSGD,
    Gossip,
    Hogwild,
    OneBitAdam,
    ParameterServer,
    PeriodicAveraging,
    Sandblaster,
    SlowMo,
    SoftSync,
    StaleSynchronous,
    Strom,
    Then,
    Replicated,
)

__all__ = [
    "ASGD",
    "EAMSGD",
    "EASGD",
    "STRATEGIES",
    "AdaComm",
    "AdaptiveAveraging",
    "AllReduceSGD",
    "AsyncDiLoCo",
    "AsyncEASGD",
    "AsyncMomentum",
    "BlockMomentum",
    "DecreasingAveraging",
    "DelayCompensated",
    "DiLoCo",
    "Downpour",
    "EAWild",
    "Gossip",
    "Hogwild",
    "OneBitAdam",
    "ParameterServer",
    "PeriodicAveraging",
    "Replicated",
    "RoundRobinEASGD",
    "Sandblaster",
    "SlowMo",
    "SoftSync",
    "StaleSynchronous",
    "Strategy",
    "Strom",
    "Then",
]
