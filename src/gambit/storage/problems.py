"""Reads problems from the command line, a file or stdin, checks all of them, and names the folder of a run."""

import csv
import io
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from gambit.errors import UserError, reason_of
from gambit.storage.files import check_text
from gambit.types import Problem

SAFE_ID = re.compile(r"[\w-][\w.-]{0,99}")
TEXT_SUFFIXES = ("", ".txt", ".md", ".tex")
MANY_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
COLUMNS = ("id", "question", "answer")
RUNS, ROWS = Path("runs"), "rows.jsonl"
Record = dict[str, object]
Located = Iterator[tuple[str, Record]]  # where a record stands, and the record


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems of a command; each of several has a subfolder of its own."""

    problems: tuple[Problem, ...]
    is_many: bool = False
    expected: Mapping[str, str] = field(default_factory=dict)  # right answers by problem id, where the file has them
    places: Mapping[str, str] = field(default_factory=dict)  # file and line by problem id


def shard_of(text: str) -> tuple[int, int]:
    """Parses `i/n`, which is every n-th problem from the i-th on, to i - 1 and n."""
    if re.fullmatch(r"[1-9]\d{0,8}/[1-9]\d{0,8}", text) is None:
        raise UserError(f"shard {text!r}: give i/n, such as 1/4")
    number, _, count = text.partition("/")
    if int(number) > int(count):
        raise UserError(f"shard {text}: there are {count} shards, from 1 to {count}")
    return int(number) - 1, int(count)


def check_not_empty(shard: str, num_problems: int) -> None:
    """Refuses a shard beyond the last problem, before a model is loaded for nothing."""
    if not num_problems:
        raise UserError(f"shard {shard} holds no problem: there are fewer problems than shards, give a smaller number")


def read_problems(
    text: str | None, file: Path | None, stdin: TextIO, columns: Mapping[str, str] | None = None
) -> Problems:
    """Reads the argument, else the file, else stdin (also `-`); `columns` maps our names to the file's."""
    if text is not None and file is not None:
        raise UserError("both a problem and --file are given: leave one out")
    if file is not None:
        return read_problem_file(file, columns or {})
    if columns:
        raise UserError("--map names the columns of a file, and no --file is given")
    if text is not None and text != "-":
        return _single(text, "the problem")
    if text is None and stdin.isatty():
        raise UserError('no problem is given: gambit solve "…", or --file FILE, or pipe it in')
    return _single(decoded(stdin.buffer.read(), "stdin"), "the problem")


def read_problem_file(file: Path, columns: Mapping[str, str]) -> Problems:
    """Reads the one problem of a text file, or all of a .jsonl, .json, .csv or .tsv."""
    suffix = file.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        if columns:
            raise UserError(f"--map names columns, and {file} is one problem of text: use {', '.join(MANY_SUFFIXES)}")
        single = _single(_read(file), str(file))
        return replace(single, places={single.problems[0].id: str(file)})
    if suffix not in MANY_SUFFIXES:
        raise UserError(f"cannot read {file}: files of problems end in {', '.join(MANY_SUFFIXES)}, one problem of text "
                        f"in {', '.join(filter(None, TEXT_SUFFIXES))} or nothing")  # fmt: skip
    return _many(file, file_records(file, columns))


def columns_of(text: str | None) -> dict[str, str]:
    """Parses `question=prompt,answer=target`: our names of columns, and the file's."""
    if text is None:
        return {}
    found: dict[str, str] = {}
    for part in text.split(","):
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not ours or not equals or not theirs:
            raise UserError(f"--map {text!r} is not of the form question=COLUMN,answer=COLUMN")
        if ours not in COLUMNS:
            raise UserError(f"--map {text!r}: {ours!r} is none of {', '.join(COLUMNS)}")
        if ours in found:
            raise UserError(f"--map {text!r}: {ours!r} is there twice")
        found[ours] = theirs
    return found


def new_run_folder() -> Path:
    """Returns `runs/<UTC time>-<short id>`: folders sort by time, and two runs of one second differ."""
    return RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def newest_run(holding: str) -> Path:
    """Returns the newest folder in `runs/` that holds a file of this name somewhere."""
    for run in sorted(RUNS.glob("*"), reverse=True):
        if next(run.rglob(f"{holding}*"), None) is not None:
            return run
    maker = "`gambit bench`" if holding == ROWS else "`gambit demo` or `gambit solve`"
    raise UserError(f"no folder in {RUNS}/ has {holding} in it: {maker} makes one, or name the folder of a run")


def runs_named(incomplete: str) -> list[str]:
    """Returns the folders in `runs/` that begin so, the newest first, as shells complete them."""
    return [str(run) for run in sorted(RUNS.glob("*"), reverse=True) if str(run).startswith(incomplete)]


# -- text --------------------------------------------------------------------------------------------------------


def decoded(content: bytes, source: str) -> str:
    """Decodes UTF-8, UTF-16 or UTF-32, with or without a byte order mark; refuses anything else with its line."""
    encoding = json.detect_encoding(content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        found = f"byte 0x{error.object[error.start]:02x} is not {encoding.removesuffix('-sig').upper()}"
        raise UserError(f"{source}, line {line}: {found}: save it as UTF-8") from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise UserError(f"{source}, line {line}: a NUL character, so that this is no text in UTF-8")
    return text


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {reason_of(error)}") from error
    return decoded(content, str(file))


def _single(text: str, source: str) -> Problems:
    if not text.strip():
        raise UserError(f"{source} is empty: give it some text")
    return Problems((Problem(text.strip()),))


# -- files of problems -------------------------------------------------------------------------------------------


def file_records(file: Path, columns: Mapping[str, str]) -> Located:
    """Yields the objects of a file with our names for columns, and where each stands."""
    text, suffix = _read(file), file.suffix.lower()
    if suffix == ".json":
        found = _json_records(file, text)
    elif suffix in (".csv", ".tsv"):
        found = _csv_records(file, text, "\t" if suffix == ".tsv" else ",")
    else:
        found = records(file, text.split("\n"))
    for where, record in found:
        yield where, renamed(where, record, columns)


def records(file: Path, lines: Iterable[str]) -> Located:
    """Yields the objects of a .jsonl; the number of its line is the id of an object without one."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _object(where, _parsed(where, line), number)


def _json_records(file: Path, text: str) -> Located:
    raw = _parsed(str(file), text)
    for number, record in enumerate(raw if isinstance(raw, list) else [raw], start=1):
        where = f"{file}, entry {number}"
        yield where, _object(where, record, number)


def _csv_records(file: Path, text: str, delimiter: str) -> Located:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a field may be as long as the file
    try:
        if doubled := [name for name, count in Counter(reader.fieldnames).items() if count > 1]:
            raise UserError(f"{file}: the column {doubled[0]!r} is there twice: give each a name of its own")
        for number, row in enumerate(reader, start=1):
            where = f"{file}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where}: the header has {len(reader.fieldnames or ())} columns, this row another "
                                "number: quote fields that hold a separator")  # fmt: skip
            yield where, {"id": number, **{name: value for name, value in row.items() if value != ""}}
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: {error}") from error


def _parsed(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error


def _object(where: str, record: object, number: int) -> Record:
    if not isinstance(record, dict):
        raise UserError(f'{where}: must be an object such as {{"question": "…"}}, not {_kind(record)}')
    return {**record, "id": number if record.get("id") is None else record["id"]}


def renamed(where: str, record: Record, columns: Mapping[str, str]) -> Record:
    """Returns an object with our names for its columns."""
    for theirs in columns.values():
        if theirs not in record:
            raise UserError(f"{where}: --map names a column {theirs!r}; it has {_names(record)}")
    return {**record, **{ours: record[theirs] for ours, theirs in columns.items()}}


def _many(file: Path, found: Located) -> Problems:
    problems: dict[str, Problem] = {}
    expected: dict[str, str] = {}
    places: dict[str, str] = {}
    for where, record in found:
        problem = problem_of(where, record)
        if problem.id in problems:
            raise UserError(f"{where}: the id {problem.id!r} is there twice")
        problems[problem.id], places[problem.id] = problem, where
        if (answer := answer_of(where, record)) is not None:
            expected[problem.id] = answer
    if not problems:
        raise UserError(f"{file} holds no problem")
    return Problems(tuple(problems.values()), True, expected, places)


def problem_of(where: str, record: Mapping[str, object]) -> Problem:
    """Returns the problem in an object."""
    if "question" not in record:
        raise UserError(f'{where}: needs a "question" of text; it has {_names(record)}. --map question=COLUMN names '
                        "another column")  # fmt: skip
    question, name = record["question"], record["id"]
    if not isinstance(question, str):
        raise UserError(f'{where}: "question" must be text, not {_kind(question)}')
    check_text(question, f'{where}: "question"')
    if not question.strip():
        raise UserError(f'{where}: "question" is empty: give it some text')
    if isinstance(name, bool) or not isinstance(name, str | int) or not SAFE_ID.fullmatch(str(name)):
        raise UserError(f"{where}: the id {name!r} names the problem's folder: use letters, digits, '.', '_' and '-'")
    return Problem(question, id=str(name))


def answer_of(where: str, record: Mapping[str, object]) -> str | None:
    """Returns the right answer; None if the object has none."""
    answer = record.get("answer")
    if isinstance(answer, bool | list | dict):
        raise UserError(f'{where}: "answer" must be text or a number, not {_kind(answer)}')
    if isinstance(answer, float) and not math.isfinite(answer):  # pandas writes NaN for an empty cell
        raise UserError(f'{where}: "answer" is {answer}, not a number: write the answer, or null where there is none')
    check_text(str(answer), f'{where}: "answer"')
    return None if answer is None else str(answer)


def _names(record: Mapping[str, object]) -> str:
    return ", ".join(sorted(map(str, record.keys() - {"id"}))) or "nothing else"


def _kind(value: object) -> str:
    """Returns the JSON name of a value's type."""
    kinds = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "text",
             list: "a list", dict: "an object"}  # fmt: skip
    return kinds[type(value)]
