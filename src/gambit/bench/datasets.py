"""Benchmarks by name or file: problems with their right answers, and the form of these."""

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeAlias, TypeVar, cast

from gambit import chains
from gambit.answers import AnswerKind
from gambit.config import registry
from gambit.errors import EngineError, UserError, first_line, install_line
from gambit.pawn.puzzles import Split, generate
from gambit.storage.files import write_whole
from gambit.storage.folders import cache_folder
from gambit.storage.problems import MANY_SUFFIXES, SAFE_ID, answer_of, file_records, problem_of, renamed

GROUP = "gambit.benchmarks"
NUM_PUZZLES = 300
NUM_GENERATED = 600
CHOICES = "ABCD"
MOST_BYTES = 1 << 22  # of a public file
HUB = "hf:"  # then ORG/NAME, with :SPLIT, or with /CONFIG:SPLIT
HUB_SPEC = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.:%\[\]-]+))?")
USUAL_SPLIT = "test"
SYNTAX = (f"{HUB}DATASET[:SPLIT]", *chains.SYNTAX)  # of benchmarks that have no fixed name
ALIKE = r"[-_]|20(?=\d\d)|diamond"  # what names of benchmarks may leave out
Record = Mapping[str, object]
T = TypeVar("T")
Convert: TypeAlias = "Callable[[str, Record], Item]"  # where it stands, the record


@dataclass(frozen=True, slots=True)
class Item:
    """One problem and its right answer."""

    id: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A named list of problems and how their answers are read; other packages register theirs as an entry point."""

    name: str
    items: Callable[[], Iterable[Item]]  # the same items in the same order at every call
    answer: AnswerKind | None = None  # None: by the user's options
    num_items: int | None = None  # where it is known before reading
    caution: str | None = None  # what figures on it are not worth

    def first(self, limit: int | None, numbers: Collection[int] = ()) -> Iterator[Item]:
        """Yields the first problems, or those with these numbers, counted from 1; raises if there are not as many."""
        return chosen(self.items(), numbers, self.name) if numbers else itertools.islice(iter(self.items()), limit)


def chosen(items: Iterable[T], numbers: Collection[int], source: str) -> Iterator[T]:
    """Yields the items with these numbers, counted from 1, in their order."""
    count = 0
    for count, item in enumerate(itertools.islice(items, max(numbers)), start=1):
        if count in numbers:
            yield item
    if count < max(numbers):
        raise UserError(f"{source} has {count} problems, there is no number {max(numbers)}")


def numbers_of(text: str | None, flag: str = "--problems") -> tuple[int, ...]:
    """Parses `12,27`: the numbers of problems, counted from 1."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"{flag} {text!r}: give numbers of problems, counted from 1, as in 12,27")
    return tuple(dict.fromkeys(map(int, parts)))


def registered_name(name: str) -> str:
    """Returns the name of a registered benchmark that is spelt in another way, as aime25 or math500; else the name."""
    spelt = {re.sub(ALIKE, "", each): each for each in registry.names(GROUP)}
    return spelt.get(re.sub(ALIKE, "", name.lower()), name)


def benchmark_for(name: str, columns: Mapping[str, str] | None = None) -> Benchmark:
    """Returns a registered benchmark, or the problems of a file, whose columns may have other names."""
    if name.partition(":")[0] in chains.FAMILIES:
        return _generated(chains.parse_spec(name))
    if name.startswith(HUB):
        return _of_hub(name, columns or {})
    path = Path(name)
    if path.suffix.lower() in MANY_SUFFIXES or path.is_file():
        if path.suffix.lower() not in MANY_SUFFIXES:
            raise UserError(f"cannot read {name}: files of problems end in {', '.join(MANY_SUFFIXES)}")
        if not SAFE_ID.fullmatch(path.stem):
            raise UserError(f"{name}: the file's name names a folder, so use letters, digits, '.', '_' and '-'")
        return Benchmark(path.stem, partial(_file_items, path, _plain, columns or {}))
    try:
        return cast("Benchmark", registry.load(GROUP, registered_name(name)))
    except UserError as error:
        raise UserError(f"{error}; or give {HUB}DATASET:SPLIT, or a .jsonl with question and answer") from error


def digest(items: Iterable[Item]) -> tuple[int, str]:
    """Returns the number of problems, and a hash of all questions and answers."""
    state, count = hashlib.sha256(), 0
    for item in items:
        state.update(repr((item.id, item.question, item.answer)).encode())
        count += 1
    return count, state.hexdigest()[:16]


# -- files -----------------------------------------------------------------------------------------------------


def local_file(name: str) -> Path:
    """Returns the path of a file that takes the place of a public dataset."""
    folder = os.environ.get("GAMBIT_BENCHMARKS") or cache_folder("benchmarks")
    return Path(folder) / f"{name}.jsonl"


def _file_items(path: Path, convert: Convert, columns: Mapping[str, str]) -> Iterator[Item]:
    seen: set[str] = set()
    for where, record in file_records(path, columns):
        item = _at(where, convert, record)
        if item.id in seen:
            raise UserError(f"{where}: the id {item.id!r} is there twice")
        seen.add(item.id)
        yield item
    if not seen:
        raise UserError(f"{path} holds no problem")


def _at(where: str, convert: Convert, record: Record) -> Item:
    try:
        return convert(where, record)
    except KeyError as error:
        raise UserError(f"{where}: a field {error} is missing; it has {', '.join(sorted(record))}") from error


def _plain(where: str, record: Record) -> Item:
    """Reads `question` and `answer` as `gambit solve --file` does; an answer is needed, or nothing can be graded."""
    problem, answer = problem_of(where, record), answer_of(where, record)
    if answer is None:
        raise UserError(f'{where}: needs an "answer" to be graded against')
    assert isinstance(problem.question, str)
    return Item(problem.id, problem.question, answer)


# -- public datasets -------------------------------------------------------------------------------------------


def _hub(
    name: str, source: str, split: str, convert: Convert, answer: AnswerKind, num_items: int, config: str | None = None
) -> Benchmark:
    """Returns a dataset of the Hugging Face hub."""
    return Benchmark(name, partial(_hub_items, name, source, split, config, convert, {}), answer, num_items)


def _of_hub(name: str, columns: Mapping[str, str]) -> Benchmark:
    """Returns any dataset of the hub. Its columns are question or problem, and answer, or those that are named."""
    spec = HUB_SPEC.fullmatch(name.removeprefix(HUB))
    if spec is None:
        raise UserError(f"{name!r} is not of the form {HUB}ORG/NAME, {HUB}ORG/NAME:SPLIT or {HUB}ORG/NAME/CONFIG:SPLIT")
    split = spec["split"] or USUAL_SPLIT
    label = slug("-".join(filter(None, (*spec["repository"].split("/"), spec["config"], split))))
    items = partial(_hub_items, label, spec["repository"], split, spec["config"], _contest, columns)
    return Benchmark(label, items)


def _hub_items(
    name: str, repository: str, split: str, config: str | None, convert: Convert, columns: Mapping[str, str]
) -> Iterator[Item]:
    """Yields the problems of the local file if there is one, else those of the hub (which keeps its own cache)."""
    path = local_file(name)
    if path.is_file():
        yield from _file_items(path, convert, columns)
        return
    try:
        from datasets import load_dataset

        records = cast("Iterable[Record]", load_dataset(repository, config, split=split))
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        is_missing = isinstance(error, ImportError)
        reason = f"{install_line('bench')} would fetch it" if is_missing else first_line(error)
        raise UserError(
            f"benchmark {name!r} is the public dataset {repository}, which is not here ({reason}). Without a "
            f'network, put its problems into {path}, one {{"question": "…", "answer": "…"}} per line, '
            "or name any such file with --benchmark FILE.jsonl"
        ) from error
    for number, record in enumerate(records, start=1):
        where = f"{repository}, row {number}"
        found = renamed(where, dict(record), columns)
        own = found.get("id")
        is_safe = isinstance(own, str | int) and SAFE_ID.fullmatch(str(own))
        yield _at(where, convert, {**found, "id": own if is_safe else f"{name}-{number}"})


def _contest(where: str, record: Record) -> Item:
    """Reads MathArena's and MATH-500's columns, or plain question and answer."""
    if "problem" not in record or "question" in record:
        return _plain(where, record)
    return _plain(where, {"id": record["id"], "question": record["problem"], "answer": record["answer"]})


def _gsm8k(where: str, record: Record) -> Item:
    """Reads the number at the end of a solution, behind `####`."""
    item = _plain(where, record)
    return Item(item.id, item.question, item.answer.rpartition("####")[2].strip())


def _gpqa(where: str, record: Record) -> Item:
    """Shuffles the four choices, always in the same way; the right one comes first in the dataset."""
    if "Question" not in record:
        return _plain(where, record)
    texts = [str(record[key]).strip() for key in ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))]
    order = list(range(len(texts)))
    Random(f"gpqa {record['Question']}").shuffle(order)
    lines = [f"{letter}) {texts[place]}" for letter, place in zip(CHOICES, order, strict=True)]
    question = f"{str(record['Question']).strip()}\n\n" + "\n".join(lines) + "\n\nAnswer with the letter of the choice."
    return _plain(where, {"id": record["id"], "question": question, "answer": CHOICES[order.index(0)]})


def _matharena(name: str, num_items: int = 30) -> Benchmark:
    return _hub(name, f"MathArena/{name}", "train", _contest, AnswerKind.BOXED, num_items)


AIME_2024 = _hub("aime_2024", "HuggingFaceH4/aime_2024", "train", _contest, AnswerKind.BOXED, 30)
AIME_2025 = _matharena("aime_2025")
AIME_2026 = _matharena("aime_2026")
HMMT_FEB_2024 = _matharena("hmmt_feb_2024")
HMMT_FEB_2025 = _matharena("hmmt_feb_2025")
HMMT_NOV_2025 = _matharena("hmmt_nov_2025")
HMMT_FEB_2026 = _matharena("hmmt_feb_2026", 33)
BEYOND_AIME = _hub("beyond_aime", "ByteDance-Seed/BeyondAIME", "test", _contest, AnswerKind.BOXED, 100)
MATH_500 = _hub("math_500", "HuggingFaceH4/MATH-500", "test", _contest, AnswerKind.BOXED, 500)
GSM8K = _hub("gsm8k", "openai/gsm8k", "test", _gsm8k, AnswerKind.NUMBER, 1319, config="main")
GPQA_DIAMOND = _hub("gpqa_diamond", "Idavidrein/gpqa", "train", _gpqa, AnswerKind.CHOICE, 198, config="gpqa_diamond")


_AUTHORS = {
    "repository": "Dao-AILab/gambit-parallel-reasoning", "commit": "7d4d42f18446e0c76f77726eca060ff8d8b5b047",
}  # fmt: skip


def by_authors(
    name: str,
    blob: str,
    num_items: int = 30,
    answer: AnswerKind = AnswerKind.BOXED,
    folder: str = "gambit/datasets",
    caution: str | None = None,
    source: Mapping[str, str] = _AUTHORS,
) -> Benchmark:
    """Returns a file of the public repository of the method's authors, fetched where it is not here."""

    def items() -> Iterator[Item]:
        place = local_file(name)
        if not place.is_file():
            fetch_to(place, blob, path=f"{folder}/{name.removeprefix('authors_')}.jsonl", **source)
        yield from _file_items(place, _plain, {})

    return Benchmark(name, items, answer, num_items, caution)


def fetch_to(place: Path, blob: str, **source: str) -> None:
    """Writes a public file to a place; raises where it cannot be fetched or git's hash of it is not `blob`."""
    from huggingface_hub import is_offline_mode  # what users set for every download

    from gambit.scorers.published import PublicFile

    file = PublicFile(**source)
    try:
        if is_offline_mode():
            raise EngineError("HF_HUB_OFFLINE is set")
        content = file.content(blob, MOST_BYTES)
    except EngineError as error:
        raise UserError(f"{file.url} cannot be fetched ({error}): put the file at {place}") from error
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, content)


AUTHORS_AIME_2025 = by_authors("authors_aime_2025", "96d61015ffebae74f345aff8b8618bbef5ab84fb")
AUTHORS_HMMT_2024 = by_authors("authors_hmmt_2024", "10588cfd662a40d8489b5044be59d84cd98ad8b8")
AUTHORS_HMMT_2025 = by_authors("authors_hmmt_2025", "59f2e80ef0637aad882d8b087506961df361e994")
AUTHORS_GPQA_DIAMOND = by_authors(
    "authors_gpqa_diamond", "5967c4ec1695f367754f956293e5c8039082c9a3", 198, AnswerKind.CHOICE
)
HMMT_2012_2023 = by_authors(
    "hmmt_2012_2023", "2713dd9a60fcece266ec16994d536e415ac2a877", 357, folder="gambit/train_scorer/train_problems",
    caution="the published scorers were trained on these problems: their figures on them are too good",
)  # fmt: skip


# -- pawn ------------------------------------------------------------------------------------------------------


def _puzzles() -> Iterator[Item]:
    """Yields puzzles of the test split, which pawn has never seen."""
    for number, puzzle in enumerate(itertools.islice(generate(Split.TEST, seed=0), NUM_PUZZLES)):
        yield Item(f"test-{number:04d}", puzzle.text, str(puzzle.answer))


PAWN = Benchmark("pawn", _puzzles, num_items=NUM_PUZZLES)


# -- long chains -----------------------------------------------------------------------------------------------


def _generated(spec: chains.Spec) -> Benchmark:
    """Returns problems of the split that is named, else of the test split."""
    split = spec.split or "test"

    def items() -> Iterator[Item]:
        for row in itertools.islice(chains.stream(spec, split), NUM_GENERATED):
            yield Item(row["id"], f"{row['question']}\n\n{chains.HOW_TO_WRITE}", row["answer"])

    return Benchmark(f"{spec.slug}-{split}", items, AnswerKind.BOXED, NUM_GENERATED)


def slug(text: str) -> str:
    """Returns a text as the name of a folder."""
    return re.sub(r"[^\w.=+-]+", "_", text)
