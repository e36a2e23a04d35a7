"""An episode: one thing that happened to a run, with its cause and its cost (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpc_elastic.report.attempts import EventIndex, Round, TaskAttempt, first_of
from hpc_elastic.run.events import Event


@dataclass(frozen=True)
class Cost:
    """What a change of the group has cost.

    Attributes:
        saved_step: The step that all ranks saved for it; None: they could not.
        reached_step: The last step that was made before; None: nobody says.
        resumed_step: The step from which training went on; None: nobody says.
        lost_steps: Steps that are made again because of it; None: it can not be told.
        pause_s: Seconds from the last step before to the first one after it, or, if ``trains`` is
            false, to the forming of the group. None: it is not over, or nobody paused.
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
    """One thing that happened.

    Attributes:
        kind: ``started``, ``formed`` (the first group), ``grew``, ``shrank``, ``changed`` (nodes
            left and others came), ``restarted`` (the same nodes), ``stopped`` (no node is left),
            ``resumed`` (after that), ``ended``; and what touches no group: ``task_exited``,
            ``agent_failed``, ``nodes_requeued``, ``parked``, ``excluded``, ``host_failure``,
            ``crash_loop``, ``tasks_restarted``, ``leader``, ``hang``, ``straggler``,
            ``preflight``, ``start_failed``, ``warm_worker_died``, ``checkpoint_failed``,
            ``checkpoint_recovered``, ``cancel``, ``preempt``, ``kill``, ``resume``.
        time: When it began, in Unix seconds.
        causes: What brought it about.
        nodes_before: Size of the group; None: there was none, or it does not matter.
        nodes_after: Size of the group; None: there is none yet.
        workers: World size of the group; None as above.
        round: Number of the round that it led to.
        leader: The host that leads from now on, if another did before.
        cost: What it has cost.
        text: What else there is to say: an error, a reason.
        facts: More, by kind. started: host, task; formed: hosts, ready_s (seconds from the forming
            to the first step; so for new replicas); ended: status, rounds, restarts, lasted_s;
            nodes_requeued: nodes, hosts, all, delay_s, why; parked: hosts; excluded: host,
            hosts_left; host_failure: host, strikes; crash_loop: attempts, checkpoint;
            tasks_restarted: tasks, hosts, avoids; start_failed: task, host, state, reason, hosts,
            again; checkpoint_failed: step; hang, straggler, preflight, warm_worker_died,
            checkpoint_recovered, cancel, preempt, kill, resume: as in the event.
        is_open: Whether it goes on still.
        has_replicas: Whether nobody was stopped because of others (``ft=true``).
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
    """Tell what became of a group."""
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
    """Return what it cost to stop workers and to start them again.

    Args:
        before: The ``workers_stopped`` events of those who trained before.
        after: The ``first_step`` events of those who train after it.
        saved: The step that all ranks saved before.
        since: When training stopped, where no step before is known.
        until: When the group formed, where no step after it is known.
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


# ---- Why a node left a run, or came (pure)


_COMES_BACK = ("requeue", "requeued", "replace")
_SIGNALLED = "signalled"


@dataclass(frozen=True)
class Cause:
    """What brought a change about.

    Attributes:
        what: ``preempted``, ``time_limit``, ``asked``, ``requeued`` (its task was, and it was not
            preempted), ``cancelled``, ``run_ended`` (its task was told so), ``signalled`` (SIGTERM,
            and it is not known why), ``nodes_requeued``, ``excluded``, ``agent_failed``,
            ``agent_killed``, ``node_lost`` (died, or out of reach), ``leader_lost``,
            ``leader_changed``, ``unreachable`` (for a while), ``worker_failed``,
            ``agent_restarted``, ``arrived``, ``returned``, ``other``.
        time: Unix seconds at which it was known.
        hosts: Of whom it is true.
        detail: An error, or what was seen.
        signal: What announced it; None: no signal did.
        given_s: The time that was given; None: none, or unknown.
        comes_back: Whether the task has gone back to the queue; None: unknown.
        away_s: How long the node was away before it returned; None: it did not, or unknown.
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
    life: TaskAttempt,
    excluded: Mapping[str, Event],
    *,
    since: float = 0.0,
    led: bool = False,
    without_it: float = float("inf"),
) -> Cause:
    """Tell why a node is not a member any more.

    Args:
        life: What happened to it.
        excluded: The exclusions of the run, by host.
        since: When the round began that it left, if there was one.
        led: Whether it led the run.
        without_it: When it was given up, or the others went on, if nobody had said why. A notice
            after that is no reason: Slurm ends what it has written off once it can be reached.
    """
    notice = life.notice
    if notice is not None and _time(notice) < without_it:
        return _noticed(life, notice)
    ends = life.ends_after(since)
    if "node_lost" in ends and _time(ends["node_lost"]) > without_it:
        del ends["node_lost"]  # that was another time
    if ends.get("node_lost", {}).get("why") == "silent":
        ends.pop(
            "nodes_requeued", None
        )  # excluded for its silence, it was told so when it was back
    if "nodes_requeued" in ends and life.host in excluded:
        event = excluded[life.host]
        return Cause("excluded", _time(event), (life.host,), str(event.get("why", "")))
    return _unannounced(life, ends, led=led)


def _noticed(life: TaskAttempt, notice: Event) -> Cause:
    left = life.ends_after(0.0).get("task_exited", {})
    how, reason = left.get("how"), str(notice["reason"])
    back = None if how in (None, "stay") else how in _COMES_BACK
    what = str(left.get("means") or _SIGNALLED) if reason == "signal" else reason
    return Cause(
        what, _time(notice), (life.host,), str(left.get("node") or ""),
        signal=notice.get("signal"), given_s=notice.get("given_s"), comes_back=back,
    )  # fmt: skip


def _unannounced(life: TaskAttempt, ends: Mapping[str, Event], *, led: bool) -> Cause:
    where = (life.host,)
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


def why_came(life: TaskAttempt, run: EventIndex, at: float) -> Cause:
    """Tell where a new member has come from.

    A node that was in the group before came back, whichever of its tasks had it then. It was away
    from when the group lost it until its agent was there again: one that was only cut off, or
    stood still, is there when it is a member.

    Args:
        life: What happened to it.
        run: What happened to all.
        at: When it became a member.
    """
    time = life.started if life.started is not None else at
    left = run.last_left(life.host, at)
    if left is None:
        return Cause("arrived", time, (life.host,))
    back = time if time > left else at
    return Cause("returned", back, (life.host,), away_s=round(back - left, 1))


def together(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return the causes with those that are the same but for the host made one."""
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
