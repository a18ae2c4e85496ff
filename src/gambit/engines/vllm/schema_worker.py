"""Schema process: compiles schemas and tries their grammars, each in a child of its own that may be killed.

Run as a script, so it imports nothing of gambit. The first line on stdin has the tokenizer, each further one a schema.
"""

import json
import os
import random
import re
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 4 * 1024**3
TRIED_TOKENS = 100  # written within the time for compilation: a grammar may also be slow to follow
PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # in xgrammar's code


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what xgrammar prints is no reply
    tokenizer = json.loads(sys.stdin.buffer.readline())["tokenizer"]
    import xgrammar

    vocabulary = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin.buffer:
        print(json.dumps({"wrong": _finding(vocabulary, **json.loads(line))}), file=replies)


def compile_schema(compiler: Any, schema: str | None) -> Any:
    """Returns a schema's grammar: fields in its order, blanks as `json.dumps` writes them."""
    return compiler.compile_json_schema(schema, any_whitespace=False)


def _finding(vocabulary: Any, schema: str, seconds: float) -> str:
    """Returns what is wrong with a schema; empty where nothing is."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the child, also inside native code
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        try:
            _try_grammar(vocabulary, schema)
        except BaseException as error:
            os.write(writing, (PLACE.sub("", str(error)).partition("\n")[0][:200] or type(error).__name__).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as pipe:
        found = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return f"is too complex: compiling it takes more than {seconds:g} s"
    return f"cannot be compiled: {found or 'the compiler broke down'}" if found or status else ""


def _try_grammar(vocabulary: Any, schema: str) -> None:
    import numpy
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compile_schema(xgrammar.GrammarCompiler(vocabulary), schema))
    mask, drawing = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size), random.Random(0)
    for _ in range(TRIED_TOKENS):
        if matcher.is_terminated():
            return
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = numpy.flatnonzero(numpy.unpackbits(mask.numpy().view("uint8"), bitorder="little")).tolist()
        if not allowed:
            raise ValueError("the model has no token with which to go on")
        matcher.accept_token(drawing.choice(allowed))


if __name__ == "__main__":
    main()
