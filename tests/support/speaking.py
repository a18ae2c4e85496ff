"""An engine that says given texts, behind a tokenizer with a tool template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from gambit.config import registry
from gambit.engines.base import EngineInfo
from gambit.solver import Solver
from gambit.types import EndReason, TraceEnd, TraceKey
from support.scripted import ScriptedEngine
from support.tiny import word_tokenizer

# As Qwen's: tools in the system message, calls of earlier turns in tags, results as turns of their own.
TEMPLATE = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools> Call a tool in <tool_call></tool_call>.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""
Say = Callable[[str, int], str]  # the prompt and a root's random numbers -> what it says


class SpeakingEngine(ScriptedEngine):
    """Every trace says its text token by token, and a child goes on with the text of its root."""

    def __init__(self, say: Say, template: str = TEMPLATE) -> None:
        super().__init__(thought_chance=0.0, finish_chance=0.0)
        self.say = say
        self.prompts: list[str] = []
        self._tokenizer = word_tokenizer(template)
        self._script: dict[TraceKey, list[int]] = {}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("speaking", "script", "none", "none", 32, 1 << 16, 1 << 20, 1)

    @property
    def tokenizer(self):
        return self._tokenizer

    def submit(self, specs: Sequence) -> None:
        super().submit(specs)
        for spec in specs:
            prompt = self._tokenizer.decode(self.searches[spec.key.search].prompt)
            self.prompts.append(prompt)
            text = self.say(prompt, spec.noise)
            self._script[spec.key] = [*self._tokenizer.encode(text, add_special_tokens=False), 0]

    def step(self):
        batch = super().step()
        for search, step in batch.searches.items():
            ended = []
            for key, trace in list(self.running.items()):
                script = self._script[key]
                if key.search == search and trace.tokens:
                    trace.tokens[-1] = script[min(len(trace.tokens), len(script)) - 1]
                    if len(trace.tokens) >= len(script):
                        ended.append(TraceEnd(key.trace, EndReason.STOP, tuple(trace.tokens)))
                        del self.running[key]
            step.finished = [*step.finished, *ended]
        return batch


@contextmanager
def speaking_solver(folder: str, say: Say, template: str = TEMPLATE) -> Iterator[tuple[Solver, SpeakingEngine]]:
    engine = SpeakingEngine(say, template)
    start = {"speaking": f"{__name__}:start"}
    with (
        mock.patch.dict(registry.BUILT_IN["gambit.engines"], start),
        mock.patch.dict(STARTED, {folder: engine}),
        Solver(folder, engine="speaking", scorer="constant") as solver,
    ):
        yield solver, engine


STARTED: dict[str, SpeakingEngine] = {}


def start(config, model: str, scorer) -> SpeakingEngine:
    return STARTED[config.model]
