"""A few of the kills of benchmarks/kills.py, which makes a hundred."""

from pathlib import Path

import pytest
from benchmarks.kills import kill_all


@pytest.mark.system
def test_what_a_kill_leaves_is_whole_and_is_gone_on_with(tmp_path: Path) -> None:
    num_kills = {"bench": 2, "collect": 1, "solve": 1}
    report = kill_all(tmp_path, num_kills, seed=2, num_problems=2)
    assert {name: report[name]["kills"] for name in num_kills} == num_kills
    assert all(report[name]["runs finished like the unbroken one"] >= 1 for name in ("bench", "collect"))
