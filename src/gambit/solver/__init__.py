"""One run wired together: a problem and its options become a search on the model's engine, and its result."""

from gambit.core.problem import Problem
from gambit.solver.pending import PendingSearch
from gambit.solver.solver import Solver

__all__ = ["PendingSearch", "Problem", "Solver"]
