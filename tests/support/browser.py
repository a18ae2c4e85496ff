"""A headless Chromium driven through its DevTools pipe: no driver, no package; it knows nothing of our page."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gambit import events as ev
from gambit.types import EndReason, StopReason
from support.tiny import word_tokenizer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-extensions", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
GONE = ("navigated", "context was destroyed", "Cannot find context")  # what Chromium says of a page that was left


class NavigatedError(AssertionError):
    """Another page came while this one was asked."""


def find_browser() -> str | None:
    """An installed Chromium or Chrome; CHROME names another one."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Everything that the page logs as an error, throws or asks the network for is in `complaints`."""

    def __init__(
        self, executable: str, profile: Path, size: tuple[int, int] = (1280, 800), *, timeout: float = 120
    ) -> None:
        self.complaints: list[str] = []
        self._timeout = timeout
        self._process, self._inbox, self._outbox = _start([executable, *SWITCHES, f"--user-data-dir={profile}"])
        self._count, self._buffer = 0, b""
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(*size)

    # -- what a reader does ------------------------------------------------------------------------------------

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        self._load("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())

    def reload(self) -> None:
        self._load("Page.reload")

    def _load(self, method: str, **params: object) -> None:
        self.run("window.isOld = true")  # a load event may be that of the page before
        self.send(method, **params)
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.wait_for(f"innerWidth === {width} && innerHeight === {height}")

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.wait_for(f"matchMedia('(prefers-color-scheme: {scheme})').matches")

    def move(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def wheel(self, x: float, y: float, delta: float, *, is_ctrl: bool = False) -> None:
        self.send(
            "Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta, modifiers=2 * is_ctrl
        )

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    # -- what a reader sees ------------------------------------------------------------------------------------

    def run(self, script: str) -> object:
        """The value of a JavaScript expression; a promise is waited for."""
        reply = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, script: str) -> None:
        """Until the expression is true."""
        self._until(lambda: bool(self.run(script)), script)

    # -- the pipe ----------------------------------------------------------------------------------------------

    def send(self, method: str, **params: object) -> dict:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._outbox, json.dumps(message).encode() + b"\0")
        while (reply := self._next()).get("id") != self._count:
            self._note(reply)
        if any(words in reply.get("error", {}).get("message", "") for words in GONE):
            raise NavigatedError(method)
        assert "error" not in reply, f"{method}: {reply['error']}"
        return reply["result"]

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._inbox], [], [], self._timeout)
            assert ready, f"the browser was silent for {self._timeout:.0f} s"
            chunk = os.read(self._inbox, 1 << 16)
            assert chunk, f"the browser ended with {self._process.poll()}"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.complaints.append(f"asked for {params['request']['url']}")

    def _until(self, is_true, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            with suppress(NavigatedError):  # the page that was asked is gone; the next one is asked again
                if is_true():
                    return
                self.run("new Promise((done) => setTimeout(done, 15))")
            assert time.monotonic() < deadline, f"waited {self._timeout:.0f} s for {what}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._inbox)
        os.close(self._outbox)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], int, int]:
    """The browser reads its orders from descriptor 3 and answers on 4."""
    orders, outbox = _high_pipe()
    inbox, answers = _high_pipe()
    plumbing = f'exec "$@" 3<&{orders} 4>&{answers}'
    process = subprocess.Popen(
        ["bash", "-c", plumbing, "browser", *command], pass_fds=(orders, answers), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(orders)
    os.close(answers)
    return process, inbox, outbox


def _high_pipe() -> tuple[int, int]:
    """From 10 on, so that putting one end in its place never covers another."""
    ends = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


HOSTILE = "</script><b>bold</b><!--<img src=x onerror=alert(1)>"
QUESTION = f"what is {HOSTILE} & 'so' \"on\"?"
FIRST, SECOND, THIRD = "so we have the sum.\n\n", f"then {HOSTILE}\n\n", "the answer is 7 \N{PARTY POPPER} so"
LAST_STEP = 400


class Story:
    """The log, with the texts that its traces must show."""

    def __init__(self, folder: Path) -> None:
        tokenizer = word_tokenizer()
        tokenizer.save_pretrained(folder / "tokenizer")

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        first, second, third = encode(FIRST), encode(SECOND), encode(THIRD)
        whole = (*first, *second, *third)
        one, two = len(first), len(first) + len(second)
        party = next(i for i in range(two, len(whole)) if "\ufffd" in tokenizer.decode(whole[two : i + 1])) + 1
        other = (*whole[party : party + 3], *encode(" we check 9."))  # the rest of the character, then its own way
        self.log = folder / "events.jsonl"
        self.texts = {0: FIRST + SECOND + THIRD, 3: tokenizer.decode((*whole[:party], *other))}
        self.branch = party
        self.header = ev.RunStarted(
            ev.LOG_FORMAT, f"p {HOSTILE}", QUESTION, "gambit", "score", "mean", 5, 4, 4, encode("so?"), {},
            {"engine": {"name": "tale", "model": str(folder / "tokenizer"), "device": "paper"}, "scorer": "hand"},
        )  # fmt: skip
        self.events: list[ev.Event] = [
            self.header,
            *(ev.Created(0, trace) for trace in range(3)),
            *(ev.Admitted(1, trace, 0, 0, 0) for trace in range(3)),
            _sample(0, 3, 0, 0, 0, 0),
            ev.Scored(60, (0, 1), (0.9, 0.2), (one, one)),
            ev.Scored(150, (0,), (0.5,), (two,)),
            ev.Evicted(160, 2, "pressure", None, second),
            ev.Pruned(200, 1, "tournament", 0.2, first),
            ev.Branched(200, 3, 0, party, 0.6),
            _sample(200, 1, 1, 1, 0, 900),
            ev.Admitted(220, 3, party, 0, 20),
            ev.Scored(230, (3,), (0.1,), (party + 3,)),
            ev.Pruned(240, 2, "tournament", None, ()),
            ev.Branched(240, 4, 3, party + 4, 0.6),
            ev.Admitted(241, 4, party + 4, 0, 0),
            ev.Finished(300, 0, EndReason.STOP, "7", whole),
            ev.Finished(350, 3, EndReason.STOP, "9", other),
            ev.Cancelled(LAST_STEP, 4, ()),
            _sample(LAST_STEP, 0, 0, 0, 2, 100),
            ev.Stopped(LAST_STEP, StopReason.BUDGET_TOKENS),
            ev.Voted("7", 0.2, ()),
        ]

    def write(self, num_events: int | None = None) -> Path:
        with ev.LogWriter(self.log) as log:
            for event in self.events[:num_events]:
                log.write(event)
        return self.log


def _sample(step: int, running: int, waiting: int, ghosts: int, completed: int, kv: int) -> ev.Sample:
    return ev.Sample(step, running, waiting, ghosts, completed, 10 * step, kv, 1000, step / 100, step / 120, 0, 0, 0)
