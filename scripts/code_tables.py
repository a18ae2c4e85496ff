"""Makes the tables of the docs that say what the code says: methods and trust. Run it to renew them."""

from __future__ import annotations

import inspect
from pathlib import Path

from scripts.result_tables import NONE, renewed, table

from gambit.config import registry
from gambit.config.trust import RULES, UNJUDGED, TrustRule
from gambit.search.choice import GROUP, load_policy, options_model

PAGES = Path(__file__).resolve().parents[1] / "docs"


def policies() -> str:
    """Returns the search methods, Gambit's first, each with the first paragraph of its docstring."""
    rows = []
    for name in sorted(registry.names(GROUP), key=lambda name: (not name.startswith("gambit"), name)):
        policy = load_policy(name)
        about = " ".join(inspect.cleandoc(policy.__doc__ or "").partition("\n\n")[0].split())
        defaults = {key: field.get_default(call_default_factory=True)
                    for key, field in options_model(policy).model_fields.items()}  # fmt: skip
        options = [f"`{key}`" + (f" ({value})" if value is not None else "") for key, value in defaults.items()]
        rows.append([f"`{name}`", about, ", ".join(options) or NONE, f"`{policy.default_vote}`"])
    return table("`--policy` | what it does | own options (default) | vote", rows)


def trust() -> str:
    """Returns what follows from the AUC half-way through a trace; C is the pool's size."""

    def row(label: str, rule: TrustRule) -> list[str]:
        warmup = "at least half a trace" if rule.least_warmup else "the preset's, or half a trace"
        floor = "0.1" if rule.has_floor else NONE
        return [label, f"C / {rule.island_size}", str(rule.swaps_per_island), f"{rule.margin:g}", floor, warmup]

    first, second, last = RULES
    rows = [
        row(f"{first.from_auc:g} or more", first),
        row(f"{second.from_auc:g} to {first.from_auc:g}", second),
        row("[published](scorers.md#published-scorers), not evaluated", UNJUDGED),
        row("below 0.7, judged on fewer than 20 problems, or unknown (as is token confidence)", last),
    ]
    return table("AUC half-way | islands | swaps in each | margin | hard floor | warm-up", rows)


TABLES = {"policies": policies, "trust": trust}

if __name__ == "__main__":
    for path in PAGES.glob("*.md"):
        path.write_text(renewed(path.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
