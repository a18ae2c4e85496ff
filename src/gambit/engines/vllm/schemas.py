"""JSON schemas of answers: checked before an engine sees them, and held to by a grammar for each trace."""

import logging
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gambit.answers.grader import LOST, WorkerProcess, worker_command
from gambit.engines.base import SearchSpec
from gambit.engines.vllm.schema_worker import compile_schema
from gambit.errors import EngineError, UserError, first_line
from gambit.text.tokenizers import load_tokenizer

SECONDS = 1.0  # for one schema
STARTUP_SECONDS = 120.0
MOST_KNOWN = 512
MOST_BYTES = 512 << 20  # of grammars that are kept
WORKER = Path(__file__).with_name("schema_worker.py")


def vocabulary_of(model: str, vocab_size: int) -> Any:
    """Returns a model's tokenizer as the compiler takes it; raises UserError for one that it does not know."""
    import xgrammar

    try:
        return xgrammar.TokenizerInfo.from_huggingface(load_tokenizer(model, use_fast=True), vocab_size=vocab_size)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"answers of this model cannot be held to a schema: {first_line(error)}") from error


class SchemaChecker:
    """Finds out, from any thread, if an engine can hold answers to a schema. The compiler is in a process beside."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._of = model, vocab_size
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()
        # Without the refused ones, whose time may be the machine's fault.
        self._known = lru_cache(MOST_KNOWN)(self._try)

    def check(self, schema: str) -> None:
        """Raises UserError for a schema that does not compile. The first call starts the process."""
        self._known(schema)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def _try(self, schema: str) -> None:
        try:
            with self._lock:
                if self._process is None or not self._process.is_alive():
                    tokenizer = vocabulary_of(*self._of).serialize_json()
                    self._process = WorkerProcess(worker_command(WORKER), "the process that compiles schemas")
                    self._process.send({"tokenizer": tokenizer})
                    self._process.wait_until_ready(float("inf"), STARTUP_SECONDS)
                wrong = self._process.ask({"schema": schema, "seconds": SECONDS}, SECONDS)["wrong"]
        except LOST as error:
            self.close()
            raise EngineError(f"the schema could not be checked ({error!r}): send it again") from error
        if wrong:
            raise UserError(f"the schema {wrong}")


class AnswerGrammars:
    """Makes the grammars of traces in vLLM's scheduler, to whose manager of structured outputs it is a backend.

    vLLM's own know neither Gambit's thinking nor tokens that a trace inherits.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        self._of = model, vocab_size
        self._compiler: Any = None

    def grammar(self, search: SearchSpec, stop_ids: list[int], inherited: Sequence[int]) -> "AnswerGrammar":
        """Returns a trace's grammar after the tokens that it inherits. The first of all loads the tokenizer."""
        import xgrammar

        if self._compiler is None:
            self._compiler = xgrammar.GrammarCompiler(vocabulary_of(*self._of), cache_limit_bytes=MOST_BYTES)
        nothing = fitting = self._compiler.compile_grammar('root ::= ""')
        try:
            fitting = compile_schema(self._compiler, search.json_schema)
        except Exception:
            logging.getLogger(__name__).exception("a schema does not compile: its traces end without an answer")
        first, last = (xgrammar.GrammarMatcher(g, override_stop_tokens=stop_ids or None) for g in (fitting, nothing))
        grammar = AnswerGrammar(first, last, search.answer_after)
        grammar.accept_tokens("", inherited)
        return grammar

    def allocate_token_bitmask(self, most_rows: int) -> torch.Tensor:
        return torch.full((most_rows, -(-self._of[1] // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        self._compiler = None


class AnswerGrammar:
    """The grammar of one trace, from the end of its thinking on. It fails no request, which would end the engine.

    A trace that cannot go on within its schema may only stop. Its answer is then no whole object, and does not count.
    """

    def __init__(self, matcher: Any, nothing: Any, think_end: int | None) -> None:
        self._matcher = matcher
        self._nothing = nothing  # allows the end alone
        self._think_end = think_end  # None once the answer has begun

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self._think_end is not None:
                self._think_end = None if token == self._think_end else self._think_end
            elif not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                self._matcher = self._nothing
        return True

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row].fill_(-1)
        if self._think_end is None:
            self._matcher.fill_next_token_bitmask(bitmask, row)
            if not bitmask[row].any():
                self._matcher = self._nothing
                self._matcher.fill_next_token_bitmask(bitmask, row)

    def is_terminated(self) -> bool:
        return self._think_end is None and bool(self._matcher.is_terminated())
