"""Entries of a timeline: what happened to a run, with its causes and its cost (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpc_elastic.report.attempts import EventIndex, Round, TaskAttempt, first_of
from hpc_elastic.run.events import Event


@dataclass(frozen=True)
class Cost:
    """The cost of a change of the group.

    Attributes:
        saved_step: The step that all ranks saved for it; None if they could not.
        reached_step: The last step before; None if unknown.
        resumed_step: The step from which training went on; None if unknown.
        lost_steps: Steps that are made again because of it; None if unknown.
        pause_s: Seconds from the last step before it to the first step after it, or, if ``trains``
            is false, to the forming of the group. None if it is not over, or nothing paused.
        trains: Whether the first step after it is known.
    """

    saved_step: int | None = None
    reached_step: int | None = None
    resumed_step: int | None = None
    lost_steps: int | None = None
    pause_s: float | None = None
    trains: bool = False


@dataclass(frozen=True)
class TimelineEntry:
    """One entry of a timeline.

    Attributes:
        kind: ``started``, ``formed`` (the first group), ``grew``, ``shrank``, ``changed`` (nodes
            left and others came), ``restarted`` (the same nodes), ``stopped`` (no node is left),
            ``resumed`` (after that), ``ended``; and without a change of the group: ``task_exited``,
            ``agent_failed``, ``nodes_requeued``, ``parked``, ``excluded``, ``host_failure``,
            ``crash_loop``, ``tasks_restarted``, ``leader``, ``hang``, ``straggler``,
            ``preflight``, ``start_failed``, ``warm_worker_died``, ``checkpoint_failed``,
            ``checkpoint_recovered``, ``cancel``, ``preempt``, ``kill``, ``resume``.
        time: When it began, in Unix seconds.
        causes: Its causes.
        nodes_before: Size of the group before; None if there was none, or it does not matter.
        nodes_after: Size of the group after; None if there is none yet.
        workers: World size of the group after; None as above.
        round: Number of the round after.
        leader: The host that leads from now on, if another led before.
        cost: Its cost.
        text: An error or a reason.
        facts: More, by kind. started: host, task; formed: hosts, ready_s (seconds from the forming
            to the first step; so for new replicas); ended: status, rounds, restarts, lasted_s;
            nodes_requeued: nodes, hosts, all, delay_s, why; parked: hosts; excluded: host,
            hosts_left; host_failure: host, strikes; crash_loop: attempts, checkpoint;
            tasks_restarted: tasks, hosts, avoids; start_failed: task, host, state, reason, hosts,
            again; checkpoint_failed: step; hang, straggler, preflight, warm_worker_died,
            checkpoint_recovered, cancel, preempt, kill, resume: as in the event.
        is_open: Whether it goes on.
        has_replicas: Whether the nodes are replicas, of which none was stopped (``ft=true``).
    """

    kind: str
    time: float
    causes: tuple[Cause, ...] = ()
    nodes_before: int | None = None
    nodes_after: int | None = None
    workers: int | None = None
    round: int | None = None
    leader: str | None = None
    cost: Cost = field(default_factory=Cost)
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False
    has_replicas: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def kind_of(departed: Iterable[object], arrived: Iterable[object]) -> str:
    """Return the kind of a change by the members that left and that joined."""
    left, came = any(True for _ in departed), any(True for _ in arrived)
    return {
        (True, True): "changed", (True, False): "shrank",
        (False, True): "grew", (False, False): "restarted",
    }[left, came]  # fmt: skip


def cost(
    before: Iterable[Event],
    after: Iterable[Event],
    *,
    saved: int | None,
    since: float,
    until: float,
) -> Cost:
    """Return the cost of stopping workers and starting them again.

    Args:
        before: The ``workers_stopped`` events of the workers before.
        after: The ``first_step`` events of the workers after it.
        saved: The step that all ranks saved before.
        since: When training stopped, if no step before is known.
        until: When the group formed, if no step after it is known.
    """
    before, after = list(before), list(after)
    reached = max((int(e["step"]) for e in before if e.get("step") is not None), default=None)
    stood = max((float(e["step_time"]) for e in before if e.get("step_time")), default=since)
    on = min((float(e["time"]) for e in after), default=until)
    resumed = _resumed(after)
    if resumed is None and not after:
        resumed = saved
    lost = None if reached is None or resumed is None else max(0, reached - resumed)
    if lost is None and saved is not None and not after:
        lost = 0
    pause_s = round(max(0.0, on - stood), 1)
    return Cost(saved, reached, resumed, lost, pause_s, trains=bool(after))


def _resumed(after: list[Event]) -> int | None:
    """Return the step from which training went on."""
    restored = first_of(after, "restored")
    if restored is not None:
        return int(restored)
    steps = [int(e["step"]) for e in after if e.get("step") is not None and not e.get("counted")]
    return max(0, min(steps) - 1) if steps else None


def ready_s(members: Iterable[TaskAttempt], round_: Round) -> float | None:
    """Return the seconds from a round to the first step of the workers that it started."""
    events = [m.first_steps[round_.number] for m in members if round_.number in m.first_steps]
    times = [float(event["time"]) for event in events]
    return round(max(0.0, max(times) - round_.time), 1) if times else None


# ---- why a node left the group, or joined


_COMES_BACK = ("requeue", "requeued", "replace")
_SIGNALLED = "signalled"


@dataclass(frozen=True)
class Cause:
    """A cause of a change.

    Attributes:
        what: ``preempted``, ``time_limit``, ``asked``, ``requeued`` (its task was, and it was not
            preempted), ``cancelled``, ``run_ended`` (its run had ended), ``signalled`` (SIGTERM,
            for an unknown reason), ``nodes_requeued``, ``excluded``, ``agent_failed``,
            ``agent_killed``, ``node_lost`` (died, or unreachable), ``leader_lost``,
            ``leader_changed``, ``unreachable`` (for a while), ``worker_failed``,
            ``agent_restarted``, ``arrived``, ``returned``, ``other``.
        time: Unix seconds from which on it was known.
        hosts: The hosts that it concerns.
        detail: An error, or an observation.
        signal: The signal that announced it; None if none did.
        given_s: The grace time in seconds; None if there was none, or it is unknown.
        comes_back: Whether the task was requeued; None if unknown.
        away_s: Seconds for which the node was away before it returned; None if it did not return,
            or it is unknown.
    """

    what: str
    time: float
    hosts: tuple[str, ...] = ()
    detail: str = ""
    signal: str | None = None
    given_s: float | None = None
    comes_back: bool | None = None
    away_s: float | None = None

    @property
    def is_announced(self) -> bool:
        """Whether there was time to save."""
        return self.what in (
            "preempted", "time_limit", "asked", "requeued", "cancelled", "run_ended", _SIGNALLED,
            "arrived", "returned",
        )  # fmt: skip


def why_left(
    attempt: TaskAttempt,
    excluded: Mapping[str, Event],
    *,
    since: float = 0.0,
    led: bool = False,
    without_it: float = float("inf"),
) -> Cause:
    """Return why a node is no member any more.

    Args:
        attempt: The attempt of its task.
        excluded: The exclusions of the run, by host.
        since: When the round began that it left, if there was one.
        led: Whether it led the run.
        without_it: When it was given up, or the others went on, without an announcement. A later
            notice is no cause: Slurm ends a lost task when its node can be reached again.
    """
    notice = attempt.notice
    if notice is not None and _time(notice) < without_it:
        return _noticed(attempt, notice)
    ends = attempt.ends_after(since)
    if "node_lost" in ends and _time(ends["node_lost"]) > without_it:
        del ends["node_lost"]  # it was lost later, for another cause
    if ends.get("node_lost", {}).get("why") == "silent":
        ends.pop("nodes_requeued", None)  # it was requeued when it was reachable again
    if "nodes_requeued" in ends and attempt.host in excluded:
        event = excluded[attempt.host]
        return Cause("excluded", _time(event), (attempt.host,), str(event.get("why", "")))
    return _unannounced(attempt, ends, led=led)


def _noticed(attempt: TaskAttempt, notice: Event) -> Cause:
    left = attempt.ends_after(0.0).get("task_exited", {})
    how, reason = left.get("how"), str(notice["reason"])
    back = None if how in (None, "stay") else how in _COMES_BACK
    what = str(left.get("means") or _SIGNALLED) if reason == "signal" else reason
    return Cause(
        what, _time(notice), (attempt.host,), str(left.get("node") or ""),
        signal=notice.get("signal"), given_s=notice.get("given_s"), comes_back=back,
    )  # fmt: skip


def _unannounced(attempt: TaskAttempt, ends: Mapping[str, Event], *, led: bool) -> Cause:
    where = (attempt.host,)
    for kind, key in (("agent_failed", "why"), ("agent_killed", "signal")):
        if kind in ends:
            event = ends[kind]
            return Cause(kind, _time(event), where, str(event.get(key, "")))
    if "nodes_requeued" in ends:
        event = ends["nodes_requeued"]
        delay_s = float(event.get("delay_s", 0.0))
        return Cause("nodes_requeued", _time(event), where, given_s=delay_s, comes_back=True)
    gone = ends.get("node_lost", {})
    time = _time(gone) if gone else 0.0
    return Cause("leader_lost" if led else "node_lost", time, where, str(gone.get("why", "")))


def why_came(attempt: TaskAttempt, run: EventIndex, at: float) -> Cause:
    """Return whether a new member arrived, or returned.

    A node that was in the group before has returned, whichever task it had then. It was away until
    its agent started again; a node that was only cut off, or paused, until it was a member again.

    Args:
        attempt: The attempt of its task.
        run: The events of the run.
        at: When it became a member.
    """
    time = attempt.started if attempt.started is not None else at
    left = run.last_left(attempt.host, at)
    if left is None:
        return Cause("arrived", time, (attempt.host,))
    back = time if time > left else at
    return Cause("returned", back, (attempt.host,), away_s=round(back - left, 1))


def together(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return the causes; those that differ in the host only are one."""
    found: dict[Cause, Cause] = {}
    for cause in causes:
        key = replace(cause, time=0.0, hosts=(), away_s=None)
        same = found.get(key)
        found[key] = cause if same is None else _both(same, cause)
    return tuple(found.values())


def _both(one: Cause, other: Cause) -> Cause:
    times = sorted(s for s in (one.away_s, other.away_s) if s is not None)
    return replace(
        one, time=min(one.time, other.time), hosts=(*one.hosts, *other.hosts),
        away_s=times[-1] if times else None,
    )  # fmt: skip


def _time(event: Event) -> float:
    return float(event["time"])
