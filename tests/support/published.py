"""A server of published scorers in the place of the public ones, and a table that leads to it."""

import base64
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from gambit.scorers.authors import blob_hash

MODEL = "org/Tiny-Thinker"
COMMIT = "1" * 40
FILE = "scorers/tiny.pt"


def tiny_scorer(hidden: int = 32, seed: int = 0) -> bytes:
    """A checkpoint as STEP publishes them, with scores that lie far apart."""
    torch.manual_seed(seed)
    state = {"net.0.weight": torch.randn(512, hidden), "net.0.bias": torch.randn(512),
             "net.2.weight": torch.randn(1, 512) / 20, "net.2.bias": torch.zeros(1)}  # fmt: skip
    content = io.BytesIO()
    torch.save({"epoch": 7, "model_state_dict": state}, content)
    return content.getvalue()


@dataclass
class Hub:
    """Files by path, and the requests for them."""

    files: dict[str, bytes] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)  # lengths that are announced instead of the true ones
    seconds: float = 0.0  # before an answer
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def environment(self, folder: Path, table: Path) -> dict[str, str]:
        """Returns what leads a process to this server, with an empty cache; it may fetch."""
        rest = {name: value for name, value in os.environ.items() if name not in ("CI", "HF_HUB_OFFLINE")}
        return {**rest, "GAMBIT_SCORERS": str(table), "XDG_CACHE_HOME": str(folder), "HF_HOME": str(folder / "hub"),
                "HF_ENDPOINT": self.address, "HF_TOKEN": "hf_tests", "NO_PROXY": "*"}  # fmt: skip

    def table(self, file: Path, content: bytes, **changes: object) -> Path:
        """Writes a table with one row, whose file is served from both of its sources."""
        sources = [
            {"repository": repository, "commit": COMMIT, "path": FILE, "address": self.address}
            for repository in ("authors/one", "others/two")
        ]
        for source in sources:
            self.files.setdefault(f"/{source['repository']}/{COMMIT}/{FILE}", content)
        row = {"model": MODEL, "hidden_size": 32, "layers": 2, "vocabulary": 37, "sources": sources,
               "blob": blob_hash(content), "most_bytes": 1 << 20, "state_position": "boundary",
               "trained_on": "tiny_set", "licence": "Apache-2.0"}  # fmt: skip
        file.write_text(json.dumps({"scorers": [{**row, **changes}], "problem_sets": {"tiny_set": ""}}))
        return file


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            time.sleep(hub.seconds)
            content = hub.files.get(self.path)
            self.send_response(404 if content is None else 200)
            if content is not None:
                self.send_header("Content-Length", str(hub.promised.get(self.path, len(content))))
            self.end_headers()
            self.wfile.write(content or b"")

        def do_HEAD(self) -> None:
            content = hub.files.get(self.path)
            self.send_response(200 if content is not None or self.path == "/" else 404)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", f'"{blob_hash(content or b"")}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()

        def do_POST(self) -> None:
            """Takes what `HfApi.create_commit` sends: files as lines of JSON, their content in base64."""
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            reply: dict[str, object] = {"url": f"{hub.address}/org/made"}
            if "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                reply = {"files": files}
            elif "/commit/" in self.path:
                repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        path = f"/{repository}/resolve/main/{line['value']['path']}"
                        hub.files[path] = base64.b64decode(line["value"]["content"])
                reply = {"commitUrl": f"{hub.address}/{repository}/commit/{COMMIT}", "commitOid": COMMIT}
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
