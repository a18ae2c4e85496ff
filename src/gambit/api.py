"""Everything that programs built on Gambit import: to search, to read results, to add policies, scorers, engines.

Importing it loads no model library; torch is imported when a model is.

**Solve.** A `Solver` holds one model on one engine. `solve` searches one problem, `solve_many` several in one batch.
A `SearchConfig` says how to search; fields left out come from the model's preset.

    from gambit.api import SearchConfig, Solver

    with Solver("pawn") as solver:
        result = solver.solve("a = 3; b = 5; c = a * b; c?", SearchConfig(capacity=8))
    print(result.answer, result.votes)

A `SpreadSolver` runs each search on several solvers, some of its islands on each; `spread_on_ray` makes one whose
solvers are under Ray.

**Extend.** Policies, scorers, engines and benchmarks are found by name through the entry-point groups
`gambit.policies`, `gambit.scorers`, `gambit.engines` and `gambit.benchmarks`; docs/extending.md has an example of each.

- A policy implements `Policy`: from a `PoolView` it makes `Decision`s.
- A scorer implements `Scorer` (or `HistoryScorer`, which remembers, or `SplitScorer`): from a `ThoughtBatch` it makes
  scores. `ScorerInfo` says which states it reads and what its numbers mean.
- An engine implements `Engine`: it runs `TraceSpec`s of open `SearchSpec`s and reports each step as a `StepBatch`. Its
  entry point is a function `start(config, model, scorer)`.
- A benchmark is a `Benchmark` of `Item`s.

**Records.** `events` has the kinds of `Event` in a log. What a record holds needs no import: `result.counts.pruned`.

**What is stable.** Names listed in `__all__`, and those of `events`, keep their meaning within a major version (1.x).
Where one is renamed or moved, its old name works until the next major version and gives a `DeprecationWarning`. New
fields and options have defaults, so that keyword arguments and records written earlier stay valid. Event logs, scorer
checkpoints, collections and bench folders of every released version can be read, and resumed while model and scorer are
the same. The protocols of engines may gain methods in a minor version, which the changelog then lists. Every other
module of the package is internal and may change at any time.
"""

from gambit import events
from gambit.answers import AnswerKind, Grader
from gambit.async_solver import AsyncSolver
from gambit.bench.datasets import Benchmark, Item
from gambit.cluster.work import spread_on_ray
from gambit.config.options import EngineConfig, SearchConfig
from gambit.config.presets import SearchSettings
from gambit.config.trust import ScorerTrust
from gambit.engines.base import Engine, EngineInfo, SearchSpec
from gambit.errors import EngineError, GambitError, GambitWarning, UserError
from gambit.events import Event, read_log
from gambit.policies.base import (
    Branch,
    Decision,
    Discard,
    Evict,
    Force,
    Policy,
    PoolView,
    Prune,
    Requirements,
    ScoreUse,
    SplitIslands,
    Start,
    Stop,
    TraceView,
    Wake,
    top_up,
)
from gambit.results.record import replay
from gambit.results.result import SearchResult
from gambit.results.vote import VoteEntry, VoteKind
from gambit.scorers.base import HistoryScorer, PastThoughts, Scorer, ScorerInfo, SplitScorer, ThoughtBatch, TwoLayers
from gambit.scorers.checkpoint import load_checkpoint, save_checkpoint
from gambit.solver import PendingSearch, Solver
from gambit.solver.spread import SpreadSolver
from gambit.text.boundary import BoundaryRule
from gambit.text.tokenizers import Tokenizer
from gambit.tree import TraceState
from gambit.types import (
    Admission,
    Aggregation,
    EndReason,
    Eviction,
    OnPressure,
    PoolSettings,
    PressureAction,
    Problem,
    Progress,
    SearchStep,
    StatePosition,
    StepBatch,
    StepSeconds,
    StopReason,
    StopRule,
    ThoughtScore,
    TraceEnd,
    TraceKey,
    TraceSpec,
)
from gambit.verifiers.base import Question, ReadingScore, ThoughtReading, Verifier, VerifierInfo
from gambit.view.notebook import NotebookProgress
from gambit.view.page import write_page

__all__ = [  # noqa: RUF022 # in groups
    # solving
    "AsyncSolver", "EngineConfig", "NotebookProgress", "PendingSearch", "Problem", "SearchConfig", "Solver",
    "SpreadSolver", "VoteKind", "spread_on_ray",
    # results
    "Event", "Grader", "PoolSettings", "SearchResult", "StopReason", "TraceState", "VoteEntry", "events", "read_log",
    "replay", "write_page",
    # errors
    "EngineError", "GambitError", "GambitWarning", "UserError",
    # policies
    "Branch", "Decision", "Discard", "Evict", "Force", "OnPressure", "Policy", "PoolView", "PressureAction", "Prune",
    "Requirements", "ScoreUse", "SearchSettings", "SplitIslands", "Start", "Stop", "StopRule", "TraceView", "Wake",
    "top_up",
    # scorers
    "Aggregation", "HistoryScorer", "PastThoughts", "Question", "ReadingScore", "Scorer", "ScorerInfo", "ScorerTrust",
    "SplitScorer", "StatePosition", "ThoughtBatch", "ThoughtReading", "TwoLayers", "Verifier", "VerifierInfo",
    "load_checkpoint", "save_checkpoint",
    # engines
    "Admission", "BoundaryRule", "EndReason", "Engine", "EngineInfo", "Eviction", "Progress", "SearchSpec",
    "SearchStep", "StepBatch", "StepSeconds", "ThoughtScore", "Tokenizer", "TraceEnd", "TraceKey", "TraceSpec",
    # benchmarks
    "AnswerKind", "Benchmark", "Item",
]  # fmt: skip
