"""What a solver is made of, loaded once: the engine on its thread, the judges of thoughts, the grader of answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from gambit.answers import Grader
from gambit.config.options import EngineConfig
from gambit.config.presets import ModelDefaults
from gambit.engines.base import Engine, start_engine
from gambit.models import files as models
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit, made_for
from gambit.scorers.choice import load_scorer, model_scorer
from gambit.scorers.simple import ConfidenceScorer
from gambit.search.host import SearchHost
from gambit.text.boundary import BoundaryRule, boundary_rule, check_boundary_rule
from gambit.text.prompts import stop_ids
from gambit.types import NamedModel
from gambit.verifiers.base import Verifier, VerifierInfo
from gambit.verifiers.names import VerifierName, parse_scorer
from gambit.verifiers.start import beside_verifier, prepare_verifier
from gambit.verifiers.thread import VerifierThread


@dataclass(frozen=True, slots=True)
class SolverParts:
    """One model, ready to be searched with."""

    config: EngineConfig
    source: str  # where the model's files are
    named: NamedModel | None
    defaults: ModelDefaults
    scorer: Scorer  # looks at states, inside the engine
    verifier: VerifierThread | None
    host: SearchHost
    memory_ratio: float  # the engine's, after the verifier has taken its part
    rule: BoundaryRule
    stop_ids: frozenset[int]
    grader: Grader = field(default_factory=Grader)

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def judge(self) -> ScorerInfo | VerifierInfo:
        """Describes what ranks the traces: the verifier, where there is one, else the scorer of states."""
        return self.scorer.info if self.verifier is None else self.verifier.info

    def check_question(self, question: str) -> None:
        """Refuse a question that a bundled model was not made for."""
        if self.named is not None:
            self.named.check_question(question)

    def text_of(self, tokens: Sequence[int]) -> str:
        """What a trace said, without the token that ended it."""
        spoken = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        return self.engine.tokenizer.decode(spoken)

    def close(self) -> None:
        self.host.close()
        if self.verifier is not None:
            self.verifier.close()
        self.grader.close()


def load_parts(config: EngineConfig, scorer: str | Scorer | Verifier) -> SolverParts:
    """Load and start everything; whatever fails leaves nothing running."""
    source = models.locate(config.model)
    named, found = models.named_model(config.model), parse_scorer(config.scorer)
    name = found if isinstance(found, VerifierName) else None
    own_scorer = _own_scorer(scorer, name, source, config.model)
    check_boundary_rule(own_scorer.info.boundary_rule)
    generation = models.generation_of(source)
    defaults = models.defaults_of(source, generation)
    with ExitStack() as started:
        verifier = _start_verifier(scorer, name, config, started)
        engine_config = beside_verifier(config, name)
        host = SearchHost(lambda: start_engine(engine_config, source, own_scorer))
        started.callback(host.close)
        tokenizer = host.engine.tokenizer
        rule = boundary_rule(tokenizer, name=own_scorer.info.boundary_rule)
        ends = stop_ids(tokenizer, generation.eos_ids)
        if verifier is not None:
            verifier.wait()
        model = MadeFor("the model", host.engine.info.hidden_size)
        check_fit(made_for(own_scorer.info), model, "give a scorer that was trained for it, or leave --scorer out")
        started.pop_all()
    return SolverParts(
        config, source, named, defaults, own_scorer, verifier, host, engine_config.memory_ratio, rule, ends
    )


def _own_scorer(scorer: str | Scorer | Verifier, verifier: VerifierName | None, source: str, model: str) -> Scorer:
    """What scores states inside the engine; beside a verifier it is the model's own, or its token confidence."""
    if verifier is not None or isinstance(scorer, Verifier):
        return model_scorer(source) or ConfidenceScorer()
    return load_scorer(scorer, source, model) if isinstance(scorer, str) else scorer


def _start_verifier(
    scorer: object, name: VerifierName | None, config: EngineConfig, started: ExitStack
) -> VerifierThread | None:
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
