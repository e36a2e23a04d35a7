"""A real headless Chromium: what a file shows in it, and live pages that a test uses."""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 150.0
_SETTLED_MS = 20_000
"""Virtual time: it passes as fast as the page has nothing to do."""
_TALL = 4000
_PROBE = """(() => {
  const told = setInterval(() => {
    const root = document.documentElement;
    if (!root.dataset.drawn) return;
    clearInterval(told);
    document.querySelectorAll("details").forEach((folded) => { folded.open = true; });
    const wide = [...document.querySelectorAll("body *")].filter(
      (e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".chart"));
    const blank = [...document.querySelectorAll(".chart")].filter((e) => {
      const canvas = e.querySelector("canvas");
      if (!canvas) return true;
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(pixels.buffer)).size < 4;
    });
    parent.postMessage(JSON.stringify({
      drawn: root.dataset.drawn, width: innerWidth, scroll_width: root.scrollWidth,
      height: root.scrollHeight, background: getComputedStyle(document.body).backgroundColor,
      wide: wide.map((e) => e.outerHTML.slice(0, 80)), blank: blank.map((e) => e.id),
      canvases: document.querySelectorAll("canvas").length, title: document.title,
      alien: document.querySelectorAll("img, b, u, script[src], iframe").length,
      hacked: "hacked" in window,
    }), "*");
  }, 20);
})();"""
_FRAME = """<!DOCTYPE html><body style="margin:0">
<iframe src="page.html" style="border:0;width:WIDTHpx;height:HEIGHTpx"></iframe>
<script>onmessage = (e) => { document.documentElement.dataset.told = encodeURIComponent(e.data); };
</script>"""


@dataclass(frozen=True)
class Seen:
    """What a page told, as `_PROBE` finds it, and the lines of its console."""

    told: dict
    console: list[str]


@dataclass(frozen=True)
class Browser:
    """A Chromium.

    A window is 500 pixels wide at least, a phone is not; so pages are looked at in a frame.
    """

    program: str
    folder: Path

    def look(self, page: str, width: int, *, dark: bool = False) -> Seen:
        """Open a report at a width, wait until it has drawn, and hear what it tells."""
        nonce = re.search(r"nonce-([\w-]+)", page)
        assert nonce is not None
        head, _, tail = page.rpartition("</body>")
        probe = f'<script nonce="{nonce[1]}">{_PROBE}</script></body>'
        (self.folder / "page.html").write_text(f"{head}{probe}{tail}")
        frame = self.folder / "frame.html"
        frame.write_text(_FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(_TALL)))
        dom, said = self._run("--dump-dom", frame, dark=dark)
        told = re.search(r'data-told="([^"]*)"', dom)
        assert told is not None, said
        return Seen(json.loads(unquote(told[1])), [x for x in said.splitlines() if "CONSOLE" in x])

    @contextlib.contextmanager
    def opened(self, url: str, width: int, *, dark: bool = False) -> Iterator["LivePage"]:
        """Open a page that goes on, in a browser of its own."""
        there_read, we_write = os.pipe()
        we_read, there_write = os.pipe()
        shell = f'exec "$0" "$@" 3<&{there_read} 4>&{there_write}'  # the pipes that it looks for
        argv = [
            "bash", "-c", shell, self.program, "--headless", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={self.folder / 'live'}", "about:blank",
        ]  # fmt: skip
        ends = (there_read, there_write)
        with subprocess.Popen(
            argv, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            for end in ends:
                os.close(end)
            with open(we_write, "wb", 0) as to, open(we_read, "rb") as back:  # noqa: PTH123
                page = LivePage(to, back)
                try:
                    page.open(url, width, dark=dark)
                    yield page
                finally:
                    process.kill()

    def _run(self, what: str, page: Path, *, dark: bool) -> tuple[str, str]:
        argv = [
            self.program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--enable-logging=stderr", f"--window-size=1400,{_TALL}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--virtual-time-budget={_SETTLED_MS}", f"--user-data-dir={self.folder / 'profile'}",
            what, page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        return done.stdout, done.stderr


class LivePage:
    """A page in a browser, driven by the DevTools protocol over a pair of pipes."""

    def __init__(self, to: IO[bytes], back: IO[bytes]) -> None:
        self._to, self._back = to, back
        self._number, self._session, self._rest = 0, None, b""
        self._is_loaded = False
        self.console: list[str] = []
        """Errors and messages of the page's console."""

    def open(self, url: str, width: int, *, dark: bool) -> None:
        """Open the first page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.go_to(url)

    def go_to(self, url: str) -> None:
        """Go to another page."""
        self._is_loaded = False
        self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self._take(self._receive())

    def resize(self, width: int, height: int = 900) -> None:
        """Change the size of the window; below 600 pixels it is a phone's."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def eventually(self, expression: str, within_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + within_s
        while not (found := self.value(f"document.body && ({expression})")):
            if time.monotonic() > deadline:
                text = self.value("document.body?.innerText.slice(0, 2000)")
                raise AssertionError(f"never: {expression}\n{self.console}\n{text}")
            time.sleep(0.05)
        return found

    def picture(self, file: Path, *, height: int | None = None) -> None:
        """Write what is to be seen; with ``height``, at most as much of the whole page."""
        size = self.value("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"clip": {"x": 0, "y": 0, "width": size[0], "height": min(size[1], height),
                         "scale": 1}} if height else {}  # fmt: skip
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=bool(height), **clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._take(answer)

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(json.dumps(event["params"])[:500])
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(event["params"]["args"])[:500])
        elif event.get("method") == "Page.loadEventFired":
            self._is_loaded = True

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._back.fileno(), 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


def find(folder: Path) -> Browser:
    """Return the machine's Chromium; skip the test where there is none, but fail it in CI."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        text = f"NO BROWSER TO TEST WITH: none of {', '.join(NAMES)} is installed"
        if os.environ.get("CI", "").lower() not in ("", "0", "false", "no") and os.geteuid() == 0:
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return Browser(program, folder)
