"""Wires one run together: model, engine, scorer, policy, prompt, vote, log. The first file to read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import cast

from gambit.config.options import EngineConfig, PresetSource, SearchConfig, build
from gambit.config.presets import SearchSettings, resolve, resolved_capacity, system_prompt_of
from gambit.core import events as ev
from gambit.core.errors import GambitWarning, UserError
from gambit.core.problem import ChatMessage, Problem
from gambit.core.types import Aggregation
from gambit.engines.base import Engine, SearchSpec, check_prompt
from gambit.engines.choice import start_engine
from gambit.engines.verifiers import beside_verifier, start_reader
from gambit.models import files as models
from gambit.results.record import SearchRecord, SearchResult
from gambit.scorers.base import Scorer, check_fit
from gambit.scorers.choice import load_scorer, model_scorer, warn_of_other_weights
from gambit.scorers.readers.base import Question, Reader
from gambit.scorers.readers.names import ReaderName, parse_reader
from gambit.scorers.readers.thread import ReaderThread
from gambit.scorers.simple import ConfidenceScorer
from gambit.search.choice import (
    confidence_window,
    embedder_of,
    make_policy,
    needs_scores,
    policy_options,
    vote_of,
    with_fixed_pool,
)
from gambit.search.host import SearchHost, SearchTicket
from gambit.search.lengths import LengthHistory
from gambit.search.loop import Search
from gambit.search.policies.base import Policy, requirements_of
from gambit.search.recorder import Callbacks
from gambit.search.verification import VerifierUse
from gambit.storage.run_folder import EventCallback, EventSink, check_writable
from gambit.storage.versions import package_version
from gambit.text.answers import Extractor, Grader, extractor_for
from gambit.text.boundary import boundary_rule, continued
from gambit.text.prompts import EncodedPrompt, encode_problem, rule_for, stop_ids


class Solver:
    """Holds one model on one engine and searches with it as often as asked.

    >>> solver = Solver()  # the bundled model
    >>> solver.solve("a = 17; b = 61; c = a + b; c?").answer
    """

    def __init__(
        self, model: str = models.BUNDLED, *, scorer: str | Scorer | Reader = "auto", **engine_options: object
    ) -> None:
        """`engine_options` are the other fields of `EngineConfig`: engine, device, dtype, kv_budget_tokens, …

        A scorer looks at the model's states; a reader, or `prm:…`, is a verifier that reads what it wrote.
        """
        named = scorer if isinstance(scorer, str) else "custom"
        self.config = build(EngineConfig, {"model": model, "scorer": named, **engine_options})
        source = models.locate(model)
        self._named = models.named_model(model)
        verifier = parse_reader(named)
        self._scorer = _own_scorer(scorer, verifier, source, model)
        generation = models.generation_of(source)
        self._defaults = models.defaults_of(source, generation)
        self._grader = Grader()
        self._num_searches = 0
        self._history = LengthHistory()
        self._said: set[str] = set()
        self._verifier = self._start_verifier(scorer, verifier)
        try:
            engine_config = beside_verifier(self.config, verifier)
            self._memory_ratio = engine_config.memory_ratio
            self._host = SearchHost(lambda: start_engine(engine_config, source, self._scorer))
        except BaseException:
            self._close_verifier()
            raise
        try:
            self._rule = boundary_rule(self.engine.tokenizer)
            self._stop_ids = stop_ids(self.engine.tokenizer, generation.eos_ids)
            check_fit(self._scorer.info, hidden_size=self.engine.info.hidden_size, boundary_rule=self._rule.name)
        except BaseException:
            self.close()
            raise
        if not self.config.any_weights:
            warn_of_other_weights(self._scorer.info, source, model)

    @property
    def engine(self) -> Engine:
        """What runs the model. Its calls belong to the solver's own thread: look, do not touch."""
        return self._host.engine

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
        """Search one problem to its end. With `out_dir`, the event log and the result are written there.

        Calls from several threads run in one batch. Callbacks are called on the solver's own thread.
        """
        wanted = _wanted(problem, config, out_dir, extractor, on_event)
        return self._submit(wanted, should_stop).result()

    def submit(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: Callable[[ev.Event], None] | None = None,
    ) -> PendingSearch:
        """Begin a search beside those that run, and come back at once; `AsyncSolver` and `gambit serve` build on it."""
        return self._submit(_wanted(problem, config, out_dir, extractor, on_event), lambda: False)

    def check_question(self, question: str) -> None:
        """Refuse, before a search begins, a question that a bundled model was not made for."""
        if self._named is not None:
            self._named.check_question(question)

    def capacity_of(self, config: SearchConfig) -> int:
        """How many traces a search runs at a time."""
        return resolved_capacity(with_fixed_pool(config), self._defaults)

    @property
    def think_end(self) -> int | None:
        """The token that ends a model's thinking; None where it has none."""
        return self._rule.think_end

    def text_of(self, tokens: Sequence[int]) -> str:
        """What a trace said, without the token that ended it."""
        spoken = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return self.engine.tokenizer.decode(spoken)

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

        A problem that cannot be searched gives a result with `error` set; the others go on. Leaving the iteration
        early ends the searches that run.
        """
        if concurrency < 1:
            raise UserError(f"concurrency {concurrency}: at least one problem must run at a time")
        asked, folder = config or SearchConfig(), _as_path(out_dir)
        if folder is not None:
            check_writable(folder)
        coming = enumerate(problems)
        pending: list[PendingSearch] = []
        try:
            while True:
                while len(pending) < concurrency and not should_stop() and (item := next(coming, None)) is not None:
                    problem = item[1] if isinstance(item[1], Problem) else Problem(item[1], id=str(item[0]))
                    own_folder = None if folder is None else folder / problem.id
                    wanted = _Wanted(problem, asked, own_folder, extractor, on_event, concurrency, must_log=False)
                    pending.append(self._submit(wanted, should_stop))
                if not pending:
                    return
                for done in _first_done(pending):
                    pending.remove(done)
                    yield done.result_or_error()
        finally:
            for left in pending:
                left.abandon()

    def equivalent(self, first: str, second: str) -> bool:
        """Whether two answers are equal, as the votes decide it; what they have compared is remembered."""
        return self._grader.equivalent(first, second)

    def grade(self, answer: str | None, gold: str) -> bool:
        """Whether an answer is right; no answer is wrong."""
        return self._grader.grade(answer, gold)

    def close(self) -> None:
        """End what runs and give back memory and processes; a second call does nothing."""
        self._host.close()
        self._close_verifier()
        self._grader.close()

    def __enter__(self) -> Solver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start_verifier(self, scorer: object, name: ReaderName | None) -> ReaderThread | None:
        """Before the engine: what it takes of the memory is then no longer free."""
        if isinstance(scorer, Reader):
            return ReaderThread(lambda: scorer)
        return None if name is None else ReaderThread(lambda: start_reader(name, self.config))

    def _close_verifier(self) -> None:
        if self._verifier is not None:
            self._verifier.close()

    # -- one run -----------------------------------------------------------------------------------------------

    def _submit(self, wanted: _Wanted, should_stop: Callable[[], bool]) -> PendingSearch:
        pending = PendingSearch(wanted, self._history)

        def make() -> Search:
            pending.run = self._prepare(wanted)
            return pending.run.search

        pending.ticket = self._host.submit(make, should_stop)
        return pending

    def _prepare(self, wanted: _Wanted) -> _Run:
        problem, config = wanted.problem, wanted.config
        self.check_question(problem.last_message)
        prompt = encode_problem(
            self.engine.tokenizer,
            problem.question,
            system_prompt=system_prompt_of(config, self._defaults.preset),
            enable_thinking=config.enable_thinking,
        )
        tokens = (*prompt.token_ids, *problem.prefix_tokens)
        check_prompt(self.engine.info, len(tokens))
        settings, found = self._resolve(config, prompt, problem)
        policy = make_policy(config, settings, is_probability=self._gives_probabilities)
        requirements = requirements_of(policy)
        verifier = self._verifier_use(problem, tokens) if needs_scores(requirements, config) else None
        embed = embedder_of(requirements)
        found += self._crowding(settings.capacity * wanted.concurrency)
        found += self._short_context(verifier, len(tokens) + settings.max_new_tokens)
        notes = (*prompt.notes, *found)
        news = tuple(note for note in notes if self._is_news(note))
        sink = EventSink(problem.id, wanted.out_dir, wanted.on_event, must_log=wanted.must_log)
        self._num_searches += 1
        spec = SearchSpec(
            self._num_searches,
            tokens,
            continued(rule_for(self._rule, prompt), problem.prefix_tokens),
            self._stop_ids,
            keeps_histories=settings.ghost_parents,
            confidence_window=confidence_window(requirements, config),
            embedding_size=requirements.embedding_size,
            has_verifier=verifier is not None,
        )
        started = self._header(problem, config, settings, policy, tokens)
        callbacks = Callbacks(
            self._answer_reader(wanted.extractor or extractor_for(config.answer), problem.prefix_tokens),
            self._grader.for_vote,
            sink.write,
            self.engine.tokenizer.decode,
            embed,
        )
        search = Search(self.engine, policy, settings, spec, started, callbacks, verifier)
        return _Run(search, sink, news, notes, prompt.thinks)

    def _verifier_use(self, problem: Problem, prompt_tokens: tuple[int, ...]) -> VerifierUse | None:
        if self._verifier is None:
            return None
        asked = problem.question
        messages = (ChatMessage(role="user", content=asked),) if isinstance(asked, str) else tuple(asked)
        return VerifierUse(
            self._verifier,
            Question(messages, prompt_tokens),
            self.engine.tokenizer.decode,
            is_async=self.config.verifier_async,
            is_optional=self.config.verifier_optional,
        )

    @property
    def _gives_probabilities(self) -> bool:
        info = self._scorer.info if self._verifier is None else self._verifier.info
        return info.is_probability

    @property
    def _aggregation(self) -> Aggregation:
        info = self._scorer.info if self._verifier is None else self._verifier.info
        return info.aggregation

    def _resolve(
        self, config: SearchConfig, prompt: EncodedPrompt, problem: Problem
    ) -> tuple[SearchSettings, list[str]]:
        info = self.engine.info
        defaults = self._defaults
        if config.preset is PresetSource.AUTO:
            defaults = self._history.added_to(defaults)
        context_left = info.context_tokens - len(prompt.token_ids)
        settings, notes = resolve(
            with_fixed_pool(config),
            defaults,
            context_left,
            has_floor=self._gives_probabilities,
            trust=self._scorer.info.trust if self._verifier is None else self._verifier.info.trust,
            policy_options=policy_options(config),
        )
        if problem.prefix_tokens:
            settings = _after_prefix(settings, problem)
        # Continuations of one trace, or of its neighbours, must not be drawn alike.
        if config.own_noise or problem.prefix_tokens:
            settings = _with_own_noise(settings, problem)
        return settings, notes

    def _crowding(self, num_traces: int) -> list[str]:
        info = self.engine.info
        if info.most_traces is None or num_traces <= info.most_traces:
            return []
        option = (
            f"; --engine-option {info.most_traces_option}={num_traces} lets all run" if info.most_traces_option else ""
        )
        return [f"of {num_traces} traces {info.most_traces} run at a time, the others wait{option}"]

    def _short_context(self, verifier: VerifierUse | None, num_tokens: int) -> list[str]:
        context = None if verifier is None else verifier.thread.info.context_tokens
        if context is None or num_tokens <= context:
            return []
        return [
            f"the verifier reads at most {context} tokens: a trace that grows longer, up to {num_tokens} with its "
            "prompt, keeps the score it has; lower --max-new-tokens, or take a verifier with a longer context"
        ]

    def _header(
        self,
        problem: Problem,
        config: SearchConfig,
        settings: SearchSettings,
        policy: Policy[object],
        prompt_tokens: tuple[int, ...],
    ) -> ev.RunStarted:
        question = problem.question if isinstance(problem.question, str) else json.dumps(list(problem.question))
        return ev.RunStarted(
            format=ev.LOG_FORMAT,
            problem_id=problem.id,
            question=question,
            policy=policy.name,
            vote=str(vote_of(config)),
            aggregation=str(self._aggregation),
            seed=settings.sampling.seed,
            capacity=settings.capacity,
            num_traces=settings.num_traces,
            prompt_tokens=prompt_tokens,
            settings=settings.to_json(),
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, ev.Json]:
        info = cast("dict[str, ev.Json]", dataclasses.asdict(self.engine.info))
        names = ("gambit-search", "torch", "transformers")
        packages: dict[str, ev.Json] = {name: package_version(name) or "unknown" for name in names}
        scorer = self.config.scorer if self.config.scorer != "auto" else self._scorer.info.architecture
        found: dict[str, ev.Json] = {"engine": info, "scorer": scorer, "python": platform.python_version(), **packages}
        if self._verifier is not None:
            found["verifier"] = cast("dict[str, ev.Json]", dataclasses.asdict(self._verifier.info))
            found["memory"] = {"engine": self._memory_ratio, "verifier": self.config.verifier_memory}
        return found

    def _answer_reader(self, extract: Extractor, prefix: tuple[int, ...]) -> Callable[[Sequence[int]], str | None]:
        def answer_of(tokens: Sequence[int]) -> str | None:
            return extract(self.text_of([*prefix, *tokens]))

        return answer_of

    def _is_news(self, note: str) -> bool:
        """Each warning is said once per solver."""
        if note in self._said:
            return False
        self._said.add(note)
        warnings.warn(note, GambitWarning, stacklevel=5)
        return True


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a caller asked for."""

    problem: Problem
    config: SearchConfig
    out_dir: Path | None
    extractor: Extractor | None
    on_event: EventCallback | None
    concurrency: int = 1
    must_log: bool = True  # False: tried before, so that a folder that has become unwritable costs the log alone


@dataclass(frozen=True, slots=True)
class _Run:
    search: Search
    sink: EventSink
    news: tuple[str, ...]  # notes that nobody was told before
    notes: tuple[str, ...]
    thinks: bool


@dataclass(slots=True, eq=False)
class PendingSearch:
    """A search that was handed in, until its caller has its result."""

    wanted: _Wanted
    history: LengthHistory
    ticket: SearchTicket = field(init=False)
    run: _Run | None = None  # once the engine's thread has taken it in

    def cancel(self) -> None:
        """End it within two engine steps, with the best vote so far."""
        self.ticket.cancel()

    @property
    def record(self) -> SearchRecord:
        """What its events say; it changes on the engine's thread until the search has ended."""
        assert self.run is not None, "the search has not begun"
        return self.run.search.record

    @property
    def notes(self) -> tuple[str, ...]:
        """Every warning about this search, those that an earlier one got too."""
        return () if self.run is None else self.run.notes

    @property
    def thinks(self) -> bool:
        """Whether its traces begin inside a think block."""
        return self.run is not None and self.run.thinks

    def live_tokens(self, trace: int, start: int = 0) -> Sequence[int]:
        """What a live trace has said so far; to be called from `on_event`, on the engine's thread."""
        assert self.run is not None, "the search has not begun"
        return self.run.search.tokens_of(trace, start)

    def result(self) -> SearchResult:
        """Waits for it; an interrupted wait ends the search first, so that its log has an end."""
        try:
            return self._finished(self.ticket.result.result())
        except BaseException:
            self.abandon()
            raise

    def result_or_error(self) -> SearchResult:
        """What went wrong in this search alone is in its result."""
        try:
            return self.result()
        except Exception as error:
            if not self.ticket.failed_alone:
                raise
            return self._failed(error)

    def abandon(self) -> None:
        """End it, and wait for that."""
        self.ticket.cancel()
        self.ticket.result.exception()
        if self.run is not None:
            self.run.sink.close()

    def _finished(self, result: SearchResult) -> SearchResult:
        assert self.run is not None
        if not self.wanted.problem.prefix_tokens:  # the rest of a trace says little about the length of one
            self.history.remember(self.run.search.record)
        result = dataclasses.replace(result, warnings=self.run.news, out_dir=self.run.sink.folder)
        failure = self.run.sink.finish(result)
        if failure is None:
            return result
        return dataclasses.replace(result, warnings=(*self.run.news, failure), log_error=failure)

    def _failed(self, error: Exception) -> SearchResult:
        if self.run is not None and self.run.search.result is not None:
            return self._finished(self.run.search.result)
        config = self.wanted.config
        return SearchResult.failed(self.wanted.problem.id, config.policy, config.seed, str(error))


def _own_scorer(scorer: str | Scorer | Reader, verifier: ReaderName | None, source: str, model: str) -> Scorer:
    """What scores states inside the engine; beside a verifier it is the model's own, or its token confidence."""
    if verifier is not None or isinstance(scorer, Reader):
        return model_scorer(source) or ConfidenceScorer()
    return load_scorer(scorer, source, model) if isinstance(scorer, str) else scorer


def _after_prefix(settings: SearchSettings, problem: Problem) -> SearchSettings:
    """With what is left of the answer's length."""
    left = settings.max_new_tokens - len(problem.prefix_tokens)
    if left < 1:
        raise UserError(f"a prefix of {len(problem.prefix_tokens)} tokens leaves nothing of an answer of at most "
                        f"{settings.max_new_tokens}: shorten it, or raise --max-new-tokens")  # fmt: skip
    return dataclasses.replace(settings, max_new_tokens=left)


def _with_own_noise(settings: SearchSettings, problem: Problem) -> SearchSettings:
    """With a seed made of the seed and the problem's id."""
    digest = hashlib.sha256(f"{settings.sampling.seed} {problem.id}".encode()).digest()
    sampling = dataclasses.replace(settings.sampling, seed=int.from_bytes(digest[:6], "big"))
    return dataclasses.replace(settings, sampling=sampling)


def _first_done(pending: Sequence[PendingSearch]) -> list[PendingSearch]:
    """Waits for at least one."""
    wait([each.ticket.result for each in pending], return_when=FIRST_COMPLETED)
    return [each for each in pending if each.ticket.result.done()]


def _wanted(
    problem: str | Sequence[ChatMessage] | Problem,
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: Callable[[ev.Event], None] | None,
) -> _Wanted:
    problem = problem if isinstance(problem, Problem) else Problem(problem)
    callback: EventCallback | None = None if on_event is None else lambda _, event: on_event(event)
    return _Wanted(problem, config or SearchConfig(), _as_path(out_dir), extractor, callback)


def _as_path(out_dir: Path | str | None) -> Path | None:
    return None if out_dir is None else Path(out_dir)
