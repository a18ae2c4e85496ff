"""`gambit serve` on vLLM: the answers of the local engine, and an error for every stream when vLLM's process is killed.

    python benchmarks/serve_vllm.py --out benchmarks/results/serve_vllm.json        # vLLM's CPU build; a minute or more

The bundled model. vLLM's core has a process of its own, as commands give it on a GPU; it is killed under three streams.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import httpx
import psutil

from serve_load import KEYS, Server

QUESTION = "a = 17; b = 61; c = a + b; d = c * a; e = d - b; e?"
VLLM = ("--engine", "vllm", "--engine-option", "max_model_len=1024", "--engine-option", "enable_chunked_prefill=false")


def body(**fields: object) -> dict[str, object]:
    return {"model": "pawn", "messages": [{"role": "user", "content": QUESTION}], "seed": 3, **fields}


def opened(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=300)


def answer(server: Server) -> dict[str, object]:
    with opened(server) as client:
        found = client.post("/v1/chat/completions", json=body(gambit={"capacity": 8})).json()
    votes = [[vote["answer"], vote["traces"]] for vote in found["gambit"]["votes"]]
    return {"answer": found["gambit"]["answer"], "votes": votes, "usage": found["usage"]}


def last_words(server: Server) -> list[str]:
    """What three streams end with when the core is killed under them."""
    endless = body(stream=True, gambit={"policy": "sc", "capacity": 4, "num_traces": 100_000})
    with opened(server) as client:
        requests = [client.build_request("POST", "/v1/chat/completions", json=endless) for _ in range(3)]
        lines = [client.send(request, stream=True).iter_lines() for request in requests]
        for each in lines:
            next(line for line in each if '"reasoning"' in line)
        children = psutil.Process(server.process.pid).children(recursive=True)
        core = next(child for child in children if "EngineCore" in child.name())
        os.kill(core.pid, signal.SIGKILL)
        return [" ".join(line for line in each if line)[-200:] for each in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    local = Server()
    expected = answer(local)
    local.close()
    began = time.monotonic()
    server = Server(*VLLM, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    report = {"start_seconds": round(time.monotonic() - began, 1), "local": expected, "vllm": answer(server)}
    report |= {"last_words": last_words(server), "exit_code": server.process.wait(timeout=60)}
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    assert report["exit_code"] == 1 and all("has died" in words and "[DONE]" in words for words in report["last_words"])


if __name__ == "__main__":
    main()
