"""Reads problems from the command line, a file or stdin, and names the folder of a run; never solves anything."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from gambit.core.errors import UserError
from gambit.core.problem import Problem

SAFE_ID = re.compile(r"[\w-][\w.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Problems:
    """What is to be solved; each of several has a subfolder of its own."""

    problems: tuple[Problem, ...]
    is_many: bool = False
    expected: Mapping[str, str] = field(default_factory=dict)  # right answers by problem id, where the file has them


def shard_of(text: str) -> tuple[int, int]:
    """`i/n`: the shard's number, from 0, and how many there are; a shard is every n-th problem from the i-th on."""
    if re.fullmatch(r"[1-9]\d*/[1-9]\d*", text) is None:
        raise UserError(f"shard {text!r}: give i/n, such as 1/4")
    number, _, count = text.partition("/")
    if int(number) > int(count):
        raise UserError(f"shard {text}: there are {count} shards, from 1 to {count}")
    return int(number) - 1, int(count)


def read_problems(text: str | None, file: Path | None, stdin: TextIO) -> Problems:
    """From the argument, else the file, else stdin (also asked for with `-`)."""
    if text is not None and file is not None:
        raise UserError("both a problem and --file are given: leave one out")
    if file is not None:
        content = _read(file)
        return _from_jsonl(file, content) if file.suffix == ".jsonl" else _single(content)
    if text is not None and text != "-":
        return _single(text)
    if text is None and stdin.isatty():
        raise UserError('no problem is given: gambit solve "…", or --file FILE, or pipe it in')
    return _single(stdin.read())


def new_run_folder() -> Path:
    """`runs/<UTC time>-<short id>`: sorts by time, and two runs of one second do not meet."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {file}: {reason}") from error


def _single(text: str) -> Problems:
    if not text.strip():
        raise UserError("the problem is empty: give it some text")
    return Problems((Problem(text.strip()),))


def _from_jsonl(file: Path, content: str) -> Problems:
    problems: dict[str, Problem] = {}
    expected: dict[str, str] = {}
    for where, record in records(file, content.split("\n")):
        problem = problem_of(where, record)
        if problem.id in problems:
            raise UserError(f"{where}: the id {problem.id!r} is there twice")
        problems[problem.id] = problem
        if record.get("answer") is not None:
            expected[problem.id] = str(record["answer"])
    if not problems:
        raise UserError(f"{file} holds no problem")
    return Problems(tuple(problems.values()), True, expected)


def records(file: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Where each object of a .jsonl stands, and the object; its line is its id unless it has one."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise UserError(f'{where}: must be an object such as {{"question": "…"}}')
        yield where, {"id": number, **record}


def problem_of(where: str, record: Mapping[str, object]) -> Problem:
    """The problem of one object."""
    question, name = record.get("question"), str(record["id"])
    if not isinstance(question, str):
        raise UserError(f'{where}: needs a "question" of text; it has {", ".join(sorted(record.keys() - {"id"}))}')
    if not SAFE_ID.fullmatch(name):
        raise UserError(f"{where}: the id {name!r} names the problem's folder: use letters, digits, '.', '_' and '-'")
    return Problem(question, id=name)
