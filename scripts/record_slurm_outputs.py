#!/usr/bin/env python3
"""Record what Slurm's commands print, as data of the unit tests of `hpc_elastic.slurm.parsing`.

    scripts/slurm_sandbox.py up --name recorded --slurm 24.11
    scripts/record_slurm_outputs.py --name recorded

writes ``tests/pure/data/slurm/24.11/``: one file for each command, and ``jobs.json``, which tells
what the jobs are that are in them. The sandbox should be new: nothing else runs in it. With
``--queue`` only what ``queue-*`` and ``sacctmgr-*`` hold is recorded; the latter needs accounting.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "slurm_sandbox")]

from hpc_elastic.slurm.environment import for_commands  # noqa: E402
from hpc_elastic.slurm.parsing import (  # noqa: E402
    EACH_NODE_FORMAT,
    QOS_FORMAT,
    QUEUE_FORMAT,
    SQUEUE_FORMAT,
)
from slurm_sandbox import SlurmSandbox  # noqa: E402
from slurm_sandbox.config import parse_version  # noqa: E402
from slurm_sandbox.processes import wait_until  # noqa: E402

DATA = ROOT / "tests" / "pure" / "data" / "slurm"
SQUEUE = ["squeue", "-h", "-r", "-t", "all", "-O", SQUEUE_FORMAT]
IN_SETS = [argument for argument in SQUEUE if argument != "-r"]
COMMANDS = {
    "squeue": SQUEUE,
    "scontrol-jobs": ["scontrol", "-o", "show", "job"],
    "scontrol-config": ["scontrol", "show", "config"],
    "scontrol-partitions": ["scontrol", "-a", "-o", "show", "partition"],
    "scontrol-node": ["scontrol", "show", "node", "node2"],
    "scontrol-no-node": ["scontrol", "show", "node", "nowhere"],
    "sinfo": ["sinfo", "-h", "-a", "-o", "%R"],
    "ping": ["scontrol", "ping"],
    "version": ["sbatch", "--version"],
    "squeue-forgotten": [*SQUEUE, "-j", "9999999"],
    "scontrol-forgotten": ["scontrol", "-o", "show", "job", "9999999"],
    "requeue-forgotten": ["scontrol", "requeue", "9999999"],
    "scancel-forgotten": ["scancel", "9999999"],
    "sbatch-partition": ["sbatch", "-p", "nowhere", "--wrap=true"],
    "sbatch-nodes": ["sbatch", "-N", "99", "--wrap=true"],
    "sbatch-feature": ["sbatch", "-C", "none", "--wrap=true"],
    "sbatch-gres": ["sbatch", "--gpus-per-node=99", "--wrap=true"],
    "sbatch-memory": ["sbatch", "--mem=9T", "--wrap=true"],
    "sbatch-array": ["sbatch", "--array=99999", "--wrap=true"],
    "sbatch-reservation": ["sbatch", "--reservation=none", "--wrap=true"],
    "sbatch-node": ["sbatch", "-w", "nowhere", "--wrap=true"],
    "sbatch-time": ["sbatch", "-t", "never", "--wrap=true"],
    "sbatch-cpus": ["sbatch", "-c", "999", "--wrap=true"],
    "sbatch-resource": ["sbatch", "--gres=nothing", "--wrap=true"],
    "sbatch-parsable": ["sbatch", "--parsable", "--hold", "--wrap=true"],
    "test-only": ["sbatch", "--test-only", "--wrap=true"],
    "test-only-partition": ["sbatch", "--test-only", "-p", "nowhere", "--wrap=true"],
}
JOBS = {
    "array": ["--array=0-9:3%1", "-J", "a b='c'", "-x", "node3,node4", "-t", "1-0", "-w", "node1"],
    "held": ["--hold", "--no-requeue"],
    "steps": ["--hold", "--array=0-20:4"],
    "coallocated": ["-N2", "-w", "node[3-4]"],
    "later": ["--begin=now+1hour"],
    "taken": ["-w", "node2"],
}
KINDS = {
    "nodes": ["-N2", "-x", "node3,node4", "--nice=7", "-t", "10"],
    "some": ["-N2-3"],
    "tasks": ["-n20"],
    "spread": ["-n9", "--ntasks-per-node=3"],
    "cpus": ["-N2", "-n6", "-c2", "--mem-per-cpu=1000"],
    "memory": ["-N2", "--mem=3G"],
    "gpus": ["--gpus=3"],
    "gpus-of-nodes": ["-N2", "--gres=gpu:2", "--mem-per-gpu=2G"],
    "gpus-of-tasks": ["-n2", "--gpus-per-task=1", "--mem-per-gpu=2G"],
    "required": ["-N2", "-w", "node1"],
    "exclusive": ["-N1", "--exclusive"],
    "beside-own": ["-N1", "--exclusive=user"],
    "shared": ["-N1", "--oversubscribe"],
    "array": ["--array=1-5%2"],
    "parts": ["-N1", "--mem=1G", ":", "-N2", "-n2", ":", "--gpus=1"],
    "a Nice=9 UserId=eve(7) NumNodes=5": ["-N1", "--comment=NumNodes=6 JobState=COMPLETED"],
}
"""Jobs that wait, by their names: what each needs of its nodes."""


class Recorder:
    """One sandbox, and the folder for its outputs."""

    def __init__(self, name: str) -> None:
        self.slurm = SlurmSandbox.attach(name)
        os.environ.update(for_commands({**os.environ, **self.slurm.env}))
        year, month = parse_version(self.slurm.run(["squeue", "-V"]).stdout)
        self.folder = DATA / f"{year}.{month:02}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def submit(self, options: list[str], line: str = "sleep 300") -> str:
        """Submit a job, and return its id."""
        argv = ["sbatch", "--parsable", "--exclusive", "-o/dev/null", "-D/", *options]
        return self.slurm.run([*argv, f"--wrap={line}"]).stdout.strip()

    def wait(self, job: str, state: str) -> None:
        """Wait until a job is in a state."""
        argv = ["squeue", "-h", "-t", "all", "-o", "%T", "-j", job]
        wait_until(f"{job} {state}", lambda: state in self.slurm.run(argv).stdout.split(), 60)

    def record(self, name: str, argv: list[str]) -> None:
        """Write what a command prints, both streams and the exit code."""
        done = self.slurm.run(argv, check=False)
        shown = {"argv": argv, "exit_code": done.returncode, "stderr": done.stderr}
        (self.folder / f"{name}.out").write_text(done.stdout)
        (self.folder / f"{name}.json").write_text(json.dumps(shown, indent=1) + "\n")


def main() -> None:
    """Record all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--name", default="default", help="of the sandbox (default: default)")
    parser.add_argument("--queue", action="store_true", help="the queue alone")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.name)
    if not arguments.queue:
        _commands(recorder)
    _queue(recorder)
    if recorder.slurm.config.accounting:
        _qos(recorder)
    print(recorder.folder)


def _commands(recorder: Recorder) -> None:
    """Make the jobs, and record what concerns them; none is left."""
    over = recorder.submit(["-w", "node1"], "true")
    recorder.wait(over, "COMPLETED")
    jobs = {name: recorder.submit(options) for name, options in JOBS.items()}
    for name in ("array", "coallocated", "taken"):
        recorder.wait(jobs[name], "RUNNING")
    time.sleep(1.5)
    for name, argv in COMMANDS.items():
        recorder.record(name, argv)
    _taken(recorder, jobs["taken"])
    _requeued(recorder, jobs["array"])
    _steered(recorder, {**jobs, "over": over})
    _nowhere(recorder)
    _down(recorder)
    text = json.dumps({**jobs, "over": over}, indent=1) + "\n"
    (recorder.folder / "jobs.json").write_text(text)
    recorder.slurm.heal_all()
    recorder.slurm.run(["scancel", "-u", "root"])
    _wait_until_empty(recorder)


def _queue(recorder: Recorder) -> None:
    """Record a queue that backfill has planned: a node is idle until a job of four may start."""
    running = recorder.submit(["-N3", "-t", "60"])
    recorder.wait(running, "RUNNING")
    planned = recorder.submit(["-N4", "-t", "120"])
    array = recorder.submit(["--array=0-2", "-t", "240"])
    held = recorder.submit(["--hold", "-t", "10"])
    squeue = ["squeue", "-h", "-a", "-O", QUEUE_FORMAT]
    nodes = ["sinfo", "-h", "-N", "-p", "low", "-o", EACH_NODE_FORMAT]

    def is_planned() -> bool:
        return "PENDING||node" in recorder.slurm.run(squeue).stdout

    wait_until("a planned start", is_planned, 60)
    wait_until("a node that is planned", lambda: "planned" in recorder.slurm.run(nodes).stdout, 60)
    recorder.record("queue-squeue", squeue)
    recorder.record("queue-sinfo", nodes)
    for number, limit in ((1, 30), (1, 240), (4, 30)):
        flags = [f"--nodes={number}", f"--ntasks={number}", f"--time={limit}", "--exclusive"]
        argv = ["sbatch", "--test-only", *flags, "--array=0", "--wrap=true"]
        recorder.record(f"queue-test-{number}-{limit}", argv)
    recorder.slurm.run(["scancel", running, planned, array, held])
    _wait_until_empty(recorder)
    running = recorder.submit(["-N4", "-J", "runs"])
    recorder.wait(running, "RUNNING")
    for name, options in KINDS.items():
        argv = ["sbatch", "-o/dev/null", "-D/", "-J", name, *options, "--wrap=true NumNodes=7"]
        recorder.slurm.run(argv)
    recorder.record("queue-needs", ["scontrol", "-a", "-o", "show", "job"])
    recorder.slurm.run(["scancel", "-u", "root"])
    _wait_until_empty(recorder)


def _wait_until_empty(recorder: Recorder) -> None:
    wait_until("an empty queue", lambda: not recorder.slurm.run(["squeue", "-h"]).stdout, 60)


def _qos(recorder: Recorder) -> None:
    """Record a standby QOS that a user may name."""
    for line in (
        "add qos standby set Flags=NoReserve PreemptMode=requeue GraceTime=60 MaxWall=30",
        "modify qos normal set Preempt=standby",
        "add account science description=science organization=here",
        "add user hxsuser account=science",
        "modify user hxsuser set qos=normal,standby",
    ):
        recorder.slurm.run(["sacctmgr", "-i", *line.split()])
    show = ["sacctmgr", "-n", "-P", "show"]
    recorder.record("sacctmgr-qos", [*show, "qos", f"format={QOS_FORMAT}"])
    recorder.record("sacctmgr-assoc", [*show, "assoc", "user=hxsuser", "format=qos"])


def _taken(recorder: Recorder, job: str) -> None:
    """Record a job that is being preempted, and after its requeue."""
    recorder.slurm.preempt(["node2"], for_s=60)
    asked = ["squeue", "-h", "-O", "PreemptTime", "-j", job]

    def preempted() -> bool:
        return "N/A" not in recorder.slurm.run(asked).stdout

    wait_until("the preemption", preempted, 30)
    recorder.record("squeue-preempted", [*SQUEUE, "-j", job])
    recorder.wait(job, "PENDING")
    time.sleep(1.5)
    recorder.record("squeue-requeued", [*SQUEUE, "-j", job])


def _requeued(recorder: Recorder, array: str) -> None:
    """Record an element that was requeued while others of its array wait."""
    recorder.slurm.run(["scontrol", "requeue", f"{array}_0"])
    recorder.wait(f"{array}_0", "PENDING")
    recorder.wait(f"{array}_3", "RUNNING")
    recorder.record("squeue-elements", SQUEUE)
    recorder.record("squeue-sets", IN_SETS)


def _steered(recorder: Recorder, jobs: dict[str, str]) -> None:
    """Record what is said to a command that comes too late, or is not permitted."""
    later = "starttime=now+60"
    recorder.record("scancel-ended", ["scancel", jobs["over"]])
    recorder.record("update-ended", ["scontrol", "update", f"jobid={jobs['over']}", later])
    recorder.record("update-running", ["scontrol", "update", f"jobid={jobs['coallocated']}", later])
    elements = f"jobid={jobs['array']}_[3,6]"
    recorder.record("update-elements", ["scontrol", "update", elements, later])
    recorder.record("requeue-requeued", ["scontrol", "requeue", jobs["taken"]])
    recorder.slurm.run(["scontrol", "update", f"jobid={jobs['coallocated']}", "requeue=0"])
    recorder.record("requeue-refused", ["scontrol", "requeue", jobs["coallocated"]])


def _nowhere(recorder: Recorder) -> None:
    """Record what is said where no partition is the default one."""
    low = ["scontrol", "update", "partitionname=low"]
    recorder.slurm.run([*low, "default=no"])
    recorder.record("sbatch-no-partition", ["sbatch", "--wrap=true"])
    recorder.slurm.run([*low, "default=yes"])


def _down(recorder: Recorder) -> None:
    """Record a node that takes no more jobs, and then does not answer."""
    show = ["scontrol", "show", "node", "node4"]
    recorder.slurm.run(["scontrol", "update", "nodename=node4", "state=drain", "reason=test"])
    recorder.record("scontrol-node-drained", show)
    recorder.slurm.run(["scontrol", "update", "nodename=node4", "state=resume"])
    recorder.slurm.kill_node("node4")
    wait_until("node4 down", lambda: "DOWN" in recorder.slurm.run(show).stdout, 60)
    recorder.record("scontrol-node-down", show)


if __name__ == "__main__":
    main()
