"""The solver: a problem and its options become a search on the model's engine, and its result."""

from gambit.solver.solver import PendingSearch, Solver
from gambit.types import Problem

__all__ = ["PendingSearch", "Problem", "Solver"]
