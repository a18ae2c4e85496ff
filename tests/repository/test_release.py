"""A release: what its tag is checked for, what pages say before and after it, and the workflow that publishes it."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from scripts import release

from gambit.errors import install_line
from support import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_a_tag_is_refused_until_the_release_is_prepared(copy):
    tag = f"v{release.version(copy)}"
    before = release.findings(copy, tag)
    assert "CHANGELOG.md has no heading" in before[0] and any(each.startswith("README.md") for each in before)
    release.prepare(copy)
    assert release.findings(copy, tag) == []
    assert release.findings(copy, "v9.9.9") == [f"the tag v9.9.9 is not {tag}, the version of pyproject.toml"]
    assert f"\nversion: {tag[1:]}\n" in (copy / "CITATION.cff").read_text()
    assert (copy / "CHANGELOG.md").read_text().count("\n## Unreleased\n") == 1


def test_pages_claim_no_release_before_there_is_one_and_name_the_index_after(copy):
    for page in release.pages(copy):
        assert "gambit-search[" not in page.read_text(), page.name
    release.prepare(copy)
    for page in release.pages(copy):
        text = page.read_text()
        assert not re.search(r"No\s+release|pip install (\.|'\.)", text), page.name
    assert "pip install gambit-search" in (copy / "README.md").read_text()


@pytest.mark.parametrize(("origin", "line"), [
    ('{"url": "file:///clone", "dir_info": {}}', "pip install '.[serve]' in a clone of Gambit"),
    ('{"url": "file:///editable", "dir_info": {"editable": false}}', "pip install '.[serve]' in a clone of Gambit"),
    ('{"url": "file:///clone", "dir_info": {"editable": true}}', "pip install -e '.[serve]' in a clone of Gambit"),
    (None, "pip install 'gambit-search[serve]'"),
])  # fmt: skip
def test_messages_name_extras_as_they_can_be_installed(monkeypatch, origin, line):
    monkeypatch.setattr("importlib.metadata.Distribution.read_text", lambda self, name: origin, raising=False)
    monkeypatch.setattr("importlib.metadata.PathDistribution.read_text", lambda self, name: origin)
    assert install_line("serve") == line


def test_the_workflow_checks_the_tag_and_publishes_without_a_token():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    steps = [step.get("run", "") for step in workflow["jobs"]["build"]["steps"]]
    assert any("scripts/release.py check" in step for step in steps) and any("uv build" in step for step in steps)
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == ["build", "docs"]
    assert "secrets." not in text and "password" not in text
    for step in (each for job in workflow["jobs"].values() for each in job["steps"]):
        script = step.get("run", "").split(" ")[0]
        assert "/" not in script or script.startswith(".venv") or (ROOT / script).exists()


def test_the_version_is_a_candidate_for_one():
    assert re.fullmatch(r"1\.\d+\.\d+(rc\d+)?", release.version(ROOT))
