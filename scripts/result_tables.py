"""Makes the tables of results in docs/results from the results themselves. Run it to renew them.

A page has a table between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, for each NAME in TABLES.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
NONE = "–"


# -- numbers ---------------------------------------------------------------------------------------------------------


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def number(value: float, digits: int = 1, sign: bool = False) -> str:
    """Returns the number with a true minus; what rounds to zero has no sign."""
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    return text.lstrip("+-") if not text.strip("+-0.,") else text.replace("-", "−")


def span(low: float, high: float, digits: int = 1) -> str:
    between = "–" if low >= 0 else " to "
    return f"({number(low, digits)}{between}{number(high, digits)})"


def share(interval: Sequence[float]) -> str:
    """Returns a percentage with its interval."""
    value, low, high = interval
    return f"{number(value)} % {span(low, high)}"


def gain(interval: Sequence[float], digits: int = 1) -> str:
    """Returns a difference with its interval."""
    value, low, high = interval
    return f"{number(value, digits, sign=True)} {span(low, high, digits)}"


def ends(interval: dict[str, float], factor: float = 100) -> list[float]:
    return [factor * interval[end] for end in ("value", "low", "high")]


def auc(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3f}"


def auc_span(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3f} ({interval['low']:.3f}–{interval['high']:.3f})"


def change(ratio: dict[str, float] | None, with_interval: bool = True) -> str:
    """Returns the change of a cost against voting."""
    if ratio is None:
        return NONE
    value, low, high = (each - 100 for each in ends(ratio))
    if not with_interval:
        return f"{number(value, 0, sign=True)} %"
    return f"{number(value, sign=True)} % {span(low, high)}"


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. Columns are divided by `|`."""
    names = [name.strip() for name in columns.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(report: Any, benchmark: str | None = None) -> dict[str, Any]:
    """Returns the cells of a bench report by method."""
    return {cell["variant"]: cell for cell in report["cells"] if benchmark in (None, cell["benchmark"])}


def against(report: Any, method: str, benchmark: str | None = None, other: str = "sc") -> list[float]:
    """Returns a method's gain over another in points, whichever of them the report names first."""
    for each in report["comparisons"]:
        if benchmark in (None, each["benchmark"]) and {each["first"], each["second"]} == {method, other}:
            value, low, high = ends(each["gain"])
            return [value, low, high] if each["first"] == method else [-value, -high, -low]
    raise KeyError(method)


# -- pawn ------------------------------------------------------------------------------------------------------------


def pawn_votes() -> str:
    methods = read("islands_noise.json")["methods"]
    names = {
        "sc": "majority",
        "best-of-n": "best of n",
        "sc, score vote (STEP)": "score vote (STEP's)",
        "sc, position vote": "position vote",
        "1 island, shipped": "Gambit, 1 island",
        "gambit, shipped": "**Gambit, 4 islands (default)**",
    }
    rows = []
    for name, label in names.items():
        found = methods[name]
        difference = NONE if name == "sc" else gain(found["against sc"])
        tokens = 100 * found["tokens_against_sc"]
        rows.append([label, share(found["accuracy"]), difference, f"{number(found['one_trace_right'])} %",
                     f"{number(tokens)} %"])  # fmt: skip
    return table("method | accuracy | against the majority | pass@1 | tokens", rows)


def pawn_methods() -> str:
    report = read("pawn_policies/report.json")
    names = {"single": "one trace", "sc": "voting (`sc`)", "deepconf": "DeepConf", "slim-sc": "Slim-SC",
             "best-of-n": "best of n", "step": "STEP", "gambit": "**Gambit**, 4 islands"}  # fmt: skip
    found = cells(report)
    rows = [
        [label, share(ends(found[name]["accuracy"])), NONE if name == "sc" else gain(against(report, name)),
         change(found[name]["token_ratio"], with_interval=False), number(found[name]["completed"], 0),
         f"{number(100 * found[name]['trace_accuracy']['value'])} %"]
        for name, label in names.items()
    ]  # fmt: skip
    return table("method | accuracy | against voting | tokens | completed | pass@1", rows)


def pawn_eleven() -> str:
    needs = {"step": "scores, a full KV cache", "deepconf": "token confidence", "slim-sc": "states or an embedder",
             **dict.fromkeys(("gambit", "beam-search", "dvts", "particle-filtering"), "scores")}  # fmt: skip
    rows = []
    for name, cell in cells(read("pawn_methods/report.json")).items():
        policy, _, more = name.partition(", ")
        scored = NONE if name == "single" else share(ends(cell["revotes"]["score"]))
        rows.append([f"`{policy}`" + f", {more}" * bool(more), needs.get(name, NONE), share(ends(cell["accuracy"])),
                     scored, number(cell["tokens"]["value"], 0)])  # fmt: skip
    return table("`--policy` | needs | accuracy, own vote | accuracy, `--vote score` | tokens a puzzle", rows)


def pawn_rounds() -> str:
    report = read("pawn_rounds/report.json")
    names = {"sc": "voting", "sc-rounds-0.6": "voting in rounds, share 0.6", "gambit": "Gambit, 4 islands",
             "gambit-rounds-0.6": "Gambit in rounds, share 0.6",
             "gambit-rounds-0.8": "Gambit in rounds, share 0.8"}  # fmt: skip
    found = cells(report)
    rows = [
        [label, share(ends(found[name]["accuracy"])), NONE if name == "sc" else gain(against(report, name)),
         change(found[name]["token_ratio"])]
        for name, label in names.items()
    ]  # fmt: skip
    return table("method | accuracy | against voting | tokens", rows)


def pawn_forced() -> str:
    names = {"sc": "voting", "gambit": "Gambit"}
    kinds = ("none", "forced", "C/2", "C/4")
    rows = [
        [f"{names[row['policy']]}, {number(100 * row['share'], 0)} %",
         *(f"{number(row['right'][kind][0], 0)} %" for kind in kinds)]
        for row in read("forced_answers.json")["table"]
    ]  # fmt: skip
    return table("budget | not forced | forced | 8 traces | 4 traces", rows)


def pawn_prefix() -> str:
    names = ("rollouts", "mlp", "confidence")
    rows = []
    for cut in read("prefix_value_pawn/report.json")["cuts"]:
        rank = {name: next(each for each in cut["judges"] if each["name"].startswith(name)) for name in names}
        rows.append([f"{100 * cut['fraction']:g} %", share(ends(cut["decided"])), *(auc(rank[n]["auc"]) for n in names),
                     gain(ends(rank["rollouts"]["gain"])), gain(ends(rank["mlp"]["gain"]))])  # fmt: skip
    columns = "cut at | decided by the prefix | AUC of 4 rollouts | pawn's scorer | confidence | gain by rollouts"
    return table(f"{columns} | gain by the scorer", rows)


# -- the real LLM ----------------------------------------------------------------------------------------------------


def llm_votes() -> str:
    found = read("llm_verifier_votes.json")
    rows = []
    for count in ("4", "8", "16"):
        row = [count]
        for name in ("test", "other"):
            votes = found[name]["outcomes"]
            row.append(f"{number(found[name]['majority'][count][0])} → {number(votes['vote'][count][0])} %")
            row.append(gain(votes["against_majority"][count]))
        rows.append([*row, f"**{gain(found['together']['outcomes'][count])}**"])
    return table("traces | MATH-500, 200 problems | difference | GSM8K, 300 problems | difference | both", rows)


def llm_searches() -> str:
    rows = []
    for folder, label in (("ample", "ample"), ("quarter", "a quarter")):
        report = read(f"llm_verifier_search/{folder}/report.json")
        for benchmark, name in (("math500_dev", "MATH-500"), ("gsm8k_dev", "GSM8K")):
            found = cells(report, benchmark)
            plain, ours = found["sc"], found["gambit"]
            rows.append([
                label, name, *(f"{number(100 * each['accuracy']['value'])} %" for each in (plain, ours)),
                gain(against(report, "gambit", benchmark)),
                " → ".join(number(100 * each["trace_accuracy"]["value"]) for each in (plain, ours)) + " %",
                f"{number(100 * ours['token_ratio']['value'] - 100, sign=True)} %",
                f"{plain['engine_seconds']:.2f} → {ours['engine_seconds']:.2f}",
            ])  # fmt: skip
        [both] = [each["gain"] for each in report["overall"] if each["variant"] == "gambit"]
        rows.append([label, "**both**", "", "", f"**{gain(ends(both))}**", "", "", ""])
    return table("KV cache | problems | voting | Gambit | difference | pass@1 | tokens | engine-seconds", rows)


def llm_rounds() -> str:
    report = read("llm_verifier_rounds/search/report.json")
    rows = []
    for benchmark, name in (("math500_dev", "MATH-500, 200, two seeds"), ("gsm8k_dev", "GSM8K, 300, one seed")):
        found = cells(report, benchmark)
        accuracies = [f"{number(100 * found[method]['accuracy']['value'])} %" for method in ("sc", "gambit")]
        difference = gain(against(report, "gambit", benchmark))
        rows.append([name, *accuracies, difference, change(found["gambit"]["token_ratio"])])
    [both] = [each["gain"] for each in report["overall"] if each["variant"] == "gambit"]
    rows.append(["**both**", "", "", f"**{gain(ends(both))}**", ""])
    return table("problems | voting | Gambit in rounds | difference | tokens", rows)


def llm_methods() -> str:
    report = read("llm_policies/report.json")
    names = {"single": "one trace", "sc": "voting (`sc`)", "slim-sc": "Slim-SC", "deepconf": "DeepConf",
             "step": "STEP", "gambit": "**Gambit**"}  # fmt: skip
    rows = []
    for name, label in names.items():
        row = [label]
        for benchmark in ("math500_dev", "gsm8k_dev"):
            cell = cells(report, benchmark)[name]
            row += [share(ends(cell["accuracy"])), change(cell["token_ratio"], with_interval=False),
                    f"{number(100 * cell['trace_accuracy']['value'], 0)} %",
                    number(cell["completed_per_second"])]  # fmt: skip
        rows.append(row)
    return table("method | MATH-500 | tokens | pass@1 | traces/s | GSM8K | tokens | pass@1 | traces/s", rows)


def llm_prefix() -> str:
    rows = []
    for cut in read("prefix_value_llm/report.json")["cuts"]:
        rank = {each["name"]: each for each in cut["judges"]}
        rows.append([f"{100 * cut['fraction']:g} %", share(ends(cut["decided"])),
                     *(auc_span(rank[name]["auc"]) for name in ("rollouts", "confidence")),
                     gain(ends(rank["rollouts"]["gain"])), gain(ends(rank["confidence"]["gain"]))])  # fmt: skip
    columns = "cut at | decided by the prefix | AUC of 4 rollouts | confidence | gain by rollouts | by confidence"
    return table(columns, rows)


def chains_ranking() -> str:
    judged = read("long_chains/judge.json")["chains"]["judged"]
    names = {
        "mlp/line/19/balanced": "**two layers (the scorer of the search)**",
        "log-probability": "mean log-probability of the tokens so far",
        "shorter": "fewer tokens so far",
        "error so far": "*a step was wrong so far (known to the generator alone)*",
    }
    rows = []
    for name, label in names.items():
        found = [judged[name][f"answered {at}%"] for at in (25, 50, 75, 100)]
        rows.append([label, *(f"{value:.3f} ({low:.3f}–{high:.3f})" for value, low, high in found)])
    return table("score | AUC at 25 % of the tokens | 50 % | 75 % | 100 %", rows)


def chains_search() -> str:
    found = read("long_chains/comparison.json")
    rows = [
        [
            label,
            *(f"{number(100 * gap[name])} %" for name in ("sc", "gambit")),
            _gain(gap),
            f"{gap['won']} : {gap['lost']}",
        ]
        for label, gap in (
            ("**accuracy**: majority of plain traces, Gambit's own vote", found["primary"]),
            ("both by majority", found["the same vote"]["majority"]),
            ("both weighed by score", found["the same vote"]["score"]),
            ("plain traces weighed by score, Gambit's own vote", found["secondary"]["score vote"]),
            ("plain traces weighed by position, Gambit's own vote", found["secondary"]["position vote"]),
            ("pass@1", found["secondary"]["pass@1"]),
        )
    ]
    for label, pair in (("tokens", found["tokens"]), ("decode steps", found["decode steps"])):
        change = f"{number(100 * (pair['gambit'] / pair['sc'] - 1))} %"
        rows.append([label, f"{pair['sc']:,}", f"{pair['gambit']:,}", change, ""])
    spans = [found["seconds"][name]["seconds a problem"] for name in ("sc", "gambit")]
    ratio = [100 * (each - 1) for each in found["seconds"]["gambit / sc"]]
    rows.append(["seconds a problem, one of three engines", *(f"{each:.2f}" for each in spans), gain(ratio) + " %", ""])
    return table("64 traces, 480 problems | plain sampling | Gambit | difference | won : lost", rows)


def _gain(gap: dict[str, Any]) -> str:
    return gain([100 * each for each in gap["difference"]])


def chains_difficulty() -> str:
    rows = []
    for each in read("long_chains/comparison.json")["by difficulty"]:
        low, high = (f"{100 * end:g}" for end in each["right traces"])
        shares = [f"{number(100 * each[name])} %" for name in ("half of sc", "gambit")]
        rows.append([f"{low} to {high} %", f"{each['problems']:.0f}", *shares, _gain(each)])
    return table("right traces | problems | 32 plain traces | Gambit, 64 | difference", rows)


# -- scorers ---------------------------------------------------------------------------------------------------------


def simulated() -> str:
    kinds: list[dict[str, Any]] = [
        {"method": "plain"},
        {"islands": 4, "warmup": 120, "margin": 0.0},
        {"islands": 4, "warmup": 120, "margin": 2.0},
        {"islands": 1, "warmup": 120, "margin": 1.0},
    ]
    found = read("simulated_search.json")["rows"]
    rows = []
    for value in sorted({row["auc"] for row in found}):
        here = [row for row in found if row["auc"] == value]
        each = [next(row for row in here if kind.items() <= row.items()) for kind in kinds]
        rows.append([f"{value:.2f}", *(gain(row["against_majority"]) for row in each)])
    columns = "AUC half-way | scored vote, no search | 4 islands, no margin | 4 islands, margin 2 | 1 island, margin 1"
    return table(columns, rows)


def verifiers() -> str:
    rows = []
    for name, problems in (("llm_verifier", "841"), ("llm_verifier_more_problems", "1,546")):
        found = {each["name"]: each for each in read(f"{name}.json")["rankings"]}
        names = {"token confidence": "token confidence", "lora": "verifier", "stack": "stack of three"}
        for key, label in names.items():
            values = [auc(found[key]["auc"][at]) for at in ("0.25", "0.5", "0.75", "1")]
            rows.append([problems, label, auc_span(found[key]["mean_auc"]), *values])
    return table("trained on | scorer | mean AUC | 25 % | 50 % | 75 % | 100 %", rows)


def state_scorers() -> str:
    names = {"mlp-ridge": "`ridge`, the best of nine", "mlp-published": "STEP's recipe",
             "token confidence": "token confidence, no training"}  # fmt: skip
    found = {each["name"]: each for each in read("llm_scorers.json")["rankings"]}
    rows = [[label, auc_span(found[name]["mean_auc"]), *(auc(found[name]["auc"][at]) for at in ("0.25", "0.5", "0.75"))]
            for name, label in names.items()]  # fmt: skip
    return table("scorer | mean AUC | 25 % | 50 % | 75 %", rows)


def noisy() -> str:
    methods = read("islands_noise.json")["methods"]
    rows = []
    for level in ("0.75", "0.65", "0.55", "0.5"):
        for trust, claims in (("true", "its own"), ("wrong", "0.82")):
            found = methods[f"gambit, AUC {level}, {trust} trust"]
            islands = ", ".join(f"{count} in {number(n, 0)}" for count, n in found["islands"].items())
            label = "0.52, useless" if level == "0.5" else level
            rows.append([label, claims, islands, share(found["accuracy"]), gain(found["against sc"])])
    return table("AUC half-way | AUC it claims | islands at the end, of 900 searches | accuracy | against voting", rows)


def reversed_scorers() -> str:
    methods = read("reversed_scorer.json")["methods"]
    names = {"gambit, shipped": "shipped", "gambit, noise 1": "noise of 1 on its logit",
             "gambit, random 0": "last layer in a random direction", "gambit, negative": "reversed",
             "gambit 32, shipped": "shipped, `--islands 32`",
             "gambit 32, negative": "reversed, `--islands 32`",
             "gambit, shipped, in a bench": "shipped, half the KV cache",
             "sc, shipped, in a bench": "shipped, plain traces"}  # fmt: skip
    votes = ("position", "majority", "counts below 0.4")
    rows = [
        [label, str(methods[name]["searches"]), *(f"{number(methods[name]['right'][vote][0], 0)} %" for vote in votes),
         gain(methods[name]["change"]["counts below 0.4"]), f"{number(methods[name]['islands_apart'], 0)} %"]
        for name, label in names.items()
    ]  # fmt: skip
    return table(
        "scorer | puzzles | accuracy | same traces counted | counted where the winner has under 40 % | which changes "
        "(points) | searches that warn of islands apart", rows
    )  # fmt: skip


# -- speed -----------------------------------------------------------------------------------------------------------


def vllm_speed() -> str:
    names = {
        "gpu_speed_house": "Qwen3-4B",
        "gpu_speed": "Qwen3-4B *(earlier code)*",
        "gpu_speed_phi4": "Phi-4-14B *(earlier code)*",
        "gpu_speed_8b": "Qwen3-8B *(earlier code)*",
        "gpu_speed_pawn": "pawn, limited by the host *(earlier code)*",
    }
    rows = []
    for name, label in names.items():
        overhead = read(f"{name}.json")["overhead"]
        ratios = [overhead[kind]["ratio"] for kind in ("scoring", "gambit")]
        shares = [share([100 * each for each in (ratio["median"], *ratio["interval"])]) for ratio in ratios]
        rows.append([f"{label} ([result](../../benchmarks/results/{name}.json))", *shares, str(overhead["rounds"])])
    return table("shape | scoring, share of stock vLLM's tokens/s | with tournaments | rounds", rows)


def forest() -> str:
    small, large = (read(f"forest_speed_qwen3-{size}.json") for size in ("4b", "8b"))
    rows = []
    for name in ("small", "middle", "large", "islands", "unshared"):
        part = small[name]
        sharing = part.get("sharing") or float(part["case"].rpartition(" ")[2])
        steps = [sorted(part[kind]["ms_per_step"]) for kind in ("stock", "forest")]
        times = [sum(each) / 2 if len(each) == 2 else each[len(each) // 2] for each in steps]
        ideal = f"{number(part['ideal_attention_ms'])} ms" if "ideal_attention_ms" in part else NONE
        other = f"{large[name]['forest / stock']:.2f} ×" if name in large else NONE
        rows.append([part["case"].partition(", sharing")[0] + ", 32 islands" * (name == "islands"), f"{sharing:.1f}",
                     f"{number(times[0])} → {number(times[1])} ms", f"**{part['forest / stock']:.2f} ×**",
                     ideal, other])  # fmt: skip
    columns = "traces × tokens | sharing | Qwen3-4B: stock → forest | speed | ideal attention alone | Qwen3-8B"
    return table(columns, rows)


def forest_search() -> str:
    found = read("forest_speed_qwen3-8b.json")["search"]
    names = {"sc, 1 islands, stock": "voting, stock attention", "gambit, 1 islands, stock": "Gambit, 1 island, stock",
             "gambit, 1 islands, auto": "Gambit, 1 island, `auto`",
             "gambit, 32 islands, auto": "Gambit, 32 islands, `auto`"}  # fmt: skip
    rows = [
        [label, f"{number(run['seconds_after_warmup'])} s", f"{number(run['seconds'])} s", number(run["steps"], 0),
         number(run["forest_steps"], 0), str(run["branched"])]
        for name, label in names.items()
        if (run := found["runs"][name])
    ]  # fmt: skip
    return table("search | after the warm-up | in all | steps | with forest attention | branched", rows)


def cpu() -> str:
    names = {"cpu_speed": "pawn, scored", "cpu_speed_without_gcc": "pawn, scored, without GCC",
             "cpu_speed_0.5b": "Qwen2.5-Coder-0.5B, float32, not scored"}  # fmt: skip
    rows = []
    for name, label in names.items():
        found = read(f"{name}.json")
        ratios = [found["ratios"][f"local / {other}"] for other in ("vllm", "generate")]
        times = [
            f"{each['median']:.2f} × ({each['interval_95'][0]:.2f}–{each['interval_95'][1]:.2f})" for each in ratios
        ]
        rows.append([f"{label} ([result](../../benchmarks/results/{name}.json))", *times,
                     number(found["tokens_per_second"]["local"]["median"], 0),
                     str(len(ratios[0]["rounds"]))])  # fmt: skip
    return table("model | against vLLM's CPU build | against transformers' `generate` | tokens/s | rounds", rows)


TABLES: dict[str, Callable[[], str]] = {
    "pawn-votes": pawn_votes, "pawn-methods": pawn_methods, "pawn-eleven": pawn_eleven, "pawn-rounds": pawn_rounds,
    "pawn-forced": pawn_forced, "pawn-prefix": pawn_prefix, "llm-votes": llm_votes, "llm-searches": llm_searches,
    "llm-rounds": llm_rounds, "llm-methods": llm_methods, "llm-prefix": llm_prefix,
    "chains-ranking": chains_ranking, "chains-search": chains_search,
    "chains-difficulty": chains_difficulty,
    "simulated": simulated, "state-scorers": state_scorers, "verifiers": verifiers, "noisy": noisy,
    "reversed": reversed_scorers,
    "vllm-speed": vllm_speed, "forest": forest, "forest-search": forest_search, "cpu": cpu,
}  # fmt: skip


def renewed(page: str, tables: dict[str, Callable[[], str]] = TABLES) -> str:
    """Returns the page with each table between its two marks."""
    for name, made in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            page = f"{before}{begin}\n{made()}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    for path in PAGES.glob("*.md"):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
