"""A few of the kills of benchmarks/kills.py, which makes a hundred."""

from pathlib import Path

import pytest
from benchmarks.kills import kill_all

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("command", "num_kills"), [("bench", 2), ("collect", 1), ("solve", 2)])
def test_what_a_kill_leaves_is_whole_and_is_gone_on_with(command: str, num_kills: int, tmp_path: Path) -> None:
    report = kill_all(tmp_path, {command: num_kills}, seed=2, num_problems=3)
    counts = report[command]
    assert isinstance(counts, dict) and counts["kills"] == num_kills
    if command != "solve":
        assert counts["runs finished like the unbroken one"] >= 1
