"""A simulated run, whose errors are broken invariants."""

from __future__ import annotations

from paceline.errors import ClusterError
from paceline.monitor.monitor import Monitors
from paceline.run import Run
from paceline.sim.run import Simulation
from paceline.study.witness import Violation


def played(simulation: Simulation) -> Run:
    """Run it to its end."""
    simulator = simulation.simulator
    try:
        return simulation.run(Monitors(None))
    except Violation:
        raise
    except ClusterError as error:
        kind = "every run ends" if str(error).startswith(("deadlock", "no end")) else "no rank fails"
        raise Violation(kind, str(error), simulator.now) from error
    except Exception as error:
        raise Violation("no rank fails", f"{type(error).__name__}: {error}", simulator.now) from error
