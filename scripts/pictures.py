"""Makes the pictures of results that README and docs show, from the results themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from scripts.charts import Axis, Point, Series, chart

from gambit.results.dots import Dot, dot_plot, stacked
from gambit.results.html import Markup

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
PAWN_VOTES = {
    "sc": "majority of 64 chains",
    "best-of-n": "best-scored of them",
    "sc, score vote (STEP)": "weighted by score",
    "sc, position vote": "… later thoughts more",
    "1 island, shipped": "Gambit, one pool",
    "gambit, shipped": "Gambit",
}
PAWN_METHODS = {
    "single": "one chain",
    "deepconf": "DeepConf",
    "slim-sc": "Slim-SC",
    "sc": "majority voting",
    "best-of-n": "best of n",
    "step": "STEP",
    "gambit": "Gambit",
}
LLM_SEARCHES = {
    "llm_verifier_search/ample": "Gambit + verifier, ample cache",
    "llm_verifier_search/quarter": "Gambit + verifier, ¼ of the cache",
    "llm_verifier_rounds/search": "Gambit + verifier, in rounds",
}
LLM_SETS = {"math500_dev": "Gambit + weak scorer, MATH", "gsm8k_dev": "Gambit + weak scorer, GSM8K"}
ROUNDS = {
    "sc": ("voting", (-10, 22, "end")),
    "sc-rounds-0.6": ("voting in rounds", (-10, 22, "end")),
    "gambit": ("Gambit", (-12, 5, "end")),
    "gambit-rounds-0.6": ("Gambit in rounds, share 0.6", (-40, 52, "start")),
    "gambit-rounds-0.8": ("share 0.8", (10, 5, "start")),
}
SIMULATED = (
    ({"method": "plain"}, "", "vote, simulated"),
    ({"islands": 1, "warmup": 120, "margin": 1.0}, "other", "search, simulated"),
)
PAWN_SCORERS = ("0.5, true trust", "0.55, true trust", "0.65, true trust", "0.75, true trust", "shipped")
SPEEDS = {"gpu_speed": "Qwen3-4B", "gpu_speed_phi4": "Phi-4-14B", "gpu_speed_8b": "Qwen3-8B, earlier code"}
FOREST_PARTS = ("unshared", "islands", "small", "middle", "large")


def votes() -> Markup:
    methods = _read("islands_noise.json")["methods"]
    dots = [Dot(label, *methods[name]["accuracy"], is_ours=label == "Gambit") for name, label in PAWN_VOTES.items()]
    return dot_plot("pawn, 300 unseen puzzles: accuracy", dots)


def methods() -> Markup:
    found = {cell["variant"]: cell["accuracy"] for cell in _read("pawn_policies/report.json")["cells"]}
    dots = [Dot(label, *_percent(found[name]), is_ours=name == "gambit") for name, label in PAWN_METHODS.items()]
    return dot_plot("pawn, 300 unseen puzzles: accuracy", dots)


def llm() -> Markup:
    judged = _read("llm_verifier_votes.json")["together"]["outcomes"]
    dots: list[Dot | str] = ["votes without a search, above the majority of the same chains"]
    dots += [Dot(f"verifier's vote, {n} chains", *judged[n]) for n in ("4", "8", "16")]
    dots.append("searches, above the majority of plain chains in the same cache")
    for folder, label in LLM_SEARCHES.items():
        [gain] = [each["gain"] for each in _read(f"{folder}/report.json")["overall"] if each["variant"] == "gambit"]
        dots.append(Dot(label, *_percent(gain), is_ours=True))
    compared = _read("llm_policies/report.json")["comparisons"]
    for name, label in LLM_SETS.items():
        [gain] = [each["gain"] for each in compared
                  if (each["benchmark"], each["first"], each["second"]) == (name, "gambit", "sc")]  # fmt: skip
        dots.append(Dot(label, *_percent(gain), is_ours=True))
    gain = _read("long_chains/comparison.json")["primary"]["difference"]
    dots.append(Dot("Gambit, long chains", *(round(100 * each, 1) for each in gain), is_ours=True))
    return dot_plot("Qwen2.5-Coder-1.5B-Instruct: points above voting", dots, unit="", is_difference=True)


def tokens() -> Markup:
    cells = {cell["variant"]: cell for cell in _read("pawn_rounds/report.json")["cells"]}
    series = [
        Series([Point(cells[name]["tokens"]["value"] / 1000, *_percent(cells[name]["accuracy"]), *label)],
               "ours" if name.startswith("gambit") else "other")
        for name, label in ROUNDS.items()
    ]  # fmt: skip
    x = Axis("thousand tokens a puzzle", (0, 4, 8, 12, 16))
    return chart("pawn, 150 puzzles: accuracy over tokens", x, Axis("accuracy, %", (60, 70, 80, 90, 100)), series)


def chains() -> Markup:
    found = _read("long_chains/comparison.json")
    plain = [Point(each["tokens"] / 1000, 100 * each["accuracy"]) for each in found["plain votes"]]
    plain[-1] = plain[-1]._replace(label="voting, 1 to 64 chains", label_at=(0, 32, "end"))
    accuracy = [100 * each for each in found["accuracy"]["gambit"]]
    ours = Point(found["tokens"]["gambit"] / 1000, *accuracy, "Gambit, 64 places", (-10, -4, "end"))
    series = [Series(plain, "", is_line=True), Series([ours], "ours")]
    x, y = Axis("thousand tokens a problem", (0, 20, 40, 60)), Axis("accuracy, %", (30, 50, 70, 90))
    return chart("Long chains, Qwen2.5-Coder-1.5B-Instruct, 480 problems", x, y, series)


def scorer() -> Markup:
    rows = _read("simulated_search.json")["rows"]
    simulated = []
    for wanted, kind, label in SIMULATED:
        points = [Point(row["auc"], row["against_majority"][0]) for row in rows if wanted.items() <= row.items()]
        points[-1] = points[-1]._replace(label=label)
        simulated.append(Series(points, kind, is_line=True))
    x = Axis("AUC of the scorer half-way through a chain", (0.5, 0.6, 0.7, 0.8, 0.9, 1))
    y = Axis("points above majority voting", (-5, 0, 5, 10, 15, 20, 25, 30, 35))
    title = "What a search gains, by its scorer"
    return chart(title, x, y, [*simulated, Series(_gains_on_pawn(), "ours", is_line=True), Series(_gains(), "ours")])


def _gains_on_pawn() -> list[Point]:
    """Returns what Gambit gained on pawn with its own scorer and with four that noise was added to."""
    found = _read("islands_noise.json")
    points = []
    for name in PAWN_SCORERS:
        method = "gambit, shipped" if name == "shipped" else f"gambit, AUC {name}"
        points.append(Point(found["scorers"][name]["auc"]["0.5"], *found["methods"][method]["against sc"]))
    points[-1] = points[-1]._replace(label="pawn", label_at=(-12, 5, "end"))
    return points


def _gains() -> list[Point]:
    """Returns what Gambit gained on a real LLM, over the AUC of the scorers that steered it."""
    [verifier] = [each for each in _read("llm_verifier_more_problems.json")["rankings"] if each["name"] == "lora"]
    overall = _read("llm_verifier_search/ample/report.json")["overall"]
    [mathematics] = [each["gain"] for each in overall if each["variant"] == "gambit"]
    judged = _read("long_chains/judge.json")["chains"]["judged"]["mlp/line/19/balanced"]["answered 50%"]
    chains = _read("long_chains/comparison.json")["primary"]["difference"]
    return [
        Point(verifier["auc"]["0.5"]["value"], *_percent(mathematics), "mathematics", (-6, -10, "end")),
        Point(judged[0], *(100 * each for each in chains), "long chains", (6, 32, "middle")),
    ]


def speed() -> Markup:
    dots = []
    for name, label in SPEEDS.items():
        ratio = _read(f"{name}.json")["overhead"]["gambit"]["ratio"]
        dots.append(Dot(label, *(100 * each - 100 for each in (ratio["median"], *ratio["interval"])), is_ours=True))
    beside = dot_plot("Tokens per second, beside stock vLLM", dots, is_difference=True)
    series = []
    for shape, kind in (("4b", "ours"), ("8b", "other")):
        measured = _read(f"forest_speed_qwen3-{shape}.json")
        parts = sorted((measured[part] for part in FOREST_PARTS if part in measured), key=_sharing)
        points = [Point(_sharing(part), part["forest / stock"]) for part in parts]
        label_at = (-10, -8, "end") if kind == "ours" else (14, 20, "start")
        labelled = -1 if kind == "ours" else 0
        points[labelled] = points[labelled]._replace(label=f"Qwen3-{shape.upper()}", label_at=label_at)
        series.append(Series(points, kind, is_line=True))
    x = Axis("sharing: tokens read by stock attention for each one stored", (1, 2, 3, 4, 5, 6))
    y = Axis("decode steps, × stock attention", (0, 1, 2, 3, 4))
    return stacked([beside, chart("Forest attention, whole decode steps", x, y, series)])


def _sharing(part: Any) -> float:
    return float(part.get("sharing") or part["case"].rpartition(" ")[2])


def _percent(interval: Any) -> tuple[float, float, float]:
    value, low, high = (round(100 * interval[end], 1) for end in ("value", "low", "high"))
    return value, low, high


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def as_file(picture: Markup) -> str:
    """Returns the picture as the text of a file: as wide as its drawing, not as the page, and with true minus signs."""
    width, height = re.findall(r'viewBox="0 0 (\S+) (\S+)"', picture)[0]
    sized = picture.replace("max-width:560px;width:100%", "").replace(
        "<svg ", f'<svg width="{width}" height="{height}" ', 1
    )
    return re.sub(r">-(?=\d)", ">−", sized) + "\n"


PICTURES = {
    "votes": votes,
    "methods": methods,
    "llm": llm,
    "chains": chains,
    "tokens": tokens,
    "scorer": scorer,
    "speed": speed,
}

if __name__ == "__main__":
    for name, made in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(as_file(made()), encoding="utf-8")
