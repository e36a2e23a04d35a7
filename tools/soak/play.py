"""Throws a plan at a run: from the submission to the end, with nobody helping the run."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_elastic import launch
from hpc_elastic.report.causes import TimelineEntry
from hpc_elastic.report.sentences import sentence
from hpc_elastic.run.directory import RunDir
from slurm_sandbox import SandboxError, SlurmSandbox
from slurm_sandbox.processes import wait_until
from soak import hands, training
from soak.hands import NobodyLeftError, Stage
from soak.plan import NUM_NODES, Fault, num_tasks, volleys
from soak.told import Finding, Thrown, Told, tell
from soak.watch import Watch

Say = Callable[[str], None]

CHANGED: dict[str, Any] = {"max_restarts": 100_000, "agent": {"hang_after_s": 20.0}}
"""Settings that are not the product's defaults: each worker that is killed spends a restart, and a
hang would take a minute to be seen as one."""

PATIENCE_S = 300.0
"""For the run to get over a fault. It bounds hanging, and measures nothing."""


@dataclass
class Record:
    """What came of a soak.

    Attributes:
        run: The run directory.
        companion: That of the companion.
        started: When the first fault could be thrown, in Unix seconds.
        thrown: The faults that were.
        passed_over: Those that could not be thrown when their turn came, and why.
        not_come_to: Those for which there was no time.
        story: What the run tells.
        companion_story: What the companion tells.
        old_leaders: What leaders have shown of themselves after their terms.
        problem: What ended the soak early; empty: nothing did.
    """

    run: Path
    companion: Path
    started: float = 0.0
    thrown: list[Thrown] = field(default_factory=list)
    passed_over: list[tuple[Fault, str]] = field(default_factory=list)
    not_come_to: list[Fault] = field(default_factory=list)
    story: list[TimelineEntry] = field(default_factory=list)
    companion_story: list[TimelineEntry] = field(default_factory=list)
    old_leaders: list[str] = field(default_factory=list)
    problem: str = ""

    def tell(self, thrown: Thrown) -> Told:
        """Return what the story of the run that was hit says of a fault."""
        story = self.companion_story if thrown.fault.of.companion else self.story
        return tell(thrown, self.thrown, story)


class RunEndedError(Exception):
    """The run has ended before it was told to."""


def play(
    sandbox: SlurmSandbox, disk: Path, faults: Sequence[Fault], minutes: float, say: Say
) -> Record:
    """Start a run, throw faults at it for so long, tell it to finish, and wait for its end.

    Args:
        sandbox: An idle one, whose nodes see the disk.
        disk: A file system of its own, for the run alone.
        faults: The plan.
        minutes: How long faults are thrown.
        say: Is given a line now and then.
    """
    os.environ.update(sandbox.env)
    watch = submit(training.train, disk, num_tasks(faults), NUM_NODES)
    companion = submit(training.train_with_handler, disk / "companion", 1, 1)
    record = Record(watch.run.path, companion.run.path)
    stage = Stage(sandbox, watch, companion, disk)
    try:
        _Player(stage, record, say).play(faults, minutes)
    except (SandboxError, RunEndedError) as e:
        record.problem = str(e)
    finally:
        stage.undo.close()
    for each in (watch, companion):
        each.look()
        record.old_leaders += each.problems
    record.story, record.companion_story = watch.story, companion.story
    return record


def submit(
    train: Callable[[str], dict[str, Any]], folder: Path, num_tasks: int, num_nodes: int
) -> Watch:
    """Submit a run.

    Args:
        train: What it trains.
        folder: Of its files.
        num_tasks: How many tasks it has, since some of them do not come back.
        num_nodes: How many of them run at a time, at most.
    """
    run = folder / "run"
    with contextlib.redirect_stdout(io.StringIO()):  # how to attach to it
        launch(
            train, str(folder), nodes=f"1:{num_tasks}", nproc_per_node=1, launcher="slurm",
            run_dir=run, wait=False, array_parallelism=num_nodes, **CHANGED,
        )  # fmt: skip
    return Watch(RunDir(run), folder / training.CHECKPOINTS, num_nodes)


class _Player:
    def __init__(self, stage: Stage, record: Record, say: Say) -> None:
        self._stage, self._record, self._say = stage, record, say
        self._runs = (stage.watch, stage.companion)
        self._told: set[tuple[str, float, str]] = set()

    def play(self, faults: Sequence[Fault], minutes: float) -> None:
        """Throw the faults, and see the run to its end."""
        self._wait_until_well((0, 0), "the runs train")
        record = self._record
        record.started = time.time()
        left = volleys(faults)
        while left and time.time() - record.started < 60.0 * minutes:
            self._throw_all(left.pop(0))
        record.not_come_to = [fault for volley in left for fault in volley]
        self._say("the runs are told to finish")
        for watch in self._runs:
            (watch.run.path.parent / training.FINISH).touch()
        wait_until(
            self._how_it_is("the runs have ended"),
            lambda: all(watch.is_over for watch in self._runs),
            PATIENCE_S,
        )
        self._tell_news()

    def _throw_all(self, volley: Sequence[Fault]) -> None:
        """Throw faults on each other's heels, and wait until the run has got over all of them."""
        saved = tuple(watch.saved_step for watch in self._runs)
        thrown: list[Thrown] = []
        for fault in volley:
            time.sleep(fault.after_s)
            if not fault.on_heels:  # what the one before has done may show late
                self._wait_until_well((0, 0), f"the runs are well before fault {fault.number}")
            self._throw(fault, thrown)
        if not thrown:
            return
        self._record.thrown += thrown
        last = max(t.time + t.fault.lasts_s for t in thrown)
        names = " and ".join(str(t.fault.number) for t in thrown)
        self._wait(f"fault {names} has lasted long enough", lambda: time.time() > last)
        if any(t.fault.of.stops_slurm for t in thrown):
            self._stage.sandbox.start_controller()  # a preemption before it may not have begun
        self._wait(f"fault {names} is told of", lambda: self._is_told(thrown))
        self._stage.bring_back()
        self._wait_until_well(saved, f"the runs have got over fault {names}")
        now = time.time()
        self._record.thrown[-len(thrown) :] = [replace(t, until=now) for t in thrown]

    def _throw(self, fault: Fault, together: list[Thrown]) -> None:
        for watch in self._runs:
            watch.look()
        now = time.time()
        try:
            hit = hands.throw(self._stage, fault, {host for t in together for host in t.hosts})
        except NobodyLeftError as e:
            self._record.passed_over.append((fault, str(e)))
            return
        volley = together[0].volley if together else fault.number
        together.append(Thrown(fault, hit.hosts, now, damaged_step=hit.damaged_step, volley=volley))
        what = fault.of.what.format(hosts=", ".join(hit.hosts))
        self._say(f"{fault.number}: {what}{' (on the heels of it)' if fault.on_heels else ''}")

    def _is_told(self, thrown: Sequence[Thrown]) -> bool:
        """Tell whether the run has noticed, so that faults may be taken back."""
        stories = {False: self._stage.watch.story, True: self._stage.companion.story}
        found = [
            tell(t, thrown, stories[t.fault.of.companion]).finding
            for t in thrown
            if not t.fault.of.told_late
        ]
        return Finding.MISSING not in found

    def _wait_until_well(self, since: Sequence[int], what: str) -> None:
        self._wait(
            what,
            lambda: all(watch.is_well(step) for watch, step in zip(self._runs, since, strict=True)),
        )

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self._tell_news()
            if any(watch.is_over for watch in self._runs):
                raise RunEndedError(f"a run has ended before it was to; waited until {what}")
            time.sleep(0.2)
            return condition()

        wait_until(self._how_it_is(what), holds, PATIENCE_S)

    def _tell_news(self) -> None:
        """Say what the story has to tell that it had not before."""
        for name, watch in zip(("", "companion: "), self._runs, strict=True):
            watch.look()
            for episode in watch.story:
                told = name, episode.time, sentence(episode)
                if not episode.is_open and told not in self._told:
                    self._told.add(told)
                    self._say(f"    {name}{told[2]}")

    def _how_it_is(self, what: str) -> Callable[[], str]:
        def describe() -> str:
            queue = self._stage.sandbox.run(["squeue", "-r", "-h"], check=False).stdout
            nodes = self._stage.sandbox.node_states()
            return f"{what}; nodes: {nodes}; queue:\n{queue}"

        return describe
