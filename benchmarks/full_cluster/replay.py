"""One replay: the other jobs are submitted, the training too, and squeue is watched."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from full_cluster.background import OtherJob
from hpc_elastic.slurm.nodelist import expand
from slurm_sandbox import SlurmSandbox

POLL_S = 2.0
_OTHER = "other"
_FORMAT = "%i|%j|%T|%S|%N"


@dataclass
class Replay:
    """What was seen; moments are seconds from the begin of the replay.

    Attributes:
        contestant: Who has trained.
        submitted_s: When the training was submitted.
        complete_s: When it was complete; None if it was not within the replay.
        occupied: Moment, number of nodes with other jobs, number of nodes of the training.
        holders: Node -> changes of who has it: moment, and ``other``, ``training`` or nothing.
        waits: Other job -> seconds for which it has waited; None if it has not started.
        trail: Moment, number of workers and node-seconds done of each step.
        slots: Node, begin, last step and end of each time that the training had a node of a job
            which has ended; the last step is None if it made none.
        forecasts: Moment, expected start of the next node by Slurm's plan, and the quantiles (10,
            50 and 90 per cent) of what was learned, the plan in place of them if that is nothing.
    """

    contestant: str
    submitted_s: float = 0.0
    complete_s: float | None = None
    occupied: list[tuple[float, int, int]] = field(default_factory=list)
    holders: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    waits: list[float | None] = field(default_factory=list)
    trail: list[tuple[float, int, float]] = field(default_factory=list)
    slots: list[tuple[str, float, float | None, float]] = field(default_factory=list)
    forecasts: list[tuple[float, float, float, float, float]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


class Player:
    """Plays the other jobs on a sandbox, where nothing else runs, and watches.

    In the file ``ended`` slurmctld notes each job that has ended (``JobCompLoc``); ``stop`` ends
    the replay early; what is seen is put into ``seen``.
    """

    def __init__(
        self,
        sandbox: SlurmSandbox,
        jobs: Sequence[OtherJob],
        folder: Path,
        ended: Path,
        stop: threading.Event,
        seen: Replay,
    ) -> None:
        self.sandbox, self.jobs, self.folder, self.seen = sandbox, jobs, folder, seen
        self._ended, self._stop = ended, stop
        ours = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
        self.env = {
            **os.environ, **sandbox.env, "SLURM_TIME_FORMAT": "%s", "PYTHONPATH": ours,
            "SUBMITIT_PREEMPT_SIGNAL": "USR2",
        }  # fmt: skip
        self._begin = time.time()
        self._submitted: dict[str, tuple[int, float]] = {}
        self._started: dict[str, float] = {}
        self._over = threading.Event()
        self._launchers: list[subprocess.Popen[bytes]] = []

    @property
    def now_s(self) -> float:
        return time.time() - self._begin

    def run(self, argv: Sequence[str], **more: Any) -> str:
        done = subprocess.run(
            self.sandbox.on_login([*argv]), env=self.env, cwd=self.folder, text=True,
            capture_output=True, timeout=180, **more,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{argv}: {done.stdout}{done.stderr}")
        return done.stdout

    def launch(self, argv: Sequence[str]) -> None:
        with (self.folder / "launcher.log").open("w") as log:
            argv = self.sandbox.on_login([*argv])
            process = subprocess.Popen(argv, cwd=self.folder, env=self.env, stdout=log, stderr=log)
        self._launchers.append(process)

    def play(
        self, submit: Callable[[Player], None] | None, submit_s: float, length_s: float
    ) -> None:
        """Play all of it; the training is submitted once the queue has formed, if there is one."""
        self._begin = time.time()
        self.seen.submitted_s = submit_s
        todo, is_submitted = list(self.jobs), submit is None
        forecasting = threading.Thread(target=self._forecast)
        forecasting.start()
        try:
            while self.now_s < length_s and not self._stop.is_set():
                while todo and todo[0].submitted_s <= self.now_s:
                    self._submit_other(len(self.jobs) - len(todo), todo.pop(0))
                if not is_submitted and self.now_s >= submit_s:
                    is_submitted = True
                    assert submit is not None
                    submit(self)
                self._watch()
                time.sleep(max(0.0, POLL_S - self.now_s % POLL_S))
        finally:
            self._over.set()
            forecasting.join()
            self._finish()

    def _submit_other(self, number: int, job: OtherJob) -> None:
        argv = [
            "sbatch", "--parsable", "--exclusive", "-J", _OTHER, "-o", "/dev/null",
            f"-N{job.nodes}", f"-t{job.limit_min}", "--wrap", f"sleep {job.runs_s}",
        ]  # fmt: skip
        self._submitted[self.run(argv).strip()] = number, self.now_s

    def _watch(self) -> None:
        holders: dict[str, str] = {}
        for line in self.run(["squeue", "-h", "-a", "-r", "-o", _FORMAT]).splitlines():
            job, name, state, start, nodes = line.split("|")
            if state not in ("RUNNING", "COMPLETING"):
                continue
            if start.isdecimal() and (job not in self._started or name != _OTHER):
                self._started[job] = started_s = float(start) - self._begin
                if name != _OTHER and started_s not in self.seen.starts:
                    self.seen.starts.append(started_s)
            holders |= dict.fromkeys(expand(nodes), _OTHER if name == _OTHER else "training")
        now = self.now_s
        others = sum(holder == _OTHER for holder in holders.values())
        self.seen.occupied.append((now, others, len(holders) - others))
        for node in self.sandbox.nodes:
            changes = self.seen.holders.setdefault(str(node), [(0.0, "")])
            holder = holders.get(str(node), "")
            if changes[-1][1] != holder:
                changes.append((now, holder))

    def _forecast(self) -> None:
        """Ask what `hpc-elastic status` expects, now and then, if this is a run of ours."""
        run = self.folder / "run"
        argv = [sys.executable, "-m", "hpc_elastic", "status", "--json", str(run)]
        while not self._over.wait(20.0):
            if not (run / "run.json").exists() or (self.folder / "complete").exists():
                continue
            asked_s = self.now_s
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired, ValueError):
                expected = json.loads(self.run(argv))["next_node"] or {}
                learned, at = expected.get("learned"), expected.get("at")
                if learned or at is not None:
                    ats = [at or learned["p50"], *(learned or dict.fromkeys("123", at)).values()]
                    by_plan, low, middle, high = (each - self._begin for each in ats)
                    self.seen.forecasts.append((asked_s, by_plan, low, middle, high))

    def _finish(self) -> None:
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()
        waits: dict[int, float | None] = {}
        for job, (number, submitted_s) in self._submitted.items():
            started_s = self._started.get(job)
            waits[number] = None if started_s is None else max(0.0, started_s - submitted_s)
        self.seen.waits = [waits.get(number) for number in range(len(self.jobs))]
        trail = self.folder / "trail"
        for line in trail.read_text().splitlines() if trail.exists() else ():
            at, world, done = line.split()
            self.seen.trail.append((float(at) - self._begin, int(world), float(done)))
        complete = self.folder / "complete"
        if complete.exists():
            self.seen.complete_s = float(complete.read_text()) - self._begin
        self._note_slots()

    def _note_slots(self) -> None:
        steps = {
            path.name: [float(line) - self._begin for line in path.read_text().splitlines()]
            for path in self.folder.glob("steps/*")
        }
        for line in self._ended.read_text().splitlines() if self._ended.exists() else ():
            job = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if job["Name"] == _OTHER or "(" in job["NodeList"]:
                continue
            begin, end = (
                datetime.fromisoformat(job[key]).timestamp() - self._begin
                for key in ("StartTime", "EndTime")
            )
            for node in expand(job["NodeList"]):
                made = [at for at in steps.get(node, ()) if begin <= at <= end + 1]
                self.seen.slots.append((node, begin, max(made, default=None), end))


# ---- contestants


@dataclass(frozen=True)
class Contestant:
    """One way of training; ``submit`` is None if there is no training."""

    label: str
    submit: Callable[[Player], None] | None


def ours(settings: Mapping[str, Any]) -> Callable[[Player], None]:
    def submit(player: Player) -> None:
        player.launch([*_work(player), json.dumps(settings)])

    return submit


def rigid(nodes: int, limit_min: int) -> Callable[[Player], None]:
    return lambda player: _sbatch(player, nodes, limit_min, f"srun {shlex.join(_work(player))}")


def chain(nodes: int, limit_min: int, number: int) -> Callable[[Player], None]:
    """Return what submits short jobs of torchrun, one after the other."""

    def submit(player: Player) -> None:
        first = "$(scontrol show hostnames | head -n 1)"
        torchrun = (
            f"{sys.executable} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 "
            f"--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint={first}:29400"
        )
        line = f"test -e complete || srun {torchrun} {shlex.join(_work(player)[1:])}"
        for _ in range(number):
            _sbatch(player, nodes, limit_min, line, "--dependency=singleton")

    return submit


def hydra_submitit(nodes: int, limit_min: int) -> Callable[[Player], None]:
    """Return what starts hydra-submitit-launcher, whose job is requeued at its time limit."""

    def submit(player: Player) -> None:
        script = str(Path(__file__).with_name("hydra_script.py"))
        terms = {
            "nodes": nodes, "tasks_per_node": 1, "cpus_per_task": 1, "timeout_min": limit_min,
            "signal_delay_s": 10, "max_num_timeout": 100,
        }  # fmt: skip
        argv = [
            sys.executable, script, "-m", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep",
            f"+folder={player.folder}", "+hydra.launcher.additional_parameters.exclusive=true",
            *(f"hydra.launcher.{key}={value}" for key, value in terms.items()),
        ]  # fmt: skip
        player.launch(argv)

    return submit


def _work(player: Player) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("work.py")), str(player.folder)]


def _sbatch(player: Player, nodes: int, limit_min: int, line: str, *more: str) -> None:
    argv = [
        "sbatch", "--exclusive", "-J", "training", f"-N{nodes}", "--ntasks-per-node=1",
        f"-t{limit_min}", "-o", "job-%j.log", *more, "--wrap", line,
    ]  # fmt: skip
    player.run(argv)
