"""`gambit policies`: the search methods and their options, as their own models describe them."""

import inspect
import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gambit.cli.terminal import OK, put, warn
from gambit.config import registry
from gambit.config.trust import RULES
from gambit.errors import UserError
from gambit.search.choice import GROUP, load_policy, options_model
from gambit.types import count_of


def policies(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per policy.")] = False) -> int:
    """List the search methods with their options (for `solve --policy NAME --policy-option KEY=VALUE`)."""
    for name in registry.names(GROUP):
        try:
            described = _describe(name)
        except UserError as error:  # in a package of somebody else's
            warn(str(error))
        else:
            typer.echo(json.dumps(described)) if as_json else _put_policy(described)
    return OK


def _describe(name: str) -> dict[str, object]:
    policy = load_policy(name)
    options = {
        key: {"default": field.get_default(call_default_factory=True), "description": field.description or ""}
        for key, field in options_model(policy).model_fields.items()
    }
    about = inspect.cleandoc(policy.__doc__ or "")
    found: dict[str, object] = {"policy": name, "vote": str(policy.default_vote), "about": about, "options": options}
    return found | ({"auto": _automatic_pools()} if name == "gambit" else {})


def _put_policy(described: dict[str, object]) -> None:
    about, options = described["about"], described["options"]
    assert isinstance(about, str) and isinstance(options, dict)
    first = " ".join(about.partition("\n\n")[0].split())
    put(Text.assemble((str(described["policy"]), "bold"), f"  {first}"))
    table = Table.grid(padding=(0, 2))
    for key, option in options.items():
        table.add_row("", f"{key}={option['default']}", Text(str(option["description"])))
    for line in _automatic_pools() if described["policy"] == "gambit" else ():
        table.add_row("", "", Text(line))
    if table.row_count:
        put(table)


def _automatic_pools() -> list[str]:
    """Describes the rules by which `--islands auto` splits a pool."""
    lines = [
        "islands, swaps and warm-up that are left open follow from the AUC at half-way in the scorer's checkpoint:"
    ]
    for rule in RULES:
        aucs = f"{rule.from_auc:g} and more" if rule.from_auc else "less, or unknown"
        share = f", warm-up of at least {rule.least_warmup:.0%} of a trace" if rule.least_warmup else ""
        swaps = count_of(rule.swaps_per_island, "swap")
        lines.append(f"  {aucs}: islands of {rule.island_size} traces, {swaps} in each{share}")
    return lines
