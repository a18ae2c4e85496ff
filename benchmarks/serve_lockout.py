"""Locks clients out of a server, or tries to: 2,060 connections that are refused and go on sending.

    python benchmarks/serve_lockout.py --out benchmarks/results/serve_lockout.json
    python benchmarks/serve_lockout.py --source before=../old/src --source after=src --out ...   # two source trees

Each connection sends the headers of a question without a key and one byte of its body, reads its 401, and sends one
byte more. Then a new connection asks for `/health`, and the attacker's connections are counted until they are gone.
`gambit serve pawn` runs with its own limits: 2,048 connections, 30 seconds from an answer to the next request.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

NUM_CONNECTIONS = 2060
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2000000\r\n\r\nx"
WAIT_SECONDS = 60.0
SOURCE = Path(__file__).parents[1] / "src"


def attack(port: int) -> list[socket.socket]:
    """Returns the connections; a server that drops some of them meanwhile is not an error."""
    connections = []
    for _ in range(NUM_CONNECTIONS):
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        connections.append(connection)
        try:
            connection.sendall(REQUEST)
            connection.recv(65536)
            connection.sendall(b"y")
        except ConnectionError:
            continue
    return connections


def health(url: str) -> tuple[str, float]:
    """Returns the answer of `/health` to a new connection, or what came instead, and the seconds until then."""
    began = time.monotonic()
    try:
        answer = str(httpx.get(f"{url}/health", timeout=60).status_code)
    except httpx.TransportError as error:
        answer = type(error).__name__
    return answer, round(time.monotonic() - began, 3)


def still_open(connections: list[socket.socket]) -> list[socket.socket]:
    """Returns the connections that the server has not closed."""
    return [connection for connection in connections if not _is_closed(connection)]


def _is_closed(connection: socket.socket) -> bool:
    """Returns whether there is an end behind whatever is left to read."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def attacked(url: str) -> dict[str, object]:
    """Returns what a server does under the attack and after it."""
    connections = attack(int(url.rpartition(":")[2]))
    try:
        began = time.monotonic()
        answer, seconds = health(url)
        held = still_open(connections)
        num_held = len(held)
        while held and time.monotonic() - began < WAIT_SECONDS:
            time.sleep(0.25)
            held = still_open(held)
        gone = None if held else round(time.monotonic() - began, 1)
        later, _ = health(url)
        return {
            "health": answer, "health_seconds": seconds, "held_after_the_attack": num_held,
            f"held_after_{WAIT_SECONDS:g}_seconds": len(held), "seconds_until_all_were_gone": gone,
            "health_at_the_end": later,
        }  # fmt: skip
    finally:
        for connection in connections:
            connection.close()


def measured(source: Path) -> dict[str, object]:
    """Returns what a server of one source tree does under the attack."""
    command = [sys.executable, "-m", "gambit", "serve", "pawn", "--port", "0", "--api-key", "sk-lockout"]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(source.resolve())},
    )  # fmt: skip
    assert server.stderr is not None
    url = next(line.split()[-1] for line in server.stderr if "/v1" in line).removesuffix("/v1")
    try:
        return attacked(url)
    finally:
        server.kill()
        server.wait()


def allow_many_files() -> None:
    """Raises this process's limit on open files as far as it may."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", metavar="LABEL=FOLDER", help="default: this repository's src")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    allow_many_files()
    sources = [each.partition("=") for each in options.source or [f"this={SOURCE}"]]
    report = {"connections": NUM_CONNECTIONS, **{label: measured(Path(folder)) for label, _, folder in sources}}
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
