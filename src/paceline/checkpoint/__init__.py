"""Checkpoints: the states of all workers in a folder, written as a whole or not at all, as safetensors and JSON."""

from paceline.checkpoint.checkpoint import BrokenCheckpoint, Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.settings import Checkpoints

__all__ = ["BrokenCheckpoint", "Checkpoint", "Checkpoints", "Folder"]
