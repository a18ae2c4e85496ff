"""A policy in somebody's own package: installed beside Gambit, found by name, used by `gambit solve`."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gambit

pytestmark = pytest.mark.system
POLICY = '''
"""A toy: two traces, and whoever is complete first ends it."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gambit.policies.base import Start, Stop, Wake
from gambit.types import OnPressure, PressureAction
from gambit.results.vote import VoteKind


class RaceOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    runners: int = Field(2, ge=1, description="traces that race")


@dataclass(frozen=True)
class Race:
    """Race: the first complete trace answers."""

    name: ClassVar[str] = "race"
    default_vote: ClassVar[VoteKind] = VoteKind.MAJORITY
    Options: ClassVar[type[RaceOptions]] = RaceOptions
    runners: int

    @classmethod
    def from_settings(cls, settings):
        return cls(settings.options_of(RaceOptions).runners)

    @property
    def wake(self):
        return Wake(on_completion=True)

    def initial_state(self):
        return None

    def decide(self, state, view):
        if view.num_created == 0:
            return None, [Start(self.runners, OnPressure(PressureAction.QUEUE))]
        return None, [Stop()] if view.finished else []
'''
INFO = "gambit_race-0.1.0.dist-info"
FILES = {
    "race.py": POLICY,
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: gambit-race\nVersion: 0.1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/entry_points.txt": "[gambit.policies]\nrace = race:Race\n",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A folder of packages into which pip has installed the toy's wheel."""
    folder = tmp_path_factory.mktemp("site")
    wheel = folder / "gambit_race-0.1.0-py3-none-any.whl"
    record = "".join(f"{name},,\n" for name in (*FILES, f"{INFO}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**FILES, f"{INFO}/RECORD": record}.items():
            archive.writestr(name, text)
    target = folder / "packages"
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=120)
    source = str(Path(gambit.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": f"{target}:{source}", "PYTHONWARNINGS": "ignore"}


def with_broken(environment):
    """The same folder with a package whose modules are gone."""
    folder = Path(environment["PYTHONPATH"].partition(":")[0]) / "gambit_lost-0.1.0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gambit-lost\nVersion: 0.1.0\n")
    groups = ("policies", "scorers", "benchmarks")
    points = "".join(f"[gambit.{group}]\nlost_{group} = nowhere:Lost\n" for group in groups)
    (folder / "entry_points.txt").write_text(points)
    return environment


def run(environment, *arguments, cwd):
    command = [sys.executable, "-m", "gambit", *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_it_is_found_listed_and_used(environment, tmp_path):
    puzzle = "a = 17; b = 5; c = a * b; d = c - a; d?"
    done = run(
        environment, "solve", "--policy", "race", "--policy-option", "runners=3", "--capacity", "4", "--json", puzzle,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["policy"], result["stop_reason"]) == ("race", "policy")
    assert result["counts"]["roots"] == 3 and result["counts"]["completed"] >= 1 and result["answer"]
    listed = run(environment, "policies", "--json", cwd=tmp_path)
    described = {line["policy"]: line for line in map(json.loads, listed.stdout.splitlines())}
    assert described["race"]["options"] == {"runners": {"default": 2, "description": "traces that race"}}
    assert {"gambit", "sc", "slim-sc", "deepconf", "step", "best-of-n", "single"} <= set(described)


def test_its_options_are_checked_before_the_model_is_loaded(environment, tmp_path):
    wrong = run(environment, "solve", "--policy", "race", "--policy-option", "runnners=3", "a?", cwd=tmp_path)
    assert wrong.returncode == 2 and "policy 'race': unknown option 'runnners': did you mean 'runners'?" in wrong.stderr


def test_a_broken_package_costs_its_own_names_alone(environment, tmp_path):
    broken = with_broken(environment)
    listed = run(broken, "policies", "--json", cwd=tmp_path)
    names = {json.loads(line)["policy"] for line in listed.stdout.splitlines()}
    assert listed.returncode == 0 and {"gambit", "race"} <= names and "lost_policies" not in names
    words = "of the package gambit-lost cannot be loaded (ModuleNotFoundError: No module named 'nowhere')"
    assert f"warning: the policy 'lost_policies' {words}" in " ".join(listed.stderr.split())
    for kind, flags in (("policy", ("solve", "--policy")), ("scorer", ("solve", "--scorer"))):
        group = {"policy": "policies", "scorer": "scorers"}[kind]
        used = run(broken, *flags, f"lost_{group}", "a = 17; b = 5; c = a * b; d = c - a; d?", cwd=tmp_path)
        assert used.returncode == 2 and f"the {kind} 'lost_{group}' of the package gambit-lost" in used.stderr
    used = run(broken, "bench", "--benchmark", "lost_benchmarks", "--dry-run", cwd=tmp_path)
    assert used.returncode == 2 and "the benchmark 'lost_benchmarks' of the package gambit-lost" in used.stderr


def test_a_policy_may_be_named_by_file_or_module(environment, tmp_path):
    (tmp_path / "mine.py").write_text(POLICY)
    for name in ("mine.py:Race", "mine:Race"):
        done = run(environment, "solve", "--policy", name, "--json", "a = 1; b = 2; c = a * b; c?", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["policy"], result["stop_reason"]) == ("race", "policy")
