"""Consensus-based optimisation on R^d: one objective, two levels, clusters, attackers, and the theory's numbers."""

from coterie.particles.api import Minimiser, Record, Result, minimise, minimise_bilevel
from coterie.particles.attackers import Attackers, Seen, drifting, fixed, mimicking, scattered
from coterie.particles.dynamics import Dynamics
from coterie.particles.system import ClusteredSystem

__all__ = [
    "Attackers",
    "ClusteredSystem",
    "Dynamics",
    "Minimiser",
    "Record",
    "Result",
    "Seen",
    "drifting",
    "fixed",
    "mimicking",
    "minimise",
    "minimise_bilevel",
    "scattered",
]
