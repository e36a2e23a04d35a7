"""One run of the product on one kind of mount, from its submission to its end, with two deaths."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from shared_folder import submit

from slurm_sandbox.config import LOGIN
from soak import training
from soak.checks import rank_checks

from .cluster import FOLDER, PATIENCE_S, Cluster, wait_until
from .machines import EXPORT


@dataclass
class Report:
    """What came of one run: figures (seconds), what else was seen, and what was wrong."""

    options: str
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Run:
    """A run that is under way, and what the server has of it."""

    def __init__(self, cluster: Cluster, name: str, say: Callable[[str], None]) -> None:
        self.cluster, self.name, self.say = cluster, name, say
        self.folder = f"{FOLDER}/{name}"
        self.stored = f"{EXPORT}/{name}"
        self.commits: dict[str, float] = {}
        """Every checkpoint that was seen, and when it was committed."""
        login = cluster.login
        login.run(["mkdir", "-p", self.folder])
        self.log = cluster.layout.directory / "log" / f"launcher-{name}.log"
        given = {
            "training": "soak.training", "arguments": [self.folder], "settings": {},
            "nodes": f"1:{len(cluster.sandbox.nodes)}", "run": f"{self.folder}/run",
        }  # fmt: skip
        self.began = time.time()
        argv = [sys.executable, submit.__file__, json.dumps(given)]
        self.pid = login.start(argv, self.log, cwd=FOLDER, env=cluster.env)

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.facts("look", f"{self.stored}/run")
        self.commits.update(found["checkpoints"])
        return found

    def trains(self, size: int, since: float) -> dict[str, Any]:
        """Wait until ``size`` nodes make steps in a round that formed after ``since``.

        Returns the newest event `first_step` of it: all of its members have made a step.
        """

        def all_train() -> Any:
            events = self.look()["events"]
            rounds = [e for e in events if e["kind"] == "round" and e["time"] > since]
            if not rounds or len(rounds[-1]["members"]) != size:
                return None
            number = rounds[-1]["number"]
            found = [e for e in events if e["kind"] == "first_step" and e["round"] == number]
            return max(found, key=lambda e: e["time"]) if len(found) >= size else None

        found: dict[str, Any] = wait_until(f"{size} nodes train", all_train, PATIENCE_S)
        return found

    def saved(self, since: float) -> float:
        """Wait for a checkpoint that was committed after a moment; return when it was."""
        found: float = wait_until(
            "a checkpoint is committed",
            lambda: max((at for _, at in self.look()["checkpoints"] if at > since), default=0),
            PATIENCE_S,
        )
        return found

    def leader(self) -> str:
        found = self.look()
        leaders = [event for event in found["events"] if event["kind"] == "leader"]
        return str(found["hosts"][leaders[-1]["task"]])


def play(cluster: Cluster, name: str, options: str, say: Callable[[str], None]) -> Report:
    """Boot machines that mount the folder so, and see one run through."""
    report = Report(options)
    cluster.remount(options)
    for machine in (LOGIN, "node1", "node2"):
        cluster.boot(machine)
    say(f"mounted: {cluster.seen_options}")
    wait_until("two nodes are idle", lambda: len(cluster.idle()) == 2, PATIENCE_S)
    cluster.login.run(["mkdir", "-p", f"{FOLDER}/home"])
    _doctor(cluster, report)
    say("the doctor has tried two nodes")
    run = Run(cluster, name, say)
    try:
        _faults(run, report)
        _end(run, report)
    except Exception as e:
        report.problems.append(f"{type(e).__name__}: {e}")
    keep(run)
    return report


def _doctor(cluster: Cluster, report: Report) -> None:
    """Note what the doctor finds about the folder: how soon others see what, and complaints."""
    done = cluster.command("doctor", "--probe", "--json", "--dir", FOLDER)
    try:
        found = json.loads(done["out"])["findings"]
    except ValueError:
        report.problems.append(f"doctor: {done}")
        return
    of_folder = [finding for finding in found if finding["check"].startswith("directory.")]
    if not any(finding["check"] == "directory.delay" for finding in of_folder):
        report.problems.append("doctor: it says nothing about the folder's delay")
    for finding in of_folder:
        line = f"doctor: {finding['check']}: {finding['verdict']}: {finding['found']}"
        (report.problems if finding["verdict"] == "fail" else report.notes).append(line)


def _faults(run: Run, report: Report) -> None:
    cluster, figures, say = run.cluster, report.figures, run.say
    whole = run.trains(2, run.began)
    figures["start: submission to all of 2 nodes' first step"] = whole["time"] - run.began
    figures["first save, after that"] = run.saved(whole["time"]) - whole["time"]
    say("two nodes train and have saved")

    booted = time.time()
    cluster.boot("node3")
    whole = run.trains(3, booted)
    joined = next(
        e["time"] for e in run.look()["events"] if e["kind"] == "joined" and e["time"] > booted
    )
    figures["join: ready until all of 3 nodes' first step"] = whole["time"] - joined
    figures["join: pause of the training"] = _pause(run, whole["time"], booted)
    run.saved(whole["time"])
    say("a third node has joined, and three have saved")

    leader = run.leader()
    follower = next(node for node in cluster.sandbox.nodes if node != leader)
    at, whole = _kill(run, report, follower, "a follower", "first save after that")
    say(f"{follower}, a follower, was killed; two go on and have saved")

    first = run.saved(whole["time"])
    cluster.boot(follower)
    whole = run.trains(3, at)
    figures["longest time between two saves until it is back"] = _longest_gap(run, first)
    run.saved(whole["time"])
    say(f"{follower} is back, and three have saved")

    leader = run.leader()
    _kill(run, report, leader, "the leader", "first save after that one")
    say(f"{leader}, which led, was killed; {run.leader()} leads, two go on and have saved")


def _kill(run: Run, report: Report, node: str, who: str, then: str) -> tuple[float, dict]:
    """Kill a node's machine; return when that was, and the others' first step and save after it."""
    held = run.cluster.facts("delegations", run.cluster.up[node].address)
    report.notes.append(f"{held} delegations were held by the {who.split()[-1]}")
    at = run.cluster.kill(node)
    whole = run.trains(2, at)
    report.figures[f"{who}'s machine killed: next step of all"] = whole["time"] - at
    report.figures[f"{who}'s machine killed: the run's files tell of that"] = time.time() - at
    report.figures[then] = run.saved(whole["time"]) - whole["time"]
    return at, whole


def _longest_gap(run: Run, first: float) -> float:
    """Return the longest time between commits, from one until a node is back; NaN if no others."""
    stop = next(e for e in reversed(run.look()["events"]) if e["kind"] == "round_stopped")
    times = sorted(at for at in run.commits.values() if first <= at <= stop["time"] + 1)
    return max((b - a for a, b in pairwise(times)), default=float("nan"))


def _pause(run: Run, first_step: float, since: float) -> float:
    """Return how long no step was made before the first one of the newest round."""
    stops = [e["time"] for e in run.look()["events"] if e["kind"] == "round_stopped"]
    return first_step - stops[-1] if stops and stops[-1] > since else float("nan")


def _end(run: Run, report: Report) -> None:
    cluster = run.cluster
    cluster.login.call("kernel_nfs.facts", "touch", f"{run.folder}/{training.FINISH}")
    told = time.time()
    is_over = lambda: cluster.login.ended(run.pid) is not None  # noqa: E731
    wait_until("the launcher returns", is_over, PATIENCE_S, poll_s=0.1)
    returned, found, code = time.time(), run.look(), cluster.login.ended(run.pid)
    report.figures["told to finish until the end of the run"] = found["ended"] - told
    report.figures["the run's end until the launcher says so"] = returned - found["ended"]
    if code:
        report.problems.append(f"the launcher's exit code is {code}")
    if not found["result"] or found["result"]["status"] != "succeeded":
        report.problems.append(f"result.json: {found['result']}")
    for name in ("status", "audit"):
        done = cluster.command(name, f"{run.folder}/run")
        if done["code"]:
            report.problems.append(f"{name}: exit code {done['code']}: {done['out']}{done['err']}")
        elif name == "status" and "succeeded" not in done["out"]:
            report.problems.append(f"status does not say succeeded: {done['out']}")
    report.problems += cluster.facts("split", f"{run.stored}/run")
    for check in rank_checks(cluster.facts("ranks", f"{run.stored}/run")):
        report.problems += [f"{check.name}: {problem}" for problem in check.problems]


def keep(run: Run) -> None:
    target = run.cluster.layout.directory / "kept"
    run.cluster.server.run(["mkdir", "-p", str(target)])
    run.cluster.server.run(["cp", "-r", run.stored, str(target)], timeout_s=120)
