"""The families of verifiers: recognised by a model's files, each with its prompt format and its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.models.files import WEIGHTS_INDEX
from gambit.storage.files import read_object
from gambit.text.boundary import THINK_END, THINK_START
from gambit.text.prompts import DEFAULT_SYSTEM_PROMPT
from gambit.text.tokenizers import Tokenizer, load_tokenizer, single_token
from gambit.types import Aggregation, ChatMessage
from gambit.verifiers.base import ThoughtReading, VerifierInfo
from gambit.verifiers.lora_folder import INFO_FILE, LoraInfo, read_info

if TYPE_CHECKING:
    import torch


QWEN_STEP = "<extra_0>"
SHEPHERD_STEP = "ки"
GOOD, BAD = "+", "-"


# -- formats ---------------------------------------------------------------------------------------------------

# Makes tokens of a reading, up to and with the one whose hidden state is scored. They begin like those of the thoughts
# before, so that a cache has most of them.
Encoder = Callable[[ThoughtReading], list[int]]


def qwen_steps(tokenizer: Tokenizer, reading: ThoughtReading) -> list[int]:
    """Encodes for Qwen2.5-Math-PRM: one assistant turn with a special token after each step."""
    system = ChatMessage(role="system", content=DEFAULT_SYSTEM_PROMPT)
    chat = _rendered(tokenizer, [system, *reading.question.messages])
    return _ids(tokenizer, chat + "".join(f"{step}{QWEN_STEP}" for step in plain_steps(reading)))


def skywork_lines(tokenizer: Tokenizer, reading: ThoughtReading) -> list[int]:
    """Encodes for Skywork-o1-Open-PRM: problem and steps as plain lines, each line and newline by itself."""
    newline = _ids(tokenizer, "\n")[-1]
    tokens = _ids(tokenizer, f"{getattr(tokenizer, 'bos_token', None) or ''}{reading.question.text}\n")
    for line in "\n".join(plain_steps(reading)).split("\n"):
        tokens += [*(_ids(tokenizer, line) if line else ()), newline]
    return tokens


def shepherd_steps(tokenizer: Tokenizer, reading: ThoughtReading) -> list[int]:
    """Encodes for Math-Shepherd: numbered steps, each with a tag at its end that `+` or `-` would follow."""
    steps = [step if step.startswith("Step ") else f"Step {number}: {step}"
             for number, step in enumerate(plain_steps(reading), start=1)]  # fmt: skip
    text = "\n".join(f"{step} {SHEPHERD_STEP}" for step in steps)
    return tokenizer.encode(f"{reading.question.text} {text}", add_special_tokens=True)


def rlhflow_turns(tokenizer: Tokenizer, reading: ThoughtReading) -> list[int]:
    """Encodes for RLHFlow: each step is a turn of the user's, answered by `+`; the last answer is open."""
    first, *others = plain_steps(reading)
    turns = [ChatMessage(role="user", content=f"{reading.question.text} {first}")]
    for step in others:
        turns += [ChatMessage(role="assistant", content=GOOD), ChatMessage(role="user", content=step)]
    return _ids(tokenizer, _rendered(tokenizer, turns))


def chat_so_far(tokenizer: Tokenizer, reading: ThoughtReading) -> list[int]:
    """Encodes for a plain sequence classifier: the chat with the whole trace as the assistant's turn, scored there."""
    said = ChatMessage(role="assistant", content="\n\n".join(plain_steps(reading)))
    return _ids(tokenizer, _rendered(tokenizer, [*reading.question.messages, said], is_open=False))


def plain_steps(reading: ThoughtReading) -> list[str]:
    """Returns thoughts without think tags and margins; one that is then empty is no step, unless it is the newest."""
    texts = [text.replace(THINK_START, "").replace(THINK_END, "").strip() for text in reading.thoughts]
    return [*filter(None, texts[:-1]), texts[-1]]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _rendered(tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, is_open: bool = True) -> str:
    """Renders a chat; with `is_open` the assistant's turn begins at its end."""
    if tokenizer.chat_template is None:
        raise UserError("the verifier's tokenizer has no chat template, which its format needs")
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_open)


# -- heads -----------------------------------------------------------------------------------------------------


Layer = tuple["torch.Tensor", "torch.Tensor"]  # weight [out, in] and bias [out]


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers with ReLU between them, in float32; the last has one logit, whose sigmoid is the score."""

    layers: tuple[Layer, ...]

    def probability(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [n] scores of [n, hidden] states."""
        for weight, bias in self.layers[:-1]:
            states = (states @ weight.T + bias).relu()
        weight, bias = self.layers[-1]
        return (states @ weight.T + bias)[:, 0].sigmoid()

    def to(self, device: torch.device) -> Head:
        return Head(tuple((weight.to(device).float(), bias.to(device).float()) for weight, bias in self.layers))


def difference(layer: Layer, yes: int, no: int) -> Layer:
    """Returns the layer whose logit is one output less another: its sigmoid is their softmax."""
    weight, bias = (each.float() for each in layer)
    return (weight[yes] - weight[no])[None], (bias[yes] - bias[no])[None]


def _one_logit(layer: Layer, folder: Path) -> Layer:
    """Returns a layer of one label as it is, and of two the second against the first."""
    num_labels = len(layer[0])
    if num_labels > 2:
        raise UserError(f"{folder}: its head has {num_labels} classes, and which of them is good is not known: "
                        "use a classifier with one or two")  # fmt: skip
    return layer if num_labels == 1 else difference(layer, yes=1, no=0)


def _classifier_head(folder: Path) -> Head:
    weight, bias = _one_logit(read_linear(folder, "score"), folder)
    own = own_info(folder)
    return Head(((weight, bias.float() + (own.calibration.offset if own else 0.0)),))


def _two_layer_head(folder: Path) -> Head:
    return Head((read_linear(folder, "score.0"), _one_logit(read_linear(folder, "score.2"), folder)))


def _plus_against_minus(folder: Path) -> Head:
    """Returns the rows of a language model's output layer for `+` against `-`, as an answer begins with them."""
    tokenizer = load_tokenizer(str(folder))
    plus, minus = (_ids(tokenizer, sign)[-1] for sign in (GOOD, BAD))
    names = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")  # with tied weights the embedding
    found = read_tensors(folder, names)
    if not found:
        raise UserError(f"{folder}: its weights have none of {', '.join(names)}")
    weight = next(found[name] for name in names if name in found)
    return Head((difference((weight, weight.new_zeros(len(weight))), plus, minus),))


def read_linear(folder: Path, name: str) -> Layer:
    """Reads a layer by its name in the weights; one without a bias has zeros there."""
    found = read_tensors(folder, (f"{name}.weight", f"{name}.bias"))
    weight = found.get(f"{name}.weight")
    if weight is None:
        raise UserError(f"{folder}: its weights have no {name}.weight, which the head of this format is made of")
    return weight, found.get(f"{name}.bias", weight.new_zeros(len(weight)))


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Reads single tensors of a model folder; those it lacks are left out."""
    found: dict[str, torch.Tensor] = {}
    for file in _files_with(folder, names):
        with safe_open(file, framework="pt") as tensors:
            for name in set(names).intersection(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found


def _files_with(folder: Path, names: Sequence[str]) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no weights in safetensors files")
        return files
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index} has no weight_map: copy the model's files again")
    return sorted({folder / str(places[name]) for name in names if name in places})


# -- families --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of verifier. Everything else is read from its folder."""

    name: str
    encode: Callable[[Tokenizer, ThoughtReading], list[int]] | None  # None: it reads the generator's own tokens
    read_head: Callable[[Path], Head]
    step_token: str | None = None  # that its tokenizer must have
    task: str | None = None  # by which vLLM's /pooling serves it; None: it does not
    good: int = 1  # which of two numbers that are served is the probability of a good thought

    def encoder(self, folder: Path | None) -> Encoder:
        """Returns what encodes readings, with the tokenizer in a folder."""
        if self.encode is None:
            return lambda reading: [*reading.question.prompt_tokens, *reading.tokens]
        tokenizer = load_tokenizer(str(folder))
        if self.step_token is not None and single_token(tokenizer, self.step_token) is None:
            raise UserError(f"{folder}: its tokenizer has no token {self.step_token}, which this format marks steps "
                            "with")  # fmt: skip
        return partial(self.encode, tokenizer)


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("gambit", None, _classifier_head, task="classify"),
        Family("classifier", chat_so_far, _classifier_head, task="classify"),
        # Served with a row for each step token.
        Family("qwen-prm", qwen_steps, _two_layer_head, step_token=QWEN_STEP, task="token_classify"),
        Family("skywork", skywork_lines, lambda folder: Head((read_linear(folder, "v_head.summary"),))),
        # Served with returned_token_ids [+, -].
        Family("math-shepherd", shepherd_steps, _plus_against_minus, task="token_classify", good=0),
        Family("rlhflow", rlhflow_turns, _plus_against_minus),
    )
}


def own_info(folder: Path | None) -> LoraInfo | None:
    """Reads what a verifier that `gambit scorer export` wrote states beside its weights; None for any other model."""
    return None if folder is None or not (folder / INFO_FILE).is_file() else read_info(folder)


def verifier_info(
    name: str, family: Family, own: LoraInfo | None, config: EngineConfig, *, runs_on: str, device: str,
    context_tokens: int | None,
) -> VerifierInfo:  # fmt: skip
    """Describes a verifier: a trace's scores are aggregated as the user chose, else as the verifier was made for."""
    aggregation = config.verifier_aggregation or (own.aggregation if own else Aggregation.LAST)
    trust = own.trust if own else None
    return VerifierInfo(name, family.name, runs_on, device, aggregation=aggregation, context_tokens=context_tokens,
                        trust=trust)  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a model folder."""
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "a file of a verifier", "give the folder of one, or copy its files again")


def family_of(folder: Path) -> Family:
    """Recognises a model's family by its own files."""
    architecture = str((read_config(folder).get("architectures") or ["none"])[0])
    if (name := _name_of(folder, architecture)) is None:
        raise UserError(f"{folder}: the format of its architecture {architecture} is not known: name it, "
                        f"verifier:FORMAT:{folder}, where FORMAT is one of {', '.join(FAMILIES)}")  # fmt: skip
    return FAMILIES[name]


def _name_of(folder: Path, architecture: str) -> str | None:
    if architecture.endswith("ForProcessRewardModel"):
        return "qwen-prm"
    if architecture.endswith("ForPrmModel") or read_tensors(folder, ("v_head.summary.weight",)):
        return "skywork"
    if architecture.endswith("ForSequenceClassification"):
        return "gambit" if own_info(folder) else "classifier"
    if not architecture.endswith("ForCausalLM"):
        return None
    # By the model's name alone: nothing in the files of a language model shows what it was trained for.
    name = f"{folder.resolve()} {read_config(folder).get('_name_or_path')}".lower()
    if "shepherd" in name:
        return "math-shepherd"
    return "rlhflow" if "rlhflow" in name or ("llama" in name and "-prm-" in name) else None
