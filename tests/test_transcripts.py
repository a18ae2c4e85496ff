"""Command lines print what they printed; a change that is meant renews it: python tests/transcripts.py."""

import pytest

import transcripts


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return dict(transcripts.transcripts())


def test_the_kept_transcripts_are_those_of_the_command_lines() -> None:
    assert sorted(path.stem for path in transcripts.FOLDER.iterdir()) == sorted(transcripts.names())


@pytest.mark.parametrize("name", transcripts.names())
def test_a_command_line_prints_what_it_printed(name: str, printed: dict[str, str]) -> None:
    assert printed[name] == (transcripts.FOLDER / f"{name}.txt").read_text()
