"""Tokens per second of the local engine beside transformers' `generate`, same model, same number of tokens.

    python benchmarks/local_speed.py [--out benchmarks/results/local_speed.json]

A 6 M-parameter Qwen3 of pawn's shape with random weights, a pool of 64 traces, 300 tokens each, temperature 1.
The two take turns, so that a noisy machine slows both; the figure is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gambit.engines.base import SearchSpec
from gambit.engines.local.engine import LocalEngine
from gambit.engines.local.model import PoolModel
from gambit.prompts import BoundaryRule
from gambit.scorers.base import ScorerInfo
from gambit.scorers.mlp import MlpScorer
from gambit.types import OnPressure, PressureAction, Sampling, TraceKey, TraceSpec

VOCABULARY, HIDDEN = 144, 256
BOUNDARY = 2  # one token in 144 ends a thought


def make_model(kv_heads: int = 4) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def make_engine(model: Qwen3ForCausalLM) -> LocalEngine:
    twin = Qwen3ForCausalLM(copy.deepcopy(model.config)).float().eval()
    twin.load_state_dict(model.state_dict())
    weights = (torch.randn(512, HIDDEN), torch.zeros(512), torch.randn(1, 512), torch.zeros(1))
    scorer = MlpScorer(ScorerInfo("mlp", hidden_size=HIDDEN), weights)
    return LocalEngine(PoolModel(twin, "random"), None, scorer)  # type: ignore[arg-type]  # no text is read here


def run_local(engine: LocalEngine, prompt: tuple[int, ...], pool: int, tokens: int) -> float:
    rule = BoundaryRule(VOCABULARY, frozenset({BOUNDARY}), frozenset(), frozenset(), None)
    began = time.perf_counter()
    engine.open(SearchSpec(1, prompt, rule, frozenset()))
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0)
    rule_of_loss = OnPressure(PressureAction.QUEUE)
    engine.submit([TraceSpec(TraceKey(1, trace), sampling, tokens, rule_of_loss) for trace in range(pool)])
    generated = sum(engine.step().searches[1].num_generated for _ in range(tokens))
    engine.close_search(1)
    assert generated == pool * tokens
    return generated / (time.perf_counter() - began)


def run_generate(model: Qwen3ForCausalLM, prompt: tuple[int, ...], pool: int, tokens: int) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=pool,
            max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
    assert out.shape == (pool, len(prompt) + tokens)
    return pool * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=80)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=4, help="8: as many as query heads, the most memory traffic")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = make_model(options.kv_heads)
    engine = make_engine(model)
    prompt = tuple(torch.randint(3, VOCABULARY, (options.prompt,)).tolist())
    run_local(engine, prompt, 4, 8)  # both warm
    run_generate(model, prompt, 4, 8)
    turns = []
    for turn in range(options.turns):
        local = run_local(engine, prompt, options.pool, options.tokens)
        generate = run_generate(model, prompt, options.pool, options.tokens)
        turns.append({"local": local, "generate": generate, "ratio": local / generate})
        print(f"turn {turn + 1}: local {local:7.0f} tokens/s, generate {generate:7.0f}, ratio {local / generate:.2f}")
    ratios = [turn["ratio"] for turn in turns]
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "median_ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "median_local_tokens_per_second": statistics.median(turn["local"] for turn in turns),
        "turns": turns,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(f"median ratio {report['median_ratio']:.2f} (range {min(ratios):.2f}–{max(ratios):.2f})")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
