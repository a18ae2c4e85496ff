"""A headless Chromium driven through its DevTools pipe: no driver, no package; it knows nothing of our page."""

from __future__ import annotations

import base64
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

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

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
