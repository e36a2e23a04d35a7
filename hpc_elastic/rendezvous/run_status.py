"""Run status: the content of status.json and progress.jsonl, from a leader's state (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from hpc_elastic._util import ThroughputMeter, counted
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.round_state import Participants, RoundPhase, RunState
from hpc_elastic.slurm.job_state import Phase as SlurmPhase
from hpc_elastic.transport.messages import Json

_PHASES = {
    RoundPhase.FORMING: "waiting",
    RoundPhase.RUNNING: "training",
    RoundPhase.DISBANDED: "requeued",
}
NUMBERS = frozenset(["step", "loss", "samples", "blocked_s", "metrics", "gpu_use", "gpu_memory",
                     "step_times"])  # fmt: skip
"""The fields of a status that change with every step."""


def status_of(leader_state: LeaderState) -> Json:
    """Return the content of status.json without its time."""
    run = leader_state.run
    formed = run.phase in (RoundPhase.RUNNING, RoundPhase.ENDED)
    members = run.ranks.members if formed else ()
    ending = run.entry.ending
    reports = [leader_state.progress[m] for m in members if m in leader_state.progress]

    known = leader_state.last_step if leader_state.last_step is not None else run.policy.progress
    last_step = known if ending is not None else None
    failed = run.policy.failed_terms

    def reported(name: str) -> list[Any]:
        return [r[name] for r in reports if r.get(name) is not None]

    return {
        "phase": ending.status if ending is not None else _PHASES[run.phase],
        "term": leader_state.at.term, "round": run.entry.round,
        "nodes": len(members), "world_size": sum(m.nproc for m in members),
        "members": [
            {"task": m.task, "host": m.host, "group_rank": rank, "nproc": m.nproc}
            for rank, m in enumerate(members)
        ],
        "joined": len(run.participants.joined), "restarts": run.policy.restarts,
        "max_restarts": run.rules.max_restarts, "checkpoint": run.policy.progress,
        "step": max(reported("step"), default=last_step), "total_steps": run.estimator.total,
        "loss": next(iter(reported("loss")), None),
        "metrics": next(iter(reported("metrics")), {}),
        "gpu_use": round(fmean(reported("gpu_use")), 3) if reported("gpu_use") else None,
        "gpu_memory": max(reported("gpu_memory"), default=None),
        "samples": max(reported("samples"), default=None),
        "blocked_s": max(reported("blocked_s"), default=0.0),
        "step_times": run.estimator.step_times,
        "stragglers": leader_state.stragglers.current if members else [],
        "warnings": [
            *_version_warnings({m.host: leader_state.versions.get(m.task, "") for m in members}),
            *_apart_warnings([rank for ranks in reported("apart") for rank in ranks]),
            *(f"the loss is {loss} at step {step} (rank {rank})"
              for rank, step, loss in sorted(reported("bad_loss"))[:1]),
            *(f"{counted(len(failed), 'term')} in a row failed, the last one so: {last.summary()}"
              for last in failed[-1:]),
        ],
    }  # fmt: skip


def _version_warnings(by_host: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning if nodes have different versions, by host; an empty one is unknown."""
    found: dict[str, list[str]] = {}
    for host, versions in by_host.items():
        if versions:
            found.setdefault(versions, []).append(host)
    if len(found) > 1:
        each = (f"{versions} on {_named(hosts)}" for versions, hosts in found.items())
        yield f"nodes have different versions: {'; '.join(each)}: use one environment on all nodes"


def _named(items: Sequence[object]) -> str:
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return ", ".join(map(str, items[:_MAX_NAMED])) + more


def _apart_warnings(apart: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield what is wrong with workers, by the rank and group size of each (0: no group)."""
    if not apart:
        return
    ranks = sorted(rank for rank, _ in apart)
    named = f"{'rank' if len(ranks) == 1 else 'ranks'} {_named(ranks)}"
    sizes = sorted({size for _, size in apart})
    groups = " or ".join(f"a process group of {size}" if size else "no process group"
                         for size in sizes)  # fmt: skip
    yield (
        f"the workers do not train together: {named} with {groups} at an optimizer step; is "
        "torch.distributed.init_process_group() missing?"
    )


_MAX_NAMED = 20
SHORTEST_S = 5.0
DENSE_S = 10_000.0  # age up to which a run has a line every `SHORTEST_S`

_RATE_WINDOW_S = 30.0
_KEPT = ("step", "total_steps", "samples", "loss", "nodes", "world_size", "blocked_s", "phase",
         "round", "term", "checkpoint", "metrics", "gpu_use", "gpu_memory")  # fmt: skip
_GROUP = ("phase", "round", "term", "nodes", "world_size")


def spacing_s(age_s: float) -> float:
    """Return the seconds between two lines of a run of this age."""
    return SHORTEST_S * max(1.0, age_s / DENSE_S)


def line_of(status: Mapping[str, Any]) -> Json:
    """Return the fields of a status that a line of progress.jsonl has besides its time."""
    return {name: status.get(name) for name in (*_KEPT, "steps_per_s", "samples_per_s")}


class ProgressLog:
    """Selects the lines of progress.jsonl for one leader.

    A change of the group is written at once, after a line with the last status before the change.
    Otherwise a line is written every `SHORTEST_S`; in a run older than `DENSE_S`, every 2000th part
    of its age. So a run of a day has about 6,000 lines and one of a year 18,000 (4 MB), besides the
    changes, which the event log has as well. Lines never change: the next leader appends to them.
    """

    def __init__(self) -> None:
        self._steps = self._samples = ThroughputMeter(_RATE_WINDOW_S)
        self._group: list[Any] | None = None
        self._unwritten: Json | None = None  # the line of the last status, if it was not due
        self._written = 0.0

    def add_status(self, status: Mapping[str, Any], now: float, started: float) -> list[Json]:
        """Record a status and return the lines to write; none if none is due.

        ``now`` is the Unix time of the leader: readers sort the lines of several leaders.
        ``started`` is when the run was first led.
        """
        group = [status.get(name) for name in _GROUP]
        changed = group != self._group
        if changed:
            self._steps = ThroughputMeter(_RATE_WINDOW_S)
            self._samples = ThroughputMeter(_RATE_WINDOW_S)
        self._steps.record_count(status.get("step"), now)
        self._samples.record_count(status.get("samples"), now)
        line = {"time": round(now, 3), **line_of({**status, **self.rates})}
        before, self._unwritten = self._unwritten, line
        if not changed and abs(now - self._written) < spacing_s(now - started):
            return []
        self._group, self._written, self._unwritten = group, now, None
        return [before, line] if changed and before is not None else [line]

    @property
    def rates(self) -> Json:
        """Steps and samples per second; None if unknown."""
        rates = {"steps_per_s": self._steps.rate, "samples_per_s": self._samples.rate}
        return {name: None if rate is None else round(rate, 4) for name, rate in rates.items()}


def waiting_for(run: RunState, log_of: Callable[[str, int], str | None]) -> str:
    """Return which nodes have joined and which are missing, with Slurm's states and their logs."""
    least = run.rules.min_nodes
    have = "has" if least == 1 else "have"
    here = f"{len(run.participants.joined)} of at least {counted(least, 'node')} {have} joined"
    if run.left_out:
        apart = ", ".join(agent.host for agent in run.left_out[:_MAX_NAMED])
        here += f"; left out, since not all of these nodes reach each other: {apart}"
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
        what = f"{task} on {member.host}, which must stop its workers and join again"
        attempt = member.attempt
    elif state is None:
        return task
    else:
        where = f" on {state.node}" if state.node else ""
        why = f", {state.reason}" if state.reason else ""
        what, attempt = f"{task} ({state.state}{where}{why})", state.restarts or 0
        if state.phase is not SlurmPhase.RUNNING:
            return what
    log = log_of(task, attempt)
    return f"{what}, log {log}" if log else what
