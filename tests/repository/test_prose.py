"""Docstrings are sentences or noun phrases: few open with a word that leaves a fragment (scripts/house.py)."""

from pathlib import Path

from scripts.house import FRAGMENTS, fragments

import gambit

MOST = 0.01


def test_few_docstrings_open_as_fragments() -> None:
    found, total = fragments(Path(gambit.__file__).parent)
    assert len(found) <= MOST * total, f"{len(found)} of {total}:\n" + "\n".join(found)


def test_a_fragment_is_told_from_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text('"""Withdraws a trace."""\ndef f():\n    """`What` it costs."""\n')
    assert fragments(tmp_path) == (["module.py:3 `What` it costs."], 2)


def test_the_openers_are_words() -> None:
    assert FRAGMENTS.match("Whether it runs") and not FRAGMENTS.match("Forgets") and not FRAGMENTS.match("Inner layers")
