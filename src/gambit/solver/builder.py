"""Makes a search out of a request: prompt, settings, policy, verifier, log."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import platform
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gambit import events as ev
from gambit.answers import Extractor, extractor_for
from gambit.config.options import PresetSource, SearchConfig
from gambit.config.presets import ModelDefaults, SearchSettings, resolve, system_prompt_of
from gambit.engines.base import SearchSpec, check_prompt
from gambit.errors import ToldOnce, UserError
from gambit.policies.base import Policy, Requirements, ScoreUse, requirements_of
from gambit.results.record import SearchRecord
from gambit.results.result import SearchResult
from gambit.results.vote import VoteKind
from gambit.search.choice import (
    confidence_window,
    embedder_of,
    make_policy,
    needs_scores,
    policy_options,
    vote_of,
    with_fixed_pool,
)
from gambit.search.loop import Search
from gambit.search.parts import RunningPart
from gambit.search.pool import Callbacks
from gambit.search.scores import VerifierUse
from gambit.solver.parts import SolverParts
from gambit.storage.identity import package_version
from gambit.storage.run_folder import EventCallback, EventSink, check_writable
from gambit.text.boundary import continued
from gambit.text.prompts import EncodedPrompt, encode_problem, rule_for
from gambit.tree import TraceState
from gambit.types import Aggregation, ChatMessage, Problem
from gambit.verifiers.base import Question

LAG_PARTS = 4  # of a check interval one is for the verifier, so that tournaments need not wait for it


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What a caller asked for."""

    problem: Problem
    config: SearchConfig
    out_dir: Path | None
    extractor: Extractor | None
    on_event: EventCallback | None
    concurrency: int = 1
    must_log: bool = True  # False: tried before, so that a folder that has become unwritable costs the log alone
    part: RunningPart | None = None  # of a search that is spread over several engines; None: all of it

    def failed(self, error: Exception) -> SearchResult:
        """The result of a search that an error ended before it had one."""
        return SearchResult.failed(self.problem.id, self.config.policy, self.config.seed, str(error))


def request_of(
    problem: str | Sequence[ChatMessage] | Problem,
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: Callable[[ev.Event], None] | None,
) -> SearchRequest:
    """Of one problem, from the arguments of a solver's call."""
    problem = problem if isinstance(problem, Problem) else Problem(problem)
    callback: EventCallback | None = None if on_event is None else lambda _, event: on_event(event)
    return SearchRequest(
        problem, config or SearchConfig(), None if out_dir is None else Path(out_dir), extractor, callback
    )


def requests_of(
    problems: Iterable[str | Problem],
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: EventCallback | None,
    concurrency: int = 1,
) -> Iterator[SearchRequest]:
    """Of many problems, each with a folder of its own in `out_dir`."""
    asked, folder = config or SearchConfig(), None if out_dir is None else Path(out_dir)
    if folder is not None:
        check_writable(folder)

    def request(number: int, given: str | Problem) -> SearchRequest:
        problem = given if isinstance(given, Problem) else Problem(given, id=str(number))
        own_folder = None if folder is None else folder / problem.id
        return SearchRequest(problem, asked, own_folder, extractor, on_event, concurrency, must_log=False)

    return itertools.starmap(request, enumerate(problems))


@dataclass(frozen=True, slots=True)
class PreparedSearch:
    """A search, ready to begin, with its log."""

    search: Search
    sink: EventSink
    news: tuple[str, ...]  # notes that nobody was told before
    notes: tuple[str, ...]
    thinks: bool


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search as it is known before it begins; picklable."""

    settings: SearchSettings
    requirements: Requirements
    header: ev.RunStarted
    notes: tuple[str, ...]
    thinks: bool  # whether its traces begin inside a think block


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a search on this solver's engine is made of."""

    prompt: EncodedPrompt
    settings: SearchSettings
    policy: Policy[object]
    requirements: Requirements
    verifier: VerifierUse | None
    header: ev.RunStarted
    notes: tuple[str, ...]


class SearchBuilder:
    """Builds a solver's searches, one after the other, on the engine's thread."""

    def __init__(self, parts: SolverParts) -> None:
        self.history = LengthHistory()
        self._parts = parts
        self._num_searches = 0
        self._told = ToldOnce()

    def plan(self, request: SearchRequest, history: LengthHistory, num_engines: int) -> SearchPlan:
        """What whoever spreads a search over several engines must know of it; `history` is of all of them."""
        draft = self._draft(request, history, num_engines)
        return SearchPlan(draft.settings, draft.requirements, draft.header, draft.notes, draft.prompt.thinks)

    def build(self, request: SearchRequest) -> PreparedSearch:
        parts, config, prefix = self._parts, request.config, request.problem.prefix_tokens
        draft = self._draft(request, self.history)
        embed = embedder_of(draft.requirements)
        news = self._told.tell(draft.notes)
        sink = EventSink(request.problem.id, request.out_dir, request.on_event, must_log=request.must_log)
        self._num_searches += 1
        spec = SearchSpec(
            self._num_searches,
            draft.header.prompt_tokens,
            continued(rule_for(parts.rule, draft.prompt), prefix),
            parts.stop_ids,
            keeps_histories=draft.settings.ghost_parents,
            confidence_window=confidence_window(draft.requirements, config),
            embedding_size=draft.requirements.embedding_size,
            has_verifier=draft.verifier is not None,
        )
        callbacks = Callbacks(
            self._answer_reader(request.extractor or extractor_for(config.answer), prefix),
            parts.grader.for_vote,
            sink.write,
            parts.engine.tokenizer.decode,
            embed,
            *(() if request.part is None else (request.part.after_step,)),
        )
        search = Search(parts.engine, draft.policy, draft.settings, spec, draft.header, callbacks, draft.verifier)
        return PreparedSearch(search, sink, news, draft.notes, draft.prompt.thinks)

    def _draft(self, request: SearchRequest, history: LengthHistory, num_engines: int = 1) -> _Draft:
        parts, problem, config = self._parts, request.problem, request.config
        parts.check_question(problem.last_message)
        prompt = self._encode(problem, config)
        tokens = (*prompt.token_ids, *problem.prefix_tokens)
        check_prompt(parts.engine.info, len(tokens))
        if request.part is None:
            settings, found = self._resolve(config, prompt, problem, history)
        else:
            settings, found = request.part.settings, []
        policy = make_policy(config, settings, is_probability=parts.judge.is_probability)
        requirements = requirements_of(policy)
        verifier = None
        if needs_scores(requirements, config):
            verifier = self._verifier_use(problem, tokens, settings, only_ends=self._counts_ends(requirements, config))
        at_once = max(settings.most_at_once, settings.num_first * request.concurrency)
        found += self._crowding(-(-at_once // num_engines))
        found += _short_context(verifier, len(tokens) + settings.max_new_tokens)
        notes = (*prompt.notes, *found) if request.part is None else ()  # the whole has said what there is to say
        header = run_header(parts, problem, config, settings, policy, tokens)
        return _Draft(prompt, settings, policy, requirements, verifier, header, notes)

    def _encode(self, problem: Problem, config: SearchConfig) -> EncodedPrompt:
        return encode_problem(
            self._parts.engine.tokenizer,
            problem.question,
            system_prompt=system_prompt_of(config, self._parts.defaults.preset),
            enable_thinking=config.enable_thinking,
        )

    def _resolve(
        self, config: SearchConfig, prompt: EncodedPrompt, problem: Problem, history: LengthHistory
    ) -> tuple[SearchSettings, list[str]]:
        parts, defaults = self._parts, self._parts.defaults
        if config.preset is PresetSource.AUTO:
            defaults = history.added_to(defaults)
        settings, notes = resolve(
            with_fixed_pool(config),
            defaults,
            parts.engine.info.context_tokens - len(prompt.token_ids),
            is_probability=parts.judge.is_probability,
            trust=parts.judge.trust,
            policy_options=policy_options(config),
        )
        if problem.prefix_tokens:
            settings = _after_prefix(settings, problem)
        # Continuations of one trace, or of its neighbours, must not be drawn alike.
        if config.own_noise or problem.prefix_tokens:
            settings = _with_own_noise(settings, problem)
        return settings, notes

    def _counts_ends(self, requirements: Requirements, config: SearchConfig) -> bool:
        """Whether of all that a verifier could read only complete traces count."""
        aggregation, needs_last = self._parts.judge.aggregation, (VoteKind.SCORE, VoteKind.BEST)
        is_last = aggregation is Aggregation.LAST and vote_of(config, aggregation) in needs_last
        return is_last and requirements.scores is ScoreUse.NEVER

    def _verifier_use(
        self, problem: Problem, prompt_tokens: tuple[int, ...], settings: SearchSettings, *, only_ends: bool
    ) -> VerifierUse | None:
        parts, asked = self._parts, problem.question
        if parts.verifier is None:
            return None
        messages = (ChatMessage(role="user", content=asked),) if isinstance(asked, str) else tuple(asked)
        return VerifierUse(
            parts.verifier,
            Question(messages, prompt_tokens),
            parts.engine.tokenizer.decode,
            lag=_verifier_lag(parts.config.verifier_lag, settings),
            is_async=parts.config.verifier_async,
            is_optional=parts.config.verifier_optional,
            # Without a verifier the engine's thoughts count.
            only_ends=only_ends and not parts.config.verifier_optional,
        )

    def _answer_reader(self, extract: Extractor, prefix: tuple[int, ...]) -> Callable[[Sequence[int]], str | None]:
        def answer_of(tokens: Sequence[int]) -> str | None:
            return extract(self._parts.text_of([*prefix, *tokens]))

        return answer_of

    def _crowding(self, num_traces: int) -> list[str]:
        info = self._parts.engine.info
        if info.most_traces is None or num_traces <= info.most_traces:
            return []
        option = (
            f"; --engine-option {info.most_traces_option}={num_traces} lets all run" if info.most_traces_option else ""
        )
        return [f"of {num_traces} traces {info.most_traces} run at a time, the others wait{option}"]


def _verifier_lag(asked: int | None, settings: SearchSettings) -> int:
    return settings.pool.check_interval // LAG_PARTS if asked is None else asked


def _short_context(verifier: VerifierUse | None, num_tokens: int) -> list[str]:
    context = None if verifier is None else verifier.thread.info.context_tokens
    if context is None or num_tokens <= context:
        return []
    return [
        f"the verifier reads at most {context} tokens: a trace that grows longer, up to {num_tokens} with its "
        "prompt, keeps the score it has; lower --max-new-tokens, or take a verifier with a longer context"
    ]


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


def run_header(
    parts: SolverParts,
    problem: Problem,
    config: SearchConfig,
    settings: SearchSettings,
    policy: Policy[object],
    prompt_tokens: tuple[int, ...],
) -> ev.RunStarted:
    """`prompt_tokens` with the prefix that the problem's traces continue."""
    question = problem.question if isinstance(problem.question, str) else json.dumps(list(problem.question))
    return ev.RunStarted(
        format=ev.LOG_FORMAT,
        problem_id=problem.id,
        question=question,
        policy=policy.name,
        vote=str(vote_of(config, parts.judge.aggregation)),
        aggregation=str(parts.judge.aggregation),
        seed=settings.sampling.seed,
        capacity=settings.capacity,
        num_traces=settings.num_traces,
        prompt_tokens=prompt_tokens,
        settings=settings.to_json(),
        environment=_environment(parts),
    )


def _environment(parts: SolverParts) -> dict[str, ev.Json]:
    config, info = parts.config, cast("dict[str, ev.Json]", dataclasses.asdict(parts.engine.info))
    names = ("gambit-search", "torch", "transformers")
    packages: dict[str, ev.Json] = {name: package_version(name) or "unknown" for name in names}
    scorer = config.scorer if config.scorer != "auto" else parts.scorer.info.architecture
    found: dict[str, ev.Json] = {"engine": info, "scorer": scorer, "python": platform.python_version(), **packages}
    if parts.verifier is not None:
        verifier = parts.verifier.info
        trust = None if verifier.trust is None else verifier.trust.to_json()
        found["verifier"] = cast("dict[str, ev.Json]", {**dataclasses.asdict(verifier), "trust": trust})
        found["memory"] = {"engine": parts.memory_ratio, "verifier": config.verifier_memory}
    return found


class LengthHistory:
    """Lengths of completed traces and of thoughts in this solver's runs so far, for `preset="auto"`."""

    def __init__(self) -> None:
        self._has_told = False
        self._lengths: deque[int] = deque(maxlen=4096)
        self._thoughts: deque[float] = deque(maxlen=4096)

    def remember(self, record: SearchRecord) -> tuple[str, ...]:
        """Gives what there is to tell about them, once: that they are too short for the search's warm-up."""
        for trace in record.tree.in_state(TraceState.FINISHED):
            self._lengths.append(trace.num_tokens)
            if trace.score.count:
                self._thoughts.append(trace.boundary_tokens / trace.score.count)
        ended = record.early_ends
        if self._has_told or ended is None or not ended.are_most:
            return ()
        self._has_told = True
        return ToldOnce().tell([ended.sentence("the traces")])

    def added_to(self, defaults: ModelDefaults) -> ModelDefaults:
        if not self._lengths:
            return defaults
        thought = statistics.fmean(self._thoughts) if self._thoughts else None
        return dataclasses.replace(
            defaults, median_length=statistics.median(self._lengths), mean_thought_length=thought
        )
