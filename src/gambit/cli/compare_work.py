"""The work of `gambit compare`: pairs of searches, some problems at a time, until the time is up."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from threading import Event

import typer
from rich.table import Table

from gambit.answers import Equivalent
from gambit.bench.datasets import Item, benchmark_for, digest
from gambit.bench.folder import differences, identity_of
from gambit.bench.recipe import BenchVariant
from gambit.bench.rows import Row
from gambit.bench.summary import MethodComparison, summarise
from gambit.cli.compare import CompareOptions
from gambit.cli.forecast import EFFORTS, CompareForecast, duration, usual_tokens
from gambit.cli.options import given, read_configs
from gambit.cli.progress import progress_bar
from gambit.cli.session import check_model, loaded, only_our_warnings, sole_writer, warn_of
from gambit.cli.terminal import NO_ANSWER, OK, StopSignal, put, say
from gambit.config.effort import Effort
from gambit.config.options import EngineConfig, SearchConfig
from gambit.config.presets import SearchSettings, num_fitting
from gambit.engines.base import check_engine
from gambit.errors import UserError
from gambit.events import Json
from gambit.models.files import usual_effort
from gambit.results.result import SearchResult
from gambit.results.vote import Ballot, VoteKind, count_votes
from gambit.solver import Problem, Solver
from gambit.solver.builder import LengthHistory, request_of
from gambit.stats import FEWEST_PROBLEMS
from gambit.storage import files
from gambit.storage.problems import columns_of, new_run_folder
from gambit.storage.run_folder import check_writable
from gambit.tree import TraceState
from gambit.types import StopReason

MOST_AT_ONCE = 8  # problems, where the user names no number
PAIRS_FILE, PLAN_FILE = "pairs.jsonl", "compare.json"
NAMES = {"sc": "voting", "scored": "voting by score", "gambit": "Gambit"}
ALL_ONE_WAY, ERRORS = 7, 2.4  # problems, and standard errors, from which a difference is shown in one of three tests
PROBABLY = 10.5  # the same and 0.84 standard errors, squared: for a chance of 80 % to show 5 points


@dataclass(frozen=True, slots=True)
class Pair:
    """A problem that both methods have searched, with about the same tokens."""

    problem: str
    digest: str  # of question and answer
    sc_right: bool
    scored_right: bool  # over the same traces
    gambit_right: bool
    sc_tokens: int  # of the traces that vote
    gambit_tokens: int
    seconds: float


def differences_of(pairs: Sequence[Pair]) -> tuple[MethodComparison, ...]:
    """Returns the paired differences of the methods, by the rules of a report of `gambit bench`."""
    rows = [Row(arm, PAIRS_FILE, pair.problem, 0, None, "", getattr(pair, f"{arm}_right"), "")
            for pair in pairs for arm in NAMES]  # fmt: skip
    return summarise(rows, [BenchVariant(arm, arm, {}) for arm in NAMES], [PAIRS_FILE], [0], len(rows)).comparisons


def advice(pairs: Sequence[Pair], at_once: int = 1, effort: Effort | None = None) -> str:
    """Returns one sentence. It calls nothing better on fewer problems than an interval needs."""
    if not pairs:
        return "No problem was finished: give more --minutes, or a smaller --capacity."
    if (missing := FEWEST_PROBLEMS - len(pairs)) > 0:
        few = f"{len(pairs)} problem{' is' if len(pairs) == 1 else 's are'} too few to choose by"
        more = missing * mean(pair.seconds for pair in pairs) / at_once
        return f"{few}: {FEWEST_PROBLEMS} are the least, {missing} more take about {duration(more)}."
    count = f"--policy sc{' --effort medium' if effort is Effort.MEDIUM else ''}"
    score, found = f"{count} --vote score", [each for each in differences_of(pairs) if each.is_shown]
    shown = {(each.first, each.second) if each.gain.value > 0 else (each.second, each.first) for each in found}
    if {("gambit", "sc"), ("gambit", "scored")} <= shown:
        return "Gambit is better than both votes on these problems at equal tokens: use it."
    if ("scored", "sc") in shown:
        return f"Voting by score is better than counting votes and at least as good as the search here: use {score}."
    if ("gambit", "sc") in shown:
        return f"Gambit is better than counting votes at equal tokens: use it, though {score} may do as well."
    if ("sc", "gambit") in shown:
        return f"Voting is better on these problems at equal tokens: use {count}."
    if ("scored", "gambit") in shown:
        return f"Voting by score is better than the search on these problems: use {score}."
    return f"No difference is shown on these problems: more of them may show one, until then {count} will do."


def power(pairs: Sequence[Pair]) -> str:
    """Returns a sentence on which differences so many problems can show."""
    num, differing = len(pairs), sum(pair.sc_right != pair.gambit_right for pair in pairs)
    least = max(ALL_ONE_WAY, ERRORS * math.sqrt(differing)) / num
    needed = math.ceil(PROBABLY * max(1, differing) / num / 0.05**2 / 100) * 100
    return (f"Gambit and voting differ on {differing} of {num} problems: so many show differences of about "
            f"{100 * least:.0f} points or more, and 5 points take about {needed:,} problems.")  # fmt: skip


class PairFile:
    """The pairs of a folder, which all have the same options, and problems that are still the same."""

    def __init__(self, folder: Path, plan: Callable[[], Json], items: Sequence[Item]) -> None:
        self._folder, self._plan, fix = folder, plan, "choose another --out"
        found = [files.record_in(Pair, line, f"{folder}, pair {number}", "a compared problem", fix)
                 for number, line in files.whole_lines(folder / PAIRS_FILE)]  # fmt: skip
        digests = {item.id: digest([item])[1] for item in items}
        others: list[str] = []
        if found:
            others += differences(files.read_object(folder / PLAN_FILE, "the plan of a comparison", fix), plan())
        others += [f"problem {pair.problem} was another one" for pair in found
                   if digests.get(pair.problem, pair.digest) != pair.digest]  # fmt: skip
        if others:
            raise UserError(f"{folder} holds another comparison ({'; '.join(others[:3])}): go on with the same options "
                            f"and problems, or {fix}")  # fmt: skip
        self.pairs = [pair for pair in found if pair.problem in digests]
        self.left = [item for item in items if item.id not in {pair.problem for pair in found}]

    def append(self, pair: Pair) -> None:
        """Adds a pair, which is on the disk before the next one; the first also fixes the options and the weights."""
        path = self._folder / PAIRS_FILE
        if not any(files.whole_lines(path)):
            files.write_whole(self._folder / PLAN_FILE, f"{json.dumps(self._plan(), indent=2)}\n".encode())
        files.drop_torn_line(path)
        with files.opened_to_append(path) as file:
            files.append_synced(file, json.dumps(dataclasses.asdict(pair)))
        self.pairs.append(pair)


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
    check_model(model, is_quiet=options.quiet, is_offline=engine.offline)
    search = search.with_usual(usual_effort(model))
    if search.effort is Effort.LOW:
        raise UserError("--effort low is a single trace, which no vote can be compared with: give medium or high")

    def plan() -> Json:
        return {
            "benchmark": benchmark.name,
            "search": search.model_dump(mode="json", exclude_unset=True),
            "engine": engine.model_dump(mode="json", exclude_unset=True, exclude={"offline"}),
            "identity": dict(identity_of(model, engine.scorer)),
        }

    with sole_writer(folder, is_quiet=options.quiet), only_our_warnings(is_quiet=options.quiet):
        kept = PairFile(folder, plan, items)
        code, at_once = _compare_left(kept, search, engine, options) if kept.left else (OK, 1)
    _show(kept.pairs, advice(kept.pairs, at_once, search.effort), as_json=options.as_json)
    if len(kept.pairs) < len(items) and not options.quiet:
        say(f"{len(kept.pairs)} of {len(items)} problems are done: the same command with --out {folder} goes on")
    return code or (OK if kept.pairs else NO_ANSWER)


def _compare_left(
    kept: PairFile, search: SearchConfig, engine: EngineConfig, options: CompareOptions
) -> tuple[int, int]:
    """Compares on the problems that have no pair yet; returns the exit code, and how many ran at a time."""
    deadline, left = time.monotonic() + 60 * options.minutes, kept.left
    num_items = len(kept.pairs) + len(left)
    with (
        loaded(engine, lambda _: None) as solver,
        progress_bar("comparing", is_quiet=options.quiet) as advance,
        StopSignal(_say_stopping) as stop,
    ):
        settings = solver.plan(request_of(left[0].question, search, None, None, None), LengthHistory(), 1).settings
        at_once = min(len(left), options.concurrency or fitting_problems(solver, settings))
        length, say_it = usual_tokens(engine.model, settings), (lambda _: None) if options.quiet else say
        forecast = CompareForecast(settings.num_traces, length, at_once, options.minutes, say_it)
        say_it(f"comparing {EFFORTS[search.effort] if search.effort else 'this pool'} with voting; {forecast}")
        failed = Event()

        def compared(item: Item) -> Pair | None:
            usual = mean([pair.seconds for pair in kept.pairs] or [0.0])
            is_late = time.monotonic() + usual > deadline
            return None if is_late else searched(solver, search, item, is_over, forecast)

        def is_over() -> bool:
            return stop() or failed.is_set() or time.monotonic() > deadline

        advance(len(kept.pairs), num_items)
        with ThreadPoolExecutor(at_once, thread_name_prefix="compare") as threads:
            try:
                for done in as_completed([threads.submit(compared, item) for item in left]):
                    if (pair := done.result()) is not None:
                        kept.append(pair)
                        forecast.on_pair(pair.seconds)
                        advance(len(kept.pairs), num_items)
            except BaseException:
                failed.set()  # which ends the other searches
                raise
    return stop.exit_code, at_once


def _say_stopping() -> None:
    os.write(2, b"stopping: finished problems are kept; Ctrl-C again aborts at once\n")  # safe in a signal handler


def fitting_problems(solver: Solver, settings: SearchSettings) -> int:
    """Returns how many searches the KV cache holds while their traces write the warm-up."""
    info = solver.engine.info
    room = num_fitting(info.kv_capacity_tokens, info.weight(settings.pool.warmup_tokens))
    return min(MOST_AT_ONCE, max(1, room // settings.capacity))


def searched(
    solver: Solver, search: SearchConfig, item: Item, should_stop: Callable[[], bool], forecast: CompareForecast
) -> Pair | None:
    """Searches a problem with both methods; None if the time is up before both have ended.

    Voting goes first, with all of its traces at once, and its tokens are Gambit's budget. Where Gambit leaves some of
    them, as in rounds, voting counts as many of its traces, in the order of their numbers, as Gambit's tokens pay for.
    """
    if should_stop():
        return None
    began = time.monotonic()
    problem = Problem(item.question, id=item.id)
    # A vote by score, so that a verifier reads these traces too.
    plain = {"policy": "sc", "vote": VoteKind.SCORE, "first_traces": None, "consensus_stop": "off"}
    voting = search.model_copy(update=plain)
    sc = solver.solve(problem, voting, should_stop=should_stop, on_event=forecast.on_event)
    budget = search.model_copy(update={"budget_tokens": max(1, sc.tokens.generated)})
    gambit = solver.solve(problem, budget, should_stop=should_stop)
    if StopReason.INTERRUPTED in (sc.stop_reason, gambit.stop_reason):
        return None
    spent = gambit.tokens.generated
    counted, tokens = vote_within(sc, spent, solver.equivalent)
    scored, _ = vote_within(sc, spent, solver.equivalent, VoteKind.SCORE)
    right = (solver.grade(answer, item.answer) for answer in (counted, scored, gambit.answer))
    return Pair(item.id, digest([item])[1], *right, tokens, spent, time.monotonic() - began)  # type: ignore[call-arg]


def vote_within(
    result: SearchResult, most_tokens: int, equivalent: Equivalent, kind: VoteKind = VoteKind.MAJORITY
) -> tuple[str | None, int]:
    """Returns the vote of the first independent traces that so many tokens pay for, and their tokens."""
    ballots: list[Ballot] = []
    total = 0
    for number, trace in enumerate(result.traces):
        if ballots and total + trace.num_tokens / 2 > most_tokens:  # nearest: as often above as below
            break
        total += trace.num_tokens
        if trace.state is TraceState.FINISHED:
            weight = 1.0 if kind is VoteKind.MAJORITY else max(trace.score or 0.0, 0.0)
            ballots.append(Ballot(number, trace.answer, weight, number))
    return count_votes(ballots, kind, equivalent).answer, total


def _show(pairs: Sequence[Pair], sentence: str, *, as_json: bool) -> None:
    gains = differences_of(pairs) if pairs else ()
    right = {arm: sum(getattr(pair, f"{arm}_right") for pair in pairs) for arm in NAMES}
    tokens = {"sc": sum(pair.sc_tokens for pair in pairs), "gambit": sum(pair.gambit_tokens for pair in pairs)}
    if as_json:
        differences = {f"{gain.first} - {gain.second}": dataclasses.asdict(gain.gain) for gain in gains}
        typer.echo(json.dumps({"problems": len(pairs), "right": right, "tokens": tokens, "differences": differences,
                               "seconds": sum(pair.seconds for pair in pairs), "advice": sentence}))  # fmt: skip
        return
    if pairs:
        table = Table("method", "right", "tokens a problem", box=None, pad_edge=False, header_style="dim")
        for arm, num in right.items():
            spent = tokens.get(arm, tokens["sc"]) / len(pairs)
            table.add_row(NAMES[arm], f"{num} of {len(pairs)} ({num / len(pairs):.1%})", f"{spent:,.0f}")
        put(table)
    for each in gains:
        value, low, high = (100 * bound for bound in dataclasses.astuple(each.gain))
        put(f"{NAMES[each.first]} against {NAMES[each.second]}: {value:+.1f} points (95 %: {low:+.1f} to {high:+.1f})")
    put(sentence)
    if len(pairs) >= FEWEST_PROBLEMS:
        put(power(pairs))
