"""Training methods, one paper a file.  A new one joins `STRATEGIES` here and is then listed, parsed and put under the laws."""

from paceline.strategies.all_reduce_sgd import AllReduceSGD
from paceline.strategies.block_momentum import BlockMomentum
from paceline.strategies.parameter_server import ParameterServer
from paceline.strategies.periodic_averaging import PeriodicAveraging
from paceline.strategy import Strategy

STRATEGIES: tuple[type[Strategy], ...] = (AllReduceSGD, PeriodicAveraging, BlockMomentum, ParameterServer)

__all__ = ["STRATEGIES", "AllReduceSGD", "BlockMomentum", "ParameterServer", "PeriodicAveraging"]
