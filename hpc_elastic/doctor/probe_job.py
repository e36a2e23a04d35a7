"""The probe as a job: an array as that of a run, submitted, looked at and taken away again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpc_elastic.config.schema import RunSettings, SlurmSettings
from hpc_elastic.doctor.allreduce_check import TIMEOUT_S as HELLO_S
from hpc_elastic.doctor.allreduce_check import AllreduceResult
from hpc_elastic.doctor.cli_settings import launcher_of
from hpc_elastic.doctor.probe_folder import ProbeFolder, ProbePlan
from hpc_elastic.doctor.probe_network import ProbeMeeting
from hpc_elastic.doctor.probe_task import NodeFacts
from hpc_elastic.doctor.signal_recorder import AGENT, ORPHANED, WORKER
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.launcher import batch_script
from hpc_elastic.launcher.prepare import python_path, read_template
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, Submission
from hpc_elastic.shared_files import is_there, refresh, write_atomic
from hpc_elastic.slurm.client import SiteClient, time_limit_s
from hpc_elastic.slurm.job_state import Phase, TaskState

MODULE = "hpc_elastic.doctor.probe_task"
_MINUTES = 10
"""The probe's time limit, where neither the user nor the partition wants a shorter one."""
_END_S = 15.0
_KILL_S = 15.0
_LOG_CHARS = 600


@dataclass(frozen=True)
class ProbeJob:
    """A probe that was submitted.

    Attributes:
        job_id: Of its array.
        num_nodes: Its number of tasks.
        place: Its files.
        client: How to reach Slurm.
    """

    job_id: str
    num_nodes: int
    place: ProbeFolder
    client: SiteClient

    def task(self, index: int) -> str:
        """Return the name of a task."""
        return f"{self.job_id}_{index}"

    def states(self) -> dict[int, TaskState]:
        """Return Slurm's word on each task; those that it has forgotten are left out.

        Raises:
            SlurmCommandError: Slurm does not answer.
        """
        found = self.client.tasks([self.job_id])
        return {i: found[self.task(i)] for i in range(self.num_nodes) if self.task(i) in found}

    def log(self, index: int) -> str:
        """Return the end of what a task has printed."""
        file = Submission(self.place.path).logs / f"{self.job_id}_{index}.log"
        try:
            return file.read_text(errors="replace").strip()[-_LOG_CHARS:]
        except OSError:
            return ""

    def end(self) -> list[str]:
        """End all tasks, and remove the files; return those that did not end, with their nodes."""
        with contextlib.suppress(OSError):  # a full disk; they are cancelled in any case
            self.place.stop.touch()
        left = self._cancelled()
        shutil.rmtree(self.place.path.parent, ignore_errors=True)
        return left

    def _cancelled(self) -> list[str]:
        name = [self.job_id]
        for attempt, timeout_s in ((self.client.cancel, _END_S), (self.client.kill, _KILL_S)):
            try:
                attempt(name)
                left = self._left(timeout_s)
            except SlurmCommandError as e:
                left = [f"{self.job_id} ({e.stderr.strip()[:200]})"]
            if not left:
                break
        return left

    def _left(self, timeout_s: float) -> list[str]:
        """Wait for the tasks to end; return those that do not."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.client.tasks([self.job_id]).values()
            left = [s for s in states if s.phase is not Phase.ENDED]
            if not left or time.monotonic() > deadline:
                return [f"{s.task} ({s.state} on {s.node or 'no node'})" for s in left]
            time.sleep(0.5)


def submit(
    settings: RunSettings,
    num_nodes: int,
    folder: Path,
    client: SiteClient,
    *,
    longest_s: float | None = None,
) -> ProbeJob:
    """Submit a probe (login node).

    Args:
        settings: What a run would be submitted with.
        num_nodes: How many nodes to look at.
        folder: The directory to try out; the probe's own is made in it.
        client: How to reach Slurm.
        longest_s: Longest time that the partition allows; None without a limit.

    Raises:
        HpcElasticError: sbatch refuses it, or the directory can not be written to.
    """
    from hpc_elastic.launcher.slurm import SbatchRefusedError, refusal, submit_script

    own = Path(tempfile.mkdtemp(dir=folder, prefix="hpc-elastic-doctor-"))
    launcher = replace(launcher_of(settings), time=time_limit(settings, longest_s))
    try:
        script = _lay_out(launcher, own / SUBMISSION, num_nodes)
        jobs = submit_script(script, num_nodes)
    except SbatchRefusedError as e:
        shutil.rmtree(own, ignore_errors=True)
        raise refusal(e.stderr, launcher, client) from e
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    job_id = str(jobs[0].job_id).partition("_")[0]
    return ProbeJob(job_id, num_nodes, ProbeFolder(own / SUBMISSION), client)


def time_limit(settings: RunSettings, longest_s: float | None) -> str:
    """Return the probe's time limit in minutes: never longer than a run's may be (pure)."""
    asked = launcher_of(settings).time
    wanted = [_MINUTES * 60.0, longest_s, time_limit_s(asked) if asked else None]
    return str(max(1, int(min(s for s in wanted if s is not None) // 60)))


def _lay_out(launcher: SlurmSettings, submission: Path, num_nodes: int) -> Path:
    """Write the probe's files; return its batch script."""
    Submission(submission).logs.mkdir(parents=True)
    limit_s = 60.0 * int(launcher.time or _MINUTES)
    plan = ProbePlan(
        num_nodes=num_nodes,
        token=secrets.token_hex(16),
        interface=launcher.interface,
        in_container=launcher.container.runtime is not None,
        lifetime_s=limit_s - 10,
    )
    ProbeFolder(submission).write_plan(plan)
    if plan.in_container:
        launcher = replace(launcher, setup=[*launcher.setup, _ask_outside(ProbeFolder(submission))])
    script = ArrayFiles.of(ProbeFolder(submission).array_file).script
    write_atomic(script, render(launcher, submission, num_tasks=num_nodes, module=MODULE))
    return script


def _ask_outside(place: ProbeFolder) -> str:
    """Return a shell line that asks Slurm before the container is entered, and never fails."""
    file = shlex.quote(str(place.outside(""))) + "$SLURM_ARRAY_TASK_ID"
    asks = 'squeue -h -j "$SLURM_JOB_ID" && scontrol show config'
    return f"{{ {asks}; }} > /dev/null 2> {file} || true"


def render(
    launcher: SlurmSettings,
    submission: Path,
    *,
    num_tasks: int,
    module: str = batch_script.TASK_MODULE,
) -> str:
    """Return the batch script that a run with these settings would have.

    Args:
        launcher: ``launcher.*``.
        submission: The folder ``.hpc_elastic`` that it names.
        num_tasks: Nodes.
        module: What its tasks run.

    Raises:
        HpcElasticError: a setting can not be written into it.
    """
    script = batch_script.Script(
        settings=replace(launcher, array_parallelism=None),
        job_name=launcher.job_name or "hpc-elastic-doctor",
        num_tasks=num_tasks,
        submission=submission,
        array=0,
        python=sys.executable,
        cwd=Path.cwd(),
        python_path=python_path(os.environ),
        module=module,
    )
    return batch_script.render(script, read_template(launcher.template))


# ---- What is done to a probe, one thing after the other (login node)
# Start, go, wait until all has been measured; the notice signal to every task; then one task is
# requeued, to see it come back, and another one cancelled, both with processes that do not go
# before they are killed. At the end, however that comes, everything is cancelled and removed.


_MEASURE_S = 90.0 + HELLO_S
_WAITS = 4
"""So often the tasks, and then the doctor, wait for files of each other while they measure."""
_NOTICE_S = 10.0
_LONGEST_KILL_WAIT_S = 60.0
_COME_BACK_S = 60.0
_REST_S = 60.0
_RELEASE_S = 5.0
_SLACK_S = 20.0
"""How much longer than KillWait Slurm may take to be through with a task."""
_HOWS: tuple[Literal["requeue", "cancel"], ...] = ("requeue", "cancel")


class ProbeRun:
    """Takes a probe through its course, and keeps what it has shown.

    Args:
        job: The probe.
        notice: The notice signal, such as ``USR2``.
        kill_wait_s: Slurm's KillWait.
        say: Is told what is being done.
    """

    def __init__(self, job: ProbeJob, *, notice: str, kill_wait_s: float, say: Say) -> None:
        self._job = job
        self._kill_wait_s = min(kill_wait_s, _LONGEST_KILL_WAIT_S)
        self._say = say
        self._watch = ProbeWatch(job, say)
        self.evidence = Evidence(job.num_nodes, notice_name=notice)

    def run(self, patience_s: float) -> Evidence:
        """Go through all of it, and leave nothing behind, also when it is interrupted.

        Args:
            patience_s: How long the first task may take to start.
        """
        try:
            running = self._watch.wait_for_start(patience_s, _REST_S)
            self._add(waiting=self._watch.waiting())
            self._start(running)
            if self.evidence.reports:
                self._notify()
                self._end_tasks()
        except BrokenPipeError:
            raise  # of whoever listened
        except (SlurmCommandError, OSError) as e:
            self._add(problem=str(e))
        finally:
            with contextlib.suppress(OSError):  # nobody listens any more: `doctor --probe | head`
                self._say("cancelling what is left of the probe")
            self._add(leftovers=self._job.end())
        return self.evidence

    def _add(self, **facts: object) -> None:
        self.evidence = replace(self.evidence, **facts)  # type: ignore[arg-type]

    def _start(self, running: list[int]) -> None:
        """Let the tasks that run measure all, and read what they have found."""
        place, took_part = self._job.place, sorted(running)
        self._say(f"{len(running)} of {self._job.num_nodes} nodes measure")
        place.write(place.go, took_part)

        def done() -> bool:
            ended = [i for i in self._watch.states() if i in self._watch.in_phase(Phase.ENDED)]
            return all(i in ended or is_there(place.node(i)) for i in took_part)

        until(done, _MEASURE_S + _WAITS * place.late_s)
        reports, unreadable = read_reports(place, took_part)
        gone = [i for i in range(self._job.num_nodes) if i not in self.evidence.waiting]
        blind = {
            i: node
            for i, node in self._nodes_of(Phase.RUNNING).items()
            if i in took_part and i not in reports and is_there(place.peer(i))
        }
        silent = {i: self._silence(i) for i in gone if i not in {**reports, **blind}}
        self._add(reports=reports, silent=silent | unreadable, blind=blind)
        self._add(outside=self._outside(reports))

    def _nodes_of(self, phase: Phase) -> dict[int, str]:
        """Return the nodes of the tasks in a phase."""
        states = self._watch.states()
        return {i: states[i].node or f"task {i}" for i in self._watch.in_phase(phase)}

    def _outside(self, reports: Mapping[int, NodeReport]) -> dict[str, str | None]:
        """Return what the nodes' batch scripts, outside of a container, found of Slurm."""
        found = {r.facts.name: self._job.place.outside(i) for i, r in reports.items()}
        return {
            name: file.read_text().strip()[:300] or None
            for name, file in found.items()
            if is_there(file)
        }

    def _silence(self, index: int) -> str:
        """Return what became of a task that has reported nothing."""
        state = self._watch.states().get(index)
        log = self._job.log(index)
        last = f": {log}" if log else ", and printed nothing"
        return f"{state.state if state else 'forgotten'} on {state.node if state else '?'}{last}"

    def _notify(self) -> None:
        """Send the notice signal to every task, and see which processes get it."""
        name = self.evidence.notice_name
        self._say(f"sending SIG{name}")
        sent = time.monotonic()
        for index in self.evidence.reports:
            self._command(lambda task: self._job.client.signal(task, name), index)
        seen: dict[int, dict[str, float | None]] = {
            index: dict.fromkeys(WHO) for index in self.evidence.reports
        }
        until(lambda: self._look_for(name, sent, seen), _NOTICE_S + self._job.place.late_s)
        self._add(notices=seen)

    def _look_for(self, name: str, sent: float, seen: dict[int, dict[str, float | None]]) -> bool:
        """Fill in which processes have received a signal by now; return whether all have."""
        for index, times in seen.items():
            for who in WHO:
                came = received(self._job.place, who, index, f"SIG{name}") is not None
                if came and times[who] is None:
                    times[who] = time.monotonic() - sent
        return all(None not in times.values() for times in seen.values())

    def _command(self, command: Callable[[str], None], index: int) -> str:
        """Tell Slurm something of a task; return why it would not."""
        try:
            command(self._job.task(index))
        except SlurmCommandError as e:
            return e.stderr.strip()[:300]
        return ""

    def _reached(self) -> list[int]:
        """Return the tasks that had the notice, or all if none had: what is done to them counts."""
        found = [
            i for i in sorted(self.evidence.reports) if self.evidence.notices[i][AGENT] is not None
        ]
        return found or sorted(self.evidence.reports)

    def _end_tasks(self) -> None:
        """Requeue the first task and cancel the second, both at once."""
        chosen = dict(zip(_HOWS, self._reached(), strict=False))
        self._say(f"requeueing one task, cancelling another; KillWait {self._kill_wait_s:.0f} s")
        start = time.monotonic()
        client = self._job.client
        commands = {"requeue": client.requeue, "cancel": lambda task: client.cancel([task])}
        refused = {how: self._command(commands[how], i) for how, i in chosen.items()}
        under_way = [i for how, i in chosen.items() if not refused[how]]
        over = until(lambda: self._are_dead(under_way), self._kill_wait_s + _SLACK_S)
        place = self._job.place
        until(lambda: all(None not in lived(place, i).values() for i in under_way), place.late_s)
        endings = [
            NodeEnding(
                how=how,
                node=self.evidence.name(index),
                lived_s=lived(place, index),
                orphaned=was_orphaned(place, index),
                capped=not over,
                refused=refused[how],
            )
            for how, index in chosen.items()
        ]
        if over and not refused["requeue"]:
            endings[0] = self._await_return(endings[0], chosen["requeue"], start)
        self._add(endings=endings)

    def _are_dead(self, indices: list[int]) -> bool:
        """Tell whether Slurm is through with tasks."""
        states = self._watch.states()
        return all(
            i not in states or states[i].phase in (Phase.ENDED, Phase.PENDING) for i in indices
        )

    def _await_return(self, ending: NodeEnding, index: int, start: float) -> NodeEnding:
        """Wait until a requeued task has come back, without Slurm's two minutes."""
        self._say("waiting for the requeued task to come back")
        file, released = self._job.place.back(index), -_RELEASE_S

        def came() -> bool:
            nonlocal released
            state, now = self._watch.states().get(index), time.monotonic()
            if state is not None and state.is_held and now - released > _RELEASE_S:
                self._command(self._job.client.release, index)
                released = now
            return is_there(file)

        if until(came, _COME_BACK_S + self._job.place.late_s):
            node = json.loads(file.read_text())["node"]
            return replace(ending, back_on=node, back_s=time.monotonic() - start)
        state = self._watch.states().get(index)
        waits = state is not None and state.phase is Phase.PENDING and (state.restarts or 0) > 0
        return replace(ending, waits=(state.reason or "starting") if state and waits else "")


# ---- Waiting for the probe, bounded, on the login node


_T = TypeVar("_T")
POLL_S = 0.5
Say = Callable[[str], None]


def until(condition: Callable[[], _T | None], timeout_s: float) -> _T | None:
    """Wait for something; return None if it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found or time.monotonic() > deadline:
            return found
        time.sleep(POLL_S)


class ProbeWatch:
    """Slurm's word on the tasks of a probe; the last one counts where there is no newer one."""

    def __init__(self, job: ProbeJob, say: Say) -> None:
        self._job = job
        self._say = say
        self._states: dict[int, TaskState] = {}

    def states(self) -> dict[int, TaskState]:
        """Ask squeue."""
        try:
            self._states = self._job.states()
        except SlurmCommandError as e:
            self._say(f"Slurm does not answer: {e.stderr.strip()[:100]}")
        return self._states

    def in_phase(self, *phases: Phase) -> list[int]:
        """Return the tasks in some phases, as last heard."""
        return [i for i, state in self._states.items() if state.phase in phases]

    def wait_for_start(self, patience_s: float, rest_s: float) -> list[int]:
        """Wait until all tasks run; return those that do.

        Args:
            patience_s: How long the first may take.
            rest_s: How long the others may take after the first.
        """
        deadline = time.monotonic() + patience_s
        first_seen = False
        while time.monotonic() < deadline:
            self.states()
            running = self.in_phase(Phase.RUNNING)
            ended = self.in_phase(Phase.ENDED)
            if len(running) + len(ended) == self._job.num_nodes:
                return running
            if running and not first_seen:
                first_seen, deadline = True, time.monotonic() + rest_s
            self._say(self._what())
            time.sleep(POLL_S)
        return self.in_phase(Phase.RUNNING)

    def waiting(self) -> dict[int, str]:
        """Return why tasks wait, in Slurm's words."""
        pending = self.in_phase(Phase.PENDING)
        return {i: self._states[i].reason or "no reason is given" for i in pending}

    def _what(self) -> str:
        running = len(self.in_phase(Phase.RUNNING))
        pending = (self._states[i].reason for i in self.in_phase(Phase.PENDING))
        reasons = ", ".join(sorted({reason for reason in pending if reason})) or "starting"
        return f"job {self._job.job_id}: {running} of {self._job.num_nodes} nodes run ({reasons})"


# ---- What a probe has left behind, read: the facts that the judges go by


WHO = (AGENT, WORKER)


@dataclass(frozen=True)
class NodeReport:
    """What one task has measured.

    Attributes:
        facts: Its node.
        meeting: What it found of the others.
        hello: What came of torch's process group; None if it took no part.
    """

    facts: NodeFacts
    meeting: ProbeMeeting
    hello: AllreduceResult | None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> NodeReport:
        """Return it from what `probe_task` has written."""
        hello = None if raw["hello"] is None else AllreduceResult.from_json(raw["hello"])
        facts, meeting = NodeFacts.from_json(raw["facts"]), ProbeMeeting.from_json(raw["meeting"])
        return cls(facts, meeting, hello)

    def to_json(self) -> dict[str, Any]:
        """Return it as `probe_task` writes it."""
        hello = None if self.hello is None else self.hello.to_json()
        return {
            "facts": self.facts.to_json(),
            "meeting": self.meeting.to_json(),
            "hello": hello,
        }


@dataclass(frozen=True)
class NodeEnding:
    """How a task was ended, and how its processes saw it.

    Attributes:
        how: ``requeue`` or ``cancel``.
        node: Its node.
        lived_s: How long a process lived after its SIGTERM, by who; None: it got none.
        orphaned: Whether the worker outlived the task's own process.
        capped: Whether it was let go before Slurm's SIGKILL: it lives that long at least.
        refused: Why Slurm would not; empty if it did.
        back_on: The node that it came back to, restarted; None if it did not.
        back_s: Seconds from the command until then.
        waits: Why it waits in the queue, requeued, and has not come back; empty if it does not.
    """

    how: Literal["requeue", "cancel"]
    node: str
    lived_s: dict[str, float | None] = field(default_factory=dict)
    orphaned: bool = False
    capped: bool = False
    refused: str = ""
    back_on: str | None = None
    back_s: float | None = None
    waits: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that a probe has shown.

    Attributes:
        num_asked: How many nodes it was to look at.
        waiting: Why a task did not start, by index.
        reports: What the tasks have measured, by index.
        silent: What a task that has measured nothing came to, by index.
        blind: The nodes of tasks that run, and have said so by a file, but do not see what was
            written since, by index.
        outside: What is wrong with Slurm's commands outside of the container, by node; None: they
            answer. Empty where there is no container.
        notice_name: The signal that was sent as a notice.
        notices: Seconds until a process had it, by task and who; None: it did not come.
        endings: How tasks were ended.
        leftovers: Tasks that did not end.
        problem: Why it was cut short; empty if it was not.
    """

    num_asked: int
    waiting: dict[int, str] = field(default_factory=dict)
    reports: dict[int, NodeReport] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    blind: dict[int, str] = field(default_factory=dict)
    outside: dict[str, str | None] = field(default_factory=dict)
    notice_name: str = "USR2"
    notices: dict[int, dict[str, float | None]] = field(default_factory=dict)
    endings: list[NodeEnding] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    problem: str = ""

    def name(self, index: int) -> str:
        """Return the node of a task; its number where that is not known."""
        report = self.reports.get(index)
        return report.facts.name if report else f"task {index}"


def read_reports(
    place: ProbeFolder, indices: list[int]
) -> tuple[dict[int, NodeReport], dict[int, str]]:
    """Return what tasks have measured, as far as they have, and why a report can not be read."""
    found, unreadable = dict[int, NodeReport](), dict[int, str]()
    for index in indices:
        if is_there(place.node(index)):
            raw = json.loads(place.node(index).read_text())
            try:
                found[index] = NodeReport.from_json(raw)
            except (TypeError, KeyError, AttributeError):
                unreadable[index] = _of_another_version(raw)
    return found, unreadable


def _of_another_version(raw: Any) -> str:
    """Say which hpc_elastic has measured something that this one does not know."""
    try:
        theirs = raw["facts"]["versions"]["hpc_elastic"]
    except (TypeError, KeyError):
        theirs = "of unknown version"
    return f"measured by hpc_elastic {theirs}, which is not the one that reads it here"


def received(place: ProbeFolder, who: str, index: int, name: str, attempt: int = 0) -> float | None:
    """Return when a process received a signal first, by its own clock; None if it did not."""
    for line in _lines(place.signals(who, index, attempt)):
        if line["signal"] == name:
            return float(line["time"])
    return None


def lived(place: ProbeFolder, index: int, attempt: int = 0) -> dict[str, float | None]:
    """Return how long the processes of a task lived after their first SIGTERM."""
    times: dict[str, float | None] = {}
    for who in WHO:
        asked = received(place, who, index, "SIGTERM", attempt)
        last = last_beat(place.beat(who, index, attempt))
        times[who] = None if asked is None or last is None else max(0.0, last - asked)
    return times


def last_beat(file: Path) -> float | None:
    """Return the time in a heartbeat file; None if there is none."""
    try:
        refresh(file)
        return float(file.read_text())
    except (OSError, ValueError):
        return None


def was_orphaned(place: ProbeFolder, index: int, attempt: int = 0) -> bool:
    """Return whether a worker outlived its parent by a heartbeat or more."""
    return received(place, WORKER, index, ORPHANED, attempt) is not None


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        refresh(file)
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        return []
