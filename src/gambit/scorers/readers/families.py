"""The families of verifiers: how one is recognised by its files, how it is asked, and what its head is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gambit.config.options import EngineConfig
from gambit.config.trust import ScorerTrust, read_trust
from gambit.errors import UserError
from gambit.scorers.readers.base import ReaderInfo
from gambit.scorers.readers.formats import (
    QWEN_STEP,
    ChatSoFar,
    GeneratorTokens,
    LineSteps,
    PromptFormat,
    StepTokens,
    StepTurns,
    TaggedSteps,
    check_step_token,
    good_and_bad,
)
from gambit.scorers.readers.heads import (
    Head,
    Linear,
    as_one_logit,
    difference,
    has_tensor,
    read_linear,
    read_output_layer,
    shifted,
)
from gambit.storage.json_file import read_object
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.types import Aggregation

VERIFIER_FILE = "verifier.json"  # beside a sequence classifier that `gambit scorer export` wrote


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of verifier. Its folder gives everything."""

    name: str
    make_format: Callable[[Path], PromptFormat]
    read_head: Callable[[Path], Head]


# -- formats ---------------------------------------------------------------------------------------------------


def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


def _step_tokens(folder: Path) -> PromptFormat:
    check_step_token(tokenizer := _tokenizer(folder), QWEN_STEP, folder)
    return StepTokens(tokenizer)


def _line_steps(folder: Path) -> PromptFormat:
    tokenizer = _tokenizer(folder)
    return LineSteps(tokenizer, str(getattr(tokenizer, "bos_token", None) or ""))


# -- heads -----------------------------------------------------------------------------------------------------


def _classifier_head(folder: Path) -> Head:
    layer = as_one_logit(read_linear(folder, "score"), str(folder))
    return Head((shifted(layer, own_settings(folder).offset),))


def _two_layer_head(folder: Path) -> Head:
    return Head((read_linear(folder, "score.0"), as_one_logit(read_linear(folder, "score.2"), str(folder))))


def _value_head(folder: Path) -> Head:
    return Head((read_linear(folder, "v_head.summary"),))


def _plus_against_minus(folder: Path) -> Head:
    plus, minus = good_and_bad(_tokenizer(folder))
    return Head((difference(Linear(read_output_layer(folder), None), plus, minus),))


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("gambit", lambda folder: GeneratorTokens(), _classifier_head),
        Family("classifier", lambda folder: ChatSoFar(_tokenizer(folder)), _classifier_head),
        Family("qwen-prm", _step_tokens, _two_layer_head),
        Family("skywork", _line_steps, _value_head),
        Family("math-shepherd", lambda folder: TaggedSteps(_tokenizer(folder)), _plus_against_minus),
        Family("rlhflow", lambda folder: StepTurns(_tokenizer(folder)), _plus_against_minus),
    )
}  # fmt: skip


# -- by its files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """What Gambit's own verifiers say beside their weights."""

    offset: float = 0.0  # of the logit: a sequence classifier's head has no bias
    aggregation: Aggregation = Aggregation.LAST
    trust: ScorerTrust | None = None


def own_settings(folder: Path) -> OwnSettings:
    """Those of the folder, or none."""
    path = folder / VERIFIER_FILE
    if not path.is_file():
        return OwnSettings()
    found = _read_json(path)
    try:
        offset = float(found["calibration"]["offset"])
        return OwnSettings(offset, Aggregation(found["aggregation"]), read_trust(found.get("trust"), path))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not what `gambit scorer` writes beside a verifier ({error})") from error


def reader_info(name: str, family: Family, settings: OwnSettings, config: EngineConfig, **where: Any) -> ReaderInfo:
    """Scores of a trace are put together as the user says, or as the verifier was made for."""
    aggregation = config.verifier_aggregation or settings.aggregation
    return ReaderInfo(name, family.name, aggregation=aggregation, trust=settings.trust, **where)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "a file of a verifier", "give the folder of one, or copy its files again")


def family_of(folder: Path) -> Family:
    """The family of a model, by its own files."""
    architecture = str((read_config(folder).get("architectures") or ["none"])[0])
    name = _name_of(folder, architecture)
    if name is None:
        raise UserError(f"{folder}: what format its architecture {architecture} reads cannot be told: name it, "
                        f"prm:FORMAT:{folder}, where FORMAT is one of {', '.join(FAMILIES)}")  # fmt: skip
    return FAMILIES[name]


def _name_of(folder: Path, architecture: str) -> str | None:
    if architecture.endswith("ForProcessRewardModel"):
        return "qwen-prm"
    if architecture.endswith("ForPrmModel") or has_tensor(folder, "v_head.summary.weight"):
        return "skywork"
    if architecture.endswith("ForSequenceClassification"):
        return "gambit" if (folder / VERIFIER_FILE).is_file() else "classifier"
    return _name_of_language_model(folder) if architecture.endswith("ForCausalLM") else None


def _name_of_language_model(folder: Path) -> str | None:
    """By its name alone: nothing in the files of a language model says that it was trained to judge."""
    name = f"{folder.resolve()} {read_config(folder).get('_name_or_path')}".lower()
    if "shepherd" in name:
        return "math-shepherd"
    return "rlhflow" if "rlhflow" in name or ("llama" in name and "-prm-" in name) else None
