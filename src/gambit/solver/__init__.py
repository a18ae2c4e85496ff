"""One run wired together: a problem and its options become a search on the model's engine, and its result."""

from gambit.solver.pending import PendingSearch
from gambit.solver.solver import Solver
from gambit.types import Problem

__all__ = ["PendingSearch", "Problem", "Solver"]
