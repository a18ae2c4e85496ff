"""Notes which lines of the mutated modules run, and for which test. Copied as `sitecustomize`, it follows subprocesses.

Caches of functions are off meanwhile: a line that ran for an earlier test and left its result there counts for all.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

SWITCH = "MUTANTS_TRACE"  # the environment variable with the arguments of `start` as JSON
MOST_CALLS = 100  # of one function for one test that are followed: a thousand more show no other line
Trace = Callable[[FrameType, str, object], object]


def start(modules: dict[str, str], log: str, current: str, uncached: list[str]) -> None:
    """`modules`: file to name; `log` gets a line for each (context, module, line); `current` holds the context.

    `uncached`: folders whose functions are not to remember results.
    """
    _switch_caches_off(tuple(uncached))
    write, out = os.write, os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Path(current).open("rb") as file:
        context = mmap.mmap(file.fileno(), 4, access=mmap.ACCESS_READ)
    seen: set[tuple[bytes, str, int]] = set()

    calls: Counter[tuple[bytes, CodeType]] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> Trace | None:
        code = frame.f_code
        if code.co_filename not in modules:
            return None
        calls[context[:4], code] += 1
        return note if calls[context[:4], code] <= MOST_CALLS else None

    def note(frame: FrameType, event: str, argument: object) -> Trace:
        key = (context[:4], frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and key not in seen:
            seen.add(key)
            write(out, f"{int.from_bytes(key[0], 'little')} {modules[key[1]]} {key[2]}\n".encode())
        return note

    threading.settrace(trace)
    sys.settrace(trace)


def _switch_caches_off(folders: tuple[str, ...]) -> None:
    real = functools.lru_cache

    def lru_cache(maxsize: object = 128, typed: bool = False) -> object:
        if callable(maxsize):
            return decorate(maxsize)
        return lambda function: decorate(function, maxsize, typed)

    def decorate(function: Callable[..., object], maxsize: object = 128, typed: bool = False) -> object:
        if not getattr(function, "__code__", decorate.__code__).co_filename.startswith(folders):
            return real(maxsize, typed)(function)  # type: ignore[arg-type]
        function.cache_clear = lambda: None  # type: ignore[attr-defined]
        return function

    functools.lru_cache = lru_cache  # type: ignore[assignment]
    functools.cache = lambda function: decorate(function, None)


if __name__ == "sitecustomize" and SWITCH in os.environ:
    start(**json.loads(os.environ[SWITCH]))
