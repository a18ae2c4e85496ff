"""Shows on a GPU what the test suite shows on a CPU: states, branches and victims under bf16, CUDA graphs, async.

    python benchmarks/vllm_cuda_check.py --out benchmarks/results/vllm_cuda_check.json      # 3 minutes on an H200
    … --parts forest,accuracy --seconds 150                    # forest attention against stock, and on 100 pawn puzzles

Runs once per model runner (V1, V2), each in a process of its own. On a CPU it runs in float32, for debugging; V2's
kernels are interpreted there. Results are written after every part, and parts for which no time is left are named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Timer

BEGAN = time.monotonic()  # importing torch and vLLM counts
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from forest_check import check_forest, pawn_accuracy  # noqa: E402

PART = "PART "  # begins a line that the writing process reads
SEARCH = {"capacity": 16, "swap_size": 2, "num_traces": 16}  # on a CPU; a GPU takes pawn's own settings
PART_SECONDS = 25  # of a part on an H200, at most: it starts an engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runners", default="1,2", help="vLLM's model runners to try")
    parser.add_argument("--parts", default="", help="by name; all unless given")
    parser.add_argument("--seconds", type=float, default=400, help="no part begins that would end later, most likely")
    parser.add_argument("--puzzles", type=int, default=100, help="of the accuracy with stock and with forest attention")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        check(args)
        return
    runners = args.runners.split(",")
    results = Results(args.out)
    with ThreadPoolExecutor() as threads:  # side by side: a start is mostly compiling
        list(threads.map(lambda runner: run_apart(args, runner, results), runners))
    sys.exit("error" in json.dumps(results.found))


class Results:
    """The results of all runners, by part; written whenever one has found something."""

    def __init__(self, path: Path | None) -> None:
        self.found: dict[str, dict] = {}
        self._path, self._lock = path, Lock()

    def note(self, runner: str, found: dict) -> None:
        with self._lock:
            self.found.setdefault(f"v{runner}", {}).update(found)
            if self._path:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self.found, indent=2, sort_keys=False) + "\n")


def run_apart(args: argparse.Namespace, runner: str, results: Results) -> None:
    print(f"--- model runner V{runner}", flush=True)
    env = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0" if runner == "1" else "1"}
    command = [sys.executable, __file__, "--one", "--seconds", str(args.seconds), "--puzzles", str(args.puzzles)]
    command += ["--parts", args.parts]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stop = Timer(args.seconds, process.kill)
    stop.start()
    last: list[str] = []
    for line in process.stdout:
        if line.startswith(PART):
            results.note(runner, json.loads(line.removeprefix(PART)))
            print(f"V{runner} {line}"[:2_000].rstrip(), flush=True)
        else:
            print(f"V{runner} {line}", end="", flush=True)
            last = [*last[-8:], line.rstrip()]
    stop.cancel()
    if process.wait():
        results.note(runner, {"ended": {"error": [f"exit code {process.returncode}", *last]}})


def tell(name: str, found: object) -> None:
    """Sends results to the process that writes them; a part may send what it has so far."""
    print(PART + json.dumps({name: found}), flush=True)


def check(args: argparse.Namespace) -> None:
    if not is_cuda() and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        from support import v2_on_cpu

        v2_on_cpu.pytest_configure()
    import vllm

    from support.tiny import save_tiny

    def left() -> float:
        return args.seconds - (time.monotonic() - BEGAN)

    tell("vllm", vllm.__version__)
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_tiny(Path(folder)))
        shared, own = parts_with_an_engine(model), parts_of(model, args, left)
        wanted = args.parts.split(",") if args.parts else [*shared, *own]
        if first := [name for name in wanted if name in shared]:
            engine = start(model)  # starting takes most of the time
            for name in first:
                run_part(name, lambda name=name: shared[name](engine), left)
            engine.close()
        for name in wanted:
            if name not in shared:
                run_part(name, own[name], left)


def parts_with_an_engine(model: str) -> dict[str, Callable[[object], dict]]:
    return {"states": lambda engine: states(engine, model), "branch": branch, "repeat": repeat}


def parts_of(model: str, args: argparse.Namespace, left: Callable[[], float]) -> dict[str, Callable[[], dict]]:
    return {
        "layers": lambda: layers(model), "pressure": lambda: pressure(model),
        "recorded": lambda: one_launch(model, "recorded", fused_scorer=False),
        "fused": lambda: one_launch(model, "fused"), "confidence": lambda: confidence(model),
        "own process": lambda: own_process(model),
        "forest": lambda: check_forest(start, model, lambda found: tell("forest", found)),
        "pawn": pawn, "accuracy": lambda: accuracy(args.puzzles, left() - 5),
    }  # fmt: skip


def run_part(name: str, part: Callable[[], dict], left: Callable[[], float]) -> None:
    """One run tells about every part, whatever becomes of it."""
    if is_cuda() and left() < PART_SECONDS:
        tell(name, "no time")
        return
    before = left()
    try:
        found = part()
    except Exception:
        found = {"error": traceback.format_exc(limit=0).splitlines()}
    tell(name, {**found, "seconds": round(before - left(), 1)})


def is_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def start(model: str, scorer: object = None, *, kv_budget_tokens: int | None = None, **options: object) -> object:
    import torch

    from gambit.config.options import EngineConfig
    from gambit.engines.vllm.start import start_vllm
    from support.engine_setups import ProjectionScorer

    is_cpu = not torch.cuda.is_available()
    config = EngineConfig(
        model=model,
        engine="vllm",
        dtype="float32" if is_cpu else "bfloat16",
        memory_ratio=0.3,
        kv_budget_tokens=kv_budget_tokens,
        engine_options={**small_engine(), "own_process": False, **options},
    )
    return start_vllm(config, model, scorer or ProjectionScorer())


def small_engine() -> dict:
    """A room of its own, not a share of the memory: two runners start side by side."""
    import torch

    return {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 512} if torch.cuda.is_available() else {
        "kv_cache_memory_bytes": 64 << 20
    }  # fmt: skip


def layers(model: str) -> dict:
    """The same of inner layers, which vLLM gives as it does for drafts."""
    from support.engine_setups import ProjectionScorer

    wanted = (-1, 0, 1)
    engine = start(model, ProjectionScorer(layers=wanted))
    found = states(engine, model, wanted)
    engine.close()
    return found


def states(engine: object, model: str, layers: tuple[int, ...] = (-1,)) -> dict:
    """Scores against transformers' states, at the right position and at its neighbours."""
    import torch
    from transformers import AutoModelForCausalLM

    from support.engine_setups import PROMPT, finish, open_search, projection, spec, tokens_of

    info, device = engine.info, "cuda" if torch.cuda.is_available() else "cpu"
    open_search(engine, stops=())
    engine.submit([spec(i) for i in range(48)])  # 16 had 41 or 55 thoughts, as the noise was
    steps = finish(engine)
    engine.close_search(1)
    tokens = tokens_of(steps)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    right, wrong = [], []
    scores = {}
    with torch.inference_mode():
        for trace, said in tokens.items():
            ids = torch.tensor([[*PROMPT, *said]], device=device)
            hidden = reference.model(input_ids=ids, output_hidden_states=True).hidden_states
            found = torch.cat([hidden[layer][0] for layer in layers], dim=-1)
            scores[trace] = found.float().cpu() @ projection(32 * len(layers))
    for thought in (t for step in steps for t in step.scored):
        at = len(PROMPT) + thought.num_tokens - 1
        right.append(abs(float(scores[thought.trace][at]) - thought.score))
        wrong.append(abs(float(scores[thought.trace][at - 1]) - thought.score))
    medians = {name: sorted(values)[len(values) // 2] for name, values in (("right", right), ("before", wrong))}
    assert len(right) > 50 and medians["right"] < 0.1 * medians["before"], (len(right), medians)
    return {"thoughts": len(right), "median |difference|": medians, "engine": f"{info.device} {info.dtype}"}


def branch(engine: object) -> dict:
    """Greedy children and the ledger; in half precision a near tie may part a child from its parent."""
    from gambit.types import TraceKey
    from support.engine_setups import GREEDY, finish, open_search, run, spec, tokens_of

    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY), spec(1)])
    run(engine, 23)
    engine.submit([spec(2 + i, sampling=GREEDY, inherited=18 + i, parent=TraceKey(1, 0)) for i in range(6)])
    steps = finish(engine)
    tokens = tokens_of(steps)
    admitted = {a.trace: (a.reused, a.recomputed) for step in steps for a in step.admitted if a.trace > 1}
    engine.close_search(1)
    assert all(reused + again == 16 + trace for trace, (reused, again) in admitted.items()), admitted
    assert all(again < engine.info.block_tokens for _, again in admitted.values()), admitted
    same = [sum(a == b for a, b in zip(tokens[2 + i], tokens[0], strict=True)) for i in range(6)]
    assert sorted(same)[3] > 40, same
    return {"tokens of 60 like the parent's": same, "reused, recomputed": list(admitted.values())}


def pressure(model: str) -> dict:
    """Gambit in a third of the room: nothing queued, every victim right, every invariant."""
    from gambit import events as ev
    from support.engine_setups import PROMPT, RULE
    from support.searching import check_ended, check_tree, check_victims, make_settings, run_one

    found = {}
    for is_async in (False, True):
        engine = start(model, kv_budget_tokens=384, async_scheduling=is_async)
        watched = run_one(
            engine,
            make_settings(capacity=12, swap_size=3, check_interval=5, warmup_tokens=8, max_new_tokens=120,
                          num_traces=60, budget_tokens=5000),
            prompt=PROMPT, rule=RULE, stop_ids=frozenset(),  # all want four times the room, whatever the noise
            check=lambda search, event: check_tree(search.record.tree),
        )  # fmt: skip
        check_ended(watched.search.record.tree)
        victims = check_victims(watched.events)
        num_queued = sum(isinstance(event, ev.Queued) for event in watched.events)
        assert len(victims) > 5 and not num_queued, (len(victims), num_queued)
        engine.close()
        found["async" if is_async else "sync"] = {
            "victims": len(victims), "branched": watched.search.result.counts.branched
        }  # fmt: skip
    return found


def repeat(engine: object) -> dict:
    """The same noise twice; a sampled run repeats itself as far as the kernels do."""
    from support.engine_setups import finish, open_search, spec, tokens_of

    said = []
    for search in (1, 2):
        open_search(engine, search, stops=())
        engine.submit([spec(i, search=search) for i in range(16)])
        said.append(tokens_of(finish(engine, search)))
        engine.close_search(search)
    same = sum(said[0][i] == said[1][i] for i in range(16))
    assert same >= 8, same
    return {"traces of 16 that were the same": same}


def confidence(model: str) -> dict:
    """Token confidence on the device, and stock sampling, whose traces are others in every run."""
    from gambit.scorers.simple import ConfidenceScorer
    from support.engine_setups import finish, open_search, spec

    engine = start(model, ConfidenceScorer(), exact_noise=False)
    open_search(engine, stops=())
    engine.submit([spec(i) for i in range(64)])  # 12 to 36 thoughts in eight of them, seen in 12 runs
    scores = [t.score for step in finish(engine) for t in step.scored]
    engine.close()
    assert len(scores) > 20 and all(0 < score < 1 for score in scores) and len(set(scores)) > 10, scores
    return {"thoughts": len(scores)}


def one_launch(model: str, way: str, **options: bool) -> dict:
    """A scorer launched as one recording, or as one kernel, against the same one kernel by kernel."""
    import torch

    from support.engine_setups import finish, open_search, random_mlp, spec, worker_of

    engine = start(model, random_mlp(), **options)
    scoring = worker_of(engine)._scoring
    assert (getattr(scoring, way) is not None) == torch.cuda.is_available()
    scores = []
    for launched in (getattr(scoring, way), None):
        setattr(scoring, way, launched)
        open_search(engine, stops=())
        engine.submit([spec(i) for i in range(48)])
        scores.append({(t.trace, t.num_tokens): t.score for step in finish(engine) for t in step.scored})
        engine.close_search(1)
    engine.close()
    both = scores[0].keys() & scores[1].keys()
    furthest = max(abs(scores[0][thought] - scores[1][thought]) for thought in both)
    assert len(both) > 50 and furthest < 0.01 and len(set(scores[0].values())) > 50, (len(both), furthest)
    return {"thoughts": len(both), "largest difference": furthest}


def accuracy(count: int, seconds: float) -> dict:
    """Pawn puzzles with stock and with forest attention."""
    search = {} if is_cuda() else SEARCH
    return pawn_accuracy(small_engine(), count, seconds, lambda found: tell("accuracy", found), **search)


def pawn() -> dict:
    """The bundled model with its own scorer, several searches in one batch, asynchronous scheduling."""
    from itertools import islice

    from gambit import Problem, SearchConfig, Solver
    from gambit.pawn.puzzles import Split, generate

    puzzles = {f"{i}": puzzle for i, puzzle in enumerate(islice(generate(Split.DEV, seed=5), 24))}
    with Solver("pawn", engine="vllm", memory_ratio=0.3, engine_options=small_engine()) as solver:
        right = {}
        for policy in ("sc", "gambit"):
            config = SearchConfig(policy=policy)
            results = solver.solve_many([Problem(p.text, id=i) for i, p in puzzles.items()], config, concurrency=8)
            right[policy] = sum(r.answer == str(puzzles[r.problem_id].answer) for r in results)
    assert right["gambit"] > right["sc"], right
    return {"puzzles": len(puzzles), "right": right}


def own_process(model: str) -> dict:
    from support.engine_setups import finish, open_search, spec, tokens_of

    # The backend of forest attention has to be known in that process too.
    engine = start(model, own_process=True, attention="auto")
    open_search(engine, stops=())
    engine.submit([spec(i) for i in range(8)])
    tokens = tokens_of(finish(engine))
    engine.close()
    assert sorted(tokens) == list(range(8)) and all(len(said) == 60 for said in tokens.values())
    return {"finished": len(tokens)}


if __name__ == "__main__":
    main()
