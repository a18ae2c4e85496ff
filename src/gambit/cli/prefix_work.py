"""The work of `gambit prefix-value`: samples traces and rollouts, and writes the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from gambit.bench.datasets import benchmark_for, numbers_of
from gambit.bench.prefix_value import PrefixPlan, is_done, run, summarise, write_prefix_report
from gambit.cli.bench import PrefixOptions
from gambit.cli.options import given, picked
from gambit.cli.progress import progress_bar
from gambit.cli.scorer_work import say_refused, usual_traces_at_once
from gambit.cli.session import check_model, only_our_warnings, sole_writer, warn_of
from gambit.cli.terminal import OK, StopSignal, put, say
from gambit.config.options import EngineConfig, SearchConfig
from gambit.engines.base import check_engine
from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.base import Scorer
from gambit.scorers.choice import load_scorer
from gambit.storage.run_folder import check_writable
from gambit.training.collect import CollectPlan
from gambit.training.sampling import Task
from gambit.types import Problem
from gambit.verifiers.names import VerifierName, parse_scorer


def prefix_value(options: PrefixOptions, flags: Mapping[str, str | bool | None]) -> int:
    out, quiet = options.out, options.quiet
    if options.keep >= options.traces:
        raise UserError(f"--keep {options.keep} of --traces {options.traces}: keep fewer, so that there is something "
                        "to choose")  # fmt: skip
    plan = PrefixPlan(_shares(options.cuts), options.rollouts, options.keep)
    benchmark = benchmark_for(options.benchmark)
    items = benchmark.first(options.limit, numbers_of(options.problems))
    tasks = [Task(Problem(item.question, item.id), item.answer) for item in items]
    values = {"memory_ratio": options.memory_ratio, **given({"answer": benchmark.answer}), **given(flags)}
    engine = picked(EngineConfig, values)
    search = picked(SearchConfig, values)
    check_engine(engine)
    warn_of([benchmark], is_quiet=quiet)
    check_model(engine.model, is_quiet=quiet, is_offline=engine.offline)
    scorers = _scorers(options.scorer, engine)
    layers = tuple(dict.fromkeys((-1, *(layer for each in scorers.values() for layer in each.info.layers))))
    at_once = options.traces_at_once or usual_traces_at_once(engine.device)
    collecting = CollectPlan(out, benchmark.name, engine, search, options.traces, at_once, layers)
    check_writable(out)
    with sole_writer(out, is_quiet=quiet):
        out.mkdir(parents=True, exist_ok=True)
        if not is_done(out, plan, tasks):
            with (
                only_our_warnings(is_quiet=quiet),
                progress_bar("traces", is_quiet=quiet) as on_traces,
                progress_bar("prefixes", is_quiet=quiet) as on_prefixes,
                StopSignal(lambda: None) as stop,
            ):
                refused = run(out, plan, tasks, collecting, on_traces, on_prefixes, stop)
            say_refused(refused)
            if stop():
                say("stopped early: the same command goes on")
                return stop.exit_code
        report = write_prefix_report(out, benchmark.name, plan, summarise(out, plan, tasks, scorers, engine.device))
    if options.as_json:
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


def _scorers(names: Sequence[str] | None, engine: EngineConfig) -> dict[str, Scorer]:
    """Returns the scorers to compare, by their names in the report."""
    source = models.locate(engine.model)
    size = models.number_on_disk(source, "hidden_size")
    has_own = models.side_file(source, models.SCORER_FILE) is not None
    found: dict[str, Scorer] = {}
    for name in names or (["auto", "confidence"] if has_own else ["confidence"]):
        if isinstance(parse_scorer(name), VerifierName):
            raise UserError(f"--scorer {name}: a verifier cannot judge prefixes here: name a scorer of hidden states")
        scorer = load_scorer(name, source, engine.model)
        needed = scorer.info.hidden_size
        if size is not None and needed not in (None, size):
            raise UserError(f"--scorer {name}: made for hidden states of {needed} numbers, and {engine.model} has "
                            f"{size}: name one that was trained for this model")  # fmt: skip
        label = f"{scorer.info.architecture} (the model's own)" if name == "auto" else Path(name).stem
        if label in found:
            raise UserError(f"two scorers are called {label!r}: rename a file")
        found[label] = scorer
    return found
