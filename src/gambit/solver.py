"""Wires one run together: model, engine, scorer, policy, prompt, vote, log. The first file to read."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import cast

from gambit.config import registry
from gambit.config.options import EngineConfig, PresetSource, SearchConfig, build
from gambit.config.presets import ModelDefaults, SearchSettings, resolve, system_prompt_of
from gambit.core import events as ev
from gambit.core.errors import GambitWarning, UserError
from gambit.core.problem import ChatMessage, Problem
from gambit.core.tree import TraceState
from gambit.engines.base import Engine, SearchSpec, check_prompt
from gambit.engines.choice import start_engine
from gambit.models import files as models
from gambit.results.record import SearchRecord, SearchResult
from gambit.scorers.base import Scorer, ScorerInfo, check_fit
from gambit.scorers.checkpoint import load_checkpoint
from gambit.search.choice import confidence_window, embedder_of, make_policy, policy_options, vote_of, with_fixed_pool
from gambit.search.loop import Search, run_searches
from gambit.search.policies.base import Policy, requirements_of
from gambit.search.recorder import Callbacks
from gambit.storage.run_folder import EventCallback, EventSink
from gambit.text.answers import Extractor, Grader, extractor_for
from gambit.text.boundary import boundary_rule
from gambit.text.prompts import EncodedPrompt, encode_problem, rule_for, stop_ids

NO_SCORER = (
    "no scorer is known for {model}: thoughts are ranked by the model's token confidence, a weak guide. "
    "Train one (`gambit scorer --help`) and pass it with --scorer FILE."
)


class Solver:
    """Holds one model on one engine and searches with it as often as asked.

    >>> solver = Solver()  # the bundled model
    >>> solver.solve("a = 17; b = 61; c = a + b; c?").answer
    """

    def __init__(self, model: str = models.BUNDLED, *, scorer: str | Scorer = "auto", **engine_options: object) -> None:
        """`engine_options` are the other fields of `EngineConfig`: engine, device, dtype, kv_budget_tokens, …"""
        named = scorer if isinstance(scorer, str) else "custom"
        self.config = build(EngineConfig, {"model": model, "scorer": named, **engine_options})
        source = models.locate(model)
        self._named = models.named_model(model)
        self._scorer = load_scorer(named, source, model) if isinstance(scorer, str) else scorer
        generation = models.generation_of(source)
        self._defaults = models.defaults_of(source, generation)
        self.engine: Engine = start_engine(self.config, source, self._scorer)
        self._rule = boundary_rule(self.engine.tokenizer)
        check_fit(self._scorer.info, hidden_size=self.engine.info.hidden_size, boundary_rule=self._rule.name)
        if not self.config.any_weights:
            warn_of_other_weights(self._scorer.info, source, model)
        self._stop_ids = stop_ids(self.engine.tokenizer, generation.eos_ids)
        self._grader = Grader()
        self._num_searches = 0
        self._history = _History()
        self._said: set[str] = set()

    def solve(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: Callable[[ev.Event], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> SearchResult:
        """Search one problem to its end. With `out_dir`, the event log and the result are written there."""
        problem = problem if isinstance(problem, Problem) else Problem(problem)
        callback: EventCallback | None = None if on_event is None else lambda _, event: on_event(event)
        run = self._prepare(problem, config or SearchConfig(), _as_path(out_dir), extractor, callback)
        try:
            next(run_searches(self.engine, [run.search], should_stop=should_stop))
            return self._conclude(run)
        finally:
            run.sink.close()

    def solve_many(
        self,
        problems: Iterable[str | Problem],
        config: SearchConfig | None = None,
        *,
        concurrency: int = 1,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: EventCallback | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[SearchResult]:
        """Search problems, `concurrency` at a time in one batch, and give results as they finish.

        A problem that cannot be searched gives a result with `error` set; the others go on.
        """
        if concurrency < 1:
            raise UserError(f"concurrency {concurrency}: at least one problem must run at a time")
        runs: dict[int, _Run] = {}
        refused: deque[SearchResult] = deque()

        def prepared() -> Iterator[Search]:
            for index, item in enumerate(problems):
                if should_stop():  # those that run are voted on, no other is begun
                    return
                problem = item if isinstance(item, Problem) else Problem(item, id=str(index))
                folder = None if out_dir is None else Path(out_dir) / problem.id
                try:
                    run = self._prepare(problem, config or SearchConfig(), folder, extractor, on_event, concurrency)
                except UserError as error:
                    asked = config or SearchConfig()
                    refused.append(SearchResult.failed(problem.id, asked.policy, asked.seed, str(error)))
                    continue
                runs[run.search.number] = run
                yield run.search

        try:
            for search in run_searches(self.engine, prepared(), concurrency=concurrency, should_stop=should_stop):
                yield self._conclude(runs.pop(search.number))
                while refused:
                    yield refused.popleft()
            yield from refused
        finally:
            for run in runs.values():
                run.sink.close()

    def equivalent(self, first: str, second: str) -> bool:
        """Whether two answers are equal, as the votes decide it; what they have compared is remembered."""
        return self._grader.equivalent(first, second)

    def grade(self, answer: str | None, gold: str) -> bool:
        return self._grader.grade(answer, gold)

    def close(self) -> None:
        self._grader.close()
        self.engine.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- one run -----------------------------------------------------------------------------------------------

    def _prepare(
        self,
        problem: Problem,
        config: SearchConfig,
        out_dir: Path | None,
        extractor: Extractor | None,
        on_event: EventCallback | None,
        concurrency: int = 1,
    ) -> _Run:
        if self._named is not None:
            self._named.check_question(problem.last_message)
        prompt = encode_problem(
            self.engine.tokenizer,
            problem.question,
            system_prompt=system_prompt_of(config, self._defaults.preset),
            enable_thinking=config.enable_thinking,
        )
        check_prompt(self.engine.info, len(prompt.token_ids))
        settings, found = self._resolve(config, prompt)
        policy = make_policy(config, settings, is_probability=self._scorer.info.is_probability)
        requirements = requirements_of(policy)
        embed = embedder_of(requirements)
        found += self._crowding(settings.capacity * concurrency)
        notes = [note for note in (*prompt.notes, *found) if self._is_news(note)]
        sink = EventSink(problem.id, out_dir, on_event)
        self._num_searches += 1
        spec = SearchSpec(
            self._num_searches,
            prompt.token_ids,
            rule_for(self._rule, prompt),
            self._stop_ids,
            keeps_histories=settings.ghost_parents,
            confidence_window=confidence_window(requirements, config),
            embedding_size=requirements.embedding_size,
        )
        started = self._header(problem, config, settings, policy, prompt)
        callbacks = Callbacks(
            self._answer_reader(extractor or extractor_for(config.answer)),
            self.equivalent,
            sink.write,
            self.engine.tokenizer.decode,
            embed,
        )
        return _Run(Search(self.engine, policy, settings, spec, started, callbacks), sink, tuple(notes))

    def _resolve(self, config: SearchConfig, prompt: EncodedPrompt) -> tuple[SearchSettings, list[str]]:
        info = self.engine.info
        defaults = self._defaults
        if config.preset is PresetSource.AUTO:
            defaults = self._history.added_to(defaults)
        room = info.context_tokens - len(prompt.token_ids)
        return resolve(
            with_fixed_pool(config),
            defaults,
            room,
            has_floor=self._scorer.info.is_probability,
            policy_options=policy_options(config),
        )

    def _crowding(self, num_traces: int) -> list[str]:
        info = self.engine.info
        if info.most_traces is None or num_traces <= info.most_traces:
            return []
        option = (
            f"; --engine-option {info.most_traces_option}={num_traces} lets all run" if info.most_traces_option else ""
        )
        return [f"of {num_traces} traces {info.most_traces} run at a time, the others wait{option}"]

    def _header(
        self,
        problem: Problem,
        config: SearchConfig,
        settings: SearchSettings,
        policy: Policy[object],
        prompt: EncodedPrompt,
    ) -> ev.RunStarted:
        question = problem.question if isinstance(problem.question, str) else json.dumps(list(problem.question))
        return ev.RunStarted(
            format=ev.LOG_FORMAT,
            problem_id=problem.id,
            question=question,
            policy=policy.name,
            vote=str(vote_of(config)),
            aggregation=str(self._scorer.info.aggregation),
            seed=settings.sampling.seed,
            capacity=settings.capacity,
            num_traces=settings.num_traces,
            prompt_tokens=prompt.token_ids,
            settings=settings.to_json(),
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, ev.Json]:
        info = cast("dict[str, ev.Json]", dataclasses.asdict(self.engine.info))
        packages: dict[str, ev.Json] = {name: _version(name) for name in ("gambit-search", "torch", "transformers")}
        scorer = self.config.scorer if self.config.scorer != "auto" else self._scorer.info.architecture
        return {"engine": info, "scorer": scorer, "python": platform.python_version(), **packages}

    def _answer_reader(self, extract: Extractor) -> Callable[[Sequence[int]], str | None]:
        def answer_of(tokens: Sequence[int]) -> str | None:
            spoken = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
            return extract(self.engine.tokenizer.decode(spoken))

        return answer_of

    def _is_news(self, note: str) -> bool:
        """Each warning is said once per solver."""
        if note in self._said:
            return False
        self._said.add(note)
        warnings.warn(note, GambitWarning, stacklevel=5)
        return True

    def _conclude(self, run: _Run) -> SearchResult:
        assert run.search.result is not None
        self._history.remember(run.search.record)
        result = dataclasses.replace(run.search.result, warnings=run.notes, out_dir=run.sink.folder)
        failure = run.sink.finish(result)
        if failure is None:
            return result
        return dataclasses.replace(result, warnings=(*run.notes, failure), log_error=failure)


@dataclass(frozen=True, slots=True)
class _Run:
    search: Search
    sink: EventSink
    notes: tuple[str, ...]


class _History:
    """Lengths of completed traces and of thoughts in this solver's runs so far, for `preset="auto"`."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=4096)
        self._thoughts: deque[float] = deque(maxlen=4096)

    def remember(self, record: SearchRecord) -> None:
        for trace in record.tree.in_state(TraceState.FINISHED):
            self._lengths.append(trace.num_tokens)
            if trace.score.count:
                self._thoughts.append(trace.boundary_tokens / trace.score.count)

    def added_to(self, defaults: ModelDefaults) -> ModelDefaults:
        if not self._lengths:
            return defaults
        thought = statistics.fmean(self._thoughts) if self._thoughts else None
        return dataclasses.replace(
            defaults, median_length=statistics.median(self._lengths), mean_thought_length=thought
        )


def load_scorer(name: str, source: str, model: str) -> Scorer:
    """A checkpoint file, another scorer of the model's own, a registered one; `auto`: the model's, or confidence."""
    if name == "auto":
        path = models.side_file(source, models.SCORER_FILE)
        if path is not None:
            return load_checkpoint(path)
        warnings.warn(NO_SCORER.format(model=model), GambitWarning, stacklevel=3)
        name = "confidence"
    if Path(name).suffix == ".safetensors" or Path(name).is_file():
        return load_checkpoint(Path(name))
    if name not in registry.names("gambit.scorers") and (path := models.own_scorer(source, name)) is not None:
        return load_checkpoint(path)
    factory = cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))
    return factory()


def warn_of_other_weights(info: ScorerInfo, source: str, model: str) -> None:
    """A scorer reads states, so it belongs to the weights it was trained on."""
    if info.base_model_hash is None or (found := models.weight_hash(source)) in (None, info.base_model_hash):
        return
    warnings.warn(
        f"the scorer was trained on {info.base_model} with weights {info.base_model_hash[:20]}…, {model} has "
        f"{found[:20]}…: that may do for a quantised variant, not for another model; --any-weights says that you know",
        GambitWarning,
        stacklevel=3,
    )  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source folder that was never installed
        return "unknown"


def _as_path(out_dir: Path | str | None) -> Path | None:
    return None if out_dir is None else Path(out_dir)
