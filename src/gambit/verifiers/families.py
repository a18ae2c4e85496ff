"""The families of verifiers: recognised by a model's files, each with its prompt format and its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gambit.config.options import EngineConfig
from gambit.config.trust import ScorerTrust
from gambit.errors import UserError
from gambit.storage.files import read_object
from gambit.text.boundary import THINK_END, THINK_START
from gambit.text.prompts import DEFAULT_SYSTEM_PROMPT
from gambit.text.tokenizers import Tokenizer, load_tokenizer, single_token
from gambit.types import Aggregation, ChatMessage
from gambit.verifiers.base import ThoughtReading, VerifierInfo
from gambit.verifiers.lora_folder import INFO_FILE, read_info

if TYPE_CHECKING:
    import torch


QWEN_STEP = "<extra_0>"
SHEPHERD_STEP = "ки"
GOOD, BAD = "+", "-"
INDEX = "model.safetensors.index.json"


class PromptFormat(Protocol):
    """Encodes readings. A thought's tokens begin like those of the thoughts before it, so that a cache has most."""

    def encode(self, reading: ThoughtReading) -> list[int]:
        """Tokens up to and with the one whose hidden state is scored."""


@dataclass(frozen=True, slots=True)
class GeneratorTokens:
    """The generator's own tokens, for verifiers that share its tokenizer: prompt and trace as they are."""

    def encode(self, reading: ThoughtReading) -> list[int]:
        return [*reading.question.prompt_tokens, *reading.tokens]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Qwen2.5-Math-PRM: one assistant turn with a special token after each step."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        chat = _rendered(self.tokenizer, [_system(), *reading.question.messages])
        steps = "".join(f"{step}{QWEN_STEP}" for step in plain_steps(reading))
        return self.tokenizer.encode(chat + steps, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class LineSteps:
    """Skywork-o1-Open-PRM: problem and steps as plain lines, each line and each newline encoded by itself."""

    tokenizer: Tokenizer
    bos_token: str

    def encode(self, reading: ThoughtReading) -> list[int]:
        newline = self._ids("\n")[-1]
        tokens = self._ids(f"{self.bos_token}{reading.question.text}\n")
        for line in "\n".join(plain_steps(reading)).split("\n"):
            tokens += [*(self._ids(line) if line else ()), newline]
        return tokens

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class TaggedSteps:
    """Math-Shepherd: numbered steps after the problem, each with a tag at its end that `+` or `-` would follow."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        steps = [step if step.startswith("Step ") else f"Step {number}: {step}"
                 for number, step in enumerate(plain_steps(reading), start=1)]  # fmt: skip
        text = "\n".join(f"{step} {SHEPHERD_STEP}" for step in steps)
        return self.tokenizer.encode(f"{reading.question.text} {text}", add_special_tokens=True)


@dataclass(frozen=True, slots=True)
class StepTurns:
    """RLHFlow: each step is a turn of the user's, and the assistant answers `+` or `-`; the last answer is open."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        first, *others = plain_steps(reading)
        turns = [ChatMessage(role="user", content=f"{reading.question.text} {first}")]
        for step in others:
            turns += [ChatMessage(role="assistant", content=GOOD), ChatMessage(role="user", content=step)]
        return self.tokenizer.encode(_rendered(self.tokenizer, turns), add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ChatSoFar:
    """A plain sequence classifier: the chat with all that was said as the assistant's turn, scored at its end."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        said = ChatMessage(role="assistant", content="\n\n".join(plain_steps(reading)))
        chat = _rendered(self.tokenizer, [*reading.question.messages, said], is_open=False)
        return self.tokenizer.encode(chat, add_special_tokens=False)


def plain_steps(reading: ThoughtReading) -> list[str]:
    """Thoughts without think tags and blank margins. One of nothing else is no step, unless it is the newest."""
    texts = [text.replace(THINK_START, "").replace(THINK_END, "").strip() for text in reading.thoughts]
    return [*filter(None, texts[:-1]), texts[-1]]


def good_and_bad(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of `+` and `-`, as an answer begins with them."""
    plus, minus = (tokenizer.encode(sign, add_special_tokens=False)[-1] for sign in (GOOD, BAD))
    return plus, minus


def check_step_token(tokenizer: Tokenizer, text: str, folder: object) -> None:
    if single_token(tokenizer, text) is None:
        raise UserError(f"{folder}: its tokenizer has no token {text}, which this format marks steps with")


def _system() -> ChatMessage:
    return ChatMessage(role="system", content=DEFAULT_SYSTEM_PROMPT)


def _rendered(tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, is_open: bool = True) -> str:
    """`is_open`: the assistant's turn begins at its end."""
    if tokenizer.chat_template is None:
        raise UserError("the verifier's tokenizer has no chat template, which its format needs")
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_open)


@dataclass(frozen=True, slots=True)
class Linear:
    """W·h + b."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        out = states @ self.weight.T
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers with ReLU between them; the last gives one logit.

    A head of two classes gives the difference of both: its sigmoid is the softmax of the second.
    """

    layers: tuple[Linear, ...]

    def probability(self, states: torch.Tensor) -> torch.Tensor:
        """[n] of [n, hidden]."""
        for layer in self.layers[:-1]:
            states = layer(states).relu()
        return self.layers[-1](states)[:, 0].sigmoid()

    def to(self, device: torch.device) -> Head:
        """In float32: it is small, and scores are compared."""
        return Head(tuple(
            Linear(each.weight.to(device).float(), None if each.bias is None else each.bias.to(device).float())
            for each in self.layers
        ))  # fmt: skip


def difference(layer: Linear, yes: int, no: int) -> Linear:
    """The logit of one output against another."""
    bias = None if layer.bias is None else (layer.bias[yes] - layer.bias[no])[None]
    return Linear((layer.weight[yes].float() - layer.weight[no].float())[None], bias)


def as_one_logit(layer: Linear, folder: str) -> Linear:
    """One label as it is, the second of two against the first."""
    num_labels = len(layer.weight)
    if num_labels > 2:
        raise UserError(f"{folder}: its head has {num_labels} classes: which is the good one cannot be told; use a "
                        "classifier with one or two")  # fmt: skip
    return layer if num_labels == 1 else difference(layer, yes=1, no=0)


def shifted(layer: Linear, offset: float) -> Linear:
    """With a constant added to its output."""
    if offset == 0.0:
        return layer
    bias = layer.weight.new_full((1,), offset).float() + (0.0 if layer.bias is None else layer.bias.float())
    return Linear(layer.weight, bias)


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Single tensors of a model folder; those it lacks are left out."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in _files_with(folder, names):
        with safe_open(file, framework="pt") as tensors:
            for name in set(names).intersection(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found


def _files_with(folder: Path, names: Sequence[str]) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no weights in safetensors files")
        return files
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} has no weight_map: copy the model's files again")
    return sorted({folder / str(places[name]) for name in names if name in places})


def has_tensor(folder: Path, name: str) -> bool:
    return bool(read_tensors(folder, (name,)))


def read_output_layer(folder: Path) -> torch.Tensor:
    """[vocabulary, hidden]; a model with tied weights has its embedding for it."""
    names = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    found = read_tensors(folder, names)
    if not found:
        raise UserError(f"{folder}: its weights have none of {', '.join(names)}")
    return next(found[name] for name in names if name in found)


def read_linear(folder: Path, name: str) -> Linear:
    """A layer by its name in the weights."""
    found = read_tensors(folder, (f"{name}.weight", f"{name}.bias"))
    if f"{name}.weight" not in found:
        raise UserError(f"{folder}: its weights have no {name}.weight, which the head of this format is made of")
    return Linear(found[f"{name}.weight"], found.get(f"{name}.bias"))


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
    """Returns the settings in a folder that `gambit scorer export` wrote, else the defaults."""
    if not (folder / INFO_FILE).is_file():
        return OwnSettings()
    info = read_info(folder)
    return OwnSettings(info.calibration.offset, info.aggregation, info.trust)


def verifier_info(name: str, family: Family, settings: OwnSettings, config: EngineConfig, **where: Any) -> VerifierInfo:
    """Scores of a trace are put together as the user says, or as the verifier was made for."""
    aggregation = config.verifier_aggregation or settings.aggregation
    return VerifierInfo(name, family.name, aggregation=aggregation, trust=settings.trust, **where)


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
                        f"verifier:FORMAT:{folder}, where FORMAT is one of {', '.join(FAMILIES)}")  # fmt: skip
    return FAMILIES[name]


def _name_of(folder: Path, architecture: str) -> str | None:
    if architecture.endswith("ForProcessRewardModel"):
        return "qwen-prm"
    if architecture.endswith("ForPrmModel") or has_tensor(folder, "v_head.summary.weight"):
        return "skywork"
    if architecture.endswith("ForSequenceClassification"):
        return "gambit" if (folder / INFO_FILE).is_file() else "classifier"
    return _name_of_language_model(folder) if architecture.endswith("ForCausalLM") else None


def _name_of_language_model(folder: Path) -> str | None:
    """By its name alone: nothing in the files of a language model says that it was trained to judge."""
    name = f"{folder.resolve()} {read_config(folder).get('_name_or_path')}".lower()
    if "shepherd" in name:
        return "math-shepherd"
    return "rlhflow" if "rlhflow" in name or ("llama" in name and "-prm-" in name) else None
