"""The pieces of a solver, loaded once: the engine on its thread, what scores its thoughts, the grader of answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from gambit.answers import Grader
from gambit.config.options import EngineConfig, SearchConfig
from gambit.engines.base import Engine, start_engine
from gambit.models import files as models
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit, made_for
from gambit.scorers.choice import load_scorer, model_scorer
from gambit.scorers.simple import ConfidenceScorer
from gambit.search.host import SearchHost
from gambit.text.boundary import BoundaryRule, boundary_rule, check_boundary_rule
from gambit.text.prompts import stop_ids
from gambit.verifiers.base import Verifier, VerifierInfo
from gambit.verifiers.names import VerifierName, parse_scorer
from gambit.verifiers.start import beside_verifier, prepare_verifier
from gambit.verifiers.thread import VerifierThread


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
