"""The deterministic cluster simulator."""

from paceline.costs import Link
from paceline.sim.cluster import Cluster, Compute, Constant, LogNormal, Measured, Stragglers
from paceline.sim.faults import Faults
from paceline.sim.run import simulate

__all__ = ["Cluster", "Compute", "Constant", "Faults", "Link", "LogNormal", "Measured", "Stragglers", "simulate"]
