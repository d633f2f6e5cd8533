"""Training control: schedules, sizes of minibatches, learning rates per sample, and what adjusts them during a run."""

from paceline.training.adjust import AutoAdjust
from paceline.training.batch_sizes import AutoBatch, GrowingBatch
from paceline.training.scaling import PerSample, Scaling
from paceline.training.schedule import Schedule

__all__ = ["AutoAdjust", "AutoBatch", "GrowingBatch", "PerSample", "Scaling", "Schedule"]
