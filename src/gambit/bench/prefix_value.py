"""Runs the prefix-value experiment: traces are cut at thoughts, the best prefixes are continued, and random ones too.

The folder of a run is a collection (`gambit scorer collect`) with the rollouts of its prefixes in a file beside it. The
same command goes on where it was stopped.
"""

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from gambit import stats as st
from gambit.bench.folder import add_environment, identity_of, stamp
from gambit.bench.report import Report, made_with
from gambit.bench.tables import Table, number, percent, points
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.scorers.base import Scorer
from gambit.stats import FEWEST_PROBLEMS, Bools, Floats, Interval, pairs_won, supports_claim
from gambit.storage.files import append_synced, drop_torn_line, opened_to_append, record_in, whole_lines
from gambit.training.collect import CollectPlan, LocalEngines, collect, sample
from gambit.training.dataset import Dataset, load_dataset
from gambit.training.sampling import Grading, Sampled, Task
from gambit.training.scoring import thought_scores
from gambit.training.storage import read_index
from gambit.types import Aggregation, Problem, StatePosition

ROLLOUTS_FILE = "rollouts.jsonl"
NUM_SPLITS, NUM_DRAWS = 16, 4  # of the rollouts into halves, used in both directions; of tie-breaks for each
RANDOM, ROLLOUTS = "chance", "half of the rollouts"  # judges that every run has


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The measurement of a run. The sampling of its traces is in the plan of the collection."""

    cuts: tuple[float, ...]  # shares of a trace's tokens
    num_rollouts: int  # of each prefix
    keep: int  # prefixes of a problem that are continued

    def __post_init__(self) -> None:
        if not self.cuts or not all(0 < cut < 1 for cut in self.cuts):
            raise UserError(f"cuts {list(self.cuts)}: give shares of a trace between 0 and 1, such as 0.25,0.5")


class Rollouts(BaseModel):
    """One line of the file: whether each continuation of a prefix ended right."""

    prefix: str
    is_right: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A collected trace up to the end of one of its thoughts, after which it goes on."""

    problem: str
    number: int  # of the trace, among all traces of the collection
    thought: int  # thoughts in the prefix, at least one
    tokens: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"{self.problem}.{self.number}.{self.thought}"


def collected(folder: Path, tasks: Iterable[Task]) -> tuple[Dataset, list[int]]:
    """Returns the collection, and the traces of the tasks that have right and wrong ones: others rank nothing."""
    data = load_dataset(folder, StatePosition.BOUNDARY, (), with_tokens=True)
    ids = {task.id for task in tasks}
    is_wanted = [problem.is_mixed and problem.id in ids for problem in data.problems]
    return data, [trace for trace, problem in enumerate(data.traces.problem_of.tolist()) if is_wanted[problem]]


def cut_at(share: float, data: Dataset, traces: Iterable[int]) -> Iterator[Prefix]:
    """Yields each trace up to the thought that ends nearest to a share of its tokens; none after which it ends."""
    for place in traces:
        tokens, start = data.tokens[place], data.traces.starts[place]
        ends = data.traces.thought_ends[start : start + data.traces.num_thoughts[place]]
        inner = ends[ends < len(tokens)]
        if len(inner):
            thought = int(np.abs(inner - share * len(tokens)).argmin()) + 1
            problem = data.problems[data.traces.problem_of[place]].id
            yield Prefix(problem, place, thought, tuple(tokens[: inner[thought - 1]].tolist()))


def read_rollouts(folder: Path, num_rollouts: int) -> dict[str, tuple[bool, ...]]:
    """Returns what was continued so far, by prefix; refuses another number of rollouts than was given."""
    found = {}
    for line_number, line in whole_lines(folder / ROLLOUTS_FILE):
        where = f"{folder / ROLLOUTS_FILE}, line {line_number}"
        one = record_in(Rollouts, line, where, "the rollouts of a prefix", "take that line away")
        if len(one.is_right) != num_rollouts:
            raise UserError(f"{folder} holds {len(one.is_right)} rollouts a prefix: run it with --rollouts "
                            f"{len(one.is_right)}, or choose another --out")  # fmt: skip
        found[one.prefix] = one.is_right
    return found


# -- the run -----------------------------------------------------------------------------------------------------


def is_done(folder: Path, plan: PrefixPlan, tasks: Sequence[Task]) -> bool:
    """Returns whether all is sampled and continued, so that no model need be loaded."""
    done = read_rollouts(folder, plan.num_rollouts)
    if not {task.id for task in tasks} <= {problem.id for entry in read_index(folder) for problem in entry.problems}:
        return False
    data, traces = collected(folder, tasks)
    return all(prefix.id in done for cut in plan.cuts for prefix in cut_at(cut, data, traces))


def run(
    folder: Path,
    plan: PrefixPlan,
    tasks: Sequence[Task],
    collecting: CollectPlan,
    on_traces: Callable[[int, int], None],
    on_prefixes: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> list[str]:
    """Samples and continues what is not there yet; returns the problems that were refused, and why."""
    with closing(LocalEngines(collecting)) as engines:
        add_environment(folder, stamp(engines.solver.engine.info, identity_of(collecting.engine.model, "auto")))
        made = collect(tasks, collecting, engines=engines, on_progress=on_traces, should_stop=should_stop)
        refused = made.refused
        if should_stop():
            return refused
        data, traces = collected(folder, tasks)
        wanted = {prefix.id: prefix for cut in plan.cuts for prefix in cut_at(cut, data, traces)}
        done = read_rollouts(folder, plan.num_rollouts)
        by_id = {task.id: task for task in tasks}
        todo = [
            Task(Problem(by_id[each.problem].problem.question, each.id, each.tokens), by_id[each.problem].answer)
            for each in wanted.values()
            if each.id not in done
        ]
        continuing = dataclasses.replace(collecting, traces_per_problem=plan.num_rollouts)
        num_done = len(wanted) - len(todo)
        on_prefixes(num_done, len(wanted))
        drop_torn_line(folder / ROLLOUTS_FILE)
        with (
            Grading(collecting.search.answer, collecting.num_graders) as grading,
            opened_to_append(folder / ROLLOUTS_FILE) as file,
        ):
            for one in _graded(sample(engines, todo, continuing, grading, refused, should_stop)):
                append_synced(file, one.model_dump_json())
                num_done += 1
                on_prefixes(num_done, len(wanted))
    return refused


def _graded(sampled: Iterable[Sampled]) -> Iterator[Rollouts]:
    """Yields rollouts once they are graded; the engine does not wait for a slow comparison."""
    waiting: deque[Sampled] = deque()
    for each in sampled:
        waiting.append(each)
        while waiting and all(grade.done() for grade in waiting[0].grades):
            yield _rollouts(waiting.popleft())
    yield from map(_rollouts, waiting)


def _rollouts(sampled: Sampled) -> Rollouts:
    return Rollouts(prefix=sampled.task.id, is_right=tuple(grade.result()[1] for grade in sampled.grades))


# -- the figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CutProblem:
    """The prefixes of one problem at one cut."""

    rollouts: Bools  # [prefix, rollout]: whether it ended right
    scores: Mapping[str, Floats]  # of each scorer, [prefix]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best prefixes by one judge, at one cut."""

    cut: float
    judge: str
    num_problems: int
    num_prefixes: int
    auc: Interval | None  # within problems, against the outcomes of rollouts that the judge has not seen
    right: Interval  # share of right continuations of the chosen prefixes
    gain: Interval  # of that share over random prefixes


def summarise(
    folder: Path, plan: PrefixPlan, tasks: Sequence[Task], scorers: Mapping[str, Scorer], device: str
) -> list[Chosen]:
    """Returns the figures of all judges at the cuts where some problem has more than `keep` prefixes with rollouts."""
    data, traces = collected(folder, tasks)
    rollouts = read_rollouts(folder, plan.num_rollouts)
    scores = {name: _scores_after(scorer, folder, device) for name, scorer in scorers.items()}
    found = []
    for cut in plan.cuts:
        groups: dict[str, list[Prefix]] = defaultdict(list)
        for prefix in cut_at(cut, data, traces):
            if prefix.id in rollouts:
                groups[prefix.problem].append(prefix)
        problems = [
            CutProblem(
                np.array([rollouts[each.id] for each in group]),
                {name: np.array([after(each) for each in group]) for name, after in scores.items()},
            )
            for group in groups.values()
            if len(group) > plan.keep
        ]
        if problems:
            found += summarise_cut(cut, problems, plan.keep)
    if not found:
        raise UserError(f"{folder}: no problem has more than {plan.keep} prefixes with rollouts yet, so that nothing "
                        "can be compared: sample more --traces or more problems, or lower --keep")  # fmt: skip
    return found


def _scores_after(scorer: Scorer, folder: Path, device: str) -> Callable[[Prefix], float]:
    """Returns a function from a prefix to the score that a search would have given it."""
    info = scorer.info
    data = load_dataset(folder, StatePosition(info.state_position), info.layers)
    found = thought_scores(scorer, data, data.all_traces(), pick_device(device))

    def after(prefix: Prefix) -> float:
        start = data.traces.starts[prefix.number]
        thoughts = found[start : start + prefix.thought]
        return float(thoughts[-1] if info.aggregation is Aggregation.LAST else thoughts.mean())

    return after


def summarise_cut(cut: float, problems: Sequence[CutProblem], keep: int) -> list[Chosen]:
    """Returns means over problems with bootstrap intervals; each problem has more than `keep` prefixes."""
    draws = st.resamples(len(problems))
    size = len(problems), sum(len(problem.rollouts) for problem in problems)
    at_random = np.array([problem.rollouts.mean() for problem in problems])
    none = st.mean_interval(0 * at_random, draws)
    rows = [Chosen(cut, RANDOM, *size, None, st.share_interval(at_random, draws), none)]
    found = [judged(problem, keep) for problem in problems]
    for name in found[0]:
        aucs, right = np.array([each[name] for each in found]).T
        known = aucs[~np.isnan(aucs)]  # a problem whose rollouts all end alike has no pair to rank
        auc = st.mean_interval(known, st.resamples(len(known))) if len(known) else None
        gain = st.mean_interval(right - at_random, draws)
        rows.append(Chosen(cut, name, *size, auc, st.share_interval(right, draws), gain))
    return rows


def judged(problem: CutProblem, keep: int) -> dict[str, tuple[float, float]]:
    """Returns of every judge its AUC (NaN without a pair) and the share of right rollouts of its best prefixes.

    The rollouts are split into halves, many times over and used in both directions: one half is a judge that has seen
    the future a few times, the other is the outcome for all judges alike. Ties are broken by chance.
    """
    rng = np.random.default_rng(0)
    num_prefixes, count = problem.rollouts.shape
    half = count // 2
    orders = np.array([rng.permutation(count) for _ in range(NUM_SPLITS)])
    pairs = [(orders[:, :half], orders[:, half : 2 * half]), (orders[:, half : 2 * half], orders[:, :half])]
    seen, unseen = (np.repeat(np.concatenate(side), NUM_DRAWS, axis=0) for side in zip(*pairs, strict=True))
    jitter = rng.random((len(seen), num_prefixes))
    right = problem.rollouts[:, unseen].sum(-1).T.astype(np.float64)  # [ranking, prefix]
    found = {}
    for name, given in {ROLLOUTS: problem.rollouts[:, seen].mean(-1).T, **problem.scores}.items():
        scores = np.broadcast_to(given, jitter.shape)
        best = np.lexsort((jitter, -scores), axis=1)[:, :keep]
        won, total = pairs_won(scores, right, half - right)
        chosen = np.take_along_axis(right, best, axis=1)
        found[name] = (won / total if total else math.nan, float(chosen.mean()) / half)
    return found


# -- the report --------------------------------------------------------------------------------------------------


def write_prefix_report(folder: Path, name: str, plan: PrefixPlan, rows: Sequence[Chosen]) -> Report:
    """Writes report.md, report.json and report.html into the folder of a run on the problems called `name`."""
    fewest = min(row.num_problems for row in rows)
    few = f"Only {fewest} problems: nothing is claimed from fewer than {FEWEST_PROBLEMS}, and intervals are rough."
    cautions = [few] if fewest < FEWEST_PROBLEMS else []
    findings = [finding(row, plan.keep) for row in rows if row.judge != RANDOM and row.num_problems >= FEWEST_PROBLEMS]
    environment = made_with(folder)
    figures = {"plan": dataclasses.asdict(plan), "rows": [dataclasses.asdict(row) for row in rows]}
    words = {"environment": environment, "cautions": cautions, "findings": findings}
    lead = (
        f"Traces are cut at the thought nearest to each share of their tokens; {plan.num_rollouts} rollouts continue "
        "each prefix."
    )
    tables = [_table(rows, plan.keep)]
    report = Report(f"Prefix values: {name}", lead, cautions, findings, tables, environment, {**figures, **words})
    report.write(folder)
    return report


def finding(row: Chosen, keep: int) -> str:
    """Returns the sentence about one judge at one cut."""
    chosen = f"At {_share(row.cut)} continuing the {keep} prefixes that {row.judge} ranks highest"
    if not supports_claim(row.gain.low, row.gain.high, row.num_problems):
        return f"{chosen} shows no gain over random ones ({points(row.gain)})."
    word = "raises" if row.gain.value > 0 else "lowers"
    return f"{chosen} {word} the share of right traces by {points(row.gain)} against random ones."


def _table(rows: Sequence[Chosen], keep: int) -> Table:
    columns = ("cut at", "prefixes by", "problems", "prefixes", "AUC", "right continuations %", "gain")
    lines = tuple(
        (_share(row.cut), row.judge, str(row.num_problems), f"{row.num_prefixes:,}", number(row.auc, digits=3),
         percent(row.right), "" if row.judge == RANDOM else points(row.gain))
        for row in rows
    )  # fmt: skip
    note = (
        f"The best {keep} prefixes of each problem with right and wrong traces are continued. AUC: how often the "
        "prefix of a right rollout stands above that of a wrong one, within problems. Rollouts that rank are no "
        "outcomes. Gains are over random prefixes, paired by problem. In brackets 95 % bootstrap intervals over "
        "problems."
    )
    return Table(f"The best {keep} prefixes against random ones", note, columns, lines)


def _share(x: float) -> str:
    return f"{100 * x:.0f} %"
