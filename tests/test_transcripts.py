"""Command lines print what they printed; a change that is meant renews it: python tests/transcripts.py."""

from difflib import unified_diff

import transcripts


def test_command_lines_print_what_they_printed() -> None:
    kept = {path.stem: path.read_text() for path in transcripts.FOLDER.glob("*.txt")}
    assert sorted(kept) == sorted(transcripts.names())
    for name, text in transcripts.transcripts():
        changes = unified_diff(kept[name].splitlines(), text.splitlines(), "kept", name, lineterm="")
        kept[name] = "\n".join(changes)
    changed = "\n".join(filter(None, kept.values()))
    assert not changed, changed
