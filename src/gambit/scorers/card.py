"""The card of a scorer on the hub: what it was made for, how it is used, and its own figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gambit.config.trust import SHARES, ScorerTrust, reason_for
from gambit.errors import UserError, first_line
from gambit.events import Json
from gambit.models.files import OFFLINE, SCHEME, SCORER_FILE, hub_address, is_offline, repository_of
from gambit.scorers.checkpoint import load_checkpoint, read_metadata

CARD_FILE = "README.md"
CARD = """---
library_name: gambit
tags:
- gambit
{base_line}---

# A scorer of thoughts for {base}

It reads hidden states of {base} at the end of each thought and says how promising the trace is, for searches by Gambit:

    gambit solve --model {base} --scorer {name} "…"

{facts}

## Figures

{figures}
"""
LABELS = {
    "base_model": "base model", "architecture": "architecture", "layers": "layers", "state_position": "state",
    "boundary_rule": "thoughts end at", "aggregation": "a trace's score",
}  # fmt: skip
KNOWN_OF_TRAINING = {
    "source": "trained on", "problem_set": "trained on", "objective": "objective", "imported_from": "imported from",
}  # fmt: skip


def card_of(path: Path, repository: str) -> str:
    """Returns the card of a checkpoint as Markdown, with the front matter that the hub reads."""
    info, metadata = load_checkpoint(path).info, read_metadata(path)
    base = info.base_model or "unknown"
    facts = {
        **facts_of({**metadata, "layers": list(info.layers)}), "hidden size": info.hidden_size,
        "weights of the base model": info.base_model_hash or "not recorded",
    }  # fmt: skip
    return CARD.format(
        base=base,
        base_line=f"base_model: {base}\n" if "/" in base else "",  # the hub knows its own names alone
        name=f"{SCHEME}{repository}",
        facts=_table(("", ""), *facts.items()),
        figures=_figures(info.trust),
    )


def facts_of(metadata: Mapping[str, Json]) -> dict[str, str]:
    """Returns what a checkpoint or a verifier was made for and from, by label, as far as its metadata has it."""
    found = metadata.get("training")
    training = found if isinstance(found, dict) else {}
    known = [(label, metadata.get(name)) for name, label in LABELS.items()]
    known += [(label, training.get(name)) for name, label in KNOWN_OF_TRAINING.items()]
    return {label: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for label, value in known if value}  # fmt: skip


def _figures(trust: ScorerTrust | None) -> str:
    if trust is None or not trust.num_problems:
        return "It was not judged: `gambit scorer eval --write` does that."
    heads = [f"{share:.0%} of a trace" for share in SHARES]
    aucs = ["unknown" if value is None else f"{value:.3f}" for value in trust.auc]
    return (f"How often it ranks a right trace above a wrong one of the same problem (0.5 is chance), on "
            f"{trust.num_problems} problems of {trust.source or 'an unnamed collection'}:\n\n{_table(heads, aucs)}\n\n"
            f"In a search: {reason_for(trust)}.")  # fmt: skip


def _table(head: Sequence[object], *rows: Sequence[object]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def push(path: Path, repository: str, *, is_private: bool) -> str:
    """Uploads a checkpoint and its card in one commit, and returns their address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    name, revision = repository_of(repository)
    card = card_of(path, name)
    if is_offline():
        raise UserError(f"{path} is not sent: {OFFLINE} is set")
    operations = [
        CommitOperationAdd(SCORER_FILE, path.read_bytes()), CommitOperationAdd(CARD_FILE, card.encode()),
    ]  # fmt: skip
    try:
        api = HfApi()
        api.create_repo(name, private=is_private, exist_ok=True)
        api.create_commit(name, operations, commit_message="A scorer of thoughts for Gambit", revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be sent to {hub_address()}/{name}: {first_line(error)}") from error
    return f"{hub_address()}/{name}"
