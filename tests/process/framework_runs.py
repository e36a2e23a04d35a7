"""Runs of the examples with frameworks: nodes that are processes here, killed or asked to leave."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from local_runs import LocalRun

from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.timeline import TimelineEntry, build_timeline
from hpc_elastic.run.events import read_events

ROOT = Path(__file__).parents[2]


class FrameworkRun(LocalRun):
    """A run of an example script, with a worker a node."""

    def __init__(self, script: str, folder: Path, *overrides: str) -> None:
        super().__init__(
            ROOT / "examples" / script, folder, "launcher=local", "nproc_per_node=1",
            "launcher.agent.warm_workers=false", *overrides,
        )  # fmt: skip

    def timeline(self) -> list[TimelineEntry]:
        """Its timeline, as of `hpc-elastic events`."""
        return build_timeline(EventIndex(read_events(self.path / "events")))

    def lost_at_notice(self) -> int:
        """How many steps were made twice because the only node was asked to leave."""
        (shrank,) = [entry for entry in self.timeline() if entry.kind == "shrank"]
        return shrank.cost.lost_steps

    def checkpoints(self) -> set[str]:
        """The names of its complete checkpoints."""
        folder = self.path / "checkpoints"
        marked = [*folder.glob("*/hpc_elastic.json"), *folder.glob("*/manifest.json")]
        return {p.parent.name for p in marked} | {p.name for p in folder.glob("step-*.ckpt")}

    def trains(self, round_number: int) -> None:
        """Wait until the workers of a round make steps."""
        self.eventually(
            lambda: any(e["round"] == round_number for e in self.events("first_step")),
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
        return [p for p in agent.children() if "hpc_elastic.agent.worker_main" in p.cmdline()]

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
        self.eventually(lambda: self.events("task_exited"), "it has left")

    def values(self) -> list[dict[str, Any]]:
        """Wait for the end; return what the workers returned, by rank."""
        assert self.wait() == 0, self.output()
        assert self.result()["status"] == "succeeded"
        files = sorted((self.path / self.result()["results"]).iterdir())
        return [json.loads(f.read_text()) for f in files]

    def audit(self) -> str:
        """The output of `hpc-elastic audit`, which found that each sample was trained once."""
        argv = [sys.executable, "-m", "hpc_elastic", "audit", str(self.path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def output(self) -> str:
        """What the launcher has printed, and the end of what the agents and workers have."""
        errors = (self.path / "tasks").glob("*/attempt-*/*.err")
        texts = [super().output()]
        for file in errors:
            with contextlib.suppress(OSError):
                texts.append(f"{file.name}: ...{file.read_text()[-3000:]}")
        return "\n".join(texts)

    def _task(self, task: str) -> dict[str, Any]:
        return next(e for e in reversed(self.events("task")) if e["task"] == task)


class CommandRun(FrameworkRun):
    """A run of a command, with `hpc-elastic run`; its settings are given as for that."""

    def __init__(self, command: list[str], folder: Path, *settings: str, **env: str) -> None:
        self.folder, self.path, self._log = folder, folder / "run", folder / "launcher.log"
        argv = [sys.executable, "-m", "hpc_elastic", "run", "--launcher=local"]
        argv += ["--nproc-per-node=1", "--agent.warm-workers=off", f"--run-dir={self.path}"]
        with self._log.open("w") as log:
            self.launcher = subprocess.Popen(
                [*argv, *settings, "--", sys.executable, *command], cwd=folder,
                env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def leaves_returns_and_dies(self) -> None:
        """One of two nodes is asked to leave, comes back, and loses its worker; then it ends."""
        self.trains(1)
        self.tell_to_go(self.tasks()[0])
        self.trains(2)
        self.trains(3)
        self.kill_worker(self.tasks()[1])
        self.trains(4)
        assert self.wait() == 0, self.output()
        assert [e["world_size"] for e in self.events("round")] == [2, 1, 2, 2]
        assert self.lost_at_notice() == 0
        self.audit()


def killed_and_told_to_go(script: str, folder: Path, *overrides: str, num_steps: int) -> None:
    """Of three nodes one loses its worker, then one is asked to leave, and two train to the end.

    Every sample is trained once an epoch, no step is lost at the notice, and all ranks have the
    same parameters.
    """
    with FrameworkRun(script, folder, "nodes=2:3", *overrides) as run:
        run.trains(1)
        run.has_saved()
        run.kill_worker(run.tasks()[1])
        run.trains(2)
        run.tell_to_go(run.tasks()[0])
        values = run.values()

    sizes = [e["world_size"] for e in run.events("round")]
    assert sizes[:3] == [3, 3, 2] and sizes[3:] in ([], [3])  # it may come back before the end
    assert run.lost_at_notice() == 0
    assert [v["steps"] for v in values] == [num_steps] * sizes[-1]
    assert all(value == values[0] for value in values)
    run.audit()
