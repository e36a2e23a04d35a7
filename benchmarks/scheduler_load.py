#!/usr/bin/env python3
"""How many commands of Slurm's does a run call a minute, on how many nodes?

    as root: python benchmarks/scheduler_load.py --sizes 16,32

METHODS.md says what is measured. The worker of each node needs no torch. Commands are counted in
programs that stand before Slurm's own on the PATH, requests by sdiag.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evidence.result import Column, Figure, Result, Table, Target
from evidence.sandbox import sandbox_of
from evidence.show import about, numbers, options, present

from hpc_elastic.run.events import read_events
from slurm_sandbox import SandboxConfig, SlurmSandbox
from slurm_sandbox.processes import wait_until

PATIENCE_S = 300.0
until = partial(wait_until, timeout_s=PATIENCE_S)
MINUTE_S = 60.0
TRAINS_S = 120.0
SETTLES_S = 30.0
GAPS = "waits for gaps"
TARGETS = {"waits": 20.0, "trains": 4.0, "preempted": 20.0, GAPS: 20.0}
COUNTED = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
RPCS = re.compile(
    r"REQUEST_(?:JOB_INFO|JOB_INFO_SINGLE|JOB_USER_INFO|JOB_STEP_INFO|NODE_INFO|NODE_INFO_SINGLE|"
    r"PARTITION_INFO|BUILD_INFO|UPDATE_JOB|JOB_REQUEUE|KILL_JOB|CANCEL_JOB_STEP|"
    r"SUBMIT_BATCH_JOB)\s.*?count:(\d+)"
)
"""What sdiag says of the requests that these commands make."""
ABOUT = about("What the scheduler is asked")
SCRIPT = """
import time
from pathlib import Path

import hydra
from hpc_elastic import report

@hydra.main(version_base=None)
def main(cfg):
    step = 0
    while not Path(__file__).with_name("done").exists():
        step += 1
        report(step=step)
        time.sleep(0.5)

if __name__ == "__main__":
    main()
"""
SHIM = """#!/bin/sh
echo "$(date +%s.%N) {name} $*" >> {log}
exec {program} "$@"
"""


@dataclass(frozen=True)
class Calls:
    """What was called in some time: commands a minute, how often which, requests to slurmctld."""

    name: str
    per_minute: float
    most: str
    requests: float


class Counter:
    """Counts the commands that are called with its environment."""

    def __init__(self, folder: Path, sandbox: SlurmSandbox) -> None:
        self.log = folder / "calls"
        self.log.touch()
        self._sandbox = sandbox
        programs = folder / "programs"
        programs.mkdir()
        for name in COUNTED:
            shim = programs / name
            shim.write_text(SHIM.format(name=name, log=self.log, program=shutil.which(name)))
            shim.chmod(0o755)
        self.env = {"PATH": f"{programs}:{os.environ['PATH']}"}

    def during(self, name: str, seconds: float, *, since: float | None = None) -> Calls:
        """Return what is called from now on for so long: the mean of its minutes.

        With ``since`` (Unix time) the busiest minute from then on instead.
        """
        began, asked = time.time(), self._requests()
        time.sleep(seconds)
        calls = self._calls(began if since is None else since)
        requests = (self._requests() - asked) / (time.time() - began) * MINUTE_S
        if since is None:
            per_minute = len(calls) / seconds * MINUTE_S
        else:
            times = [at for at, _ in calls]
            per_minute = max((sum(t <= u < t + MINUTE_S for u in times) for t in times), default=0)
        names = [command for _, command in calls]
        most = ", ".join(f"{names.count(n)} {n}" for n in COUNTED if n in names)
        return Calls(name, per_minute, most, requests)

    def _calls(self, since: float) -> list[tuple[float, str]]:
        lines = (line.split() for line in self.log.read_text().splitlines())
        return [(float(at), name) for at, name, *_ in lines if float(at) >= since]

    def _requests(self) -> int:
        return sum(map(int, RPCS.findall(self._sandbox.run(["sdiag"]).stdout)))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--sizes", type=numbers, default=[16, 32],
        metavar="N,M", help="nodes of the sandboxes (default: 16,32)",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=200, help="of the sweep (default: 200)")
    parser.add_argument("--quick", action="store_true", help="a quarter of each time")
    given = parser.parse_args()
    rows: list[tuple[str | Figure, ...]] = []
    targets: list[Target] = []
    for size in given.sizes:
        with sandbox_of(SandboxConfig(name="load", nodes=size), enter=True) as sandbox:
            found = [*of_run(sandbox, size, given.quick), of_gaps(sandbox, size, given.quick)]
            for calls in found:
                rows.append(_row(f"{size} nodes: {calls.name}", calls))
                what = f"{size} nodes, {calls.name}: commands a minute"
                targets.append(Target(what, TARGETS[calls.name], calls.per_minute, ""))
            if size == given.sizes[0]:
                sweep = of_sweep(sandbox, given.runs)
                rows.append(_row(sweep.name, sweep))
                what = f"{sweep.name}: commands a minute"
                targets.append(Target(what, TARGETS["waits"], sweep.per_minute, ""))
    columns = (
        Column(""), Column("commands a minute", ".1f"), Column("in all that time"),
        Column("requests a minute", ".0f"),
    )  # fmt: skip
    table = Table("launcher and agents together", columns, tuple(rows))
    present(Result(ABOUT, (table,), tuple(targets)), given)


def _row(name: str, calls: Calls) -> tuple[str | Figure, ...]:
    return name, Figure(calls.per_minute), calls.most, Figure(calls.requests)


def of_run(sandbox: SlurmSandbox, size: int, quick: bool) -> list[Calls]:
    """Return what a run calls while it waits for half of its nodes, trains, and is preempted."""
    shorter = 4.0 if quick else 1.0
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder, counter = Path(name), Counter(Path(name), sandbox)
        busy = occupy_half(sandbox, size)
        run, began = folder / "runs" / "0", time.time()
        settings = ["launcher.agent.warm_workers=false", "launcher.below_min_timeout_s=null"]
        launcher = start(folder, counter, f"nodes={size}:{size}", *settings)
        try:
            until("half of the nodes have come", lambda: len(events(run, "joined")) >= size // 2)
            found = [counter.during("waits", 90.0 / shorter, since=began)]
            sandbox.run(["scancel", busy])
            until("all train", lambda: len(events(run, "round")) == 1)
            time.sleep(SETTLES_S)
            found.append(counter.during("trains", TRAINS_S / shorter))
            taken = time.time()
            sandbox.preempt(range(1, size + 1), 20.0)
            found.append(counter.during("preempted", 90.0 / shorter, since=taken))
            until("all train again", lambda: len(events(run, "round")) == 2)
            (folder / "done").touch()
            launcher.wait(PATIENCE_S)
        finally:
            end(launcher, sandbox)
    return found


def of_gaps(sandbox: SlurmSandbox, size: int, quick: bool) -> Calls:
    """Return what a run calls that trains on half of the nodes, and waits for gaps elsewhere."""
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder, counter = Path(name), Counter(Path(name), sandbox)
        occupy_half(sandbox, size)
        slots = ["launcher.time=60", "launcher.time_min=5", "launcher.agent.warm_workers=false"]
        launcher = start(folder, counter, f"nodes=1:{size}", *slots)
        try:
            run = folder / "runs" / "0"
            until("half of the nodes have come", lambda: len(events(run, "joined")) >= size // 2)
            time.sleep(SETTLES_S)
            return counter.during(GAPS, TRAINS_S / (4.0 if quick else 1.0))
        finally:
            end(launcher, sandbox)


def occupy_half(sandbox: SlurmSandbox, size: int) -> str:
    """Let a job take half of the nodes; return its id."""
    size_of_job = [f"-N{size // 2}", "--exclusive", "-o", "/dev/null", "--chdir=/"]
    busy = sandbox.run(["sbatch", "--parsable", *size_of_job, "--wrap=sleep 3600"]).stdout
    running = ["squeue", "-h", "-t", "RUNNING", "-o", "%i"]
    until("half of the nodes are busy", lambda: sandbox.run(running).stdout.strip())
    return busy.strip()


def of_sweep(sandbox: SlurmSandbox, num_runs: int) -> Calls:
    """Return what the launcher of a sweep calls while all its runs wait."""
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        counter = Counter(Path(name), sandbox)
        held = ["launcher.sbatch={hold:true}", f"+x=range({num_runs})"]
        launcher = start(Path(name), counter, "nodes=1:4", *held)
        try:
            until("the sweep is submitted", lambda: "squeue" in counter.log.read_text())
            return counter.during(f"a sweep of {num_runs} runs waits", MINUTE_S)
        finally:
            end(launcher, sandbox)


def start(folder: Path, counter: Counter, *overrides: str) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "script.py", "-m", "+launcher=slurm", "hydra.sweep.dir=runs"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*argv, *overrides], cwd=folder, env={**os.environ, **counter.env},
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def end(launcher: subprocess.Popen[bytes], sandbox: SlurmSandbox) -> None:
    launcher.terminate()  # whoever runs in the background may have SIGINT ignored
    launcher.wait(PATIENCE_S)
    sandbox.heal_all()


def events(run: Path, kind: str) -> list[dict[str, object]]:
    """Return the events of a kind that a run has told so far."""
    folder = run / "events"
    return [e for e in read_events(folder) if e["kind"] == kind] if folder.exists() else []


if __name__ == "__main__":
    main()
