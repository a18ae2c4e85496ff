"""More than 200 mistakes: exit code 2, one sentence that names the culprit, and neither a model nor a file made."""

import json
import os
import re
import subprocess
import sys

import pytest

from support import bad_invocations
from support.bad_invocations import INVOCATIONS, WITH_TORCH
from support.tables import table


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All of them, tried in one process of their own, where nothing heavy is imported yet."""
    folder = tmp_path_factory.mktemp("mistakes")
    script = bad_invocations.__file__
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {tuple(args): rest for args, *rest in map(json.loads, done.stdout.splitlines())}


def test_there_are_at_least_200_of_them_and_all_were_tried(outcomes):
    assert len(outcomes) == len(INVOCATIONS) >= 200


@table(("args", "culprit"), INVOCATIONS)
def test_a_mistake_is_one_sentence_that_names_it(outcomes, args, culprit):
    code, out, err, imported, left = outcomes[args]
    said = sentence(err)
    assert (code, out) == (2, ""), err
    assert culprit in said and "Traceback" not in said, said
    assert imported == [] or WITH_TORCH & set(args), f"{imported} is imported"
    assert left == [], "a command that refuses leaves nothing behind"


def sentence(err):
    """Without typer's frame around it; of a wrong usage only what is wrong with it."""
    text = re.sub(r"[│╭╮╰╯─]+", " ", err)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("Usage:", "Try "))]
    assert len(lines) <= 2, f"more than one sentence: {lines}"
    return " ".join(" ".join(lines).split())
