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
  entry point is a `StartEngine` function.
- A benchmark is a `Benchmark` of `Item`s.

**What is stable.** Names listed in `__all__` keep their meaning within a minor version (0.2.x). Where one is renamed or
moved, its old name works for one minor version more and gives a `DeprecationWarning`. New fields and options have
defaults, so that keyword arguments and records written earlier stay valid. Event logs, scorer checkpoints, collections
and bench folders of every released version can be read, and resumed while model and scorer are the same. The protocols
of engines may gain methods in a minor version, which the changelog then lists. Every other module of the package is
internal and may change at any time.
"""

from __future__ import annotations

from gambit.answers import AnswerKind, Extractor, Grader
from gambit.async_solver import AsyncSolver, SearchStream
from gambit.bench.datasets import Benchmark, Item
from gambit.cluster.spreading import spread_on_ray
from gambit.config.options import BranchPoint, EngineConfig, PresetSource, SearchConfig
from gambit.config.presets import SearchPart, SearchSettings
from gambit.config.trust import Doubt, ScorerTrust
from gambit.engines.base import Engine, EngineInfo, SearchSpec, StartEngine, check_prompt
from gambit.errors import EngineError, GambitError, GambitWarning, UserError
from gambit.events import (
    Admitted,
    Branched,
    Cancelled,
    Created,
    Discarded,
    Event,
    Evicted,
    Finished,
    Json,
    Pruned,
    Queued,
    RunStarted,
    Sample,
    Scored,
    Stopped,
    Verified,
    VerifierTotals,
    Voted,
    Waited,
    read_log,
)
from gambit.policies.base import (
    Branch,
    Decision,
    Discard,
    Evict,
    Policy,
    PoolView,
    Prune,
    Requirements,
    ScoreUse,
    SplitBy,
    SplitIslands,
    Start,
    Stop,
    ThoughtNeed,
    ThoughtSplit,
    ThoughtView,
    TraceView,
    Wake,
    top_up,
)
from gambit.results.record import replay
from gambit.results.result import (
    Counts,
    SearchResult,
    SearchSharing,
    Seconds,
    Tokens,
    TraceOutline,
    VerifierCost,
    Waiting,
)
from gambit.results.vote import Consensus, VoteEntry, VoteKind
from gambit.scorers.base import HistoryScorer, PastThoughts, Scorer, ScorerInfo, SplitScorer, ThoughtBatch, TwoLayers
from gambit.scorers.checkpoint import load_checkpoint, save_checkpoint
from gambit.solver import PendingSearch, Solver
from gambit.solver.spread import SpreadSolver
from gambit.storage.run_folder import EventCallback
from gambit.text.boundary import BoundaryRule, ThoughtState, advance, boundary_rule
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.tree import TraceState
from gambit.types import (
    Admission,
    Aggregation,
    ChatMessage,
    EndReason,
    Eviction,
    NamedModel,
    OnPressure,
    PoolSettings,
    PressureAction,
    Problem,
    Progress,
    RunningScore,
    Sampling,
    SearchStep,
    StatePosition,
    StepBatch,
    StepSeconds,
    StopReason,
    StopRule,
    ThoughtScore,
    TraceConfidence,
    TraceEnd,
    TraceKey,
    TraceSpec,
)
from gambit.verifiers.base import Question, ReadingKey, ReadingScore, ThoughtReading, Verifier, VerifierInfo
from gambit.view.notebook import NotebookProgress
from gambit.view.page import write_page

__all__ = [  # noqa: RUF022 # in groups
    # solving
    "AnswerKind",
    "AsyncSolver",
    "BranchPoint",
    "ChatMessage",
    "EngineConfig",
    "Extractor",
    "NotebookProgress",
    "PendingSearch",
    "PresetSource",
    "Problem",
    "SearchConfig",
    "SearchStream",
    "Solver",
    "SpreadSolver",
    "spread_on_ray",
    "VoteKind",
    # results
    "Counts",
    "Grader",
    "SearchResult",
    "SearchSharing",
    "Seconds",
    "StopReason",
    "Tokens",
    "TraceOutline",
    "TraceState",
    "VoteEntry",
    "VerifierCost",
    "Waiting",
    "replay",
    "write_page",
    # errors
    "EngineError",
    "GambitError",
    "GambitWarning",
    "UserError",
    # events
    "Admitted",
    "Branched",
    "Cancelled",
    "Created",
    "Discarded",
    "EndReason",
    "Event",
    "EventCallback",
    "Evicted",
    "Finished",
    "Json",
    "Pruned",
    "Queued",
    "RunStarted",
    "Sample",
    "Scored",
    "Stopped",
    "Verified",
    "VerifierTotals",
    "Voted",
    "Waited",
    "read_log",
    # policies
    "Branch",
    "Consensus",
    "Decision",
    "Discard",
    "Evict",
    "OnPressure",
    "Policy",
    "PoolSettings",
    "PoolView",
    "PressureAction",
    "Prune",
    "Requirements",
    "Sampling",
    "ScoreUse",
    "SplitBy",
    "SplitIslands",
    "SearchPart",
    "SearchSettings",
    "ThoughtSplit",
    "Start",
    "Stop",
    "StopRule",
    "ThoughtNeed",
    "ThoughtView",
    "TraceConfidence",
    "TraceView",
    "Wake",
    "top_up",
    # scorers
    "Aggregation",
    "HistoryScorer",
    "PastThoughts",
    "Question",
    "Verifier",
    "VerifierInfo",
    "ThoughtReading",
    "ReadingKey",
    "ReadingScore",
    "Scorer",
    "ScorerInfo",
    "Doubt",
    "ScorerTrust",
    "SplitScorer",
    "StatePosition",
    "ThoughtBatch",
    "TwoLayers",
    "load_checkpoint",
    "save_checkpoint",
    # engines
    "Admission",
    "BoundaryRule",
    "Engine",
    "EngineInfo",
    "Eviction",
    "NamedModel",
    "Progress",
    "RunningScore",
    "SearchSpec",
    "SearchStep",
    "StartEngine",
    "StepBatch",
    "StepSeconds",
    "ThoughtScore",
    "ThoughtState",
    "Tokenizer",
    "TraceEnd",
    "TraceKey",
    "TraceSpec",
    "advance",
    "boundary_rule",
    "check_prompt",
    "load_tokenizer",
    # benchmarks
    "Benchmark",
    "Item",
]
