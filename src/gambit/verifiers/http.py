"""A verifier that is served elsewhere, by vLLM's `/pooling`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from gambit.config.options import EngineConfig
from gambit.errors import EngineError, UserError
from gambit.models.files import folder_on_disk
from gambit.stats import log_odds, sigmoid
from gambit.verifiers.base import ReadingScore, ThoughtReading, VerifierInfo
from gambit.verifiers.families import FAMILIES, Encoder, Family, own_info, verifier_info
from gambit.verifiers.names import VerifierName, family_named

TIMEOUT_SECONDS = 600.0  # for a batch: a server that loads or compiles first takes its time


@dataclass(frozen=True, slots=True)
class HttpVerifier:
    """Posts the token ids of readings, all of a batch at once."""

    info: VerifierInfo
    address: str
    model: str
    family: Family
    encode: Encoder
    offset: float  # added to the log-odds of what the server returns: its head has no bias

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        encoded = [self.encode(reading) for reading in readings]
        short = [tokens for tokens in encoded if self._fits(tokens)]
        found = iter(self._ask(short) if short else ())
        return [ReadingScore(next(found), len(tokens)) if self._fits(tokens) else None for tokens in encoded]

    def close(self) -> None:
        """Does nothing: the server belongs to others."""

    def _fits(self, tokens: Sequence[int]) -> bool:
        return self.info.context_tokens is None or len(tokens) <= self.info.context_tokens

    def _ask(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        content = {"model": self.model, "task": self.family.task, "input": sequences}
        answer = _call(self.address, content)
        try:
            rows = sorted(answer["data"], key=lambda row: int(row["index"]))
            assert len(rows) == len(sequences), f"{len(rows)} answers to {len(sequences)} readings"
            return [self._score(row["data"]) for row in rows]
        except (KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise EngineError(f"{self.address} does not answer as vLLM's /pooling does: {error}") from error

    def _score(self, data: Sequence[Any]) -> float:
        """Returns the score in an answer; where it has a row for each step, that of the last."""
        row = [float(each) for each in (data[-1] if isinstance(data[-1], list) else data)]
        if len(row) not in (1, 2):
            raise ValueError(f"{len(row)} numbers for a thought, not one or two")
        probability = row[0] if len(row) == 1 else row[self.family.good]
        return sigmoid(log_odds(probability) + self.offset) if self.offset else probability


def start_http_verifier(name: VerifierName, config: EngineConfig) -> HttpVerifier:
    """Connects to a verifier, once its server has listed what it serves."""
    parts = urlsplit(name.model)
    path = parts.path if parts.path.strip("/") else "/pooling"
    address = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
    listed = _first_call(urlunsplit((parts.scheme, parts.netloc, "/v1/models", "", "")))
    model, root, context = str(listed["id"]), str(listed.get("root") or listed["id"]), listed.get("max_model_len")
    folder = folder_on_disk(parts.fragment or root)
    family = _family(name, folder)
    if folder is None and family.encode is not None:
        raise UserError(f"the verifier's tokenizer is needed, and {root!r} is not on this disk: put a folder that has "
                        "it behind the address, verifier:http://…#FOLDER")  # fmt: skip
    own = own_info(folder)
    info = verifier_info(f"{model} at {address}", family, own, config, runs_on="http", device="elsewhere",
                         context_tokens=None if context is None else int(context))  # fmt: skip
    offset = own.calibration.offset if own else 0.0
    return HttpVerifier(info, address, model, family, family.encoder(folder), offset)


def _family(name: VerifierName, folder: Path | None) -> Family:
    if name.family is None and folder is None:
        served = ", ".join(each.name for each in FAMILIES.values() if each.task)
        raise UserError(f"the format of the verifier at {name.model} is not known here: name it, "
                        f"verifier:FORMAT:http://…, where FORMAT is one of {served}")  # fmt: skip
    family = family_named(name, folder or Path())
    if family.task is None:
        raise UserError(f"vLLM's /pooling does not serve verifiers of the format {family.name!r}: give the model's "
                        "folder instead of an address")  # fmt: skip
    return family


def _first_call(address: str) -> dict[str, Any]:
    try:
        listed = _call(address)["data"][0]
    except EngineError as error:
        raise UserError(f"no verifier is served: {error}") from error
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{address} does not list a model, as vLLM does") from error
    assert isinstance(listed, dict)
    return listed


def _call(address: str, content: object | None = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = Request(address, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        reason = " ".join(error.read(500).decode(errors="replace").split())
        raise EngineError(f"{address} answers {error.code}: {reason}") from error
    except (URLError, OSError, ValueError) as error:
        raise EngineError(f"{address} does not answer: {getattr(error, 'reason', error)}") from error
