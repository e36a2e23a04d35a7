"""A script's run with ``launcher=local``: a process of its own, and what is found out about it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from hpc_elastic.run.events import read_events

PATIENCE_S = 300.0
"""With processes that import torch, and perhaps a framework, on a busy machine."""


class LocalRun:
    """The first run of a sweep; used as a context, it is over behind it.

    Args:
        script: What is run.
        folder: Where it works, and where its output and its sweep are.
        overrides: As in the shell; the launcher is one of them, added where the script has none.
    """

    def __init__(self, script: Path, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.path = folder / "sweep" / "0"
        self._log = folder / "launcher.log"
        sweep = f"hydra.sweep.dir={folder / 'sweep'}"
        with self._log.open("w") as log:
            self.launcher = subprocess.Popen(
                [sys.executable, str(script), "-m", *overrides, sweep], cwd=folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Self:
        """Use the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of it."""
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGINT)
        self.launcher.wait(PATIENCE_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its events of a kind."""
        folder = self.path / "events"
        return [e for e in read_events(folder) if e["kind"] == kind] if folder.exists() else []

    def result(self) -> dict[str, Any]:
        """How it ended."""
        return json.loads((self.path / "result.json").read_text())

    def output(self) -> str:
        """What the launcher has printed so far."""
        return self._log.read_text()

    def wait(self) -> int:
        """Wait until the launcher ends; return its exit code."""
        return self.launcher.wait(PATIENCE_S)

    def eventually(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; a run that has ended will not meet it."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = self.launcher.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                raise AssertionError(f"never: {what}\n{self.output()}")
            time.sleep(0.05)
