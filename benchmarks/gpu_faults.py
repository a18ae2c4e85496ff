"""Faults of a GPU engine: killed, out of memory at the start and in mid-search, a device-side assert. What is lost?

    python benchmarks/gpu_faults.py --out benchmarks/results/gpu_faults.json      # at most 7 minutes on an H200
    python benchmarks/gpu_faults.py --only bench --together 2                     # on a CPU two minutes each

vLLM's core lives in a process of its own, as commands on a GPU have it. Each fault runs in a process with a time limit,
some of them side by side on a GPU, and its findings are written as soon as they are there. A bench must end with a
sentence and exit code 1, then be resumed to its end with no row lost, changed or doubled. A server must answer what it
was searching with a 5xx and a sentence, and end with exit code 1; under Ray another engine must take the place.

Faults in mid-search come from a scorer, which runs in the engine's worker: it is registered by an entry point, as any
package's, and misbehaves once when a file says so. A CPU has no device-side assert: that fault is skipped there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

BEGAN = time.monotonic()  # importing torch counts
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from kills import (  # noqa: E402
    Wrong,
    bench_rows,
    check_logs,
    check_rows_have_whole_logs,
    descendants,
    name_of,
    wait_for,
    write_problems,
)

FAULTS_FILE = "GAMBIT_FAULT"  # the variable that names the file with the name of the fault to come
KEY = "sk-faults"
KILL = "kill"
NUM_PROBLEMS = 12
NUM_CLIENTS = 3
FOUND = "FOUND "  # begins the line of a fault's findings
STEPS_BEFORE = 40  # that the scorer scores before the fault, the self-check's included
LONG_SECONDS = 40.0  # of a search that is to meet a fault
END_SECONDS = 60.0  # from the fault until the command has ended, or a request has its answer
START_SECONDS = 180.0  # until an engine is there, or has said why not; a loaded CPU takes a minute
LEAST_SECONDS = 30.0  # that a fault takes
IS_CUDA = torch.cuda.is_available()
ROOM = 1 << (30 if IS_CUDA else 27)  # bytes of KV cache

# vLLM pickles the scorer for its worker, which imports this module from PYTHONPATH.
SCORER = f'''
import os
from contextlib import suppress
from pathlib import Path

import torch

from gambit.scorers.base import ScorerInfo


class Faulty:
    """Prefers thoughts whose state has a small norm, until the file that {FAULTS_FILE} names holds a fault."""

    info = ScorerInfo("faulty", is_probability=False, ranks_within_run=True)
    num_steps = 0

    def to(self, device):
        return self

    def score(self, thoughts):
        self.num_steps += 1
        scores = -thoughts.states.float().norm(dim=-1)
        if self.num_steps > {STEPS_BEFORE}:
            with suppress(FileNotFoundError):  # no fault is wanted, or another engine has just taken it
                taken = Path(os.environ["{FAULTS_FILE}"]).rename(f"{{os.environ['{FAULTS_FILE}']}} of {{os.getpid()}}")
                FAULTS[taken.read_text()](scores)
        return scores


def allocate(scores):
    torch.empty(1 << 46, dtype=torch.uint8, device=scores.device)


def fail_on_the_device(scores):
    scores += scores[torch.full_like(scores, len(scores) + 1000, dtype=torch.long)]


def fail(scores):
    raise ValueError("the scorer was told to fail")


FAULTS = {{"allocation": allocate, "assert": fail_on_the_device, "error": fail}}
'''


Fault = Callable[["Stage", "Found"], None]


# -- faults, each in a process of its own --------------------------------------------------------------------------


class Found(dict[str, object]):
    """A fault's findings: figures by name, and what is wrong."""

    def __init__(self) -> None:
        super().__init__(wrong=[])

    def check(self, is_right: bool, otherwise: str) -> None:
        if not is_right:
            self["wrong"].append(otherwise)  # type: ignore[attr-defined]

    def take_end(self, end: End, code: int, *words: str) -> None:
        """Notes how a command ended: its exit code, and a last sentence with these words."""
        self |= {"exit_code": end.code, "sentence": end.sentence, "seconds_until_its_end": end.seconds}
        self.check(end.code == code, f"exit code {end.code}, not {code}")
        self.check(end.sentence.startswith("error: "), "the last line is no sentence")
        for word in words:
            self.check(word in end.sentence, f"the sentence does not name {word!r}")


class End:
    """A command's end: its exit code, the sentence it printed last, the seconds since the fault."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, since: float, seconds: float = END_SECONDS) -> None:
        self.code: int | str = f"none: it hung for {seconds:.0f} s"
        with suppress(subprocess.TimeoutExpired):
            self.code = process.wait(timeout=seconds)
        self.seconds = round(time.monotonic() - since, 1)
        self.lines = log.read_text(errors="replace").splitlines()
        self.sentence = next((line for line in reversed(self.lines) if line.startswith("error: ")), "")


class Stage:
    """A folder with puzzles, the faulty scorer, and commands that use them."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.model = model
        self.problems = folder / "puzzles.jsonl"
        self.fault = folder / "fault"
        write_problems(self.problems, NUM_PROBLEMS)
        site = folder / "site"
        info = site / "faulty_scorer-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "faulty_scorer.py").write_text(SCORER)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-scorer\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[gambit.scorers]\nfaulty = faulty_scorer:Faulty\n")
        paths = [str(site), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), FAULTS_FILE: str(self.fault),
                            "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # fmt: skip

    def engine(self, fault: str = KILL, *, room: int | None = ROOM, ratio: str = "0.3") -> list[str]:
        """Returns the options of an engine that meets this fault; `room`: bytes of its KV cache, None: by the ratio."""
        options = ["own_process=true", "enforce_eager=true", *([f"kv_cache_memory_bytes={room}"] if room else [])]
        words = ["--engine", "vllm", "--memory-ratio", ratio]
        words += [word for option in options for word in ("--engine-option", option)]
        return words if fault == KILL else [*words, "--scorer", "faulty"]

    def strike(self, fault: str, process: subprocess.Popen[bytes]) -> float:
        """Kills the cores, or has the scorer misbehave in its next step; returns when that was."""
        if fault != KILL:
            written = self.fault.with_name("fault to come")
            written.write_text(fault)
            written.rename(self.fault)
        else:
            cores = cores_of(process)
            assert cores, "vLLM's core is not found by its name: install setproctitle"
            for core in cores:
                os.kill(core, signal.SIGKILL)
        return time.monotonic()

    def search(self) -> list[str]:
        return ["--capacity", "4", "--check-interval", "8", "--warmup-tokens", "8"]

    def bench(self, *engine: str, problems: int = NUM_PROBLEMS) -> list[str]:
        return ["bench", "--model", self.model, "--benchmark", str(self.problems), "--limit", str(problems), "--block",
                "2", *self.search(), *engine, "--out", str(self.folder / "run"), "--no-report", "--quiet"]  # fmt: skip

    def again(self) -> list[str]:
        return ["bench", "--resume", "--out", str(self.folder / "run"), "--no-report", "--quiet"]

    def serve(self, *engine: str) -> list[str]:
        return ["serve", self.model, "--served-model-name", "served", "--port", "0", "--api-key", KEY, *self.search(),
                *engine, "--out", str(self.folder / "searches")]  # fmt: skip

    @contextmanager
    def running(self, words: list[str], log: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Starts a command in a session of its own; nothing of it is left afterwards."""
        path = self.folder / log
        with path.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "gambit", *words],
                stdout=file, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True,
            )  # fmt: skip
            try:
                yield process, path
            finally:
                end_session(process)


def bench(fault: str, problems: int = NUM_PROBLEMS, after: int = 4) -> Fault:
    def run(stage: Stage, found: Found) -> None:
        """Strikes once a bench has some rows, then resumes it."""
        with stage.running(stage.bench(*stage.engine(fault), problems=problems), "bench.txt") as (process, log):
            wait_for_rows(stage, after, process, log)
            since = stage.strike(fault, process)
            end = End(process, log, since)
        found.check(not stage.fault.exists(), "the scorer did not come to its fault")
        found.take_end(end, 1, "--resume")
        check_resumed(stage, found, problems)

    return run


def check_resumed(stage: Stage, found: Found, problems: int) -> None:
    """Resumes a bench that ended early; compares its rows with those before."""
    folder = stage.folder / "run"
    before = bench_rows(folder)
    with stage.running(stage.again(), "again.txt") as (process, log):
        end = End(process, log, time.monotonic(), START_SECONDS + END_SECONDS)
    found |= {"rows_before": len(before), "exit_code_of_the_resumed": end.code}
    found.check(end.code == 0, f"the resumed bench ended with {end.code}: {end.lines[-6:]}")
    try:
        after = bench_rows(folder)  # raises for one that is there twice
        check_rows_have_whole_logs(folder)
    except Wrong as error:
        found.check(False, str(error))
        return
    found["rows"] = len(after)
    found.check(len(after) == 2 * problems, f"{len(after)} rows of {2 * problems}")
    changed = [key for key, row in before.items() if after.get(key) != row]
    found.check(not changed, f"lost or changed: {changed}")
    failed = [key for key, row in after.items() if row["error"]]  # type: ignore[index]
    found.check(not failed, f"rows with an error: {failed}")


def serve(fault: str) -> Fault:
    def run(stage: Stage, found: Found) -> None:
        """Strikes a server that has searches: they get a 5xx, and the server ends with the reason."""
        with stage.running(stage.serve(*stage.engine(fault)), "serve.txt") as (process, log):
            url = address(process, log)
            with asking(stage, url) as answers:
                since = stage.strike(fault, process)
                check_refused(found, answers())
            end = End(process, log, since)
        found.take_end(end, 1)
        check_searches(stage, found)

    return run


def idle_server(stage: Stage, found: Found) -> None:
    """Kills the core of a server that has nothing to do: the next request finds out, and the server ends."""
    with stage.running(stage.serve(*stage.engine()), "serve.txt") as (process, log):
        url = address(process, log)
        since = stage.strike(KILL, process)
        check_refused(found, [ask(stage, url, {})])
        end = End(process, log, since)
    found.take_end(end, 1)


def replicas(fault: str) -> Fault:
    def run(stage: Stage, found: Found) -> None:
        """Strikes replicas: their searches get a 5xx, the server lives, and another engine takes the place."""
        number = 2 if IS_CUDA else 1
        share = ["--gpus-per-engine", str(1 / number)] if IS_CUDA else []
        words = stage.serve(*stage.engine(fault), "--ray", "--engines", str(number), *share)
        with stage.running(words, "serve.txt") as (process, log):
            url = address(process, log)
            wait_for(lambda: engines_ready(url) == number, "the engines", START_SECONDS)
            with asking(stage, url) as answers:
                since = stage.strike(fault, process)
                # A scorer misbehaves in one of them; what runs on the other ends by its budget.
                check_refused(found, [each for each in answers() if fault == KILL or each[0] != 200])
            wait_for(lambda: engines_ready(url) == number, "new engines", START_SECONDS + END_SECONDS)
            found["seconds_until_all_were_back"] = round(time.monotonic() - since, 1)
            code, text = ask(stage, url, {})
            found.check(code == 200, f"a request after that got {code}: {text}")
            process.send_signal(signal.SIGTERM)
            end = End(process, log, time.monotonic())
            found.check(end.code == 0, f"the server ended with {end.code}: {end.lines[-6:]}")
        check_searches(stage, found)

    return run


@contextmanager
def asking(stage: Stage, url: str) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    """Has clients begin long searches; what it gives waits for their answers."""
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        long = {"gambit": {"policy": "sc", "num_traces": 5000, "budget_seconds": LONG_SECONDS}}
        bodies = [long, *[{**long, "stream": True}] * (NUM_CLIENTS - 1)]
        asked = [clients.submit(ask, stage, url, body) for body in bodies]
        logs = stage.folder / "searches"
        wait_for(lambda: len(list(logs.glob("*/events.jsonl"))) >= NUM_CLIENTS or any(a.done() for a in asked),
                   "the searches")  # fmt: skip
        time.sleep(2)
        yield lambda: [each.result() for each in asked]


def ask(stage: Stage, url: str, body: Mapping[str, object]) -> tuple[int, str]:
    """Returns the status and the error's message; a stream's status is that of the error in its last chunk."""
    import httpx

    question = json.loads(stage.problems.read_text().splitlines()[0])["question"]
    body = {"model": "served", "messages": [{"role": "user", "content": question}], **body}
    headers = {"authorization": f"Bearer {KEY}"}
    try:
        reply = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=START_SECONDS)
    except httpx.HTTPError as error:
        return 0, f"no answer: {error!r}"
    if reply.status_code != 200:
        return reply.status_code, reply.json()["error"]["message"]
    if "stream" not in body:
        return 200, reply.json()["choices"][0]["message"]["content"]
    chunks = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    error = next((json.loads(each)["error"] for each in chunks if each.startswith('{"error"')), None)
    if chunks[-1] != "[DONE]":
        return 0, f"a stream that ends with {chunks[-2:]}"
    if error is None:
        return 200, "a whole stream"
    return 500 if error["type"] == "server_error" else 400, error["message"]


def check_refused(found: Found, answers: list[tuple[int, str]]) -> None:
    found["answers"] = sorted({f"{code}: {message}" for code, message in answers})
    found.check(
        bool(answers) and all(500 <= code < 600 and message for code, message in answers),
        "an answer is no 5xx with a sentence",
    )


def check_searches(stage: Stage, found: Found) -> None:
    """Every log of the server's searches replays to its last whole line."""
    counts: Counter[str] = Counter()
    try:
        check_logs(stage.folder / "searches", counts)
    except Wrong as error:
        found.check(False, str(error))
    found["logs"] = dict(counts)


def engines_ready(url: str) -> int:
    import httpx

    with suppress(httpx.HTTPError):
        text = httpx.get(f"{url.removesuffix('/v1')}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        lines = [line.split() for line in text.splitlines() if line.startswith("gambit_engines_ready")]
        return int(float(lines[0][-1])) if lines else -1
    return -1


def no_start(room: int | None = None, ratio: str = "0.3") -> Fault:
    def run(stage: Stage, found: Found) -> None:
        """Starts a server with a cache that the memory does not hold."""
        with stage.running(stage.serve(*stage.engine(room=room, ratio=ratio)), "serve.txt") as (process, log):
            end = End(process, log, time.monotonic(), START_SECONDS)
        found.take_end(end, 1, "memory")

    return run


FAULTS: Mapping[str, Fault] = {  # the most important first
    "a bench's core is killed": bench(KILL),
    "a server's core is killed": serve(KILL),
    "device-side assert in a bench": bench("assert"),
    "device-side assert in a server": serve("assert"),
    "replicas' cores are killed": replicas(KILL),
    "cache larger than the memory": no_start(1 << 46),
    "cache without room for a context": no_start(1 << 16),
    "other work has the memory": no_start(ratio="1.0"),
    "allocation fails in a bench": bench("allocation"),
    "allocation fails in a server": serve("allocation"),
    "device-side assert in a replica": replicas("assert"),
    "an idle server's core is killed": idle_server,
    "a bench's core is killed near the end": bench(KILL, 2, 2),  # fewer searches left than failures that end a bench
    "a scorer raises in a bench": bench("error"),
}


def why_skipped(name: str, seconds_left: float) -> str | None:
    """Returns why a fault is not tried here; None for one that is."""
    if "assert" in name and not IS_CUDA:
        return "only CUDA has device-side asserts"
    if name == "other work has the memory" and not IS_CUDA:
        return "vLLM looks for free memory before it starts on a GPU only"
    if "replica" in name and find_spec("ray") is None:
        return "Ray is not installed"
    return "no time is left" if seconds_left < LEAST_SECONDS else None


# -- processes -------------------------------------------------------------------------------------------------------


def wait_for_rows(stage: Stage, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    rows = stage.folder / "run" / "rows.jsonl"

    def is_there() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the bench ended before its fault: {log.read_text(errors='replace')[-500:]}")
        return rows.exists() and rows.read_bytes().count(b"\n") >= count

    wait_for(is_there, f"{count} rows", START_SECONDS + END_SECONDS)


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Returns the server's, once it serves."""
    found: list[str] = []

    def is_there() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-500:]}")
        found[:] = [line.split()[-1] for line in log.read_text(errors="replace").splitlines() if line.endswith("/v1")]
        return bool(found)

    wait_for(is_there, "the server", START_SECONDS)
    return found[0]


def cores_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Returns the processes of vLLM's cores, which name themselves so."""
    return [pid for pid in descendants(process.pid) if "EngineCore" in name_of(pid)]


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all of its session: engines have groups of their own, and the session stays theirs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == process.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
    process.wait()


# -- the script ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="pawn", help="the bundled one, or the folder of another")
    parser.add_argument("--only", default="", help="faults with one of these in their names, as in assert,replica")
    parser.add_argument("--seconds", type=float, default=420.0 if IS_CUDA else 3600.0, help="no fault lasts longer")
    parser.add_argument("--together", type=int, default=3 if IS_CUDA else 1, help="faults side by side")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(FOUND + json.dumps(tried(options.one, options.model)), flush=True)
        return
    device = torch.cuda.get_device_name() if IS_CUDA else "cpu"
    results, lock = {"device": device, "faults": {}}, Lock()

    def note(name: str) -> None:
        found = apart(name, options)
        with lock:
            results["faults"][name] = found
            print(name, json.dumps(found, indent=1), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")

    with ThreadPoolExecutor(options.together) as threads:
        wanted = options.only.split(",")
        list(threads.map(note, [name for name in FAULTS if any(word in name for word in wanted)]))
    sys.exit(any(found.get("wrong") for found in results["faults"].values()))


def apart(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Tries a fault in a process of its own, until the script's time is up."""
    left = options.seconds - (time.monotonic() - BEGAN)
    if reason := why_skipped(name, left):
        return {"skipped": reason}
    command = [sys.executable, __file__, "--one", name, "--model", options.model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            text, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its commands
            process.wait(END_SECONDS)
            return {"wrong": [f"it was not over after {left:.0f} s"]}
    lines = [line.removeprefix(FOUND) for line in text.splitlines() if line.startswith(FOUND)]
    return json.loads(lines[0]) if lines else {"wrong": [f"it ended with {process.returncode} and found nothing"]}


def tried(name: str, model: str) -> dict[str, object]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found, began = Found(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            FAULTS[name](Stage(Path(folder), model), found)
        except Exception as error:
            found.check(False, f"{type(error).__name__}: {error}")
    return {**found, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    main()
