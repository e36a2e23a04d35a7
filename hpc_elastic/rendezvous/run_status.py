"""Run status: the content of status.json and progress.jsonl, from a leader's state (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpc_elastic._util import ThroughputMeter, counted
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.round_state import Participants, RoundPhase, RunState
from hpc_elastic.slurm.job_state import Phase as SlurmPhase
from hpc_elastic.slurm.job_state import TaskState

_PHASES = {
    RoundPhase.FORMING: "waiting",
    RoundPhase.RUNNING: "training",
    RoundPhase.DISBANDED: "requeued",
}
NUMBERS = frozenset(["step", "loss", "samples", "blocked_s"])
"""What changes with every step."""


def status_of(leadership: LeaderState) -> dict[str, Any]:
    """Return the content of status.json, but for its time."""
    run = leadership.run
    formed = run.phase in (RoundPhase.RUNNING, RoundPhase.ENDED)
    members = run.ranks.members if formed else ()
    ending = run.entry.ending
    phase = ending.status if ending is not None else _PHASES[run.phase]
    return {
        "phase": phase, "term": leadership.at.term, "round": run.entry.round,
        "nodes": len(members), "world_size": sum(m.nproc for m in members),
        "members": [
            {"task": m.task, "host": m.host, "group_rank": rank, "nproc": m.nproc}
            for rank, m in enumerate(members)
        ],
        "joined": len(run.participants.joined), "restarts": run.policy.restarts,
        "max_restarts": run.rules.max_restarts, "checkpoint": run.policy.progress,
        **_progress(leadership, members),
        "stragglers": leadership.stragglers.current if members else [],
    }  # fmt: skip


def _progress(leadership: LeaderState, members: tuple[Agent, ...]) -> dict[str, Any]:
    reports = [leadership.progress[m] for m in members if m in leadership.progress]
    steps = [r["step"] for r in reports if r.get("step") is not None]
    losses = [r["loss"] for r in reports if r.get("loss") is not None]
    samples = [r["samples"] for r in reports if r.get("samples") is not None]
    return {
        "step": max(steps, default=None),
        "total_steps": leadership.run.estimator.total,
        "loss": losses[0] if losses else None,
        "samples": max(samples, default=None),
        "blocked_s": max((r.get("blocked_s") or 0.0 for r in reports), default=0.0),
    }


# ---- Which looks at the group are worth a line of progress.jsonl, and at what pace it trains
# A line is written when the group has changed, after one of how far it was before; and else every
# `SHORTEST_S`, in a run that has lasted for longer than `DENSE_S` every 2000th part of its age.
# So a run of a day has about 6,000 lines, and one of a year 18,000 (some 4 MB), besides those of
# its changes, which the event log has as well. Nothing that was written is ever changed: whoever
# leads next goes on below.


SHORTEST_S = 5.0
DENSE_S = 10_000.0
"""So long after its start a run has a line every `SHORTEST_S`."""

_PACE_S = 30.0
"""The pace is taken over so long."""
_KEPT = ("step", "total_steps", "samples", "loss", "nodes", "world_size", "blocked_s", "phase",
         "round", "term", "checkpoint")  # fmt: skip
_GROUP = ("phase", "round", "term", "nodes", "world_size")

Message = dict[str, Any]


def spacing_s(age_s: float) -> float:
    """Return the seconds between two lines of a run of this age."""
    return SHORTEST_S * max(1.0, age_s / DENSE_S)


def line_of(status: Mapping[str, Any]) -> Message:
    """Return what is kept of a status, but for its time."""
    return {name: status.get(name) for name in (*_KEPT, "steps_per_s", "samples_per_s")}


class ProgressLog:
    """The progress of a run, as one leader writes it down."""

    def __init__(self) -> None:
        self._steps, self._samples = ThroughputMeter(_PACE_S), ThroughputMeter(_PACE_S)
        self._group: list[Any] | None = None
        self._last: Message | None = None
        """The last look, which was not worth a line."""
        self._written = 0.0

    def look(self, status: Mapping[str, Any], now: float, started: float) -> list[Message]:
        """Take note of the group as it is now.

        Args:
            status: What status.json shows.
            now: Unix seconds. Leaders have clocks of their own: whoever reads sorts the lines.
            started: When the run was first led.

        Returns:
            The lines to write, none if none is due.
        """
        group = [status.get(name) for name in _GROUP]
        changed = group != self._group
        if changed:
            self._steps, self._samples = ThroughputMeter(_PACE_S), ThroughputMeter(_PACE_S)
        self._steps.record_count(status.get("step"), now)
        self._samples.record_count(status.get("samples"), now)
        line = {"time": round(now, 3), **line_of({**status, **self.rates})}
        before, self._last = self._last, line
        if not changed and abs(now - self._written) < spacing_s(now - started):
            return []
        self._group, self._written, self._last = group, now, None
        return [before, line] if changed and before is not None else [line]

    @property
    def rates(self) -> Message:
        """Steps and samples a second, None where they are not known."""
        rates = {"steps_per_s": self._steps.rate, "samples_per_s": self._samples.rate}
        return {name: None if rate is None else round(rate, 4) for name, rate in rates.items()}


# ---- Says in words what a group that has not formed is waiting for (pure)


_MAX_NAMED = 20


def waiting_for(run: RunState, log_of: Callable[[str, int], str | None]) -> str:
    """Return which nodes have joined and which are missing, with Slurm's states and their logs.

    Args:
        run: The leader's, while a round forms.
        log_of: (task, attempt) -> where that attempt's log is; None if unknown.
    """
    least = run.rules.min_nodes
    have = "has" if least == 1 else "have"
    here = f"{len(run.participants.joined)} of at least {counted(least, 'node')} {have} joined"
    missing = run.participants.missing(least)
    if not missing:
        return f"{here}; no other task of the run is known to run or to be queued"
    named = [_describe(task, run.participants, log_of) for task in missing[:_MAX_NAMED]]
    more = f", and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return f"{here}; missing: {'; '.join(named)}{more}"


def _describe(
    task: str, participants: Participants, log_of: Callable[[str, int], str | None]
) -> str:
    state = (participants.task_states or {}).get(task)
    member = next((a for a in participants.pending_rejoin if a.task == task), None)
    if member is not None:
        what = f"{task} on {member.host}, which was told to stop its workers and to join again"
        attempt = member.attempt
    elif state is None:
        return task
    else:
        what, attempt = f"{task} ({_slurms_word(state)})", state.restarts or 0
        if state.phase is not SlurmPhase.RUNNING:
            return what
    log = log_of(task, attempt)
    return f"{what}, log {log}" if log else what


def _slurms_word(state: TaskState) -> str:
    where = f" on {state.node}" if state.node else ""
    why = f", {state.reason}" if state.reason else ""
    return f"{state.state}{where}{why}"
