"""A leader that is deposed, because it stood still or was cut off for 8 s, and is back: real Slurm.

The files that it shares with the next leader are watched all the time: `status.json`,
`progress.jsonl`, and notice files that are written while two may take themselves for the leader.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sweeps import Sweep, eventually, leader_host

AWAY_S = 8.0


class Watched:
    """What a reader sees of a run's files over time."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.seen: list[dict[str, Any]] = []
        """Every status.json that was another than the one before."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            status = json.loads((self.run / "status.json").read_text())
            if not self.seen or self.seen[-1]["updated"] != status["updated"]:
                self.seen.append(status)

    def end(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()

    def progress(self) -> list[dict[str, Any]]:
        """All lines of progress.jsonl, in the order in which they were written."""
        return [json.loads(line) for line in (self.run / "progress.jsonl").read_text().splitlines()]


@contextmanager
def watched(s: Sweep) -> Iterator[Watched]:
    """Watch the files of a run that trains."""
    seen = Watched(s.run())
    try:
        yield seen
    finally:
        seen.end()


def goes_back(values: list[int]) -> list[tuple[int, int]]:
    """Where a sequence goes back."""
    return [(a, b) for a, b in pairwise(values) if b < a]


def pause(slurm, host: str, task: str) -> Callable[[], None]:
    """Stop every process of the node."""
    slurm.pause_node(host)
    return lambda: slurm.resume_node(host)


def suspend(slurm, host: str, task: str) -> Callable[[], None]:
    """Let Slurm suspend the task."""
    slurm.run(["scontrol", "suspend", task])
    return lambda: slurm.run(["scontrol", "resume", task]) and None


def cut_off(slurm, host: str, task: str) -> Callable[[], None]:
    """Take the node's network away; its files are there as ever."""
    slurm.partition(host)
    return lambda: slurm.heal(host)


@pytest.mark.long
@pytest.mark.parametrize("ways", [(pause, cut_off), (suspend, pause, suspend)])
def test_a_deposed_leader_leaves_the_run_to_the_next(slurm, sweep, ways):
    """No read goes back to an earlier term, and a notice is obeyed whoever has seen it first."""
    s = sweep("nodes=1:4", "epochs=1000", "pause_s=0.25")
    trains_whole(s)
    with watched(s) as seen:
        for away in ways:
            depose(slurm, s, away)
            trains_whole(s)
        eventually(lambda: seen.seen[-1]["nodes"] == 4, "the status shows it")
    s.process.terminate()
    terms = [status["term"] for status in seen.seen]
    assert not goes_back(terms), [(x["term"], x["phase"], x["nodes"]) for x in seen.seen]
    assert len(set(terms)) > len(ways)
    assert not goes_back([line["term"] for line in seen.progress()])


def trains_whole(s: Sweep) -> None:
    """Wait until all four nodes train, and no notice is open."""
    eventually(lambda: s.group_sizes()[-1:] == [4] and not asked_still(s), "all train")


def depose(slurm, s: Sweep, away: Callable[..., Callable[[], None]]) -> None:
    """Take the leader away for a while; as it returns, ask for two nodes to be left."""
    first, since = s.events("leader")[-1]["task"], time.time()
    members = [m["task"] for m in s.events("round")[-1]["members"]]
    began, bring_back = time.monotonic(), away(slurm, leader_host(s), first)
    eventually(lambda: s.events("leader")[-1]["task"] != first, f"{away.__name__}: another leads")
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - began)))
    asked = [t for t in members if t not in (first, s.events("leader")[-1]["task"])]
    assert len(asked) == 2
    bring_back()
    for task in asked:  # one after the other: both leaders may see either
        (s.run() / "preempt" / task).touch()
        what = f"{away.__name__}: {task} leaves as it was asked to"
        eventually(lambda task=task: left(s, task, since), what)


def left(s: Sweep, task: str, since: float) -> bool:
    """Whether a task has gone because it was asked to."""
    gone = (e for e in s.events("task_exited") if e["time"] > since)
    return any(e["task"] == task and e["reason"] == "asked" for e in gone)


def asked_still(s: Sweep) -> list[Path]:
    """Notices that nobody has obeyed yet."""
    return [*(s.run() / "preempt").iterdir(), *s.run().glob("rdzv/term.*/notice.*")]
