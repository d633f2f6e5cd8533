"""What a person sees of a running training: progress, metrics in files, and where the time goes."""

from paceline.monitor.monitor import Monitor
from paceline.monitor.progress import ProgressBar
from paceline.monitor.recorder import Recorder
from paceline.monitor.statistics import Statistics
from paceline.monitor.watched import Facts, Record

__all__ = ["Facts", "Monitor", "ProgressBar", "Record", "Recorder", "Statistics"]
