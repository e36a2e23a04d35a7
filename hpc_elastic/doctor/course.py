"""What is done to a probe, one thing after the other (login node).

Start, go, wait until all has been measured; the notice signal to every task; then one task is
requeued, to see it come back, and another one cancelled, both with processes that do not go before
they are killed. At the end, however that comes, everything is cancelled and removed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from hpc_elastic.doctor.evidence import (
    WHO,
    Ending,
    Evidence,
    Report,
    lived,
    read_reports,
    received,
    was_orphaned,
)
from hpc_elastic.doctor.hello import TIMEOUT_S as HELLO_S
from hpc_elastic.doctor.job import ProbeJob
from hpc_elastic.doctor.patient import AGENT
from hpc_elastic.doctor.watch import Say, Watch, until
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.files import is_there
from hpc_elastic.slurm.states import Phase

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


class Course:
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
        self._watch = Watch(job, say)
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

    def _outside(self, reports: Mapping[int, Report]) -> dict[str, str | None]:
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
            Ending(
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

    def _await_return(self, ending: Ending, index: int, start: float) -> Ending:
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
