"""Records what search-and-learn and its_hub decide on random pools, for tests/golden/originals/peers.json.xz.

    python scripts/peer_decisions.py FOLDER_OF_SEARCH_AND_LEARN tests/golden/originals/peers.json.xz

Run it where its_hub is installed. Their own search functions run; the model, its verifier and their tokenizer are
stood in for by scripts. Scores of a pool are distinct, since their sorts leave ties open.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import lzma
import random
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

NUM_POOLS = 500


class Stood(ModuleType):
    """A library that their module imports and the recorded functions do not need."""

    def __getattr__(self, name: str) -> Any:
        return MagicMock()


def main(folder: Path, out: Path) -> None:
    sys.path.insert(0, str(folder / "src"))
    for name in ("vllm", "sal.models", "sal.models.reward_models", "datasets", "tqdm", "transformers", "sal.utils.math",
                 "huggingface_hub", "sal.utils.hub"):  # fmt: skip
        sys.modules[name] = Stood(name)
    sys.modules["tqdm"].tqdm = lambda each, **options: each  # type: ignore[attr-defined]
    rng = random.Random(40)
    record = {
        "source": {"search-and-learn": "6f81cac", "its_hub": version("its_hub")},
        "beam_search": [beam_case(rng) for _ in range(NUM_POOLS)],
        "dvts": [dvts_case(rng) for _ in range(NUM_POOLS)],
        "particle_filtering": [particle_case(rng, seed) for seed in range(NUM_POOLS)],
        "adaptive": [adaptive_case(rng) for _ in range(NUM_POOLS)],
    }
    out.write_bytes(lzma.compress(json.dumps(record, separators=(",", ":")).encode(), preset=9))


def distinct_scores(rng: random.Random, count: int) -> list[float]:
    return [score / 10_000 for score in rng.sample(range(1, 10_000), count)]


class Script:
    """A model that writes one given text after each conversation, and a verifier that returns given scores."""

    def __init__(self, texts: list[list[str]], ends: set[str], scores: list[list[list[float]]]) -> None:
        self.texts, self.ends, self.scores = texts, ends, scores
        self.seen: list[list[str]] = []  # the texts that were continued, by iteration

    def get_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(apply_chat_template=lambda convs, **options: convs, chat_template=None)

    def steps(self, convs: list[str], *others: object) -> list[SimpleNamespace]:
        self.seen.append(convs)
        texts = self.texts if len(self.seen) == 1 else [["end"] * len(self.texts[0]) for _ in convs]
        return [
            SimpleNamespace(
                next_texts=each,
                lookahead_texts=each,
                stop_reasons=["EOS" if text in (*self.ends, "end") else None for text in each],
                completion_tokens=0,
            )
            for each in texts
        ]

    def score(self, prompts: object, completions: list[list[str]]) -> list[list[list[float]]]:
        return self.scores if len(self.seen) == 1 else [[[0.5] for _ in each] for each in completions]


def run_theirs(module: Any, search: Any, script: Script, **settings: object) -> None:
    module.generate_k_steps = script.steps
    module.build_conv = lambda prompt, text, system: text
    config = SimpleNamespace(temperature=1, max_tokens=1, top_p=1, num_iterations=2, system_prompt="", lookahead=0,
                             custom_chat_template=None, agg_strategy="last", filter_duplicates=False,
                             sort_completed=False, **settings)  # fmt: skip
    search(["problem"], config, script, script)


def beam_case(rng: random.Random) -> dict[str, object]:
    theirs = importlib.import_module("sal.search.beam_search")  # the package hides it behind its function

    width = rng.choice([1, 2, 3, 4, 8])
    n = width * rng.randint(1, 32 // width)
    scores = distinct_scores(rng, n)
    ended = sorted(rng.sample(range(n), rng.choice([0, 0, rng.randint(0, n - 1)])))
    script = Script([[f"{i};"] for i in range(n)], {f"{i};" for i in ended}, [[[score]] for score in scores])
    run_theirs(theirs, theirs._beam_search, script, n=n, beam_width=width)
    continued = [int(text.rstrip(";")) for text in script.seen[1]]
    return {"width": width, "scores": scores, "ended": ended, "continued": continued}


def dvts_case(rng: random.Random) -> dict[str, object]:
    theirs = importlib.import_module("sal.search.diverse_verifier_tree_search")

    width, num_trees = rng.choice([2, 3, 4, 8]), rng.randint(1, 8)
    scores = distinct_scores(rng, width * num_trees)
    by_tree = [scores[tree * width : (tree + 1) * width] for tree in range(num_trees)]
    texts = [[f"{tree * width + i};" for i in range(width)] for tree in range(num_trees)]
    script = Script(texts, set(), [[[score] for score in tree] for tree in by_tree])
    run_theirs(theirs, theirs._dvts, script, n_beams=num_trees, beam_width=width)
    return {"width": width, "scores": scores, "continued": [int(text.rstrip(";")) for text in script.seen[1]]}


def particle_case(rng: random.Random, seed: int) -> dict[str, object]:
    import numpy as np
    from its_hub.core.algorithms.particle_gibbs import ParticleGibbs  # type: ignore[import-not-found]

    scores = distinct_scores(rng, rng.randint(1, 32))
    seen: list[list[str]] = []

    async def forward(lm: object, prompts: object, steps: list[list[str]], **options: object) -> list[Any]:
        seen.append([each[-1] if each else "" for each in steps])
        return [(str(i), len(seen) == 2) for i in range(len(steps))]

    async def score(prompt: object, texts: list[str]) -> list[float]:
        return scores if len(seen) == 1 else [0.5] * len(texts)

    generation = SimpleNamespace(aforward=forward, max_steps=2, _post_process=lambda steps, **options: steps[-1])
    # Their ParticleFiltering ignores its resampling_method; it is this class with one iteration.
    method = ParticleGibbs(
        generation, SimpleNamespace(ascore=score), num_ref_particles=0, resampling_method="systematic"
    )
    np.random.seed(seed)
    offset = np.random.uniform(0, 1)
    np.random.seed(seed)
    asyncio.run(method.ainfer(None, "problem", len(scores)))
    return {"scores": scores, "offset": offset, "continued": [int(each) for each in seen[1]]}


def adaptive_case(rng: random.Random) -> dict[str, object]:
    from its_hub.core.algorithms.beta_self_consistency import BetaSelfConsistency  # type: ignore[import-not-found]

    budget, confidence = rng.randint(2, 40), rng.choice([0.8, 0.9, 0.95, 0.99])
    weights = [rng.random() ** 3 for _ in range(rng.randint(1, 6))]
    answers = [str(each) for each in rng.choices(range(len(weights)), weights, k=budget)]
    order = iter(range(budget))

    async def generate(*others: object, **options: object) -> list[dict[str, str]]:
        number = next(order)
        for _ in range(10 * number):  # so that responses come one by one, in this order
            await asyncio.sleep(0)
        return [{"role": "assistant", "content": answers[number]}]

    method = BetaSelfConsistency(confidence, orchestrator=SimpleNamespace(agenerate=generate))
    result = asyncio.run(method.ainfer(None, "problem", budget, return_response_only=False))
    return {"confidence": confidence, "answers": answers, "stopped_after": len(result.responses)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
