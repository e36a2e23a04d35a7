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
from hpc_elastic.rundir import RunDir
from hpc_elastic.story.episode import Episode
from hpc_elastic.story.sentences import sentence
from hpc_elastic.testing.slurm_sandbox import SandboxError, SlurmSandbox
from hpc_elastic.testing.slurm_sandbox.commands import wait_until
from hpc_elastic.testing.soak import hands, training
from hpc_elastic.testing.soak.hands import NobodyLeftError, Stage
from hpc_elastic.testing.soak.plan import Fault, num_tasks, volleys
from hpc_elastic.testing.soak.told import Finding, Thrown, tell
from hpc_elastic.testing.soak.watch import Watch

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
        started: When the first fault could be thrown, in Unix seconds.
        thrown: The faults that were.
        passed_over: Those that could not be thrown when their turn came, and why.
        not_come_to: Those for which there was no time.
        story: What the run tells.
        problem: What ended the soak early; empty: nothing did.
    """

    run: Path
    started: float = 0.0
    thrown: list[Thrown] = field(default_factory=list)
    passed_over: list[tuple[Fault, str]] = field(default_factory=list)
    not_come_to: list[Fault] = field(default_factory=list)
    story: list[Episode] = field(default_factory=list)
    problem: str = ""


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
    watch = submit(sandbox, disk, num_tasks(faults))
    record = Record(watch.run.path)
    stage = Stage(sandbox, watch, disk)
    try:
        _Player(stage, record, say).play(faults, minutes)
    except (SandboxError, RunEndedError) as e:
        record.problem = str(e)
    finally:
        stage.undo.close()
    watch.look()
    record.story = watch.story
    return record


def submit(sandbox: SlurmSandbox, disk: Path, num_nodes: int) -> Watch:
    """Submit the run; its files are on the disk."""
    os.environ.update(sandbox.env)
    run = disk / "run"
    with contextlib.redirect_stdout(io.StringIO()):  # how to attach to it
        launch(
            training.train, str(disk), nodes=f"1:{num_nodes}", nproc_per_node=1, launcher="slurm",
            run_dir=run, wait=False, **CHANGED,
        )  # fmt: skip
    return Watch(RunDir(run), disk / training.CHECKPOINTS)


class _Player:
    def __init__(self, stage: Stage, record: Record, say: Say) -> None:
        self._stage, self._record, self._say = stage, record, say
        self._told: set[tuple[float, str]] = set()

    def play(self, faults: Sequence[Fault], minutes: float) -> None:
        """Throw the faults, and see the run to its end."""
        self._wait_until_well(0, "the run trains")
        record = self._record
        record.started = time.time()
        left = volleys(faults)
        while left and time.time() - record.started < 60.0 * minutes:
            self._throw_all(left.pop(0))
        record.not_come_to = [fault for volley in left for fault in volley]
        self._say("the run is told to finish")
        (self._stage.disk / training.FINISH).touch()
        wait_until(
            self._how_it_is("the run has ended"), lambda: self._stage.watch.is_over, PATIENCE_S
        )
        self._tell_news()

    def _throw_all(self, volley: Sequence[Fault]) -> None:
        """Throw faults on each other's heels, and wait until the run has got over all of them."""
        saved = self._stage.watch.saved_step
        thrown: list[Thrown] = []
        for fault in volley:
            time.sleep(fault.after_s)
            if not fault.on_heels:  # what the one before has done may show late
                self._wait_until_well(0, f"the run is well before fault {fault.number}")
            self._throw(fault, thrown)
        if not thrown:
            return
        self._record.thrown += thrown
        last = max(t.time + t.fault.lasts_s for t in thrown)
        names = " and ".join(str(t.fault.number) for t in thrown)
        self._wait(
            f"fault {names} is told of", lambda: time.time() > last and self._is_told(thrown)
        )
        self._stage.bring_back()
        self._wait_until_well(saved, f"the run has got over fault {names}")
        now = time.time()
        self._record.thrown[-len(thrown) :] = [replace(t, until=now) for t in thrown]

    def _throw(self, fault: Fault, together: list[Thrown]) -> None:
        self._stage.watch.look()
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
        story = self._stage.watch.story
        found = [tell(t, thrown, story).finding for t in thrown if not t.fault.of.told_late]
        return Finding.MISSING not in found

    def _wait_until_well(self, since: int, what: str) -> None:
        self._wait(what, lambda: self._stage.watch.is_well(since))

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self._tell_news()
            if self._stage.watch.is_over:
                raise RunEndedError(f"the run has ended before it was to; waited until {what}")
            time.sleep(0.2)
            return condition()

        wait_until(self._how_it_is(what), holds, PATIENCE_S)

    def _tell_news(self) -> None:
        """Say what the story has to tell that it had not before."""
        self._stage.watch.look()
        for episode in self._stage.watch.story:
            told = episode.time, sentence(episode)
            if not episode.is_open and told not in self._told:
                self._told.add(told)
                self._say(f"    {told[1]}")

    def _how_it_is(self, what: str) -> Callable[[], str]:
        def describe() -> str:
            queue = self._stage.sandbox.run(["squeue", "-r", "-h"], check=False).stdout
            nodes = self._stage.sandbox.node_states()
            return f"{what}; nodes: {nodes}; queue:\n{queue}"

        return describe
