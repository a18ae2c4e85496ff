"""The work of `gambit scorer …`; imported once a command is called, since it needs torch."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from gambit.bench.datasets import GROUP, HUB, SYNTAX, Benchmark, benchmark_for, chosen, numbers_of, registered_name
from gambit.chains import FAMILIES
from gambit.cli.options import given, picked, with_adapter
from gambit.cli.progress import engine_lines, progress_bar
from gambit.cli.scorer import AUTO, NONE, CollectOptions, EvalOptions, ImportOptions, TrainOptions
from gambit.cli.session import check_model, needs_in_cluster, only_our_warnings, sole_writer, solver_maker, warn_of
from gambit.cli.terminal import OK, StopSignal, put, say, warn
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import ClusterPlan
from gambit.config import registry
from gambit.config.options import EngineConfig, SearchConfig
from gambit.config.trust import SHARES, ScorerTrust, reason_for
from gambit.engines.base import check_engine
from gambit.engines.local.model import pick_device
from gambit.errors import EngineError, StorageError, UserError
from gambit.models import files as models
from gambit.scorers.authors import is_torch_file, load_torch_scorer
from gambit.scorers.base import ScorerInfo
from gambit.scorers.card import facts_of
from gambit.scorers.checkpoint import CHECKPOINT, load_checkpoint, read_metadata, save_checkpoint
from gambit.scorers.choice import scorer_file
from gambit.stats import FEWEST_PROBLEMS
from gambit.storage.problems import MANY_SUFFIXES, check_not_empty, columns_of, read_problem_file, shard_of
from gambit.storage.run_folder import check_replaceable, check_replaceable_folder, check_writable
from gambit.text.boundary import check_boundary_rule
from gambit.training import collect as collecting
from gambit.training import train as training
from gambit.training.collect import CollectEngines, CollectPlan, CollectSummary, LocalEngines, RayEngines
from gambit.training.dataset import Division
from gambit.training.evaluate import (
    ScorerReport,
    check_writable_trust,
    conclusions,
    judge_scorers,
    report_json,
    write_figures,
)
from gambit.training.networks import ARCHITECTURES
from gambit.training.sampling import PAWN_SOURCE, Task, generated_tasks, pawn_tasks
from gambit.training.scoring import CURVE, QUARTERS
from gambit.training.storage import merge as merge_collections
from gambit.types import Aggregation, Problem, StatePosition
from gambit.verifiers.lora_folder import LoraInfo, is_verifier, read_info
from gambit.verifiers.names import VerifierName, parse_scorer, trained_scorer, verifier_folder

VERIFIER = "verifier"
GPU_TRACES, CPU_TRACES = 1024, 64  # traces sampled at a time
USUAL_TASKS = 600  # of sources without an end
MOST_REASONS = 5


# -- collect, merge --------------------------------------------------------------------------------------------


def collect(options: CollectOptions, flags: Mapping[str, str | None]) -> int:
    check_boundary_rule(options.boundary)
    first, every = shard_of(options.shard)
    values = options.model_dump()
    benchmark = _benchmark(options)
    if benchmark is not None:
        warn_of([benchmark], is_quiet=options.quiet)
        values.update(given({"answer": benchmark.answer}))
    tasks, numbers = tasks_of(options), numbers_of(options.only, "--only")
    tasks = (list(chosen(tasks, numbers, options.problems)) if numbers else tasks)[first::every]
    check_not_empty(options.shard, len(tasks))
    positions = tuple(StatePosition) if options.state_position == "both" else (StatePosition(options.state_position),)
    plan = CollectPlan(
        out=options.out,
        source=options.problems if options.problems.startswith((PAWN_SOURCE, HUB)) else Path(options.problems).name,
        engine=with_adapter(picked(EngineConfig, values), options.lora),
        search=picked(SearchConfig, values),
        traces_per_problem=options.traces,
        traces_at_once=options.traces_at_once or usual_traces_at_once(options.device),
        layers=() if options.layers == NONE else _layers_of(options.layers, NONE),
        positions=positions,
        with_confidence=options.confidence,
        boundary=options.boundary,
        batch_tokens=options.batch_tokens,
        num_graders=options.graders,
    )
    check_engine(plan.engine)
    check_model(plan.engine.model, is_quiet=options.quiet)
    check_writable(plan.out)
    cluster = picked(ClusterPlan, flags).checked(plan.engine)
    with sole_writer(plan.out, is_quiet=options.quiet):
        if cluster is not None:
            return _collect_on_ray(tasks, plan, cluster, options)
        with (
            only_our_warnings(is_quiet=options.quiet),
            progress_bar("collecting", is_quiet=options.quiet) as advance,
            StopSignal(lambda: None) as stop,
        ):
            return _sample_and_store(tasks, plan, lambda: None, advance, stop)


def _collect_on_ray(tasks: Sequence[Task], plan: CollectPlan, cluster: ClusterPlan, options: CollectOptions) -> int:
    with only_our_warnings(is_quiet=options.quiet), needs_in_cluster(cluster, plan.engine) as needs:
        if options.traces_at_once is None:
            plan = dataclasses.replace(plan, traces_at_once=GPU_TRACES if needs.gpus else CPU_TRACES)
        solver = solver_maker(collecting.sampling_engine(plan), needs, plan.meter)
        make = partial(LocalEngines, plan, solver)
        with (
            EnginePool(make, cluster.num_engines, needs, jobs_per_engine=plan.most_problems_at_once) as pool,
            progress_bar("collecting", is_quiet=options.quiet, lines=lambda: engine_lines(pool.slots)) as advance,
            StopSignal(lambda: None) as stop,
        ):
            return _sample_and_store(tasks, plan, lambda: RayEngines(pool, stop), advance, stop)


def _sample_and_store(
    tasks: Sequence[Task],
    plan: CollectPlan,
    engines: Callable[[], CollectEngines | None],
    advance: Callable[[int, int], None],
    stop: StopSignal,
) -> int:
    """Collects on these engines, or on one of this process (None); returns the exit code."""
    began = time.monotonic()
    try:
        summary = collecting.collect(tasks, plan, engines=engines(), on_progress=advance, should_stop=stop)
    except StorageError as error:
        error.add_note("problems written before are kept; once there is room, the same command goes on from there")
        raise
    except EngineError:
        if stop():  # before an engine was ready
            return stop.exit_code
        raise
    put(summary_line(summary, plan.out, time.monotonic() - began))
    say_refused(summary.refused)
    return stop.exit_code


def say_refused(reasons: Sequence[str]) -> None:
    """Prints why the first few problems were left out."""
    for reason in reasons[:MOST_REASONS]:
        say(f"left out: {reason}", style="yellow")


def _benchmark(options: CollectOptions) -> Benchmark | None:
    """Returns the benchmark that is named, a dataset of the hub too; None for files and generators."""
    is_named = options.problems.startswith(HUB) or registry.knows(GROUP, registered_name(options.problems))
    return benchmark_for(options.problems, columns_of(options.columns)) if is_named else None


def tasks_of(options: CollectOptions) -> list[Task]:
    """Returns the problems of a benchmark, a file or a generator, each with its answer."""
    source, limit = options.problems, options.limit
    columns = columns_of(options.columns)
    if source.partition(":")[0] in FAMILIES:
        return generated_tasks(source, limit or USUAL_TASKS, options.seed)
    if source.startswith(PAWN_SOURCE):
        return pawn_tasks(source.removeprefix(PAWN_SOURCE), limit or USUAL_TASKS, options.seed)
    if (benchmark := _benchmark(options)) is not None:
        return [Task(Problem(item.question, id=item.id), item.answer) for item in benchmark.first(limit)]
    path = Path(source)
    if path.suffix.lower() not in MANY_SUFFIXES:
        known = " nor ".join((f"a file of problems ({', '.join(MANY_SUFFIXES)})", "a benchmark", "pawn:SPLIT", *SYNTAX))
        raise UserError(f"{source!r} is neither {known}")
    found = read_problem_file(path, columns)
    unanswered = [problem.id for problem in found.problems if problem.id not in found.expected]
    if unanswered:
        raise UserError(f'{source}: {unanswered[0]} has no "answer", and a trace can only be graded by one')
    return [Task(problem, found.expected[problem.id]) for problem in found.problems[:limit]]


def usual_traces_at_once(device: str) -> int:
    return GPU_TRACES if pick_device(device).type == "cuda" else CPU_TRACES


def _layers_of(text: str, word: str) -> tuple[int, ...]:
    """Returns the layers of a list such as -1,-9; the error names `word` as what may stand there instead."""
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise UserError(f"layers {text!r}: give numbers such as -1,-9, or {word}") from error
    if len(set(found)) < len(found):
        raise UserError(f"layers {text!r}: one of them is there twice, leave it out")
    return found


def merge(folders: Sequence[Path], out: Path) -> int:
    check_writable(out)
    with sole_writer(out):
        num_problems = merge_collections(folders, out)
    put(f"{out}: {num_problems} problems")
    return OK


# -- train, export ---------------------------------------------------------------------------------------------


def train(options: TrainOptions) -> int:
    known = (*ARCHITECTURES, VERIFIER)
    if options.architecture not in known:
        raise UserError(f"unknown architecture {options.architecture!r}: use {', '.join(known)}")
    shares = given({"validation": options.validation, "test": options.test, "seed": options.split_seed})
    if options.architecture == VERIFIER:
        return _train_verifier(options, shares)
    if options.start is not None:
        raise UserError(f"--start is for verifiers: leave it out, {options.architecture} is fitted anew in minutes")
    changes = given({"seed": options.seed, "max_epochs": options.epochs, "is_balanced": options.balance,
                     "normalises": options.normalise, "width": options.width, "blocks": options.blocks})  # fmt: skip
    plan = training.TrainPlan(
        data=options.data,
        architecture=options.architecture,
        objective=options.objective,
        state_position=options.state_position,
        layers=None if options.layers == AUTO else _layers_of(options.layers, AUTO),
        division=Division(**shares),  # type: ignore[arg-type]
        changes=changes,
        device=options.device,
        labels=options.labels,
    )
    check_replaceable(options.out, CHECKPOINT)
    training.recipes_for(plan.architecture, plan.objective, plan.changes)  # finds mistakes before gigabytes are read
    skipped: list[str] | None = [] if options.skip_corrupted else None
    datasets = training.datasets_of(plan, skipped)
    _warn_of(skipped)
    with progress_bar("training") as advance:
        trained = training.train(plan, datasets, advance, say if options.verbose else lambda _: None)
    save_checkpoint(trained.best.scorer, options.out, trained.metadata)
    show_training(options.out, trained, options.as_json)
    return OK


def _train_verifier(options: TrainOptions, shares: Mapping[str, float]) -> int:
    """Trains a LoRA verifier. Progress is printed line by line, since such a training is often followed in a file."""
    from gambit.training.verifier.recipe import VerifierPlan, VerifierRecipe, continued, division_of
    from gambit.training.verifier.train import passages_of, train_verifier
    from gambit.verifiers.lora import check_installed

    model, out = options.model, options.out
    if model is None:
        raise UserError("a verifier is trained on the weights of the model that wrote the traces: name it with --model")
    if out.suffix == CHECKPOINT:
        raise UserError(f"a verifier is a folder, {out} looks like a file: give --out without .safetensors")
    check_replaceable_folder(out, "a verifier", is_own=is_verifier(out))
    check_installed()
    changes = given({"seed": options.seed, "epochs": options.epochs, "seconds": options.seconds, "rank": options.rank,
                     "rate": options.rate, "targets": options.targets, "update_tokens": options.batch_tokens,
                     "pass_tokens": options.pass_tokens, "recomputes": options.recompute,
                     "num_problems": options.train_problems})  # fmt: skip
    recipe, division = VerifierRecipe(**changes), Division()  # type: ignore[arg-type]
    start = None if options.start is None else verifier_folder(options.start)
    if start is not None:
        recipe = continued(recipe, start, frozenset(changes))
        division = division_of(read_info(start)) or division
    division = dataclasses.replace(division, **shares)  # type: ignore[arg-type]
    plan = VerifierPlan(options.data, model, recipe, division, options.labels, options.device, start)
    skipped: list[str] | None = [] if options.skip_corrupted else None
    read = passages_of(plan, skipped)
    _warn_of(skipped)
    with only_our_warnings():
        trained = train_verifier(plan, read, say)
    show_verifier(out, trained.info, trained.save(out), options.as_json)
    return OK


def _warn_of(skipped: Sequence[str] | None) -> None:
    for line in dict.fromkeys(skipped or ()):
        warn(line)


def export(folder: str, out: Path, model: str | None, device: str) -> int:
    from gambit.verifiers import lora

    check_replaceable_folder(out, "an exported verifier", is_own=lora.is_exported(out))
    with only_our_warnings():
        lora.export(lora.LoraVerifier.load(verifier_folder(folder), pick_device(device), model), out, model)
    put(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:,.0f} MB")
    return OK


# -- eval ------------------------------------------------------------------------------------------------------


def evaluate(scorers: Sequence[str], options: EvalOptions) -> int:
    if options.problems is not None:
        from gambit.cli.scorer_published import collected_for

        scorers, options = collected_for(scorers, options)
    if (data := options.data) is None:
        raise UserError("no collection to judge by: give --data FOLDER, or --problems to make one with a model")
    names, out, plot = [trained_scorer(each) for each in scorers], options.out, options.plot
    if options.write:
        check_writable_trust(names, data, options.part)
    if out is not None:
        check_replaceable(out, ".json")
    if plot is not None:
        check_replaceable(plot, ".svg")
    skipped: list[str] | None = [] if options.skip_corrupted else None
    with only_our_warnings():
        found = judge_scorers(
            names, data, options.part, device=options.device, model=options.model, skipped=skipped, warn=warn
        )
    _warn_of(skipped)
    if options.write:
        write_figures(names, found)
    text = json.dumps(report_json(found), indent=2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        from gambit.training.plot import draw

        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_text(draw(found), encoding="utf-8")
    if options.as_json:
        typer.echo(text)
    else:
        show_report(found)
    return OK


# -- import, show ----------------------------------------------------------------------------------------------


def import_checkpoint(file: Path, options: ImportOptions) -> int:
    check_replaceable(options.out, CHECKPOINT)
    info = _import_info(options)
    scorer = load_torch_scorer(file, info)
    save_checkpoint(scorer, options.out, {"training": {"imported_from": file.name}})
    made = scorer.info
    put(f"{options.out}: {made.architecture} for {info.base_model}, hidden size {made.hidden_size}, "
        f"state {made.state_position}")  # fmt: skip
    if info.base_model_hash is None:
        say(f"note: the weights of {options.base_model} are not on this disk, so the checkpoint holds no hash of them")
    return OK


def _import_info(options: ImportOptions) -> ScorerInfo:
    model, position = options.base_model, options.state_position
    needed = {"--base-model NAME": model, "--state-position boundary|before": position}
    missing = [flag for flag, value in needed.items() if value is None]
    if model is None or position is None:
        raise UserError(f"the file does not say what it was trained on: give {' and '.join(missing)}")
    for value, kind, flag in (
        (position, StatePosition, "state-position"), (options.aggregation, Aggregation, "aggregation"),
    ):  # fmt: skip
        if value not in list(kind):
            raise UserError(f"--{flag} {value!r}: use {' or '.join(kind)}")
    source = models.locate(model) if model == models.BUNDLED else model
    return ScorerInfo(
        "mlp", StatePosition(position), Aggregation(options.aggregation), boundary_rule=options.boundary_rule,
        hidden_size=models.number_on_disk(source, "hidden_size"), base_model=models.name_of(model),
        base_model_hash=models.weight_hash(source),
    )  # fmt: skip


def show(scorer: str, *, as_json: bool, is_verbose: bool) -> int:
    metadata = _metadata_of(scorer)
    if as_json or is_verbose:
        typer.echo(json.dumps(metadata, indent=2 if is_verbose and not as_json else None))
        return OK
    trust = None if metadata.get("trust") is None else ScorerTrust.model_validate_json(json.dumps(metadata["trust"]))
    facts = facts_of(metadata)
    if trust is not None and trust.is_judged:
        facts["AUC"] = ", ".join(f"{auc:.2f} at {share:.0%}" for auc, share in zip(trust.auc, SHARES, strict=True))
    facts["trusted"] = f"{reason_for(trust)} (more: -v)"
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), value)
    put(table)
    return OK


def _metadata_of(scorer: str) -> dict[str, Any]:
    found, path = parse_scorer(scorer), Path(trained_scorer(scorer))
    if isinstance(found, str):
        model = models.locate(found) if models.named_model(found) else found
        own = None if registry.knows("gambit.scorers", found) else scorer_file(AUTO, model)
        if own is None:
            raise UserError(f"scorer {scorer!r} has no checkpoint to show: give a .safetensors file, the folder of a "
                            "verifier, or a model whose scorer is here (`gambit scorer get` fetches one)")  # fmt: skip
        path = own
    if isinstance(found, VerifierName):
        return read_info(path).model_dump(mode="json")
    loaded = load_checkpoint(path)  # a file that engines would refuse is refused here too
    described = TypeAdapter(ScorerInfo).dump_python(loaded.info, mode="json")
    return described if is_torch_file(path) else {**read_metadata(path), "layers": described["layers"]}


# -- tables and sentences ---------------------------------------------------------------------------------------


def summary_line(summary: CollectSummary, out: Path, seconds: float) -> str:
    share = summary.num_correct / max(1, summary.num_traces)
    before = f", {summary.num_before} were there before" if summary.num_before else ""
    stopped = "; stopped early, the same command goes on" if summary.was_stopped else ""
    return (
        f"{out}: {summary.num_problems} problems{before}; {summary.num_traces} traces, {share:.1%} right; "
        f"{summary.num_mixed} problems with both; {summary.num_thoughts} thoughts, {summary.num_tokens} tokens"
        f", {seconds:.0f} s{stopped}"
    )


def show_training(out: Path, trained: training.Trained, as_json: bool) -> None:
    best, metadata = trained.best, trained.metadata
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(out), **metadata}))
        return
    table = Table("objective", "state", "layers", "held-out AUC", "epochs", "seconds", box=None)
    candidates = metadata["candidates"]
    assert isinstance(candidates, list)
    for each in candidates:
        chosen = "bold" if each["is_chosen"] else None
        layers = ",".join(map(str, each["layers"]))
        row = (each["objective"], each["state_position"], layers, f"{each['held_out_auc']:.4f}", str(each["epochs"]))
        table.add_row(*row, f"{each['seconds']:.0f}", style=chosen)
    put(table)
    put(f"{out}: {best.scorer.info.architecture}, objective {best.recipe.objective}; held-out AUC within problems, "
        f"mean over 25-100 % of the thoughts: {best.held_out_auc:.4f}")  # fmt: skip
    if best.held_out_auc < max(each["held_out_auc"] for each in candidates):
        put("kept because it is the simplest: none is ahead of it by more than chance among so few problems")
    num_mixed = trust["problems"] if isinstance(trust := metadata["trust"], dict) else 0
    if num_mixed < FEWEST_PROBLEMS:
        put(
            f"searches trust it little: {num_mixed} test problems have right and wrong traces, of {FEWEST_PROBLEMS} "
            "that would count; collect more (about 200 problems), or `gambit scorer eval --write` on others"
        )


def show_verifier(out: Path, trained: LoraInfo, file: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(trained.model_dump_json())
        return
    size, metrics, training = file.stat().st_size, trained.metrics, trained.training
    quarters = " / ".join(f"{auc:.3f}" for auc in metrics["auc"].values())
    put(f"{out}: verifier, {size / 1e6:.1f} MB; {training['seconds']:.0f} s at "
        f"{training['tokens_per_second']:,.0f} tokens/s; held-out AUC within problems {metrics['held_out_auc']:.4f}, "
        f"at 25 / 50 / 75 / 100 %: {quarters}")  # fmt: skip


def show_report(report: ScorerReport) -> None:
    put(f"{report.model}, {report.source}: {report.num_problems} problems, {report.num_mixed} with both right and "
        f"wrong traces, {report.num_traces} traces, {report.share_right:.1%} right\n")  # fmt: skip
    put(_ranking_table(report, "AUC within problems"))
    put("")
    put(_ranking_table(report, "pairs ranked right"))
    put("")
    for ranking in report.rankings:
        if ranking.calibration:
            errors = ", ".join(f"{each.error:.3f} at {each.share:.0%}" for each in ranking.calibration)
            put(f"calibration error of {ranking.name}: {errors} of the thoughts")
    for line in conclusions(report):
        put(line)


def _ranking_table(report: ScorerReport, title: str) -> Table:
    is_auc = title.startswith("AUC")
    shares = QUARTERS if is_auc else CURVE
    means = ["mean (95 %)"] if is_auc else []
    table = Table(title, *means, *(f"{share:.0%}" for share in shares), box=None)
    for ranking in report.rankings:
        found = ranking.auc if is_auc else ranking.pairwise
        cells = [f"{found[share].value:.3f}" if share in found else "" for share in shares]
        table.add_row(ranking.name, *([str(ranking.mean_auc)] if is_auc else []), *cells)
    return table
