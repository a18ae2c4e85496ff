"""Models by a hub name: a hub that does not answer costs no minute of retries, a missing folder none at all."""

import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.errors import GambitWarning, UserError
from gambit.models.files import OFFLINE, locate, side_file

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing listens there, the cache is empty, and whoever asks the library for a file all the same is found out."""

    def refuse(*args: object, **options: object) -> str:
        raise AssertionError("the hub's library tries again for half a minute")

    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(OFFLINE, "0")  # so that it is put back
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.chdir(tmp_path)


def cached(tiny_folder: Path, name: str) -> None:
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    shutil.copytree(tiny_folder, folder / "snapshots" / ("a" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)


def test_a_model_that_nobody_can_fetch_is_refused_after_one_question() -> None:
    done = CliRunner().invoke(app, ["solve", "--model", "some/model", "1 + 1?"])
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert f"some/model is not on this machine: fetching it from {NOBODY}" in done.stderr
    assert f"the hub cannot be reached: {NOBODY} does not answer (" in done.stderr
    assert "fetching" not in CliRunner().invoke(app, ["solve", "-q", "--model", "some/model", "1 + 1?"]).stderr


def test_a_folder_that_is_missing_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    for name, said in [
        ("weights.gguf", "it is a file; give the folder"),
        ("./models/mine", "names on the hub have the form owner/model"),
    ]:
        done = CliRunner().invoke(app, ["solve", "--model", name, "1 + 1?"])
        assert done.exit_code == 2 and f"cannot load model {name!r}" in done.stderr and said in done.stderr
        assert NOBODY not in done.stderr


def test_a_cached_model_is_used_without_its_hub_and_without_waiting(tiny_folder: Path) -> None:
    cached(tiny_folder, "some/tiny")
    with pytest.warns(GambitWarning, match=f"{NOBODY} does not answer .* some/tiny is used as it lies in this machine"):
        assert locate("some/tiny") == "some/tiny"
    assert huggingface_hub.is_offline_mode() and os.environ[OFFLINE] == "1", "no library asks for optional files"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert locate("some/tiny") == "some/tiny", "it is said once"


def test_a_name_that_is_not_cached_says_why_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub is not asked: HF_HUB_OFFLINE is set"):
        locate("some/tiny")


class Busy(BaseHTTPRequestHandler):
    """A hub that answers, though not kindly."""

    def do_HEAD(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Busy)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("busy")
def test_a_hub_that_answers_with_an_error_is_left_to_its_library(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names: asked.append(names) or str(tiny_folder))
    assert locate("some/model") == "some/model" and asked == [("some/model", "config.json")]
    assert not huggingface_hub.is_offline_mode()
    assert side_file("some/model", "gambit.json") == tiny_folder
