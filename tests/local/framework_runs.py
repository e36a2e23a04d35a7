"""Runs of the examples with frameworks: nodes that are processes here, killed or told to go."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hpc_elastic.events import read_events
from hpc_elastic.story.episode import Episode
from hpc_elastic.story.episodes import episodes

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0
"""With processes that import torch and a framework on a busy machine."""


class FrameworkRun:
    """A run of an example script, with a worker a node."""

    def __init__(self, script: str, folder: Path, *overrides: str) -> None:
        self.path = folder / "sweep" / "0"
        self._log = folder / "launcher.log"
        argv = [
            sys.executable, str(ROOT / "examples" / script), "launcher=local", "nproc_per_node=1",
            f"hydra.sweep.dir={folder / 'sweep'}", "launcher.agent.spares=false", *overrides,
        ]  # fmt: skip
        with self._log.open("w") as log:
            self._launcher = subprocess.Popen(
                argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> "FrameworkRun":
        """Use the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left of it."""
        if self._launcher.poll() is None:
            self._launcher.terminate()
        self._launcher.wait(PATIENCE_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of a kind."""
        folder = self.path / "events"
        return [e for e in read_events(folder) if e["kind"] == kind] if folder.exists() else []

    def story(self) -> list[Episode]:
        """What `hpc-elastic events` tells of it."""
        return episodes(read_events(self.path / "events"))

    def checkpoints(self) -> set[str]:
        """The names of its complete checkpoints."""
        folder = self.path / "checkpoints"
        marked = [*folder.glob("*/hpc_elastic.json"), *folder.glob("*/manifest.json")]
        return {p.parent.name for p in marked} | {p.name for p in folder.glob("step-*.ckpt")}

    def trains(self, round_number: int) -> None:
        """Wait until the workers of a round make steps."""
        self.eventually(
            lambda: any(e["round"] == round_number for e in self.events("trains")),
            f"round {round_number} trains",
        )

    def has_saved(self) -> None:
        """Wait for a checkpoint, and for a step that is not in it."""
        self.eventually(self.checkpoints, "a checkpoint")
        self.eventually(self._is_ahead, "a step after it")

    def _is_ahead(self) -> bool:
        status = json.loads((self.path / "status.json").read_text())
        return (status["step"] or 0) > (status["checkpoint"] or 0) > 0

    def workers(self, task: str) -> list[psutil.Process]:
        """The worker processes of a task."""
        agent = psutil.Process(self._task(task)["pid"])
        return [p for p in agent.children() if "hpc_elastic.agent.worker" in p.cmdline()]

    def tasks(self) -> list[str]:
        """The tasks of the last round, in rank order."""
        return [member["task"] for member in self.events("round")[-1]["members"]]

    def kill_worker(self, task: str) -> None:
        """Kill a task's worker."""
        (worker,) = self.workers(task)
        worker.kill()

    def tell_to_go(self, task: str) -> None:
        """Send SIGTERM to a task's agent, and to its worker, as Slurm does at many sites."""
        (worker,) = self.workers(task)
        for pid in (self._task(task)["pid"], worker.pid):
            os.kill(pid, signal.SIGTERM)
        self.eventually(lambda: self.events("left"), "it has left")

    def result(self) -> list[dict[str, Any]]:
        """Wait for the end; return what the workers returned, by rank."""
        self.eventually(lambda: self._launcher.poll() is not None, "the launcher ends")
        assert self._launcher.returncode == 0, self._output()
        result = json.loads((self.path / "result.json").read_text())
        assert result["status"] == "succeeded"
        files = sorted((self.path / result["results"]).iterdir())
        return [json.loads(f.read_text()) for f in files]

    def audit(self) -> str:
        """What `hpc-elastic audit` says, having found that each sample was trained once."""
        argv = [sys.executable, "-m", "hpc_elastic", "audit", str(self.path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def eventually(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; a run that has ended will not meet it."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = self._launcher.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                raise AssertionError(f"never: {what}\n{self._output()}")
            time.sleep(0.05)

    def _task(self, task: str) -> dict[str, Any]:
        return next(e for e in self.events("task") if e["task"] == task)

    def _output(self) -> str:
        errors = (self.path / "tasks").glob("*/attempt-*/*.err")
        texts = [self._log.read_text()]
        for file in errors:
            with contextlib.suppress(OSError):
                texts.append(f"{file.name}: ...{file.read_text()[-3000:]}")
        return "\n".join(texts)
