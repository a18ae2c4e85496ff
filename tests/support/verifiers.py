"""Tiny random verifiers of every family, laid out as by their authors, and what they say by a plain computation."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.config.trust import ScorerTrust
from gambit.models.files import name_of, weight_hash
from gambit.training.storage import ProblemRecord, TraceRecord, state_name
from gambit.types import Aggregation
from gambit.verifiers.lora_folder import LoraInfo, Platt, write_info
from support.collected import header, writing
from support.scripted import make_reading
from support.tiny import tiny_tokenizer

SPECIAL = ["<pad>", "<unk>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<extra_0>", "ки"]
WIDTH = 128  # four heads of 32: vLLM's CPU kernels know no smaller ones
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = "<|system|>Please reason step by step, and put your final answer within \\boxed{}.<|end|>"


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """One id per character, and the special tokens of all families."""
    pieces = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    return wrapped


def shape(kind: type[PretrainedConfig], **changes: object) -> PretrainedConfig:
    return kind(**{
        "vocab_size": len(letters()), "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0,
        "tie_word_embeddings": False, **changes,
    })  # fmt: skip


def lively(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights, so that scores differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    return model.eval()


@dataclass(frozen=True)
class TinyVerifier:
    folder: Path
    model: torch.nn.Module
    scores: Callable[[str, Sequence[str]], list[float]]  # of each thought; by one pass without a cache


def _ids(text: str) -> torch.Tensor:
    return torch.tensor([letters().encode(text, add_special_tokens=False)])


def _save(folder: Path, config: PretrainedConfig, tensors: dict[str, torch.Tensor], architecture: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    letters().save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    content = {**config.to_dict(), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(content, default=str))


@torch.no_grad()
def qwen_prm(folder: Path) -> TinyVerifier:
    torch.manual_seed(1)
    config = shape(Qwen2Config)
    model = lively(Qwen2Model(config))
    score = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 2))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in score.state_dict().items()}
    _save(folder, config, tensors, "Qwen2ForProcessRewardModel")

    @torch.no_grad()
    def scores(question: str, thoughts: Sequence[str]) -> list[float]:
        said = "".join(f"{thought.strip()}<extra_0>" for thought in thoughts)
        ids = _ids(f"{SYSTEM}<|user|>{question}<|end|><|assistant|>{said}<|end|>")
        probabilities = score(model(ids).last_hidden_state).softmax(-1)[0, :, 1]
        return probabilities[ids[0] == SPECIAL.index("<extra_0>")].tolist()

    return TinyVerifier(folder, model, scores)


@torch.no_grad()
def skywork(folder: Path) -> TinyVerifier:
    torch.manual_seed(2)
    config = shape(Qwen2Config)
    model = lively(AutoModelForCausalLM.from_config(config))
    head = torch.nn.Linear(WIDTH, 1)
    tensors = dict(model.state_dict()) | {f"v_head.summary.{name}": t for name, t in head.state_dict().items()}
    _save(folder, config, tensors, "Qwen2ForCausalLM")  # recognised by its head

    @torch.no_grad()
    def scores(question: str, thoughts: Sequence[str]) -> list[float]:
        lines = [line for thought in thoughts for line in thought.strip().split("\n")]
        ids = _ids(f"<bos>{question}\n" + "".join(f"{line}\n" for line in lines))
        values = head(model(ids, output_hidden_states=True).hidden_states[-1])[0, :, 0].sigmoid()
        ends = torch.tensor([len(thought.strip().split("\n")) for thought in thoughts]).cumsum(0)
        newlines = (ids[0] == letters().convert_tokens_to_ids("\n")).nonzero()[:, 0]
        return values[newlines[ends]].tolist()  # the first newline ends the question

    return TinyVerifier(folder, model, scores)


@torch.no_grad()
def math_shepherd(folder: Path) -> TinyVerifier:
    torch.manual_seed(3)
    config = shape(MistralConfig, sliding_window=None)
    model = lively(AutoModelForCausalLM.from_config(config))
    _save(folder, config, dict(model.state_dict()), "MistralForCausalLM")

    @torch.no_grad()
    def scores(question: str, thoughts: Sequence[str]) -> list[float]:
        thoughts = "\n".join(f"Step {i + 1}: {thought.strip()} ки" for i, thought in enumerate(thoughts))
        ids = _ids(f"{question} {thoughts}")
        signs = [letters().convert_tokens_to_ids(sign) for sign in "+-"]
        good = model(ids).logits[0][:, signs].softmax(-1)[:, 0]
        return good[ids[0] == SPECIAL.index("ки")].tolist()

    return TinyVerifier(folder, model, scores)


@torch.no_grad()
def rlhflow(folder: Path) -> TinyVerifier:
    torch.manual_seed(4)
    config = shape(LlamaConfig, tie_word_embeddings=True)
    model = lively(AutoModelForCausalLM.from_config(config))
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    _save(folder, config, tensors, "LlamaForCausalLM")

    @torch.no_grad()
    def scores(question: str, thoughts: Sequence[str]) -> list[float]:
        found, chat = [], ""
        signs = [letters().convert_tokens_to_ids(sign) for sign in "+-"]
        for i, thought in enumerate(thoughts):
            thought = f"{question} {thought.strip()}" if i == 0 else thought.strip()
            chat += f"<|user|>{thought}<|end|><|assistant|>+<|end|>"
            # As its authors do: the token before the last two, `+` and the end of its turn.
            found.append(float(model(_ids(chat)).logits[0, -3, signs].softmax(-1)[0]))
        return found

    return TinyVerifier(folder, model, scores)


@torch.no_grad()
def classifier(folder: Path, num_labels: int, **changes: object) -> TinyVerifier:
    torch.manual_seed(5)
    config = shape(Qwen2Config, num_labels=num_labels, **changes)
    model = lively(AutoModelForSequenceClassification.from_config(config))
    _save(folder, config, dict(model.state_dict()), "Qwen2ForSequenceClassification")

    @torch.no_grad()
    def scores(question: str, thoughts: Sequence[str]) -> list[float]:
        said = ["\n\n".join(thought.strip() for thought in thoughts[: i + 1]) for i in range(len(thoughts))]
        logits = [model(_ids(f"<|user|>{question}<|end|><|assistant|>{text}<|end|>")).logits[0] for text in said]
        return [float(each.sigmoid() if num_labels == 1 else each.softmax(-1)[1]) for each in logits]

    return TinyVerifier(folder, model, scores)


@torch.no_grad()
def own(folder: Path, offset: float = 0.75, **changes: object) -> TinyVerifier:
    """As `gambit scorer export` writes it: one label, and the rest of the calibration beside it."""
    made = classifier(folder, num_labels=1, **changes)
    write_info(folder, LoraInfo(
        base_model="tiny", base_model_hash=None, hidden_size=WIDTH, calibration=Platt(offset=offset),
        aggregation=Aggregation.MEAN, trust=ScorerTrust(auc=(0.6, 0.7, 0.8, 0.9), num_problems=40),
    ))  # fmt: skip

    @torch.no_grad()
    def scores(question: str, thoughts: Sequence[str]) -> list[float]:
        texts = [question + "".join(thoughts[: i + 1]) for i in range(len(thoughts))]
        return [float((made.model(_ids(text)).logits[0] + offset).sigmoid()) for text in texts]

    return TinyVerifier(folder, made.model, scores)


HIDDEN = 32
EOS, BREAK, GOOD, BAD = 0, 5, 20, 21  # ids of the tiny tokenizer
STEP_TOKENS, NUM_THOUGHTS = 5, 4
LAYERS = (1, -1)


def save_qwen2(folder: Path, seed: int = 0) -> Path:
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scorer(*args: object) -> tuple[int, str, str]:
    """`gambit scorer …`: exit code, stdout, stderr."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["scorer", *map(str, args)])
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def told_traces(folder: Path, model: Path, num_problems: int, num_traces: int = 6, seed: int = 0) -> Path:
    """From the third thought on a right trace says GOOD, a wrong one BAD; all else is noise.

    So nothing is known at a quarter or half of the thoughts, and everything from the third of four on. One problem in
    six has wrong traces only.
    """
    rng = np.random.default_rng(seed)
    made = header(
        id=f"told-{seed}", source=f"told-{seed}.jsonl", model=name_of(str(model)), model_hash=weight_hash(str(model)),
        hidden_size=HIDDEN, layers=LAYERS, positions=("boundary",), traces_per_problem=num_traces,
    )  # fmt: skip
    with writing(folder, made) as writer:
        for start in range(0, num_problems, 10):
            rows = [_problem(rng, f"{seed}-{i}", num_traces, i) for i in range(start, min(start + 10, num_problems))]
            count = NUM_THOUGHTS * num_traces * len(rows)
            states = {state_name(layer, "boundary"): torch.randn(count, HIDDEN).half() for layer in LAYERS}
            tokens = [token for _, _, traces in rows for trace in traces for token in trace]
            prompts = [token for _, prompt, _ in rows for token in prompt]
            ends = [STEP_TOKENS * (i + 1) for i in range(NUM_THOUGHTS)] * (num_traces * len(rows))
            tensors = {
                **states,
                "thought_ends": torch.tensor(ends, dtype=torch.int32),
                "confidences": torch.from_numpy(rng.random(count).astype(np.float32)),
                "tokens": torch.tensor(tokens, dtype=torch.int32),
                "prompts": torch.tensor(prompts, dtype=torch.int32),
                "prompt_lengths": torch.tensor([len(prompt) for _, prompt, _ in rows], dtype=torch.int32),
            }
            writer.add([record for record, _, _ in rows], tensors)
    return folder


def _problem(rng: np.random.Generator, name: str, num_traces: int, number: int) -> tuple:
    prompt = rng.integers(12, 20, size=int(rng.integers(3, 8))).tolist()
    records, traces = [], []
    for trace in range(num_traces):
        is_right = trace % 2 == 0 and number % 6 != 5
        tail = [*rng.integers(12, 20, size=int(rng.integers(0, 5))).tolist(), GOOD if is_right else BAD]
        traces.append([*_thoughts(rng, is_right), *tail, EOS])
        answer = "7" if is_right else str(rng.integers(8, 11))
        records.append(TraceRecord(answer=answer, is_correct=is_right, num_tokens=len(traces[-1]),
                                   num_thoughts=NUM_THOUGHTS, end="stop"))  # fmt: skip
    return ProblemRecord(id=name, question=name, gold="7", traces=tuple(records)), prompt, traces


def _thoughts(rng: np.random.Generator, is_right: bool) -> list[int]:
    found = []
    for thought in range(NUM_THOUGHTS):
        body = rng.integers(12, 20, size=STEP_TOKENS - 1).tolist()
        if thought >= 2:
            body[0] = GOOD if is_right else BAD
        found += [*body, BREAK]
    return found


QUESTION = "a=1; b=2; c?"
THOUGHTS = ["First, a+b=3.\nSo c is 3.\n\n", "Wait, c was\nnot given.\n\n", "c=4.\n\n"]


CLOSE = {"rel": 1e-4, "abs": 1e-6}


def readings(thoughts=THOUGHTS, question=QUESTION):
    """As a search hands them over, one per thought; the generator is a model of letters, too."""
    encode = letters().encode
    prompt, made, tokens, ends = encode(question, add_special_tokens=False), [], [], []
    for number, thought in enumerate(thoughts, start=1):
        tokens += encode(thought, add_special_tokens=False)
        ends.append(len(tokens))
        made.append(make_reading(prompt, tokens, ends, thoughts[:number], question))
    return made
