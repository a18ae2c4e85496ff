"""Samples traces of generated problems with stock vLLM: settings are chosen on development problems, then collections.

    python -m benchmarks.long_chains.generate --model DIR --out OUT [--engines 3] [--until SECONDS_SINCE_EPOCH]

Rounds, each handed to all engines at once:

1. for `moves`, of which nothing is known yet, many sizes on development problems: that one and its neighbours are taken
   whose votes of `VOTES[-1]` are right most nearly half of the time. Sizes of `chains` are those of `SIZES`;
2. temperatures, on development problems of the middle size: the one with the best vote (a tie goes to the lower one);
3. collections of all sizes at this temperature, their problems mixed;
4. nothing more is sampled: the size to search on is the one whose votes of `VOTES[-1]` on the development and judging
   problems are right most nearly half of the time. Below that size voting leaves nothing to win.

Everything is chosen by plain sampling, nothing on the test split. `--settled chains:12+16+20/lines/0.7` leaves out the
first two, and at `--end` what is unfinished is left out. `settings.json` holds what was
tried and chosen, `NAME.npz` the token ids of a collection, `NAME.jsonl` its problems. `--fake` takes random tokens in
place of an engine, to try the program on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.long_chains.answers import answer_in, expected_votes
from benchmarks.long_chains.problems import generate, prompt

FAMILIES = ("chains", "moves")
SIZES = {"chains": (12, 16, 20, 24)}
MANY_SIZES = {"moves": (2, 3, 4, 6, 8, 11, 15)}
USUAL_TEMPERATURE = 0.8  # at which these are tried
TEMPERATURES = (0.4, 0.6, 0.8, 1.0)
WANTED = 0.5  # votes that are right
VOTES = (1, 16)  # sizes of the votes that settings are chosen by
# name: family, split, problems, traces a problem, change of the size
COLLECTIONS = {
    "chains-train": ("chains", "train", 1200, 8),
    "chains-dev": ("chains", "dev", 200, 16),
    "chains-judge": ("chains", "judge", 300, 16),
    "moves-train": ("moves", "train", 600, 8),
    "moves-dev": ("moves", "dev", 100, 16),
    "moves-judge": ("moves", "judge", 150, 16),
}


@dataclass(frozen=True)
class Setting:
    """The making and answering of a family's problems."""

    family: str
    size: int
    phrase: str
    temperature: float

    @property
    def spec(self) -> str:
        return f"{self.family}:{self.size}"


@dataclass
class Request:
    """One problem under one setting, and the traces it gets."""

    setting: Setting
    problem: dict[str, Any]
    num_traces: int
    prompt_ids: list[int]


@dataclass
class Traces:
    """Token ids of all traces of some requests, one after another."""

    request: np.ndarray  # [trace]
    length: np.ndarray  # [trace]
    is_whole: np.ndarray  # [trace]: ended by itself
    tokens: np.ndarray

    def rows(self) -> Iterator[tuple[int, bool, np.ndarray]]:
        bounds = np.cumsum(self.length)
        for request, is_whole, tokens in zip(
            self.request, self.is_whole, np.split(self.tokens, bounds[:-1]), strict=True
        ):
            yield int(request), bool(is_whole), tokens


# -- engines ---------------------------------------------------------------------------------------------------


def start_vllm(options: argparse.Namespace, number: int) -> Any:
    """Returns a function from (prompt ids, traces, temperature) triples to vLLM's outputs."""
    os.environ["VLLM_CACHE_ROOT"] = f"{options.scratch}/cache-{number}"
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        options.model, max_num_seqs=options.rows, max_model_len=options.longest + 1536, gpu_memory_utilization=0.29,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30), seed=options.seed + number, disable_log_stats=True,
        max_num_batched_tokens=16384,
    )  # fmt: skip

    engine, serial = llm.llm_engine, iter(range(1 << 30))

    def sample(wanted: list[tuple[list[int], int, float]]) -> Iterator[tuple[int, bool, Sequence[int]]]:
        first = next(serial)
        for ids, traces, heat in wanted:
            parameters = SamplingParams(
                n=traces, temperature=heat, max_tokens=options.longest, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            engine.add_request(f"{next(serial)}", {"prompt_token_ids": ids}, parameters)
        while engine.has_unfinished_requests() and time.time() < options.end:
            for output in engine.step():
                if output.finished:
                    for trace in output.outputs:
                        yield int(output.request_id) - first - 1, trace.finish_reason == "stop", trace.token_ids

    return sample


def start_fake(options: argparse.Namespace, number: int) -> Any:
    """Answers at random, some rightly, in the form that a model would write."""
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(options.model), np.random.default_rng(number)

    def sample(wanted: list[tuple[list[int], int, float]]) -> Iterator[tuple[int, bool, Sequence[int]]]:
        for index, (_, traces, _) in enumerate(wanted):
            for _ in range(traces):
                lines = [f"A{i} has {rng.integers(99)} + 3 = {rng.integers(99)}." for i in range(rng.integers(3, 12))]
                pick = rng.integers(3)
                text = "\n".join([*lines, rf"The answer is \boxed{{{pick} {'abc'[pick]}}}"])
                yield index, True, tokenizer(text)["input_ids"]

    return sample


def serve(options: argparse.Namespace, number: int, orders: Any, done: Any) -> None:
    """Runs one engine in a process of its own until it is given None."""
    sample = (start_fake if options.fake else start_vllm)(options, number)
    done.put(("ready", number, None))
    while (order := orders.get()) is not None:
        name, wanted = order
        found = list(sample(wanted))
        path = Path(options.scratch) / f"{name}-{number}.npz"
        np.savez(
            path, request=np.array([index for index, _, _ in found], dtype=np.int32),
            length=np.array([len(ids) for _, _, ids in found], dtype=np.int32),
            is_whole=np.array([is_whole for _, is_whole, _ in found]),
            tokens=np.concatenate([np.asarray(ids, dtype=np.int32) for _, _, ids in found]),
        )  # fmt: skip
        done.put((name, number, str(path)))


class Engines:
    """Several engines on one GPU, each with a share of every round."""

    def __init__(self, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._done = context.Queue()
        self._orders = [context.Queue() for _ in range(options.engines)]
        self._running = []
        for number, orders in enumerate(self._orders):
            process = context.Process(target=serve, args=(options, number, orders, self._done))
            process.start()
            self._running.append(process)
            time.sleep(0 if options.fake else 6)

    def wait_until_ready(self) -> None:
        for _ in self._running:
            say(f"engine {self._next()[1]} is ready")

    def sample(self, name: str, requests: list[Request]) -> Traces:
        """Hands every engine a share, and returns all traces when the last one is done."""
        shares = [list(range(number, len(requests), len(self._orders))) for number in range(len(self._orders))]
        for share, orders in zip(shares, self._orders, strict=True):
            own = [requests[i] for i in share]
            orders.put((name, [(each.prompt_ids, each.num_traces, each.setting.temperature) for each in own]))
        parts = []
        for _ in self._running:
            _, number, path = self._next()
            with np.load(path) as found:
                indices = np.array(shares[number], dtype=np.int32)[found["request"]]
                parts.append(Traces(indices, found["length"], found["is_whole"], found["tokens"]))
        together = [np.concatenate([getattr(each, field) for each in parts]) for field in Traces.__dataclass_fields__]
        return Traces(*together)

    def _next(self) -> tuple[str, int, Any]:
        while True:
            try:
                found: tuple[str, int, Any] = self._done.get(timeout=5)
            except multiprocessing.queues.Empty:  # type: ignore[attr-defined]
                if not all(process.is_alive() for process in self._running):
                    raise SystemExit("an engine died") from None
            else:
                return found

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self._running:
            process.join(30)
            process.kill()


# -- rounds ----------------------------------------------------------------------------------------------------


class Sampler:
    """Makes requests, grades what comes back, and writes it down."""

    def __init__(self, options: argparse.Namespace, engines: Engines) -> None:
        from transformers import AutoTokenizer

        self._options, self._engines = options, engines
        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.num_tokens = 0

    def requests(self, setting: Setting, split: str, problems: int, traces: int) -> list[Request]:
        made = generate(setting.spec, split, max(1, problems // self._options.fewer))
        chats = [[{"role": "user", "content": prompt(each["question"], setting.phrase)}] for each in made]
        ids = self._tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [Request(setting, each, traces, list(own)) for each, own in zip(made, ids, strict=True)]

    def try_out(self, name: str, settings: Sequence[Setting], problems: int, traces: int) -> list[dict[str, Any]]:
        """Returns a row of figures for every setting."""
        requests = [each for setting in settings for each in self.requests(setting, "dev", problems, traces)]
        sampled = self._sample(name, requests)
        answers, lengths, cut = self._answers(requests, sampled)
        rows = []
        for setting in settings:
            own = [i for i, request in enumerate(requests) if request.setting == setting]
            votes = [expected_votes(answers[i], requests[i].problem["answer"], VOTES) for i in own]
            mean = np.mean(votes, axis=0)
            row = asdict(setting) | {f"vote_of_{n}": round(float(mean[j]), 4) for j, n in enumerate(VOTES)}
            row |= {
                "some_right": float(np.mean([requests[i].problem["answer"].lower() in answers[i] for i in own])),
                "tokens": round(float(np.mean([n for i in own for n in lengths[i]])), 1),
                "cut": round(float(np.mean([n for i in own for n in cut[i]])), 4),
            }
            rows.append(row)
            say(json.dumps(row))
        return rows

    def _sample(self, name: str, requests: list[Request]) -> Traces:
        began = time.monotonic()
        sampled = self._engines.sample(name, requests)
        seconds, tokens = time.monotonic() - began, int(sampled.length.sum())
        self.num_tokens += tokens
        say(f"{name}: {len(sampled.length):,} traces, {tokens:,} tokens, {tokens / seconds:,.0f} a second")
        return sampled

    def _answers(
        self, requests: list[Request], sampled: Traces
    ) -> tuple[list[list[str | None]], list[list[int]], list[list[bool]]]:
        answers: list[list[str | None]] = [[] for _ in requests]
        lengths: list[list[int]] = [[] for _ in requests]
        cut: list[list[bool]] = [[] for _ in requests]
        rows = list(sampled.rows())
        texts = self._tokenizer.batch_decode([tokens[-64:] for _, _, tokens in rows], skip_special_tokens=True)
        for (request, is_whole, tokens), text in zip(rows, texts, strict=True):
            answers[request].append(answer_in(text, requests[request].problem["family"]))
            lengths[request].append(len(tokens))
            cut[request].append(not is_whole)
        return answers, lengths, cut

    def _collection(
        self, settings: dict[str, list[Setting]], family: str, split: str, problems: int, traces: int
    ) -> list[Request]:
        share = self._options.counts.get(split, problems) // len(settings[family])
        return in_turns([self.requests(setting, split, share, traces) for setting in settings[family]])

    def collect(self, names: Sequence[str], settings: dict[str, list[Setting]]) -> None:
        made = {name: self._collection(settings, *COLLECTIONS[name]) for name in names}
        requests = in_turns([made[name] for name in names])
        sampled = self._sample("+".join(names), requests)
        found: dict[int, list[tuple[bool, np.ndarray]]] = defaultdict(list)
        for index, is_whole, tokens in sampled.rows():
            found[id(requests[index])].append((is_whole, tokens))
        for name, own in made.items():
            done = [request for request in own if id(request) in found]  # all but what the end cut off
            rows = [(number, *trace) for number, request in enumerate(done) for trace in found[id(request)]]
            self._write_answers(name, [(request, found[id(request)]) for request in done])
            self._write(name, done, rows)

    def _write_answers(self, name: str, found: list[tuple[Request, list[tuple[bool, np.ndarray]]]]) -> None:
        with (self._options.out / f"{name}.answers.jsonl").open("w", encoding="utf-8") as file:
            for request, traces in found:
                tails = [tokens[-64:] for _, tokens in traces]
                texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
                row = {
                    "size": request.setting.size, "answer": request.problem["answer"],
                    "answers": [answer_in(text, request.problem["family"]) for text in texts],
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")

    def _write(self, name: str, requests: list[Request], rows: list[tuple[int, bool, np.ndarray]]) -> None:
        with (self._options.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for request in requests:
                line = request.problem | {"prompt_ids": request.prompt_ids, "setting": asdict(request.setting)}
                file.write(json.dumps(line) + "\n")
        np.savez(
            self._options.out / f"{name}.npz", problem=np.array([index for index, _, _ in rows], dtype=np.int32),
            length=np.array([len(tokens) for _, _, tokens in rows], dtype=np.int32),
            is_whole=np.array([is_whole for _, is_whole, _ in rows]), tokens=np.concatenate([row[2] for row in rows]),
        )  # fmt: skip
        (self._options.out / f"{name}.done").touch()


def chosen_temperature(rows: Sequence[dict[str, Any]]) -> float:
    vote = f"vote_of_{VOTES[-1]}"
    return max(rows, key=lambda row: (row[vote], -row["temperature"]))["temperature"]


def in_turns(lists: Sequence[list[Request]]) -> list[Request]:
    """Returns the requests of all lists, mixed so that each list is spread over the whole."""
    places = [((number + 0.5) / len(own), request) for own in lists for number, request in enumerate(own)]
    return [request for _, request in sorted(places, key=lambda place: place[0])]


def settled(text: str) -> dict[str, list[Setting]]:
    """Reads settings such as `chains:12+16+20/lines/0.7`."""
    spec, phrase, heat = text.split("/")
    family, _, sizes = spec.partition(":")
    return {family: [Setting(family, int(size), phrase, float(heat)) for size in sizes.split("+")]}


def names(text: str) -> list[str]:
    return text.split(",")


def counts(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (each.split("=") for each in text.split(","))}


def choose(sampler: Sampler, record: dict[str, Any], family: str) -> list[Setting]:
    """Returns the settings of a family's collections; what was tried goes into the record."""
    sizes = SIZES.get(family) or sizes_by_votes(sampler, record, family)
    middle = sizes[(len(sizes) - 1) // 2]
    tried = [Setting(family, middle, "lines", heat) for heat in TEMPERATURES]
    record.setdefault("temperatures", []).extend(rows := sampler.try_out("temperatures", tried, 36, 16))
    return [Setting(family, size, "lines", chosen_temperature(rows)) for size in sizes]


def sizes_by_votes(sampler: Sampler, record: dict[str, Any], family: str) -> tuple[int, ...]:
    """Returns the size with votes on development problems that are right most nearly half of the time, and two more."""
    tried = [Setting(family, size, "lines", USUAL_TEMPERATURE) for size in MANY_SIZES[family]]
    record.setdefault("sizes", []).extend(rows := sampler.try_out("sizes", tried, 30, 16))
    best = min(range(len(rows)), key=lambda at: abs(rows[at][f"vote_of_{VOTES[-1]}"] - WANTED))
    return MANY_SIZES[family][max(best - 1, 0) : best + 2]


def choose_size(out: Path, record: dict[str, Any], family: str) -> None:
    """Records how plain traces vote at each size, and the size to search on."""
    right: dict[int, list[list[float]]] = defaultdict(list)
    for split in ("dev", "judge"):
        for line in (out / f"{family}-{split}.answers.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            right[row["size"]].append(expected_votes(row["answers"], row["answer"], VOTES))
    votes = {size: [round(float(each), 4) for each in np.mean(own, axis=0)] for size, own in sorted(right.items())}
    record.setdefault("votes", {})[family] = {"of": VOTES, "by size": votes}
    size = min(votes, key=lambda size: abs(votes[size][-1] - WANTED))
    record.setdefault("search", {})[family] = size
    say(f"votes of {VOTES} by size: {votes}, so that searches take {size}")


BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", default="/tmp", help="for what only this run needs")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--rows", type=int, default=768, help="traces at once in each engine")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="memory of each engine for keys and values")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fewer", type=int, default=1, help="divide every number of problems by this, to try it out")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds since the epoch; no round after it")
    parser.add_argument(
        "--end", type=float, default=float("inf"), help="seconds since the epoch; unfinished traces are left"
    )
    parser.add_argument("--settled", metavar="FAMILY:SIZE[+SIZE...]/PHRASE/TEMPERATURE", help="choose nothing")
    parser.add_argument("--families", type=names, default=FAMILIES, metavar="NAME,...", help="to choose settings of")
    parser.add_argument("--counts", type=counts, default={}, metavar="SPLIT=N,...", help="problems of each split")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a trace at most")
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = Engines(options)
    sampler = Sampler(options, engines)
    engines.wait_until_ready()
    record: dict[str, Any] = {"model": Path(options.model).name, "engines": options.engines, "rows": options.rows}
    if options.settled:
        settings = settled(options.settled)
    else:
        settings = {family: choose(sampler, record, family) for family in options.families}
    record["chosen"] = {family: [asdict(each) for each in own] for family, own in settings.items()}
    for family in settings:
        if time.time() < options.until:
            sampler.collect([f"{family}-{split}" for split in ("judge", "dev", "train")], settings)
            choose_size(options.out, record, family)
    record["tokens"], record["seconds"] = sampler.num_tokens, round(time.monotonic() - BEGAN, 1)
    (options.out / "settings.json").write_text(json.dumps(record, indent=1))
    (options.out / "generate.done").touch()
    engines.close()


if __name__ == "__main__":
    main()
