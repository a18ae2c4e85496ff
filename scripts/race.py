"""Makes docs/race.svg, docs/race.gif and docs/race-llm.svg: a problem by plain voting and by Gambit, from event logs.

python scripts/race.py          # the SVGs again, and pawn's frames as a GIF (needs Chromium and Pillow)
python scripts/race.py --search # runs pawn's two searches first

The logs of the LLM are those of a problem of benchmarks/results/long_chains, without the folders of that machine.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from gambit import SearchConfig, Solver, events
from gambit.answers import Grader
from gambit.view.race import HEIGHT, HELD, SECONDS, SHARE_MOVING, WIDTH, race

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LOGS = tuple(DOCS / "race" / f"{policy}.jsonl.gz" for policy in ("sc", "gambit"))
LLM_LOGS = tuple(DOCS / "race" / f"llm-{policy}.jsonl.gz" for policy in ("sc", "gambit"))
QUESTION = (  # test-0025 of the bundled model's puzzles
    "b = 28; k = 63; n = 83; l = n * k; y = l * b; q = l * y; j = q - k; g = j + y; x = l * g; w = x + l; "
    "a = w * k; c = x * a; o = x + c; h = n * o; p = h * j; m = x - p; z = l - m; z?"
)
ANSWER = "23"
LLM_ANSWER = "408"
SIZE = 640, 640 * HEIGHT // WIDTH
FRAMES, FRAME_MS, FIRST_MS, END_MS = 60, 150, 2_500, 2_000


def search() -> None:
    """Searches with seed 0 and writes the logs; paths of this machine become the name of the bundled model."""
    with Solver("pawn") as solver, tempfile.TemporaryDirectory() as scratch:
        for log in LOGS:
            policy = log.name.partition(".")[0]
            folder = Path(scratch) / policy
            solver.solve(QUESTION, SearchConfig(policy=policy, seed=0), out_dir=folder)
            _pack(folder / "events.jsonl", log)


def _pack(found: Path, out: Path) -> None:
    named = found.with_name("named.jsonl")
    with events.LogWriter(named) as writer:
        for event in events.read_log(found):
            if isinstance(event, events.RunStarted):
                engine = {**event.environment["engine"], "model": "pawn"}
                event = replace(event, environment={**event.environment, "engine": engine})
            writer.write(event)
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(gzip.compress(named.read_bytes(), mtime=0))


def picture(logs: tuple[Path, ...] = LOGS, answer: str = ANSWER) -> str:
    with Grader() as grader:
        return race(logs, grader.equivalent, answer)


def frames(svg: Path) -> list[bytes]:
    """Returns PNGs of the moving part, the last one of its end; GIFs have no dark side."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.browser import Browser, find_browser

    browser = find_browser()
    assert browser is not None, "needs Chromium or Chrome"
    found = []
    with tempfile.TemporaryDirectory() as profile, Browser(browser, Path(profile), SIZE) as tab:
        tab.prefer("light")
        tab.open(svg)
        tab.run("document.getAnimations().forEach((each) => each.pause())")
        for number in range(1, FRAMES + 1):
            at = 1000 * (HELD + SECONDS * SHARE_MOVING * number / FRAMES) + 1  # the last one shows the end
            tab.run(f"document.getAnimations().forEach((each) => (each.currentTime = {at:.0f}))")
            tab.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            found.append(base64.b64decode(tab.send("Page.captureScreenshot", format="png")["data"]))
    return found


def gif(pngs: list[bytes], out: Path) -> None:
    from PIL import Image

    images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    palette = images[-1].quantize(64)
    small = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    small.insert(0, small[-1])
    durations = [FIRST_MS, *[FRAME_MS] * FRAMES]
    durations[-1] = END_MS
    small[0].save(out, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", action="store_true")
    if parser.parse_args().search:
        search()
    (DOCS / "race.svg").write_text(picture(), encoding="utf-8")
    (DOCS / "race-llm.svg").write_text(picture(LLM_LOGS, LLM_ANSWER), encoding="utf-8")
    gif(frames(DOCS / "race.svg"), DOCS / "race.gif")
    print(re.sub(r".*<title>(.*?)</title>.*", r"\1", picture(), flags=re.DOTALL).strip())
