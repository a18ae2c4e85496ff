"""Builders for the tests of verifiers: a tiny Qwen2, and collections of traces in which one token tells the outcome."""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from collected import header
from gambit.cli.app import app
from gambit.models.files import name_of, weight_hash
from gambit.training.storage import ProblemRecord, TraceRecord, state_name, writing
from tiny import tiny_tokenizer

HIDDEN = 32
EOS, BREAK, GOOD, BAD = 0, 5, 20, 21  # ids of the tiny tokenizer
STEP_TOKENS, NUM_STEPS = 5, 4
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
            count = NUM_STEPS * num_traces * len(rows)
            states = {state_name(layer, "boundary"): torch.randn(count, HIDDEN).half() for layer in LAYERS}
            tokens = [token for _, _, traces in rows for trace in traces for token in trace]
            prompts = [token for _, prompt, _ in rows for token in prompt]
            ends = [STEP_TOKENS * (i + 1) for i in range(NUM_STEPS)] * (num_traces * len(rows))
            tensors = {
                **states,
                "step_ends": torch.tensor(ends, dtype=torch.int32),
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
                                   num_steps=NUM_STEPS, end="stop"))  # fmt: skip
    return ProblemRecord(id=name, question=name, gold="7", traces=tuple(records)), prompt, traces


def _thoughts(rng: np.random.Generator, is_right: bool) -> list[int]:
    found = []
    for step in range(NUM_STEPS):
        body = rng.integers(12, 20, size=STEP_TOKENS - 1).tolist()
        if step >= 2:
            body[0] = GOOD if is_right else BAD
        found += [*body, BREAK]
    return found
