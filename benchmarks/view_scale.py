"""How the tree page copes with a search of the paper's size: page size, time to write, open, hover and click.

python benchmarks/view_scale.py [--nodes 1600] [--tokens 35000] [--out result.json] [--keep folder]
python benchmarks/view_scale.py --capacity 64 --islands 16 --nodes 300 --tokens 4000 --shots folder     # to look at

The log is synthetic: a pool of 256 traces of 35,000 tokens, swapped as in a tournament, with text of the standard
library in a byte-level vocabulary made on the spot. Times in the browser are those that a script in the page sees, from
an event to the second frame after it; medians. Everything is unfolded first: that is the most there is to draw.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gambit import events as ev
from gambit.types import EndReason, StopReason
from gambit.view import write_page

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.browser import Browser, find_browser

SWAP, INTERVAL, KV_ROOM = 16, 200, 4_000_000


@dataclass(frozen=True)
class Size:
    """Of the synthetic search."""

    nodes: int
    tokens: int
    capacity: int
    islands: int


@dataclass
class Live:
    """A trace of the synthetic pool."""

    created: int
    inherited: int
    quality: float
    goal: int  # tokens at which it answers
    island: int
    scores: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else 0.0


class Corpus:
    """English of the standard library's sources, and a tokenizer for it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:160]
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        self.ids = [token for text in texts for token in tokenizer.encode(text).ids]
        self._rng = rng

    def draw(self, count: int) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < count:
            begin = self._rng.randrange(len(self.ids) - 3000)
            found += self.ids[begin : begin + self._rng.randrange(300, 3000)]
        return tuple(found[:count])


class Simulation:
    """A search without a model: it writes what a tournament of this size would log."""

    def __init__(self, log: ev.LogWriter, corpus: Corpus, size: Size, rng: random.Random) -> None:
        self.log, self.corpus, self.size, self.rng = log, corpus, size, rng
        self.nodes, self.tokens = size.nodes, size.tokens
        self.live: dict[int, Live] = {}
        self.num_created = self.num_completed = self.num_ghosts = self.generated = 0

    def run(self) -> None:
        for trace in range(self.size.capacity):
            island = trace * self.size.islands // self.size.capacity
            self.add(Live(0, 0, self.rng.uniform(0.1, 0.8), self.goal(), island))
            self.log.write(ev.Created(0, trace, island))
            self.log.write(ev.Admitted(0, trace, 0, 0, 0))
        step = 0
        while self.live and step < 2 * self.tokens:
            self.think(step)
            step += INTERVAL
            self.finish(step)
            self.swap(step)
            self.sample(step)
        self.log.write(ev.Stopped(step, StopReason.EXHAUSTED))

    def goal(self) -> int:
        return round(self.tokens * self.rng.uniform(0.85, 1.0))

    def add(self, trace: Live) -> int:
        self.live[self.num_created] = trace
        self.num_created += 1
        return self.num_created - 1

    def think(self, step: int) -> None:
        """About two thoughts per trace and interval."""
        found: dict[int, list[tuple[int, float]]] = {}
        for number, trace in self.live.items():
            for at in sorted(self.rng.sample(range(step + 1, step + INTERVAL + 1), self.rng.randrange(1, 4))):
                score = min(max(self.rng.gauss(trace.quality, 0.18), 0.0), 1.0)
                trace.scores.append(score)
                found.setdefault(at, []).append((number, score))
        for at, entries in sorted(found.items()):
            lengths = tuple(self.live[number].inherited + at - self.live[number].created for number, _ in entries)
            numbers, scores = zip(*entries, strict=True)
            self.log.write(ev.Scored(at, numbers, scores, lengths))
        self.generated += INTERVAL * len(self.live)

    def finish(self, step: int) -> None:
        for number, trace in list(self.live.items()):
            if trace.inherited + step - trace.created >= trace.goal:
                answer = "204" if self.rng.random() < trace.quality else str(self.rng.randrange(200, 208))
                own = self.end(number, step)
                self.log.write(ev.Finished(step, number, EndReason.STOP, answer, own))
                self.num_completed += 1

    def end(self, number: int, step: int) -> tuple[int, ...]:
        return self.corpus.draw(step - self.live.pop(number).created)

    def swap(self, step: int) -> None:
        for island in range(self.size.islands):
            self.swap_inside(step, [number for number, trace in self.live.items() if trace.island == island])

    def swap_inside(self, step: int, members: list[int]) -> None:
        ranked = sorted(members, key=lambda number: self.live[number].mean)
        most = max(1, SWAP // self.size.islands)
        parents = [n for n in reversed(ranked) if step - self.live[n].created >= self.tokens // 3][:most]
        pairs = list(zip(parents, [n for n in ranked if n not in parents], strict=False))
        for parent, victim in pairs[: self.nodes - self.num_created]:
            score, own = self.live[victim].mean, self.end(victim, step)
            self.log.write(ev.Pruned(step, victim, "tournament", score, own))
            self.branch(parent, step)

    def branch(self, number: int, step: int) -> None:
        parent = self.live[number]
        inherited = parent.inherited + step - parent.created
        quality = self.rng.gauss(0.5 + 0.7 * (parent.quality - 0.5), 0.12)
        goal = max(self.goal(), inherited + INTERVAL)
        child = self.add(Live(step, inherited, quality, goal, parent.island, list(parent.scores)))
        self.log.write(ev.Branched(step, child, number, inherited, 0.6))
        self.log.write(ev.Admitted(step, child, inherited, 0, 0))

    def sample(self, step: int) -> None:
        used = min(sum(step - trace.created for trace in self.live.values()), KV_ROOM)
        seconds = (step / 20, step / 22, 0.0, 0.0, 0.0)
        counts = (len(self.live), 0, 0, self.num_completed, self.generated)
        self.log.write(ev.Sample(step, *counts, used, KV_ROOM, *seconds))


def write_log(path: Path, tokenizer: Path, size: Size) -> Simulation:
    rng = random.Random(0)
    corpus = Corpus(tokenizer, rng)
    header = ev.RunStarted(
        format=ev.LOG_FORMAT, problem_id="synthetic", question="Which answer does a synthetic pool of traces give?",
        policy="gambit", vote="score", aggregation="mean", seed=0, capacity=size.capacity,
        num_traces=size.capacity, prompt_tokens=corpus.draw(120), settings={},
        environment={"engine": {"name": "none", "model": str(tokenizer), "device": "none"}, "scorer": "synthetic"},
    )  # fmt: skip
    with ev.LogWriter(path) as log:
        log.write(header)
        simulation = Simulation(log, corpus, size, rng)
        simulation.run()
    return simulation


FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
# The pointer's event is made in the page, so that the time of the pipe to the browser does not count.
POINT = """(async () => {{
  const box = document.getElementById("tree"), began = performance.now();
  const at = {{ clientX: {x}, clientY: {y}, bubbles: true, pointerId: 1 }};
  for (const kind of {kinds}) box.dispatchEvent(new PointerEvent(kind, at));
  const handled = performance.now() - began;
  {until}
  await {frames};
  return [handled, performance.now() - began];
}})()"""
# A click beside all traces opens none and has no time.
SHOWN = """const before = document.querySelector("#trace .own");
  if (!location.hash) return null;
  while (document.querySelector("#trace .own") === before) await new Promise((next) => setTimeout(next, 1));"""


def measure(page: Path, executable: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as profile, Browser(executable, Path(profile), timeout=120) as browser:
        opened = []
        for _ in range(3):
            began = time.perf_counter()
            browser.open(page)
            browser.run(FRAMES)
            opened.append(time.perf_counter() - began)
        browser.run('document.getElementById("unfold").click()')
        browser.run("HTMLElement.prototype.setPointerCapture = () => {}")  # made-up pointers cannot be captured
        spots = [(100 + 37 * i % 650, 130 + 53 * i % 400) for i in range(21)]
        hover = [browser.run(point(x, y, '["pointermove"]')) for x, y in spots]
        click = list(filter(None, (browser.run(point(x, y, '["pointerdown", "pointerup"]', SHOWN)) for x, y in spots)))
        zoom = [browser.run(key(sign)) for sign in "+-+-+-"]
        assert not browser.complaints, browser.complaints
        version = browser.send("Browser.getVersion")["product"]
    return {
        "version": version,
        "open_s": round(statistics.median(opened), 3),
        "hover_ms": round(statistics.median(both[1] for both in hover), 1),
        "hover_handler_ms": round(statistics.median(both[0] for both in hover), 1),
        "clicks": len(click),
        "click_to_text_ms": round(statistics.median(both[1] for both in click), 1),
        "click_to_text_worst_ms": round(max(both[1] for both in click), 1),
        "zoom_ms": round(statistics.median(zoom), 1),
    }


def take_pictures(page: Path, executable: str, folder: Path) -> None:
    """The page as it opens, wide and narrow, light and dark, and with everything unfolded."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Browser(executable, Path(profile), timeout=120) as browser:
        for width, height in ((1400, 900), (400, 800)):
            for scheme in ("light", "dark"):
                browser.resize(width, height)
                browser.prefer(scheme)
                browser.open(page)
                browser.run(FRAMES)
                browser.screenshot(folder / f"{width}-{scheme}.png")
        browser.resize(1400, 900)
        browser.prefer("light")
        browser.open(page)
        browser.run('document.getElementById("unfold").click()')
        browser.run(FRAMES)
        browser.screenshot(folder / "unfolded.png")


def point(x: float, y: float, kinds: str, until: str = "") -> str:
    return POINT.format(x=x, y=y, kinds=kinds, until=until, frames=FRAMES)


def key(sign: str) -> str:
    return f"""(async () => {{
      const began = performance.now();
      document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key: "{sign}", bubbles: true }}));
      await {FRAMES};
      return performance.now() - began;
    }})()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=35_000)
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--islands", type=int, default=1)
    parser.add_argument("--shots", type=Path, help="only take pictures of the page, into this folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for log and page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        log, page = folder / "events.jsonl", folder / "tree.html"
        log.unlink(missing_ok=True)
        size = Size(options.nodes, options.tokens, options.capacity, options.islands)
        simulation = write_log(log, folder / "tokenizer", size)
        began = time.perf_counter()
        write_page(log, page)
        result: dict[str, object] = {
            "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
            "capacity": options.capacity, "islands": options.islands,
            "nodes": simulation.num_created, "trace_tokens": options.tokens, "generated_tokens": simulation.generated,
            "log_mb": round(log.stat().st_size / 1e6, 1), "page_mb": round(page.stat().st_size / 1e6, 1),
            "write_s": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        executable = find_browser()
        if options.shots and executable:
            take_pictures(page, executable, options.shots)
            return
        result["browser"] = measure(page, executable) if executable else "none is installed"
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
