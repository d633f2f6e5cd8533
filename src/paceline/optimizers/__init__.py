"""Optimizers for large batches, which torch does not have: LARS, LAMB and a change of optimizer during training.

They are ordinary optimizers of torch: with a Task, with `attach`, or alone.
"""

from paceline.optimizers.lamb import LAMB
from paceline.optimizers.lars import LARS
from paceline.optimizers.two_stage import TwoStage

__all__ = ["LAMB", "LARS", "TwoStage"]
