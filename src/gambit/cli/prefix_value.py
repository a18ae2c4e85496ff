"""`gambit prefix-value`: what continuing the best prefixes of traces gains over continuing random ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.options import SEARCH_PANELS, with_options
from gambit.cli.scorer_collect import MANY, MemoryRatio, TracesAtOnce, usual_traces_at_once
from gambit.cli.session import check_model, only_our_warnings, prepare_libraries, sole_writer
from gambit.cli.terminal import OK, put, say
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.errors import UserError

if TYPE_CHECKING:
    from gambit.scorers.base import Scorer

SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "answer", "system_prompt", "enable_thinking",
)  # fmt: skip
UNUSED = {
    *(set(SearchConfig.model_fields) - set(SAMPLING)),
    *(name for name in EngineConfig.model_fields if name.startswith("verifier_")),
    *("scorer", "any_weights", "memory_ratio"),
}


@with_options(*SEARCH_PANELS, without=UNUSED)
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
        typer.Option(metavar="TEXT", help="Scorers to compare (default: the model's own, and confidence)."),
    ] = None,
    traces_at_once: TracesAtOnce = None,
    memory_ratio: MemoryRatio = 0.6,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no warnings.")] = False,
    **flags: str | bool | None,
) -> int:
    """Measure what the best prefixes gain, continued instead of random ones."""
    from gambit.bench.datasets import benchmark_for
    from gambit.bench.prefix_value import PrefixPlan, is_done, run, summarise, write_prefix_report
    from gambit.cli.progress import progress_bar
    from gambit.cli.terminal import StopSignal
    from gambit.engines.base import check_engine
    from gambit.storage.run_folder import check_writable
    from gambit.training.collect import CollectPlan
    from gambit.training.sampling import Task
    from gambit.types import Problem

    if keep >= traces:
        raise UserError(f"--keep {keep} of --traces {traces}: keep fewer, so that there is something to choose")
    plan = PrefixPlan(_shares(cuts), rollouts, keep)
    found = benchmark_for(benchmark)
    tasks = [Task(Problem(item.question, item.id), item.answer) for item in found.first(limit)]
    given = {"memory_ratio": memory_ratio, **{k: v for k, v in flags.items() if v is not None}}
    if found.answer is not None:
        given.setdefault("answer", found.answer)
    engine = build(EngineConfig, {key: given[key] for key in given if key in EngineConfig.model_fields})
    search = build(SearchConfig, {key: given[key] for key in given if key in SearchConfig.model_fields})
    check_engine(engine)
    check_model(engine.model, is_quiet=quiet)
    scorers = _scorers(scorer, engine)
    layers = tuple(dict.fromkeys((-1, *(layer for each in scorers.values() for layer in each.info.layers))))
    collecting = CollectPlan(
        out, found.name, engine, search, traces, traces_at_once or usual_traces_at_once(engine.device), layers
    )
    check_writable(out)
    with sole_writer(out, is_quiet=quiet):
        out.mkdir(parents=True, exist_ok=True)
        if not is_done(out, plan, tasks):
            prepare_libraries()
            with (
                only_our_warnings(is_quiet=quiet),
                progress_bar("traces", is_quiet=quiet) as on_traces,
                progress_bar("prefixes", is_quiet=quiet) as on_prefixes,
                StopSignal(lambda: None) as stop,
            ):
                refused = run(out, plan, tasks, collecting, on_traces, on_prefixes, stop)
            for reason in refused[:5]:
                say(f"left out: {reason}", style="yellow")
            if stop():
                say("stopped early: the same command goes on")
                return stop.exit_code
        report = write_prefix_report(out, found.name, plan, summarise(out, plan, tasks, scorers, engine.device))
    if as_json:
        typer.echo(report.to_json())
        return OK
    for sentence in (*report.cautions, *report.findings):
        put(sentence)
    put(f"report: {out / 'report.html'}")
    return OK


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(share) for share in text.split(",")}))
    except ValueError as error:
        raise UserError(f"cuts {text!r}: give shares of a trace such as 0.25,0.5,0.75") from error


def _scorers(names: list[str] | None, engine: EngineConfig) -> dict[str, Scorer]:
    """Returns the scorers to compare, by their names in the report."""
    from gambit.models import files as models
    from gambit.scorers.choice import load_scorer
    from gambit.verifiers.names import VerifierName, parse_scorer

    source = models.locate(engine.model)
    size = models.hidden_size_on_disk(source)
    has_own = models.side_file(source, models.SCORER_FILE) is not None
    found: dict[str, Scorer] = {}
    for name in names or (["auto", "confidence"] if has_own else ["confidence"]):
        if isinstance(parse_scorer(name), VerifierName):
            raise UserError(f"--scorer {name}: a verifier cannot judge prefixes here: name a scorer of hidden states")
        scorer = load_scorer(name, source, engine.model)
        wanted = scorer.info.hidden_size
        if size is not None and wanted not in (None, size):
            raise UserError(f"--scorer {name}: made for hidden states of {wanted} numbers, and {engine.model} has "
                            f"{size}: name one that was trained for this model")  # fmt: skip
        label = f"{scorer.info.architecture} (the model's own)" if name == "auto" else Path(name).stem
        if label in found:
            raise UserError(f"two scorers are called {label!r}: rename a file")
        found[label] = scorer
    return found
