"""The work of `gambit compare`: pairs of searches, some problems at a time, until the time is up."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fractions import Fraction
from statistics import mean
from threading import Event

import numpy as np
import typer
from rich.table import Table

from gambit.answers import Equivalent
from gambit.bench.datasets import Item, benchmark_for
from gambit.cli.compare import CompareOptions
from gambit.cli.forecast import duration
from gambit.cli.options import given, read_configs
from gambit.cli.progress import progress_bar
from gambit.cli.session import check_model, loaded, only_our_warnings, sole_writer, warn_of
from gambit.cli.terminal import NO_ANSWER, OK, StopSignal, put
from gambit.config.options import SearchConfig
from gambit.config.presets import num_fitting
from gambit.engines.base import check_engine
from gambit.results.result import SearchResult
from gambit.results.vote import Ballot, VoteKind, count_votes
from gambit.solver import Problem, Solver
from gambit.solver.builder import LengthHistory, request_of
from gambit.stats import FEWEST_PROBLEMS, SIGNIFICANT, Interval, mean_interval, resamples, sign_flip_p, supports_claim
from gambit.storage.problems import columns_of, new_run_folder
from gambit.storage.run_folder import check_writable
from gambit.tree import TraceState
from gambit.types import StopReason

MOST_AT_ONCE = 8  # problems, where the user names no number


@dataclass(frozen=True, slots=True)
class Pair:
    """A problem that both methods have searched, with about the same tokens."""

    problem: str
    sc_right: bool
    gambit_right: bool
    sc_tokens: int  # of the traces that vote
    gambit_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs of a run."""

    pairs: tuple[Pair, ...]
    seconds: float

    @property
    def difference(self) -> Interval:
        """Returns Gambit's share of right answers less that of voting."""
        values = np.array([float(pair.gambit_right) - float(pair.sc_right) for pair in self.pairs])
        return mean_interval(values, resamples(len(values)))

    @property
    def advice(self) -> str:
        """Returns one sentence. It calls nothing better on fewer problems than an interval needs."""
        num = len(self.pairs)
        if num < FEWEST_PROBLEMS:
            more = duration((FEWEST_PROBLEMS - num) * self.seconds / num) if num else "an unknown time"
            return (f"{num} problems are too few to choose by: {FEWEST_PROBLEMS} are the least, "
                    f"{FEWEST_PROBLEMS - num} more take about {more}.")  # fmt: skip
        found = self.difference
        p = sign_flip_p([Fraction(pair.gambit_right - pair.sc_right) for pair in self.pairs])
        if not supports_claim(found.low, found.high, num) or p >= SIGNIFICANT:  # as in a report of `gambit bench`
            return (
                "No difference is shown on these problems: more of them may show one, until then --policy sc will do."
            )
        if found.value > 0:
            return "Gambit is better on these problems at equal tokens: use it."
        return "Voting is better on these problems at equal tokens: use --policy sc."


def compare(model: str, file: str, options: CompareOptions, flags: Mapping[str, str | bool | None]) -> int:
    search, engine = read_configs(None, {**flags, "model": model})
    benchmark = benchmark_for(file, columns_of(options.columns))
    warn_of([benchmark], is_quiet=options.quiet)
    items = list(benchmark.first(options.limit))
    # With one seed for all, the traces of all problems would share their luck.
    search = search.model_copy(update={"own_noise": True, **given({"answer": benchmark.answer})})
    check_engine(engine)
    folder = options.out or new_run_folder()
    check_writable(folder)
    check_model(model, is_quiet=options.quiet)
    began, pairs = time.monotonic(), list[Pair]()
    deadline = began + 60 * options.minutes
    with (
        sole_writer(folder, is_quiet=options.quiet),
        only_our_warnings(is_quiet=options.quiet),
        loaded(engine, lambda _: None) as solver,
        progress_bar("comparing", is_quiet=options.quiet) as advance,
        StopSignal(lambda: None) as stop,
    ):
        begun = time.monotonic()
        taken: list[float] = []  # seconds of each pair
        failed = Event()

        def compared(item: Item) -> Pair | None:
            start = time.monotonic()
            if start + mean(taken or [0.0]) > deadline:
                return None
            try:
                pair = searched(solver, search, item, is_over)
            except BaseException:
                failed.set()
                raise
            taken.append(time.monotonic() - start)
            return pair

        def is_over() -> bool:
            return stop() or failed.is_set() or time.monotonic() > deadline

        at_once = options.concurrency or fitting_problems(solver, search, items)
        with ThreadPoolExecutor(at_once, thread_name_prefix="compare") as threads:
            for done in as_completed([threads.submit(compared, item) for item in items]):
                if (pair := done.result()) is None:
                    continue
                pairs.append(pair)
                with (folder / "pairs.jsonl").open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(dataclasses.asdict(pair)) + "\n")
                advance(len(pairs), len(items))
        found = Comparison(tuple(pairs), time.monotonic() - begun)
    _show(found, as_json=options.as_json)
    return stop.exit_code or (OK if pairs else NO_ANSWER)


def fitting_problems(solver: Solver, search: SearchConfig, items: Sequence[Item]) -> int:
    """Returns how many searches the KV cache holds while their traces write the warm-up."""
    if not items:
        return 1
    plan = solver.plan(request_of(items[0].question, search, None, None, None), LengthHistory(), 1)
    info = solver.engine.info
    room = num_fitting(info.kv_capacity_tokens, info.weight(plan.settings.pool.warmup_tokens))
    return min(MOST_AT_ONCE, max(1, room // plan.settings.capacity))


def searched(solver: Solver, search: SearchConfig, item: Item, should_stop: Callable[[], bool]) -> Pair | None:
    """Searches a problem with both methods; None if the time is up before both have ended.

    Voting goes first, and its tokens are Gambit's budget. Where Gambit leaves some of them, voting counts as many of
    its traces, in the order of their numbers, as Gambit's tokens pay for.
    """
    if should_stop():
        return None
    problem = Problem(item.question, id=item.id)
    voting = search.model_copy(update={"policy": "sc"})
    sc = solver.solve(problem, voting, should_stop=should_stop)
    budget = search.model_copy(update={"budget_tokens": max(1, sc.tokens.generated)})
    gambit = solver.solve(problem, budget, should_stop=should_stop)
    if StopReason.INTERRUPTED in (sc.stop_reason, gambit.stop_reason):
        return None
    answer, tokens = vote_within(sc, gambit.tokens.generated, solver.equivalent)
    grade = solver.grade
    return Pair(item.id, grade(answer, item.answer), grade(gambit.answer, item.answer), tokens, gambit.tokens.generated)


def vote_within(result: SearchResult, most_tokens: int, equivalent: Equivalent) -> tuple[str | None, int]:
    """Returns the majority of the first independent traces that so many tokens pay for, and their tokens."""
    ballots: list[Ballot] = []
    total = 0
    for number, trace in enumerate(result.traces):
        if ballots and total + trace.num_tokens / 2 > most_tokens:  # nearest: as often above as below
            break
        total += trace.num_tokens
        if trace.state is TraceState.FINISHED:
            ballots.append(Ballot(number, trace.answer, 1.0, number))
    return count_votes(ballots, VoteKind.MAJORITY, equivalent).answer, total


def _show(found: Comparison, *, as_json: bool) -> None:
    pairs = found.pairs
    num_right = {"sc": sum(pair.sc_right for pair in pairs), "gambit": sum(pair.gambit_right for pair in pairs)}
    tokens = {"sc": sum(pair.sc_tokens for pair in pairs), "gambit": sum(pair.gambit_tokens for pair in pairs)}
    interval = dataclasses.asdict(found.difference) if pairs else None
    if as_json:
        typer.echo(json.dumps({"problems": len(pairs), "right": num_right, "tokens": tokens, "difference": interval,
                               "seconds": found.seconds, "advice": found.advice}))  # fmt: skip
        return
    if pairs:
        table = Table("method", "right", "tokens a problem", box=None, pad_edge=False, header_style="dim")
        for name in num_right:
            right = f"{num_right[name]} of {len(pairs)} ({num_right[name] / len(pairs):.1%})"
            table.add_row(name, right, f"{tokens[name] / len(pairs):,.0f}")
        put(table)
        value, low, high = (100 * each for each in dataclasses.astuple(found.difference))
        put(f"gambit less sc: {value:+.1f} points (95 %: {low:+.1f} to {high:+.1f}) in {duration(found.seconds)}")
    put(found.advice)
