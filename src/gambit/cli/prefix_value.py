"""`gambit prefix-value`: what a trace's beginning decides, and what a judge of beginnings could gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.commands import BriefCommand, HelpAll, made_command
from gambit.cli.options import with_config_options
from gambit.cli.scorer_collect import MANY, Graders, MemoryRatio, TracesAtOnce, usual_traces_at_once
from gambit.cli.session import check_model, only_our_warnings, prepare_libraries, sole_writer
from gambit.cli.terminal import OK, exit_with, put, say
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.errors import UserError

if TYPE_CHECKING:
    from gambit.bench.prefix_judges import PrefixJudge
    from gambit.bench.prefix_value import PrefixPlan
    from gambit.training.collect import CollectPlan
    from gambit.training.sampling import Task

SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "answer", "system_prompt", "enable_thinking",
)  # fmt: skip
MOST_REFUSALS_SHOWN = 5


def command() -> object:
    """With an option for every field of the configs that it uses."""
    unused = set(SearchConfig.model_fields) - set(SAMPLING) | {"scorer", "any_weights", "memory_ratio"}
    return made_command(with_config_options(prefix_value, without=unused), "prefix-value", BriefCommand)


def prefix_value(
    *,
    benchmark: Annotated[
        str, typer.Option(metavar="TEXT", help="A name, or a .jsonl, .json or .csv with question and answer.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the run; resumed if it exists.")],
    limit: Annotated[int | None, typer.Option(min=1, max=MANY, metavar="INT", help="First problems only.")] = None,
    traces: Annotated[int, typer.Option(min=2, max=65_536, metavar="INT", help="Traces a problem.")] = 16,
    cuts: Annotated[
        str, typer.Option(metavar="TEXT", help="Shares of a trace's tokens at which it is cut.")
    ] = "0.25,0.5,0.75",
    rollouts: Annotated[int, typer.Option(min=2, max=65_536, metavar="INT", help="Continuations of each prefix.")] = 8,
    keep: Annotated[
        int, typer.Option(min=1, max=65_536, metavar="INT", help="Best prefixes of a problem that are continued.")
    ] = 4,
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A judge to compare, as often as wanted (default: the model's own, and confidence)."
        ),
    ] = None,
    all_problems: Annotated[
        bool, typer.Option("--all-problems", help="Continue problems too whose traces are all right or all wrong.")
    ] = False,
    shard: Annotated[
        str, typer.Option(metavar="TEXT", help="i/n: every n-th problem; `gambit scorer merge` joins.")
    ] = "1/1",
    traces_at_once: TracesAtOnce = None,
    memory_ratio: MemoryRatio = 0.6,
    graders: Graders = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no warnings.")] = False,
    help_all: HelpAll = False,
    **flags: str | bool | None,
) -> None:
    """Measure what a trace's prefix decides, and what a judge of prefixes could gain."""

    def body() -> int:
        from gambit.bench.datasets import benchmark_for
        from gambit.bench.prefix_value import is_done, layers_for, make_prefix_plan, open_folder
        from gambit.engines.choice import check_engine
        from gambit.storage.run_folder import check_writable

        if keep >= traces:
            raise UserError(f"--keep {keep} of --traces {traces}: keep fewer, so that there is something to choose")
        found = benchmark_for(benchmark)
        plan, tasks = make_prefix_plan(
            found, limit, shard, fractions=_fractions(cuts), num_rollouts=rollouts, all_problems=all_problems
        )
        answer = {} if found.answer is None else {"answer": found.answer}
        given = {**answer, "memory_ratio": memory_ratio, **{k: v for k, v in flags.items() if v is not None}}
        collecting = _collecting(out, found.name, given, traces, traces_at_once, graders)
        check_engine(collecting.engine)
        check_model(collecting.engine.model, is_quiet=quiet)
        judges = _judges(scorer, collecting.engine)
        check_writable(out)
        with sole_writer(out, is_quiet=quiet):
            open_folder(out, plan)
            if not is_done(out, plan, tasks):
                collecting = replace(collecting, layers=layers_for(out, judges.values()))
                code = _run(out, plan, tasks, collecting, is_quiet=quiet)
                if code != OK:
                    return code
            return _report(out, plan, judges, keep, collecting.engine.device, as_json=as_json)

    exit_with(body)


def _fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise UserError(f"cuts {text!r}: give shares of a trace such as 0.25,0.5,0.75") from error


def _collecting(
    out: Path, source: str, given: Mapping[str, object], traces: int, at_once: int | None, graders: int
) -> CollectPlan:
    from gambit.training.collect import CollectPlan

    engine = build(EngineConfig, {key: given[key] for key in given if key in EngineConfig.model_fields})
    search = build(SearchConfig, {key: given[key] for key in given if key in SearchConfig.model_fields})
    return CollectPlan(
        out, source, engine, search, traces_per_problem=traces, num_graders=graders,
        traces_at_once=at_once or usual_traces_at_once(engine.device),
    )  # fmt: skip


def _judges(names: list[str] | None, engine: EngineConfig) -> dict[str, PrefixJudge]:
    """By what the report calls them."""
    from gambit.models import files as models

    source = models.locate(engine.model)
    has_own = models.side_file(source, models.SCORER_FILE) is not None
    wanted = names or (["auto", "confidence"] if has_own else ["confidence"])
    found: dict[str, PrefixJudge] = {}
    for name in wanted:
        label, judge = _judge(name, source, engine.model)
        if label in found:
            raise UserError(f"two scorers are called {label!r}: rename a file")
        found[label] = judge
    return found


def _judge(name: str, source: str, model: str) -> tuple[str, PrefixJudge]:
    from gambit.bench.prefix_judges import StateJudge, VerifierJudge
    from gambit.scorers.choice import load_scorer
    from gambit.scorers.names import ScorerKind, parse_scorer, verifier_folder
    from gambit.scorers.verifier.folder import read_info
    from gambit.scorers.verifier.model import check_installed

    if parse_scorer(name).kind is ScorerKind.VERIFIER:
        check_installed()  # what is missing is told before anything is sampled
        folder = verifier_folder(name)
        info = read_info(folder)
        _check_size(name, info.hidden_size, source, model)
        return folder.resolve().name, VerifierJudge(folder, info, model)
    scorer = load_scorer(name, source, model)
    _check_size(name, scorer.info.hidden_size, source, model)
    return f"{scorer.info.architecture} (the model's own)" if name == "auto" else Path(name).stem, StateJudge(scorer)


def _check_size(name: str, wanted: int | None, source: str, model: str) -> None:
    from gambit.models import files as models

    size = models.hidden_size_on_disk(source)
    if size is not None and wanted not in (None, size):
        raise UserError(f"--scorer {name}: made for hidden states of {wanted} numbers, and {model} has {size}: name "
                        "one that was trained for this model")  # fmt: skip


def _run(out: Path, plan: PrefixPlan, tasks: list[Task], collecting: CollectPlan, *, is_quiet: bool) -> int:
    from gambit.bench.prefix_value import run
    from gambit.cli.scorer_display import progress
    from gambit.cli.signals import StopSignal

    prepare_libraries()
    with (
        only_our_warnings(is_quiet=is_quiet),
        progress("traces", is_quiet=is_quiet) as on_traces,
        progress("prefixes", is_quiet=is_quiet) as on_prefixes,
        StopSignal(lambda: None) as stop,
    ):
        bars = {"traces": on_traces, "prefixes": on_prefixes}
        found = run(out, plan, tasks, collecting, progress=lambda what, *at: bars[what](*at), should_stop=stop)
    for reason in found.refused[:MOST_REFUSALS_SHOWN]:
        say(f"left out: {reason}", style="yellow")
    if found.was_stopped:
        say("stopped early: the same command goes on")
    return stop.exit_code


def _report(
    out: Path, plan: PrefixPlan, judges: Mapping[str, PrefixJudge], keep: int, device: str, *, as_json: bool
) -> int:
    from gambit.bench.prefix_report import write_prefix_report
    from gambit.bench.prefix_value import summarise

    report = write_prefix_report(out, plan, summarise(out, plan, judges, keep, device))
    if as_json:
        typer.echo(report.json)
        return OK
    for sentence in report.sentences:
        put(sentence)
    put(f"report: {out / 'report.html'}")
    return OK
