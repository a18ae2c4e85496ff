"""Scorers that others have published for a model: a table of them, fetched once, checked, and kept in the cache."""

import dataclasses
import hashlib
import os
import time
import warnings
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, build_opener

from pydantic import BaseModel, ConfigDict, Field

from gambit.config.trust import ScorerTrust
from gambit.errors import EngineError, GambitError, GambitNote, UserError, first_line
from gambit.models import files as models
from gambit.scorers.authors import blob_hash, load_torch_scorer
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from gambit.storage.files import read_record
from gambit.storage.folders import cache_folder, locked
from gambit.types import StatePosition

NAME = "published"  # as a scorer's name: the published one or none
TABLE = Path(__file__).with_name("published.json")
MORE_TABLES = "GAMBIT_SCORERS"  # names a further table, which comes first
FETCHES_NOTHING = "CI"  # set on machines that run tests for others
CONNECT_SECONDS, FETCH_SECONDS, WAIT_SECONDS = 10.0, 600.0, 900.0
CHUNK_BYTES = 1 << 16
LISTS_MODELS = "`gambit scorer list` names the models that have one"
HASH_DIGITS = 8  # of a question


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PublicFile(_Row):
    """A file in a public git repository at one commit."""

    repository: str
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    path: str
    address: str = Field("https://raw.githubusercontent.com", pattern=r"^https?://")

    @property
    def url(self) -> str:
        return f"{self.address}/{self.repository}/{self.commit}/{self.path}"

    def content(self, blob: str, most_bytes: int) -> bytes:
        """Downloads it; raises EngineError where that fails or git's hash of the bytes is another."""
        try:
            content = _downloaded(self.url, most_bytes)
        except (OSError, HTTPException, ValueError) as error:
            raise EngineError(_reason(error)) from error
        if (found := blob_hash(content)) != blob:
            raise EngineError(f"the hash of its {len(content):,} bytes is {found[:12]}…, not {blob[:12]}…")
        return content


class PublishedScorer(_Row):
    """A published scorer: for which weights it was made, where it is, and how its bytes are known again."""

    model: str
    hidden_size: int
    layers: int
    vocabulary: int
    sources: tuple[PublicFile, ...] = Field(min_length=1)  # the same bytes in each
    blob: str = Field(pattern=r"^[0-9a-f]{40}$")  # git's hash of the file
    most_bytes: int = Field(ge=1, le=1 << 30)
    state_position: StatePosition
    trained_on: str | None = None  # a problem set of the table
    licence: str

    @property
    def cache_file(self) -> Path:
        return cache_folder("scorers") / f"{self.model.rpartition('/')[2]}-{self.blob[:12]}.safetensors"

    @property
    def is_cached(self) -> bool:
        """Returns whether the cache has it whole; a damaged file is fetched anew."""
        try:
            return self.cache_file.is_file() and _origin(read_metadata(self.cache_file)).get("blob") == self.blob
        except UserError:
            return False


class PublishedTable(_Row):
    """Published scorers, and the problems they were trained on: hashes of the questions, one after the other."""

    scorers: tuple[PublishedScorer, ...]
    problem_sets: dict[str, str] = Field(default_factory=dict)


def tables() -> list[PublishedTable]:
    """Returns the user's own table, where there is one, and Gambit's."""
    own = os.environ.get(MORE_TABLES)
    files = [*([Path(own)] if own else []), TABLE]
    fix = f"mend it, or unset {MORE_TABLES}"
    return [read_record(PublishedTable, file, "a table of published scorers", fix) for file in files]


def published_scorers() -> list[PublishedScorer]:
    """Returns all that are known."""
    return [row for table in tables() for row in table.scorers]


def row_for(model: str) -> PublishedScorer | None:
    """Returns the row of a hub name, or of a folder that is called like the model; None where it has none."""
    folder = Path(model).resolve()
    if not folder.is_dir():
        name = model.lower()
    elif folder.parent.name == "snapshots":  # models--ORG--NAME/snapshots/COMMIT, in the hub's cache
        name = folder.parent.parent.name.lower().removeprefix("models--").replace("--", "/")
    else:
        name = folder.name.lower()
    names = ((row, row.model.lower()) for row in published_scorers())
    return next((row for row, its in names if name in (its, its.rpartition("/")[2])), None)


def known_row(model: str) -> PublishedScorer:
    """Returns the row of a model; raises where nobody has published a scorer for it."""
    if (row := row_for(model)) is None:
        raise UserError(f"no scorer is published for {model!r}: {LISTS_MODELS}; `gambit scorer collect` and "
                        "`train` make one")  # fmt: skip
    return row


def published_scorer(model: str) -> Scorer:
    """Returns the scorer that is published for these weights, with the trust that it has until it is judged."""
    scorer = load_checkpoint(fetched_file(model))
    if scorer.info.trust is not None and scorer.info.trust.is_judged:
        return scorer
    trust = ScorerTrust(auc=(None,) * 4, num_problems=0, base_model=known_row(model).model, is_published=True)
    return dataclasses.replace(scorer, info=dataclasses.replace(scorer.info, trust=trust))  # type: ignore[type-var]


def cached_file(model: str) -> Path | None:
    """Returns the published scorer of these weights as it lies in the cache; None where it does not."""
    row = row_for(model)
    return row.cache_file if row is not None and row.is_cached and misfit(row, model) is None else None


def fetched_file(model: str) -> Path:
    """Returns the file of the scorer that is published for these weights; raises if there is none or it is not here."""
    row = known_row(model)
    if (reason := misfit(row, model)) is not None:
        raise UserError(reason)
    if row.is_cached:
        return row.cache_file
    if (reason := why_not_fetched()) is not None:
        raise UserError(f"a scorer is published for {row.model}, but {reason}: run `gambit scorer get {row.model}` "
                        "where there is a network")  # fmt: skip
    return fetch(row)


def misfit(row: PublishedScorer, model: str) -> str | None:
    """Returns why a model is not the one that the scorer was published for, whatever its name; None where it is."""
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    needed = (row.hidden_size, row.layers, row.vocabulary)
    found = tuple(models.number_on_disk(model, name) for name in names)
    if found == needed:
        return None
    numbers = ", ".join("unknown" if number is None else f"{number}" for number in found)
    return (f"the scorer published for {row.model} is for a hidden size of {needed[0]}, {needed[1]} layers and "
            f"{needed[2]} token ids, but {model} has {numbers}: give another --scorer")  # fmt: skip


def why_not_fetched() -> str | None:
    """Returns why nothing is fetched without being asked for; None where it may be."""
    if models.is_offline():
        return f"nothing is fetched offline (--offline, {models.OFFLINE}, or a hub that does not answer)"
    is_ci = os.environ.get(FETCHES_NOTHING, "").lower() not in ("", "0", "false")
    return f"nothing is fetched where {FETCHES_NOTHING} is set" if is_ci else None


def outlook(model: str) -> str | None:
    """Returns a sentence on what a search with the model's own scorer would do; None for a model without a row."""
    row = row_for(model)
    if row is None:
        return None
    if row.is_cached:
        return f"the scorer published for {row.model} is in the cache ({row.cache_file})"
    if (reason := why_not_fetched()) is not None:
        return f"the scorer published for {row.model} is not here, and {reason}: run `gambit scorer get {row.model}`"
    return f"the scorer published for {row.model} would be fetched from {row.sources[0].url}"


_failed: dict[tuple[Path, str], GambitError] = {}  # what could not be fetched is not tried again by this process


def fetch(row: PublishedScorer) -> Path:
    """Returns the file in the cache, downloaded, checked and imported where it is not there.

    Another process that fetches the same is waited for. The file is complete or absent.
    """
    path = row.cache_file
    if row.is_cached:
        return path
    if (failure := _failed.get((path, row.blob))) is not None:
        raise failure
    try:
        with locked(path.parent, WAIT_SECONDS, "wait until it has ended, or set XDG_CACHE_HOME to another folder"):
            if not row.is_cached:
                _import(row, *_download(row))
    except GambitError as error:
        _failed[path, row.blob] = error
        raise
    return path


def _import(row: PublishedScorer, content: bytes, source: PublicFile) -> None:
    info = ScorerInfo("", row.state_position, hidden_size=row.hidden_size, base_model=row.model)
    scorer = load_torch_scorer(Path(Path(source.path).name), info, content)
    origin = {**source.model_dump(), "model": row.model, "blob": row.blob, "licence": row.licence}
    training = {"imported_from": Path(source.path).name, "problem_set": row.trained_on}
    save_checkpoint(scorer, row.cache_file, {NAME: origin, "training": training})


def _download(row: PublishedScorer) -> tuple[bytes, PublicFile]:
    """Returns the bytes that the row describes from the first source that has them."""
    reasons = []
    for source in row.sources:
        note = f"fetching the scorer published for {row.model} from {source.url}"
        warnings.warn(note, GambitNote, stacklevel=3)
        try:
            return source.content(row.blob, row.most_bytes), source
        except EngineError as error:
            reasons.append(f"{source.repository}: {error}")
    raise EngineError(f"the scorer published for {row.model} cannot be fetched ({'; '.join(reasons)})")


def _downloaded(url: str, most_bytes: int) -> bytes:
    """Downloads through the proxies of the environment."""
    end = time.monotonic() + FETCH_SECONDS
    with build_opener().open(Request(url, headers={"User-Agent": "gambit"}), timeout=CONNECT_SECONDS) as answer:
        promised = int(answer.headers.get("Content-Length") or 0)
        content = bytearray()
        while len(content) <= most_bytes and promised <= most_bytes and (chunk := answer.read(CHUNK_BYTES)):
            content += chunk
            if time.monotonic() > end:
                raise ValueError(f"not complete after {FETCH_SECONDS:.0f} s")
    if (size := max(promised, len(content))) > most_bytes:
        raise ValueError(f"{size:,} bytes, more than the {most_bytes:,} that are allowed")
    if promised and len(content) != promised:
        raise ValueError(f"{len(content):,} bytes of {promised:,} arrived")
    return bytes(content)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"the server answers {error.code}"
    return str(error.reason) if isinstance(error, URLError) else first_line(error)


def _origin(metadata: dict[str, Any]) -> dict[str, Any]:
    found = metadata.get(NAME)
    return found if isinstance(found, dict) else {}


def question_hash(question: str) -> str:
    """Returns a short hash of a question, which blanks and line breaks do not change."""
    return hashlib.sha256("".join(question.split()).encode()).hexdigest()[:HASH_DIGITS]


def trained_on(path: Path, questions: Iterable[str]) -> tuple[str, int]:
    """Returns the problem set that a checkpoint was trained on, and how many of the questions are from it."""
    training = read_metadata(path).get("training")
    name = str(training.get("problem_set") or "") if isinstance(training, dict) else ""
    digits = next((table.problem_sets[name] for table in tables() if name in table.problem_sets), "")
    known = {digits[start : start + HASH_DIGITS] for start in range(0, len(digits), HASH_DIGITS)}
    return name, sum(question_hash(question) in known for question in questions)
