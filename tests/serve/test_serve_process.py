"""`gambit serve` as a process of its own: curl, signals, a restart, mistakes on the command line."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import openai
import pytest

from gambit.errors import ONE_WISH_SECONDS
from support.serving import EASY

pytestmark = pytest.mark.system


class Process:
    """A server started as a user starts it."""

    def __init__(self, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "gambit", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        for line in self.process.stderr:
            if "/v1" in line:
                self.url = line.split()[-1]
                self.greeting = [line, self.process.stderr.readline(), self.process.stderr.readline()]
                break
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._reader.start()

    def client(self, key="sk-test"):
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join()
        self.process.stderr.close()
        self.process.stdout.close()
        return code


@contextmanager
def started(*options, **environment):
    process = Process(*options, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        process.end()


def ask(client, **fields):
    body = {"model": "pawn", "messages": [{"role": "user", "content": EASY}], **fields}
    return client.chat.completions.create(**body)


LONG = {"gambit": {"policy": "sc", "num_traces": 100_000}}


def test_curl_a_first_signal_that_drains_and_a_restart_that_repeats(tmp_path):
    with started(
        "pawn", "--capacity", "4", "--shutdown-timeout", "0.5", "--out", str(tmp_path), GAMBIT_API_KEY="sk-test"
    ) as server:
        body = json.dumps({"model": "pawn", "messages": [{"role": "user", "content": EASY}], "seed": 7})
        command = ["curl", "-sS", f"{server.url}/chat/completions", "-H", "Authorization: Bearer sk-test", "-d", body]
        curled = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert curled["choices"][0]["message"]["content"] == "\\boxed{78}"
        assert (tmp_path / curled["gambit"]["search_id"] / "events.jsonl").is_file()
        client = server.client()
        kept = client.responses.create(model="pawn", input=EASY)
        stream = ask(client, stream=True, extra_body=LONG)
        next(chunk for chunk in stream if getattr(chunk.choices[0].delta, "reasoning", None))
        for _ in range(2):  # as `timeout` does it
            server.process.send_signal(signal.SIGTERM)
        last = list(stream)[-1]
        assert last.choices[0].finish_reason == "length" and last.gambit["stop_reason"] == "interrupted"
        assert server.end() == 0
        logged = [json.loads(line) for line in server.lines]
        assert [line["status"] for line in logged] == [200, 200, 200] and EASY not in "".join(server.lines)
    with started("--model", "pawn", "--capacity", "4", VLLM_API_KEY="sk-test") as again:
        assert ask(again.client(), seed=7).gambit["votes"] == curled["gambit"]["votes"]
        with pytest.raises(openai.NotFoundError):
            again.client().responses.retrieve(kept.id)
        stream = ask(again.client(), stream=True, extra_body=LONG)
        next(chunk for chunk in stream if getattr(chunk.choices[0].delta, "reasoning", None))
        again.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIStatusError):
            while True:  # until it has heard the signal
                ask(again.client(), model="pawn:single")
        time.sleep(2 * ONE_WISH_SECONDS)
        again.process.send_signal(signal.SIGINT)
        assert again.end() == 130, "the second signal ends it at once"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "lets other machines in without a key"),
        (["--api-key", " "], "--api-key is empty"),
        (["--ssl-certfile", "x"], "HTTPS needs both"),
        (["--ssl-certfile", "x", "--ssl-keyfile", "y"], "no file x"),
        (["--api-keys", "missing.yaml"], "cannot read the keys"),
        (["pawn", "--model", "other"], "two models are named"),
        (["--host", "256.1.1.1", "--no-auth"], "cannot serve at 256.1.1.1"),
        (["--policy", "nonsense"], "unknown policy"),
        (["no/such-model"], "no/such-model"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_the_model_is_loaded(options, sentence, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from gambit import solver
    from gambit.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GAMBIT_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(solver, "Solver", None)
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2 and sentence in " ".join(result.stderr.split())
