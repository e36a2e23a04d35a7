"""The probe as a job: an array like that of a run, submitted, driven, read and removed.

The tasks start and measure everything. Then every task is sent the notice signal. Then one task is
requeued, to see it come back, and another one cancelled, both with processes that ignore SIGTERM.
At the end, and after any error, everything is cancelled and removed.
"""

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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from hpc_elastic.config.parse import restored, time_limit_s
from hpc_elastic.config.schema import RunSettings, SlurmSettings
from hpc_elastic.doctor import probe_files
from hpc_elastic.doctor.allreduce_check import TIMEOUT_S as ALLREDUCE_S
from hpc_elastic.doctor.allreduce_check import AllreduceResult
from hpc_elastic.doctor.cluster import ClusterFacts, slurm_settings
from hpc_elastic.doctor.probe_files import AGENT, PROCESSES, WORKER, ProbeFolder, ProbePlan
from hpc_elastic.doctor.probe_network import MeetingResult
from hpc_elastic.doctor.probe_task import NodeFacts
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.launcher import batch_script
from hpc_elastic.launcher.slurm import refusal, submit_script
from hpc_elastic.launcher.submit import read_template
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, Submission
from hpc_elastic.shared_files import is_there, read_tail, write_atomic
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState

Report = Callable[[str], None]
MODULE = "hpc_elastic.doctor.probe_task"
POLL_S = 0.5
_MINUTES = 10
"""The probe's time limit, where neither the user nor the partition wants a shorter one."""
_LOG_CHARS = 600
_END_S = 15.0
_MEASURE_S = 90.0 + ALLREDUCE_S
_WAITS = 4
"""How often the tasks, and then the doctor, wait for each other's files."""
_NOTICE_S = 10.0
_LONGEST_KILL_WAIT_S = 60.0
_COME_BACK_S = 60.0
_REST_S = 60.0
"""Longest wait for the other tasks after the first."""
_RELEASE_S = 5.0
_SLACK_S = 20.0
"""How much longer than KillWait Slurm may take to end a task."""
_HOWS: tuple[Literal["requeue", "cancel"], ...] = ("requeue", "cancel")
wait_until = partial(probe_files.wait_until, pause_s=POLL_S)


def submit_probe(
    settings: RunSettings, cluster: ClusterFacts, folder: Path, num_nodes: int, report: Report
) -> ProbeRun:
    """Submit a probe in the directory to test."""
    own = Path(tempfile.mkdtemp(dir=folder, prefix="hpc-elastic-doctor-"))
    launcher, client = slurm_settings(settings), SlurmClient(env=dict(os.environ))
    limits = [p.max_time_s for p in cluster.named(launcher.partition) if p.max_time_s is not None]
    launcher = replace(launcher, time=time_limit(settings, max(limits, default=None)))
    try:
        script = _write_submission(launcher, own / SUBMISSION, num_nodes)
        job_id = submit_script(script, num_nodes, client)
    except BaseException as e:
        shutil.rmtree(own, ignore_errors=True)
        if isinstance(e, SlurmCommandError):
            raise refusal(e, launcher, client) from e
        raise
    return ProbeRun(
        job_id, num_nodes, ProbeFolder(own / SUBMISSION), client, report,
        notice=launcher.preempt_signal, kill_wait_s=cluster.kill_wait_s,
    )  # fmt: skip


def time_limit(settings: RunSettings, longest_s: float | None) -> str:
    """Return the probe's time limit in minutes, at most that of a run and of the partition."""
    asked = slurm_settings(settings).time
    wanted = [_MINUTES * 60.0, longest_s, time_limit_s(asked) if asked else None]
    return str(max(1, int(min(s for s in wanted if s is not None) // 60)))


def _write_submission(launcher: SlurmSettings, submission: Path, num_nodes: int) -> Path:
    Submission(submission).logs.mkdir(parents=True)
    place, limit_s = ProbeFolder(submission), 60.0 * int(launcher.time or _MINUTES)
    place.write_plan(ProbePlan(secrets.token_hex(16), launcher.interface, limit_s - 10))
    if launcher.container.runtime is not None:
        # a shell line outside of the container that runs Slurm's commands, and never fails
        file = shlex.quote(str(place.outside_file(""))) + "$SLURM_ARRAY_TASK_ID"
        queries = 'squeue -h -j "$SLURM_JOB_ID" && scontrol show config'
        line = f"{{ {queries}; }} > /dev/null 2> {file} || true"
        launcher = replace(launcher, setup=[*launcher.setup, line])
    script = ArrayFiles.of(place.array_file).script
    write_atomic(script, render(launcher, submission, num_tasks=num_nodes, module=MODULE))
    return script


def render(
    launcher: SlurmSettings,
    submission: Path,
    *,
    num_tasks: int,
    module: str = batch_script.TASK_MODULE,
) -> str:
    """Return the batch script of a run with these settings; raise HpcElasticError if impossible."""
    script = batch_script.Script(
        settings=replace(launcher, array_parallelism=None),
        job_name=launcher.job_name or "hpc-elastic-doctor",
        num_tasks=num_tasks,
        submission=submission,
        array=0,
        python=sys.executable,
        cwd=Path.cwd(),
        python_path=batch_script.python_path(os.environ),
        module=module,
    )
    return batch_script.render(script, read_template(launcher.template))


class ProbeRun:
    """A probe that was submitted, an array with a task for each node: its course and its evidence.

    ``notice`` is a signal such as ``USR2``; ``kill_wait_s`` is Slurm's KillWait.
    """

    def __init__(
        self, job_id: str, num_nodes: int, place: ProbeFolder, client: SlurmClient, report: Report,
        *, notice: str, kill_wait_s: float,
    ) -> None:  # fmt: skip
        self._job_id = job_id
        self._place = place
        self._client = client
        self._report = report
        self._kill_wait_s = min(kill_wait_s, _LONGEST_KILL_WAIT_S)
        self._states: dict[int, TaskState] = {}
        """The last known states; they count while Slurm does not answer."""
        self.evidence = Evidence(num_nodes, notice_name=notice)

    def run(self, timeout_s: float) -> Evidence:
        """Run the probe, whose first task has ``timeout_s`` to start; it leaves nothing behind."""
        try:
            running = self._wait_for_start(timeout_s)
            pending = self._in_phase(Phase.PENDING)
            self.evidence.waiting = {
                i: self._states[i].reason or "no reason given" for i in pending
            }
            self._measure(running)
            if self.evidence.reports:
                self._send_notice()
                self._end_tasks()
        except BrokenPipeError:
            raise  # the reader of our output has ended
        except (SlurmCommandError, OSError) as e:
            self.evidence.problem = str(e)
        finally:
            with contextlib.suppress(OSError):  # the reader has ended: `doctor --probe | head`
                self._report("cancelling the rest of the probe")
            self.evidence.leftovers = self._cancel()
        return self.evidence

    def _cancel(self) -> list[str]:
        """Cancel all tasks, and remove the files; return the tasks that did not end."""
        with contextlib.suppress(OSError):  # a full disk; the tasks are cancelled in any case
            self._place.stop_file.touch()
        left: list[str] = []

        def have_ended() -> bool:
            states = self._client.tasks([self._job_id]).values()
            going = [s for s in states if s.phase is not Phase.ENDED]
            left[:] = [f"{s.task} ({s.state} on {s.node or 'no node'})" for s in going]
            return not left

        for end_tasks in (self._client.cancel, self._client.kill):
            try:
                end_tasks([self._job_id])
                if wait_until(have_ended, _END_S):
                    break
            except SlurmCommandError as e:
                left[:] = [f"{self._job_id} ({e.stderr.strip()[:200]})"]
        shutil.rmtree(self._place.path.parent, ignore_errors=True)
        return left

    def _refresh(self) -> dict[int, TaskState]:
        """Query the state of each task that Slurm remembers."""
        try:
            found = self._client.tasks([self._job_id])
            names = {i: f"{self._job_id}_{i}" for i in range(self.evidence.num_asked)}
            self._states = {i: found[name] for i, name in names.items() if name in found}
        except SlurmCommandError as e:
            self._report(f"Slurm does not answer: {e.stderr.strip()[:100]}")
        return self._states

    def _in_phase(self, phase: Phase) -> list[int]:
        """Return the tasks in a phase, as of the last `_refresh`."""
        return [i for i, state in self._states.items() if state.phase is phase]

    def _wait_for_start(self, timeout_s: float) -> list[int]:
        """Wait until all tasks run, for the first one up to the time-out; return those that do."""
        deadline, first_seen = time.monotonic() + timeout_s, False
        num_nodes = self.evidence.num_asked
        while time.monotonic() < deadline:
            self._refresh()
            running = self._in_phase(Phase.RUNNING)
            if len(running) + len(self._in_phase(Phase.ENDED)) == num_nodes:
                return running
            if running and not first_seen:
                first_seen, deadline = True, time.monotonic() + _REST_S
            pending = (self._states[i].reason for i in self._in_phase(Phase.PENDING))
            reasons = ", ".join(sorted({reason for reason in pending if reason})) or "starting"
            ran = f"{len(running)} of {num_nodes} nodes run ({reasons})"
            self._report(f"job {self._job_id}: {ran}")
            time.sleep(POLL_S)
        return self._in_phase(Phase.RUNNING)

    def _measure(self, running: list[int]) -> None:
        """Let the running tasks measure everything, and read their reports."""
        place, took_part, num_asked = self._place, sorted(running), self.evidence.num_asked
        self._report(f"{len(running)} of {num_asked} nodes measure")
        probe_files.write_json(place.members_file, took_part)

        def done() -> bool:
            self._refresh()
            ended = self._in_phase(Phase.ENDED)
            return all(i in ended or is_there(place.task_file("node", i)) for i in took_part)

        wait_until(done, _MEASURE_S + self._client.timeout_s + _WAITS * place.staleness_s)
        reports, unreadable = read_reports(place, took_part)
        states, silent = self._refresh(), dict[int, str]()
        blind = {
            i: states[i].node or f"task {i}"
            for i in self._in_phase(Phase.RUNNING)
            if i in took_part and i not in reports and is_there(place.task_file("peer", i))
        }
        for i in range(num_asked):
            if i not in {**self.evidence.waiting, **reports, **blind}:
                state = states.get(i)
                log = read_tail(Submission(place.path).logs / f"{self._job_id}_{i}.log")
                where = f"{state.state} on {state.node}" if state else "forgotten on ?"
                silent[i] = where + (f": {log[-_LOG_CHARS:]}" if log else ", and printed nothing")
        self.evidence.reports, self.evidence.blind = reports, blind
        self.evidence.silent = silent | unreadable
        files = {r.facts.name: place.outside_file(i) for i, r in reports.items()}
        self.evidence.outside = {
            name: file.read_text().strip()[:300] or None
            for name, file in files.items()
            if is_there(file)
        }

    def _send_notice(self) -> None:
        """Send the notice signal to every task, and record which processes receive it."""
        name, place = self.evidence.notice_name, self._place
        self._report(f"sending SIG{name}")
        sent = time.monotonic()
        for index in self.evidence.reports:
            self._run_on_task(lambda task: self._client.signal(task, name), index)
        seen: dict[int, dict[str, float | None]] = {
            index: dict.fromkeys(PROCESSES) for index in self.evidence.reports
        }

        def all_received() -> bool:
            for index, times in seen.items():
                for who in PROCESSES:
                    received = probe_files.signal_time(place, who, index, f"SIG{name}") is not None
                    if received and times[who] is None:
                        times[who] = time.monotonic() - sent
            return all(None not in times.values() for times in seen.values())

        wait_until(all_received, _NOTICE_S + place.staleness_s)
        self.evidence.notices = seen

    def _run_on_task(self, command: Callable[[str], None], index: int) -> str:
        """Run a command of Slurm on a task; return its error, empty without one."""
        try:
            command(f"{self._job_id}_{index}")
        except SlurmCommandError as e:
            return e.stderr.strip()[:300]
        return ""

    def _end_tasks(self) -> None:
        """Requeue the first task and cancel the second, both at once."""
        place, client, notices = self._place, self._client, self.evidence.notices
        tasks = sorted(self.evidence.reports)
        reached = [i for i in tasks if notices[i][AGENT] is not None] or tasks
        chosen = dict(zip(_HOWS, reached, strict=False))
        self._report(f"requeueing one task, cancelling another; KillWait {self._kill_wait_s:.0f} s")
        start = time.monotonic()
        commands = {"requeue": client.requeue, "cancel": lambda task: client.cancel([task])}
        refused = {how: self._run_on_task(commands[how], i) for how, i in chosen.items()}
        under_way = [i for how, i in chosen.items() if not refused[how]]

        def have_ended() -> bool:
            states = self._refresh()
            over = (Phase.ENDED, Phase.PENDING)
            return all(i not in states or states[i].phase in over for i in under_way)

        def all_known() -> bool:
            lived = (probe_files.survival_times(place, i).values() for i in under_way)
            return all(None not in times for times in lived)

        over = wait_until(have_ended, self._kill_wait_s + _SLACK_S)
        wait_until(all_known, place.staleness_s)
        endings = [
            NodeEnding(
                how=how,
                node=self.evidence.name(index),
                lived_s=probe_files.survival_times(place, index),
                orphaned=probe_files.signal_time(place, WORKER, index, probe_files.ORPHANED)
                is not None,
                capped=not over,
                refused=refused[how],
            )
            for how, index in chosen.items()
        ]
        if over and not refused["requeue"]:
            endings[0] = self._await_return(endings[0], chosen["requeue"], start)
        self.evidence.endings = endings

    def _await_return(self, ending: NodeEnding, index: int, start: float) -> NodeEnding:
        """Wait until a requeued task runs again; release it from Slurm's hold of two minutes."""
        self._report("waiting for the requeued task to come back")
        file, released = self._place.task_file("back", index), -_RELEASE_S

        def is_back() -> bool:
            nonlocal released
            state, now = self._refresh().get(index), time.monotonic()
            if state is not None and state.is_held and now - released > _RELEASE_S:
                self._run_on_task(self._client.release, index)
                released = now
            return is_there(file)

        if wait_until(is_back, _COME_BACK_S + self._place.staleness_s):
            node = json.loads(file.read_text())["node"]
            return replace(ending, back_on=node, back_s=time.monotonic() - start)
        state = self._refresh().get(index)
        waits = state is not None and state.phase is Phase.PENDING and (state.restarts or 0) > 0
        return replace(ending, waits=(state.reason or "starting") if state and waits else "")


@dataclass(frozen=True)
class NodeReport:
    """The report of one task, by `probe_task`; no all_reduce if it took no part in that."""

    facts: NodeFacts
    meeting: MeetingResult
    allreduce: AllreduceResult | None


@dataclass(frozen=True)
class NodeEnding:
    """The end of one task, and its effect on the processes.

    Attributes:
        how: ``requeue`` or ``cancel``.
        lived_s: How long each process lived after its SIGTERM; None if it received none.
        orphaned: Whether the worker outlived the task's own process.
        capped: Whether the probe stopped waiting before Slurm's SIGKILL.
        back_on: The node on which it runs again; None if it does not.
        back_s: Seconds from the command until then.
        waits: Why it waits in the queue after the requeue; empty if it does not.
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


@dataclass
class Evidence:
    """Everything that a probe has shown.

    Attributes:
        silent: Description of a task that has measured nothing, by index.
        blind: The nodes of running tasks that do not see newly written files, by index.
        outside: Error of Slurm's commands outside of the container, by node; None if they answer.
            Empty without a container.
        notices: Seconds until a process received the notice, by task and process; None if none.
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

    @property
    def facts(self) -> list[NodeFacts]:
        """The facts of the nodes that have reported."""
        return [report.facts for report in self.reports.values()]

    def name(self, index: int) -> str:
        """Return the node of a task, or its number if unknown."""
        report = self.reports.get(index)
        return report.facts.name if report else f"task {index}"


def read_reports(
    place: ProbeFolder, indices: list[int]
) -> tuple[dict[int, NodeReport], dict[int, str]]:
    """Return the reports of tasks, and why a report cannot be read, by index."""
    found, unreadable = dict[int, NodeReport](), dict[int, str]()
    for index in indices:
        file = place.task_file("node", index)
        if is_there(file):
            raw = json.loads(file.read_text())
            try:
                found[index] = restored(NodeReport, raw)
            except (TypeError, KeyError, ValueError):
                try:
                    theirs = raw["facts"]["versions"]["hpc_elastic"]
                except (TypeError, KeyError):
                    theirs = "of unknown version"
                why = f"measured by hpc_elastic {theirs}, which is not the one that reads it here"
                unreadable[index] = why
    return found, unreadable
