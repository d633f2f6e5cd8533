"""Training methods, one paper a file.  A new one joins `STRATEGIES` here and is then listed, parsed and put under the laws."""

from paceline.strategies.adaptive_averaging import AdaptiveAveraging
from paceline.strategies.all_reduce_sgd import AllReduceSGD
from paceline.strategies.block_momentum import BlockMomentum
from paceline.strategies.decreasing_averaging import AdaComm, DecreasingAveraging
from paceline.strategies.diloco import DiLoCo
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.periodic_averaging import PeriodicAveraging
from paceline.strategies.slow_mo import SlowMo
from paceline.strategies.then import Replicated, Then
from paceline.strategy import Strategy

STRATEGIES: tuple[type[Strategy], ...] = (
    AllReduceSGD,
    PeriodicAveraging,
    AdaptiveAveraging,
    DecreasingAveraging,
    AdaComm,
    BlockMomentum,
    SlowMo,
    DiLoCo,
    ParameterServer,
    Replicated,
    Then,
)

__all__ = [
    "STRATEGIES",
    "AdaComm",
    "AdaptiveAveraging",
    "AllReduceSGD",
    "BlockMomentum",
    "DecreasingAveraging",
    "DiLoCo",
    "ParameterServer",
    "PeriodicAveraging",
    "Replicated",
    "SlowMo",
    "Then",
]
