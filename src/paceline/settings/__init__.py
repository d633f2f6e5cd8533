"""Settings files: a whole training in TOML, for the simulator, for processes of this machine, and for a cluster."""

from paceline.settings.decode import SettingsError
from paceline.settings.read import load, naming
from paceline.settings.recipe import Recipe
from paceline.settings.sections import Settings

__all__ = ["Recipe", "Settings", "SettingsError", "load", "naming"]
