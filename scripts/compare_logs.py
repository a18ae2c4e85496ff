"""Runs the same searches with pawn on the local engine by two source trees, and compares their event logs.

    python scripts/compare_logs.py OLD/src NEW/src

Events must be equal, and their figures within 1e-6; header, chain and seconds may differ. Both trees are driven
through `python -m gambit solve`, so that packages may have moved between them. About a minute on one core.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from pathlib import Path

PUZZLES = (
    "a = 17; b = 61; c = a + b; d = c - a; e = d + b; f = e + c; f?",
    "a = 6; b = 7; c = a * b; d = c + b; e = d - a; e?",
)
ROUNDS = "--first-traces 3 --num-traces 12 --consensus-stop 0.9"
TIGHT = "--kv-budget-tokens 400"
VERIFIER = "--scorer VERIFIER --check-interval 8"
SEARCHES = {
    "gambit": "",
    "one island, tight": f"--islands 1 --ghost-parents {TIGHT}",
    "islands, floor": "--islands 4 --capacity 16 --hard-floor 0.3 --swap-margin 0.1",
    "islands, tight": f"--islands 2 --vote position {TIGHT}",
    "branch points": "--branch-point last_boundary --child-temperature 1.2 --budget-traces 6",
    "rounds": ROUNDS,
    "rounds, plain": f"--policy sc {ROUNDS}",
    "sc, tight": f"--policy sc --vote majority --own-noise {TIGHT}",
    "best-of-n": "--policy best-of-n",
    "step": "--policy step",
    "deepconf": "--policy deepconf --temperature 0.9 --top-k 12",
    "slim-sc": "--policy slim-sc --capacity 12",
    "verifier": f"{VERIFIER} --islands 2",
    "verifier, rounds, tight": f"{VERIFIER} --policy sc {ROUNDS} {TIGHT}",
    "verifier, lag": f"{VERIFIER} --verifier-lag 0 --verifier-aggregation mean --hard-floor 0.3",
}
# One process for all searches of a tree: starting each would take most of the time.
DRIVER = """
import json, runpy, sys
for args in json.loads(sys.stdin.read()):
    sys.argv = ["gambit", *args]
    try:
        runpy.run_module("gambit", run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0, 3):
            sys.exit(f"{args}: exit code {end.code}")
"""
OF_CLOCKS = re.compile("line|chain|seconds.*")
OF_VERIFIER = ("event", "step", "needed", "is_async")  # the rest of its totals depends on threads


class StubVerifier(BaseHTTPRequestHandler):
    """Serves scores that follow from the tokens alone, as vLLM's `/pooling` does for a classifier."""

    def do_GET(self) -> None:
        self._reply([{"id": "stub", "root": "stub", "max_model_len": 4096}])

    def do_POST(self) -> None:
        sequences = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        scores = [sum(i * token for i, token in enumerate(tokens, 1)) % 1009 / 1009 for tokens in sequences]
        self._reply([{"index": i, "data": [score]} for i, score in enumerate(scores)])

    def _reply(self, data: list[dict[str, object]]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"object": "list", "data": data}).encode())

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def run(source: str, folder: Path, address: str) -> dict[str, list[dict[str, object]]]:
    """Returns the events of each search, as they stand in the logs without their headers."""
    common = [
        "--engine",
        "local",
        "--seed",
        "5",
        "--capacity",
        "8",
        "--quiet",
        "--file",
        str(folder / "problems.jsonl"),
    ]
    kind = "verifier" if (Path(source) / "gambit" / "verifiers").is_dir() else "prm"  # its name until 2d95e3d
    verifier, lines = f"{kind}:gambit:{address}", []
    for name, options in SEARCHES.items():
        given = options.replace("VERIFIER", verifier).split()
        lines.append(["solve", *common, *given, "--out", str(folder / name)])
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(source).resolve()),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    (folder / "problems.jsonl").write_text("".join(json.dumps({"question": each}) + "\n" for each in PUZZLES))
    subprocess.run([sys.executable, "-c", DRIVER], input=json.dumps(lines), text=True, env=environment, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    logs = sorted(folder.rglob("events.jsonl"))
    return {str(log.parent.relative_to(folder)): list(events(log)) for log in logs}


def events(log: Path) -> Iterator[dict[str, object]]:
    for line in log.read_text().splitlines()[1:]:
        event = json.loads(line)
        if event["event"] == "VerifierTotals":
            event = {name: event[name] for name in OF_VERIFIER}
        yield {name: value for name, value in event.items() if not OF_CLOCKS.fullmatch(name)}


def is_same(old: object, new: object) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-6)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(is_same(old[name], new[name]) for name in old)
    return old == new


def main() -> None:
    old_source, new_source = sys.argv[1:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubVerifier)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        old, new = run(old_source, Path(a), address), run(new_source, Path(b), address)
    server.shutdown()
    assert old.keys() == new.keys() and len(old) == len(SEARCHES) * len(PUZZLES), (sorted(old), sorted(new))
    num_wrong, kinds = 0, Counter(str(event["event"]) for log in old.values() for event in log)
    for name in old:
        differing = [(i, a, b) for i, (a, b) in enumerate(zip_longest(old[name], new[name])) if not is_same(a, b)]
        num_wrong += bool(differing)
        print(f"{name:32} {len(old[name]):5} events  {'differs' if differing else 'equal'}")
        for i, a, b in differing[:1]:
            print(f"  line {i + 2}:\n  - {json.dumps(a)[:600]}\n  + {json.dumps(b)[:600]}")
    print(*(f"{kind}: {number}" for kind, number in sorted(kinds.items())), sep=", ")
    sys.exit(f"{num_wrong} of {len(old)} logs differ" if num_wrong else 0)


if __name__ == "__main__":
    main()
