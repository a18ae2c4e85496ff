"""Makes the pictures of results that README and docs show, from the results themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gambit.results.dots import Dot, dot_plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PAWN_METHODS = {
    "sc": "majority of 64 chains",
    "best-of-n": "best-scored of them",
    "sc, score vote (STEP)": "weighted by score",
    "sc, position vote": "… later thoughts more",
    "1 island, shipped": "Gambit, one pool",
    "gambit, shipped": "Gambit",
}
LLM_SEARCHES = {
    "llm_verifier_search/ample": "Gambit",
    "llm_verifier_search/quarter": "Gambit, ¼ KV cache",
    "llm_verifier_rounds/search": "Gambit, in rounds",
}


def pawn() -> str:
    methods = _read("islands_noise.json")["methods"]
    dots = [Dot(label, *methods[name]["accuracy"], is_ours=label == "Gambit") for name, label in PAWN_METHODS.items()]
    return str(dot_plot("pawn, 300 unseen puzzles: accuracy", dots))


def llm() -> str:
    votes = _read("llm_verifier_votes.json")["together"]["outcomes"]
    dots = [Dot(f"verifier's vote, {n} chains", *votes[n]) for n in ("4", "8", "16")]
    for folder, label in LLM_SEARCHES.items():
        [gain] = [each["gain"] for each in _read(f"{folder}/report.json")["overall"] if each["variant"] == "gambit"]
        dots.append(Dot(label, *(round(100 * gain[end], 1) for end in ("value", "low", "high")), is_ours=True))
    return str(dot_plot("Qwen2.5-Coder-1.5B: points above majority voting", dots, unit="", is_difference=True))


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


PICTURES = {"results-pawn.svg": pawn, "results-llm.svg": llm}

if __name__ == "__main__":
    for name, made in PICTURES.items():
        (DOCS / name).write_text(made() + "\n", encoding="utf-8")
