"""The work of `gambit scorer get`, `list` and `push`: scorers that others have published, and one's own for others."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from gambit.cli.scorer import CollectOptions, EvalOptions
from gambit.cli.scorer_work import collect, tasks_of
from gambit.cli.session import check_model, only_our_warnings
from gambit.cli.terminal import OK, put, say
from gambit.config.presets import DEFAULT_MAX_NEW_TOKENS, ModelDefaults
from gambit.errors import EngineError, UserError
from gambit.models import files as models
from gambit.models.files import OFFLINE, SCHEME, is_offline, repository_of
from gambit.scorers.card import card_of, push
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.choice import scorer_file
from gambit.scorers.published import PublishedScorer, fetch, fetched_file, known_row, misfit, published_scorers
from gambit.stats import FEWEST_PROBLEMS
from gambit.storage.problems import new_run_folder
from gambit.training.evaluate import check_unseen

PROBLEMS_FOR_A_MIXED_ONE = 2  # a guess: of two problems one has right and wrong traces


def get(model: str, *, as_json: bool) -> int:
    row = known_row(model)
    if models.folder_on_disk(model) is not None and (reason := misfit(row, model)) is not None:
        raise UserError(reason)
    if is_offline() and not row.is_cached:
        raise UserError(f"{OFFLINE} is set: unset it to fetch the scorer of {row.model}")
    with only_our_warnings():
        fetch(row)
    typer.echo(json.dumps(_facts(row)) if as_json else f"{row.cache_file}")
    if not as_json:
        say(f"for {row.model}: `--scorer auto` uses it from now on ({_judged(row)})")
    return OK


def show_list(*, as_json: bool) -> int:
    table = Table("model", "trained on", "judged", "fetched", box=None, pad_edge=False)
    for row in published_scorers():
        if as_json:
            typer.echo(json.dumps(_facts(row)))
        table.add_row(row.model, row.trained_on, _judged(row), "yes" if row.is_cached else "no")
    if not as_json:
        put(table)
    return OK


def push_scorer(scorer: Path, repository: str, *, is_private: bool, only_card: bool) -> int:
    name, _ = repository_of(repository)
    if only_card:
        typer.echo(card_of(scorer, name))
        return OK
    with only_our_warnings():
        put(push(scorer, repository, is_private=is_private))
    say(f"to use it: --scorer {SCHEME}{name}")
    return OK


def _facts(row: PublishedScorer) -> dict[str, object]:
    """Returns what a script may want to know of a published scorer."""
    source = row.sources[0].url
    file = str(row.cache_file) if row.is_cached else None
    return {"model": row.model, "file": file, "source": source, "blob": row.blob, "trained_on": row.trained_on,
            "licence": row.licence, "judged": _judged(row)}  # fmt: skip


def _judged(row: PublishedScorer) -> str:
    trust = load_checkpoint(row.cache_file).info.trust if row.is_cached else None
    if trust is None or not trust.is_judged:
        return "published, not judged by us"
    return f"AUC {trust.halfway:.2f} on {trust.num_problems} problems"


def collected_for(models_named: Sequence[str], options: EvalOptions) -> tuple[list[str], EvalOptions]:
    """Collects traces of the problems with a model; returns its own scorer and the options to judge it by them."""
    if len(models_named) != 1:
        raise UserError("--problems: name one model, whose own scorer is judged")
    [model], folder = models_named, options.data or new_run_folder()
    check_model(model)
    source = models.locate(model)
    with only_our_warnings():
        file = fetched_file(source) if (own := scorer_file("auto", source)) is None else own
    info = load_checkpoint(file).info
    collection = CollectOptions(
        problems=options.problems, out=folder, model=model, traces=options.traces, limit=options.limit,
        max_new_tokens=options.max_new_tokens, device=options.device, boundary=info.boundary_rule,
        state_position=str(info.state_position), layers=",".join(map(str, info.layers)),
    )  # fmt: skip
    tasks = tasks_of(collection)
    if options.write:
        check_unseen(file, [task.problem.last_message for task in tasks])
    say(_cost(len(tasks), options, models.defaults_of(source)))
    if (code := collect(collection, {})) != OK:
        raise EngineError(f"{folder}: not all of the problems were collected (exit code {code}); the same command with "
                          f"--data {folder} goes on")  # fmt: skip
    return [str(file)], options.model_copy(update={"data": folder})


def _cost(num_problems: int, options: EvalOptions, defaults: ModelDefaults) -> str:
    """Returns what the collection takes, and what one takes that counts."""
    longest = options.max_new_tokens or defaults.preset.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    length = min(longest, int(defaults.preset.median_length or longest / 2))

    def cost(problems: int) -> str:
        traces = problems * options.traces
        return f"{problems} problems, {traces:,} traces and about {traces * length:,} tokens"

    return (f"collecting {cost(num_problems)} ({length:,} a trace); a scorer counts as judged from {FEWEST_PROBLEMS} "
            "problems with right and wrong traces on: if every second one has both, that takes "
            f"{cost(FEWEST_PROBLEMS * PROBLEMS_FOR_A_MIXED_ONE)}")  # fmt: skip
