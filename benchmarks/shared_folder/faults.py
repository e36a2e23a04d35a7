"""Faults of a minute, and of many nodes: one writer at any time, every sample once, a good end."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.result import Column, Table, Target, figure
from kernel_nfs.facts import split
from recovery.faults import trained
from recovery.trail import run_events

from hpc_elastic.run.directory import RunDir
from shared_folder.place import NFS, Place, Training, training
from slurm_sandbox import SandboxTimeoutError
from slurm_sandbox.processes import wait_until
from soak.inject import RunMonitor

LASTS_S = 60.0
_AWAY_S = 20.0
_BETWEEN_S = 1.0
_BACK_S = 240.0
_EVERY_STEPS = 100


def _two_deaths(run: Training, rest: Callable[[float], None]) -> None:
    sandbox, leader = run.place.sandbox, run.leader()
    nodes = [next(node for node in sandbox.nodes if node != leader), leader]
    for node in nodes:
        sandbox.kill_node(node)
        rest(_BETWEEN_S)
    rest(_AWAY_S)


def _all_preempted(run: Training, rest: Callable[[float], None]) -> None:
    run.place.sandbox.preempt(run.place.sandbox.nodes, for_s=_AWAY_S)
    rest(_AWAY_S)


def _leader_cut_off(run: Training, rest: Callable[[float], None]) -> None:
    run.place.sandbox.partition(run.leader())
    rest(LASTS_S)


def _server_stopped(run: Training, rest: Callable[[float], None]) -> None:
    run.place.sandbox.stop_server()
    rest(LASTS_S)


CASES: dict[str, Callable[[Training, Callable[[float], None]], None]] = {
    "a follower's and the leader's node are killed": _two_deaths,
    "all nodes are preempted": _all_preempted,
    f"the leader's node is cut off for {LASTS_S:g} s": _leader_cut_off,
    f"the file server is stopped for {LASTS_S:g} s": _server_stopped,
}
"""What is done; what lasts is looked on at by the second argument."""


@dataclass(frozen=True)
class Measurement:
    """One fault, and what came of it.

    ``problems``: what did not hold, each a sentence; ``pause_s``: the longest time without any
    step, from the fault on; ``leaders``: of the whole run; ``nodes``: of the group at the end.
    """

    case: str
    place: str
    problems: tuple[str, ...]
    pause_s: float = 0.0
    leaders: int = 0
    nodes: int = 0


def applies(case: str, place: Place) -> bool:
    """Tell whether a place can have a fault: only one has a file server."""
    return CASES[case] is not _server_stopped or place.name == NFS


def measure(case: str, place: Place, train_s: float) -> Measurement:
    """Start a training, do something to it, let it finish, and look at all that it has left."""
    with training(place, every_steps=_EVERY_STEPS) as run:
        if not trained(run.local, 4, train_s):
            return Measurement(case, place.name, ("no start",))
        watch = RunMonitor(RunDir(run.run), run.run.parent / "checkpoints", 4)
        at = time.time()
        CASES[case](run, lambda seconds: _look_on(watch, seconds))
        place.sandbox.bring_back()
        back = time.time()
        nodes = _trains_again(run, watch, back)
        said = run.finish()
        watch.refresh()
        steps = sorted(s[0] for w in run.workers() for s in w.steps)
        moments = [at, *(s for s in steps if s > at)]
        leaders = sum(event["kind"] == "leader" for event in run_events(run.run))
        return Measurement(
            case=case,
            place=place.name,
            problems=(*said, *_problems(run, watch)),
            pause_s=max(b - a for a, b in itertools.pairwise(moments)),
            leaders=leaders,
            nodes=nodes,
        )


def _look_on(watch: RunMonitor, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.refresh()
        time.sleep(0.1)


def _trains_again(run: Training, watch: RunMonitor, since: float) -> int:
    """Wait until all nodes train again, or at least some; return how many do."""

    def trains() -> bool:
        watch.refresh()
        return bool(run.group(4, since))

    try:
        wait_until("all nodes train again", trains, _BACK_S)
        return 4
    except SandboxTimeoutError:
        return next((n for n in (3, 2, 1) if run.group(n, time.time() - _AWAY_S)), 0)


def _problems(run: Training, watch: RunMonitor) -> Iterator[str]:
    argv = [str(Path(sys.executable).with_name("hpc-elastic")), "audit", str(run.run)]
    audit = subprocess.run(argv, capture_output=True, text=True, check=False)
    if audit.returncode:
        yield f"the audit: {(audit.stdout + audit.stderr)[-300:]}"
    yield from watch.status_regressions
    yield from split(str(run.run))


def table(measured: Sequence[Measurement]) -> Table:
    columns = (
        Column(""), Column(""), Column("held"), Column("longest pause, s", ".1f"),
        Column("leaders", "g"), Column("nodes at the end", "g"),
    )  # fmt: skip
    rows = []
    for case, place in dict.fromkeys((m.case, m.place) for m in measured):
        group = [m for m in measured if (m.case, m.place) == (case, place)]
        good = sum(not m.problems for m in group)
        figures = ([getattr(m, name) for m in group] for name in ("pause_s", "leaders", "nodes"))
        rows.append((case, place, f"{good} of {len(group)}", *map(figure, figures)))
    caption = "held: audit clean, one writer at any time, exit code 0, and the launcher says so"
    return Table(caption, columns, tuple(rows))


def targets(measured: Sequence[Measurement]) -> list[Target]:
    """Hold each case as by NFS against the aim: nothing that does not hold."""
    ours = [m for m in measured if m.place == NFS]
    return [
        Target(
            f"{case}: what did not hold", 0, sum(len(m.problems) for m in ours if m.case == case)
        )
        for case in dict.fromkeys(m.case for m in ours)
    ]
