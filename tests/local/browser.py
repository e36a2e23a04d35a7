"""A real headless Chromium that looks at a file: what its console said, and what a page told."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
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


def find(folder: Path) -> Browser:
    """Return the machine's Chromium; skip the test where there is none, but fail it in CI."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        text = f"NO BROWSER TO TEST WITH: none of {', '.join(NAMES)} is installed"
        if os.environ.get("CI", "").lower() not in ("", "0", "false", "no") and os.geteuid() == 0:
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return Browser(program, folder)
