"""Makes a search out of a request: prompt, settings, policy, verifier, log."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import platform
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gambit import events as ev
from gambit.answers import Extractor, Grader, extractor_for
from gambit.answers.structured import with_calls
from gambit.config.options import Compat, EngineConfig, PresetSource, SearchConfig, build
from gambit.config.presets import ModelDefaults, SearchSettings, resolve, system_prompt_of
from gambit.engines.base import Engine, SearchSpec, check_prompt, start_engine
from gambit.errors import UserError, WarnOnce, named
from gambit.models import files as models
from gambit.policies.base import Outcome, Policy, Requirements, ScoreUse, requirements_of
from gambit.policies.slim_sc import load_embedder
from gambit.results.record import SearchRecord
from gambit.results.result import SearchResult
from gambit.results.vote import VoteKind
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit, made_for
from gambit.scorers.choice import load_scorer, model_scorer
from gambit.scorers.simple import ConfidenceScorer
from gambit.search.choice import check_end, idle_reason, policy_for, policy_options, vote_of, with_fixed_pool
from gambit.search.host import SearchHost
from gambit.search.loop import Search
from gambit.search.parts import RunningPart
from gambit.search.pool import Callbacks
from gambit.search.scores import VerifierUse
from gambit.storage.files import check_text, package_version
from gambit.storage.run_folder import EventCallback, EventSink, check_writable
from gambit.text.boundary import THINK_END, BoundaryRule, boundary_rule, check_boundary_rule, continued
from gambit.text.prompts import encode_problem, ends_of, rule_for, stop_ids
from gambit.text.tokenizers import single_token
from gambit.tree import TraceState
from gambit.types import Aggregation, ChatMessage, Forcing, Problem
from gambit.verifiers.base import Question, Verifier, VerifierInfo, VerifierThread
from gambit.verifiers.names import VerifierName, beside_verifier, parse_scorer, prepare_verifier


class SolverParts:
    """One model, ready to be searched with."""

    def __init__(self, config: EngineConfig, scorer: str | Scorer | Verifier) -> None:
        """Loads and starts everything; a failure leaves nothing running."""
        if config.offline:
            models.go_offline()
        found = parse_scorer(config.scorer)
        name = found if isinstance(found, VerifierName) else None
        self.config = config
        self.source = models.locate(config.model)  # where the model's files are
        self.named = models.named_model(config.model)
        self.scorer = _engine_scorer(scorer, name, self.source, config.model)
        check_boundary_rule(self.scorer.info.boundary_rule)
        self.defaults = models.defaults_of(self.source)
        with ExitStack() as started:
            self.grader = Grader()
            started.callback(self.grader.close)
            self.verifier = _start_verifier(scorer, name, config, started)
            engine_config = beside_verifier(config, name)
            self.memory_ratio = engine_config.memory_ratio  # the engine's, after the verifier has taken its share
            self.host = SearchHost(lambda: start_engine(engine_config, self.source, self.scorer))
            started.callback(self.host.close)
            self.rule = boundary_rule(self.engine.tokenizer, name=self.scorer.info.boundary_rule)
            self._rules = {self.scorer.info.boundary_rule: self.rule}
            self.stop_ids = stop_ids(self.engine.tokenizer, models.end_ids(self.source))
            if self.verifier is not None:
                self.verifier.wait()
            model = MadeFor("the model", self.engine.info.hidden_size)
            advice = "give a scorer that was trained for it, or leave --scorer out"
            check_fit(made_for(self.scorer.info), model, advice)
            self.close = started.pop_all().close

    def rule_of(self, config: SearchConfig) -> BoundaryRule:
        """Returns the rule that cuts the thoughts of a search. Rules are kept, since a vocabulary takes a while."""
        name = config.boundary or self.scorer.info.boundary_rule
        if name not in self._rules:
            self._rules[name] = boundary_rule(self.engine.tokenizer, name=name)
        return self._rules[name]

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def judge(self) -> ScorerInfo | VerifierInfo:
        """Describes what ranks the traces: the verifier, where there is one, else the scorer of states."""
        return self.scorer.info if self.verifier is None else self.verifier.info

    def check_question(self, question: str) -> None:
        """Refuses a question that a bundled model was not made for."""
        if self.named is not None:
            self.named.check_question(question)

    def check_schema(self, schema: str) -> None:
        """Refuses a schema to which the engine does not hold answers."""
        check = getattr(self.engine, "check_schema", None)
        if check is None:
            raise UserError(f"the engine {self.engine.info.name} holds no answers to a schema: use an "
                            "engine that does, or json_object and name the fields in the question")  # fmt: skip
        check(schema)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of a trace, without the token that ended it."""
        spoken = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        return self.engine.tokenizer.decode(spoken)


def _engine_scorer(scorer: str | Scorer | Verifier, verifier: VerifierName | None, source: str, model: str) -> Scorer:
    """Returns the scorer of states inside the engine: beside a verifier the model's own, or its token confidence."""
    if verifier is not None or isinstance(scorer, Verifier):
        return model_scorer(source) or ConfidenceScorer()
    return load_scorer(scorer, source, model) if isinstance(scorer, str) else scorer


def _start_verifier(
    scorer: object, name: VerifierName | None, config: EngineConfig, started: ExitStack
) -> VerifierThread | None:
    """Returns None where states alone are scored. Waits for a verifier that must take its memory before the engine."""
    is_beside = False
    if isinstance(scorer, Verifier):
        verifier = VerifierThread(lambda: scorer)
    elif name is not None:
        start, is_beside = prepare_verifier(name, config)
        verifier = VerifierThread(start)
    else:
        return None
    started.callback(verifier.close)
    if not is_beside:
        verifier.wait()  # what it takes of the memory is then no longer free
    return verifier


LEAST_ANSWER_TOKENS, MOST_ANSWER_TOKENS = 4, 48  # of a forced answer, which has a 32nd of its trace between them
MOST_JSON_TOKENS = 512  # of one that is held to a schema, which has an eighth
LAG_SHARES = 4  # of a check interval one is for the verifier, so that tournaments need not wait for it


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The arguments of a caller for one search."""

    problem: Problem
    config: SearchConfig
    out_dir: Path | None
    extractor: Extractor | None
    on_event: EventCallback | None
    concurrency: int = 1
    must_log: bool = True  # False: tried before, so that a folder that has become unwritable costs the log alone
    part: RunningPart | None = None  # of a search that is spread over several engines; None: all of it

    def failed(self, error: Exception) -> SearchResult:
        """Returns the result of a search that an error ended before it had one."""
        return SearchResult.failed(self.problem.id, self.config.policy_name, self.config.seed, named(error))


def request_of(
    problem: str | Sequence[ChatMessage] | Problem,
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: Callable[[ev.Event], None] | None,
    fields: Mapping[str, object] | None = None,
) -> SearchRequest:
    """Returns the request for one problem; `fields` of the options were given as keywords."""
    problem = problem if isinstance(problem, Problem) else Problem(problem)
    config = with_fields(config, fields or {})
    check_question_type(problem)
    callback: EventCallback | None = None if on_event is None else lambda _, event: on_event(event)
    folder = None if out_dir is None else Path(out_dir)
    return SearchRequest(problem, config, folder, extractor, callback)


def with_fields(config: object, fields: Mapping[str, object]) -> SearchConfig:
    """Returns options with some fields replaced, checked as if all had been given together."""
    if not isinstance(config, SearchConfig | None):
        raise UserError(f"the options are a {type(config).__name__}: give a SearchConfig, as in "
                        "SearchConfig(capacity=16), or its fields, as in capacity=16")  # fmt: skip
    if config is not None and not fields:
        return config
    named = {} if config is None else {name: getattr(config, name) for name in config.model_fields_set}
    return build(SearchConfig, {**named, **fields})


def check_question_type(problem: Problem) -> None:
    """Raises UserError for a question of a wrong type, which would fail later with other words."""
    question = problem.question
    if not isinstance(question, str) and not _are_messages(question):
        raise UserError(
            f"the problem is a {type(question).__name__}: give a text, or a list of messages such as "
            '{"role": "user", "content": "…"}'
        )
    for text in [question] if isinstance(question, str) else [message["content"] for message in question]:
        check_text(text, "the problem")


def _are_messages(question: object) -> bool:
    return isinstance(question, Sequence) and all(
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in question
    )


def requests_of(
    problems: Iterable[str | Problem],
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: EventCallback | None,
    concurrency: int = 1,
    fields: Mapping[str, object] | None = None,
) -> Iterator[SearchRequest]:
    """Returns the requests for many problems, each with a folder of its own in `out_dir`."""
    options, folder = with_fields(config, fields or {}), None if out_dir is None else Path(out_dir)
    if folder is not None:
        check_writable(folder)

    def request(number: int, given: str | Problem) -> SearchRequest:
        problem = given if isinstance(given, Problem) else Problem(given, id=str(number))
        check_question_type(problem)
        own_folder = None if folder is None else folder / problem.id
        return SearchRequest(problem, options, own_folder, extractor, on_event, concurrency, must_log=False)

    return itertools.starmap(request, enumerate(problems))


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search as it is known before it begins; picklable."""

    settings: SearchSettings
    requirements: Requirements
    header: ev.RunStarted
    notes: tuple[str, ...]
    thinks: bool  # its traces begin inside a think block


@dataclass(frozen=True, slots=True)
class PreparedSearch:
    """A search, ready to begin, with its log."""

    plan: SearchPlan
    search: Search
    sink: EventSink
    news: tuple[str, ...]  # notes that no earlier search had
    text_of: Callable[[Sequence[int]], str]  # of a trace's tokens


class SearchBuilder:
    """Builds a solver's searches, one after the other, on the engine's thread."""

    def __init__(self, parts: SolverParts) -> None:
        self.history = LengthHistory()
        self._parts = parts
        self._num_searches = 0
        self._warnings = WarnOnce()

    def plan(self, request: SearchRequest, history: LengthHistory, num_engines: int = 1) -> SearchPlan:
        """Resolves the settings of a search; `history` is of all engines that share it."""
        parts, problem, config = self._parts, request.problem, request.config
        parts.check_question(problem.last_message)
        prompt = encode_problem(
            parts.engine.tokenizer,
            problem.question,
            system_prompt=system_prompt_of(config, parts.defaults.preset, has_tools=problem.tools is not None),
            enable_thinking=config.enable_thinking,
            tools=problem.tools,
        )
        tokens = (*prompt.token_ids, *problem.prefix_tokens)
        check_prompt(parts.engine.info, len(tokens))
        if request.part is None:
            settings, found = self._resolve(config, len(prompt.token_ids), problem, history, num_engines)
            settings = dataclasses.replace(
                settings, forcing=self._forcing(config, settings, found, thinks=prompt.thinks)
            )
        else:
            settings, found = request.part.settings, []
        check_end(config, is_probability=parts.judge.is_probability)
        found += self._adapter_notes(config.lora)
        policy = policy_for(config, settings)
        requirements = requirements_of(policy)
        at_once = max(settings.most_at_once, settings.num_first * request.concurrency)
        found += self._crowding(-(-at_once // num_engines))
        if self._needs_verifier(requirements, config):
            found += self._short_verifier(len(tokens) + settings.max_new_tokens)
        notes = (*prompt.notes, *found) if request.part is None else ()  # the whole search has the notes
        header = self._header(problem, config, settings, policy, tokens)
        return SearchPlan(settings, requirements, header, notes, prompt.thinks)

    def build(self, request: SearchRequest) -> PreparedSearch:
        parts, config, prefix = self._parts, request.config, request.problem.prefix_tokens
        plan = self.plan(request, self.history)
        settings, requirements, tokens = plan.settings, plan.requirements, plan.header.prompt_tokens
        thoughts, window = requirements.thoughts, requirements.confidence_window
        if not window and vote_of(config).needs_confidence:
            window = config.confidence_window
        embed = load_embedder(thoughts.embedder) if thoughts and thoughts.embedder else None
        verifier = self._verifier_use(request.problem, tokens, plan, config)
        news = self._warnings.warn(plan.notes)
        sink = EventSink(request.problem.id, request.out_dir, request.on_event, must_log=request.must_log)
        self._num_searches += 1
        rule = continued(rule_for(parts.rule_of(config), thinks=plan.thinks), prefix)
        spec = SearchSpec(
            self._num_searches, tokens, rule, parts.stop_ids, keeps_histories=settings.ghost_parents,
            confidence_window=window, embedding_size=requirements.embedding_size,
            aggregation=self._aggregation(config), lora=config.lora, has_verifier=verifier is not None,
            json_schema=config.json_schema,
            answer_after=single_token(parts.engine.tokenizer, THINK_END) if plan.thinks else None,
        )  # fmt: skip
        extract = request.extractor or extractor_for(config.answer)
        if request.problem.tools is not None:
            extract = with_calls(extract, request.problem.tools)
        after_step = None if request.part is None else request.part.after_step
        callbacks = Callbacks(
            lambda own: extract(parts.text_of([*prefix, *own])), parts.grader.for_vote, sink.write,
            parts.engine.tokenizer.decode, embed, after_step,
        )  # fmt: skip
        policy = policy_for(config, settings)
        search = Search(parts.engine, policy, settings, spec, plan.header, callbacks, verifier)
        return PreparedSearch(plan, search, sink, news, parts.text_of)

    def _resolve(
        self, config: SearchConfig, num_prompt_tokens: int, problem: Problem, history: LengthHistory, num_engines: int
    ) -> tuple[SearchSettings, list[str]]:
        """Returns the settings of a whole search, and warnings.

        With a prefix, the answer's length is what the prefix leaves of it. Continuations of one trace, or of its
        neighbours, must not be drawn alike: their seed is made of the seed and the problem's id.
        """
        parts, defaults = self._parts, self._parts.defaults
        if config.preset is PresetSource.AUTO:
            defaults = history.added_to(defaults)
        info, num_prefix = parts.engine.info, len(problem.prefix_tokens)
        settings, notes = resolve(
            with_fixed_pool(config),
            defaults,
            info.context_tokens - num_prompt_tokens,
            is_probability=parts.judge.is_probability,
            trust=parts.judge.trust,
            policy_options=policy_options(config),
            room_tokens=num_engines * (info.kv_capacity_tokens - info.weight(num_prompt_tokens + num_prefix)),
            weight=info.weight,
        )
        if num_prefix >= settings.max_new_tokens:
            raise UserError(f"a prefix of {num_prefix} tokens leaves nothing of an answer of at most "
                            f"{settings.max_new_tokens}: shorten it, or raise --max-new-tokens")  # fmt: skip
        sampling = settings.sampling
        if config.own_noise or num_prefix:
            digest = hashlib.sha256(f"{sampling.seed} {problem.id}".encode()).digest()
            sampling = dataclasses.replace(sampling, seed=int.from_bytes(digest[:6], "big"))
        left = settings.max_new_tokens - num_prefix
        return dataclasses.replace(settings, max_new_tokens=left, sampling=sampling), notes

    def _forcing(self, config: SearchConfig, settings: SearchSettings, notes: list[str], *, thinks: bool) -> Forcing:
        """Returns how traces of a search are forced to answer; adds a note where they have no thinking to end."""
        answer, end_of_thought = ends_of(self._parts.engine.tokenizer, config.answer, thinks=thinks)
        if config.thinking_tokens is not None and not thinks:
            notes.append("thinking_tokens has no effect: the model does not think in a block of its own here")
        most, share, is_auto = MOST_ANSWER_TOKENS, 32, config.force_answers == "auto"
        if config.json_schema is not None:  # a grammar takes every token of an answer, and begins it by itself
            answer, most, share, is_auto = end_of_thought, MOST_JSON_TOKENS, 8, is_auto and thinks
        return Forcing(
            answer,
            end_of_thought,
            answer_tokens=min(most, max(LEAST_ANSWER_TOKENS, settings.max_new_tokens // share)),
            is_auto=is_auto,
            thinking_tokens=config.thinking_tokens if thinks else None,
        )

    def _needs_verifier(self, requirements: Requirements, config: SearchConfig) -> bool:
        """Returns False if there is no verifier, or neither policy nor vote looks at scores."""
        if self._parts.verifier is None:
            return False
        return requirements.scores is not ScoreUse.NEVER or vote_of(config).needs_scores

    def _verifier_use(
        self, problem: Problem, prompt_tokens: tuple[int, ...], plan: SearchPlan, config: SearchConfig
    ) -> VerifierUse | None:
        parts, options, question = self._parts, self._parts.config, problem.question
        if parts.verifier is None or not self._needs_verifier(plan.requirements, config):
            return None
        messages = (ChatMessage(role="user", content=question),) if isinstance(question, str) else tuple(question)
        lag, vote = options.verifier_lag, vote_of(config, parts.judge.aggregation)
        uses_last = vote.needs_scores and vote is not VoteKind.POSITION
        is_last = parts.judge.aggregation is Aggregation.LAST and uses_last
        return VerifierUse(
            parts.verifier,
            Question(messages, prompt_tokens),
            parts.engine.tokenizer.decode,
            lag=plan.settings.pool.check_interval // LAG_SHARES if lag is None else lag,
            is_async=options.verifier_async,
            is_optional=options.verifier_optional,
            # If the verifier is lost, the engine's scores of thoughts count: then all thoughts are followed.
            only_ends=is_last and plan.requirements.scores is ScoreUse.NEVER and not options.verifier_optional,
        )

    def _adapter_notes(self, lora: str | None) -> list[str]:
        """Returns a warning where the scorer was trained on states of another adapter; raises for an unknown one."""
        engine, parts = self._parts.config, self._parts
        if lora is not None and lora not in engine.adapters:
            known = ", ".join(engine.adapters) or "none"
            raise UserError(
                f"the engine has no adapter {lora!r} (its own: {known}): start it with --adapter NAME=FOLDER"
            )
        trained = parts.scorer.info.base_model_hash
        if trained is None or engine.any_weights or parts.verifier is not None:
            return []
        of, now = trained.partition("+")[2], "" if lora is None else models.adapter_hash(engine.adapters[lora])
        if of == now:
            return []
        before = f"with adapter {of[:20]}…" if of else "without an adapter"
        return [f"the scorer was trained {before}, this search runs {f'with {lora}' if lora else 'without one'}: "
                "its scores may rank worse; silence this with --any-weights"]  # fmt: skip

    def _crowding(self, num_traces: int) -> list[str]:
        info = self._parts.engine.info
        if info.most_traces is None or num_traces <= info.most_traces:
            return []
        option = (
            f"; --engine-option {info.most_traces_option}={num_traces} lets all run" if info.most_traces_option else ""
        )
        return [f"of {num_traces} traces {info.most_traces} run at a time, the others wait{option}"]

    def _short_verifier(self, num_tokens: int) -> list[str]:
        assert self._parts.verifier is not None
        context = self._parts.verifier.info.context_tokens
        if context is None or num_tokens <= context:
            return []
        return [
            f"the verifier reads at most {context} tokens: a trace that grows longer, up to {num_tokens} with its "
            "prompt, keeps the score it has; lower --max-new-tokens, or take a verifier with a longer context"
        ]

    def _aggregation(self, config: SearchConfig) -> Aggregation:
        """Returns how a trace's score is made of its thoughts': as the scorer says, or the authors' mean."""
        by_authors = config.compat is Compat.AUTHORS and self._parts.verifier is None
        return Aggregation.MEAN if by_authors else self._parts.judge.aggregation

    def _header(
        self,
        problem: Problem,
        config: SearchConfig,
        settings: SearchSettings,
        policy: Policy[object],
        prompt_tokens: tuple[int, ...],
    ) -> ev.RunStarted:
        """Returns the header of the log; `prompt_tokens` with the prefix that the problem's traces continue."""
        aggregation = self._aggregation(config)
        question = problem.question if isinstance(problem.question, str) else json.dumps(list(problem.question))
        return ev.RunStarted(
            format=ev.LOG_FORMAT,
            problem_id=problem.id,
            question=question,
            policy=policy.name,
            vote=str(vote_of(config, aggregation)),
            aggregation=str(aggregation),
            seed=settings.sampling.seed,
            capacity=settings.capacity,
            num_traces=settings.num_traces,
            prompt_tokens=prompt_tokens,
            settings=settings.to_json(),
            environment=_environment(self._parts, config),
        )


def _environment(parts: SolverParts, search: SearchConfig) -> dict[str, ev.Json]:
    config, lora, info = parts.config, search.lora, cast("dict[str, ev.Json]", dataclasses.asdict(parts.engine.info))
    names = ("gambit-search", "torch", "transformers")
    packages: dict[str, ev.Json] = {name: package_version(name) or "unknown" for name in names}
    scorer = config.scorer if config.scorer not in ("auto", "custom") else parts.scorer.info.architecture
    found: dict[str, ev.Json] = {"engine": info, "scorer": scorer, "python": platform.python_version(), **packages}
    if lora is not None:
        found["lora"] = {"name": lora, "hash": models.adapter_hash(config.adapters[lora])}
    if search.json_schema is not None:
        found["json_schema"] = search.json_schema
    if parts.verifier is not None:
        verifier = parts.verifier.info
        trust = None if verifier.trust is None else verifier.trust.to_json()
        found["verifier"] = cast("dict[str, ev.Json]", {**dataclasses.asdict(verifier), "trust": trust})
        found["memory"] = {"engine": parts.memory_ratio, "verifier": config.verifier_memory}
    return found


class LengthHistory:
    """Lengths of completed traces and of thoughts in this solver's runs so far, for `preset="auto"`."""

    def __init__(self) -> None:
        self._has_warned = False
        self._lengths: deque[int] = deque(maxlen=4096)
        self._thoughts: deque[float] = deque(maxlen=4096)

    def remember(self, record: SearchRecord, config: SearchConfig) -> tuple[str, ...]:
        """Takes in the lengths of a search; returns, once, the warning that they left its policy nothing to do."""
        for trace in record.tree.in_state(TraceState.FINISHED):
            self._lengths.append(trace.num_tokens)
            if trace.score.count:
                self._thoughts.append(trace.boundary_tokens / trace.score.count)
        if self._has_warned or (found := _nothing_to_do(record, config)) is None:
            return ()
        self._has_warned = True
        return WarnOnce().warn([found])

    def added_to(self, defaults: ModelDefaults) -> ModelDefaults:
        """Returns the defaults with the lengths of earlier runs, if there were any."""
        if not self._lengths:
            return defaults
        preset = dataclasses.replace(defaults.preset, median_length=statistics.median(self._lengths))
        if self._thoughts:
            preset = dataclasses.replace(preset, mean_thought_length=statistics.fmean(self._thoughts))
        return dataclasses.replace(defaults, preset=preset)


def _nothing_to_do(record: SearchRecord, config: SearchConfig) -> str | None:
    """Returns why the policy of a search had nothing to do, or None."""
    ended, counts = record.early_ends, record.counts
    if ended is not None and ended.are_most:
        return ended.sentence("the traces")
    lengths = [trace.num_tokens for trace in record.tree.in_state(TraceState.FINISHED)]
    reason = idle_reason(config, Outcome(counts.roots, counts.pruned, lengths, record.kv_share))
    return None if reason is None else f"{config.policy_name} cannot have worked: {reason}"
