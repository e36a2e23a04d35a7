"""The timeline of a run: its events grouped into entries with cause and cost (pure)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from hpc_elastic._util import counted
from hpc_elastic.report.attempts import EventIndex, Round, TaskAttempt, time_of
from hpc_elastic.run.events import Event, LossReason


@dataclass(frozen=True)
class Cost:
    """The cost of a change of the group."""

    saved_step: int | None = None  # the step that all ranks saved for it; None if they could not
    reached_step: int | None = None  # the last step before; None if unknown
    resumed_step: int | None = None  # the step from which training went on; None if unknown
    lost_steps: int | None = None  # steps that are made again because of it; None if unknown
    is_least: bool = False
    """Whether ``lost_steps`` is the least number, since all workers were killed before they could
    report how far they had come."""
    pause_s: float | None = None
    """Seconds from the last step before it to the first step after it, or, if ``trains`` is false,
    to the forming of the group. None if it is not over, or nothing paused."""
    trains: bool = False  # whether the first step after it is known


@dataclass(frozen=True)
class Cause:
    """A cause of a change."""

    what: str
    """``preempted``, ``time_limit``, ``asked``, ``given_back`` (for the job in ``detail``),
    ``requeued`` (its task was, and it was not preempted), ``cancelled``, ``run_ended`` (its run had
    ended), ``signalled`` (SIGTERM, for an unknown reason), ``nodes_requeued``, ``excluded``,
    ``agent_failed``, ``agent_killed``, ``node_lost`` (died, or unreachable), ``leader_lost``,
    ``leader_changed``, ``unreachable`` (for a while), ``worker_failed``, ``agent_restarted``,
    ``arrived``, ``returned``, ``other``."""
    time: float  # Unix seconds from which on it was known
    hosts: tuple[str, ...] = ()  # the hosts that it concerns
    detail: str = ""  # an error, or an observation
    signal: str | None = None  # the signal that announced it; None if none did
    given_s: float | None = None
    """The grace time in seconds; None if there was none, or it is unknown."""
    comes_back: bool | None = None  # whether the task was requeued; None if unknown
    away_s: float | None = None
    """Seconds for which the node was away before it returned; None if it did not return, or it is
    unknown."""


@dataclass(frozen=True)
class TimelineEntry:
    """One entry of a timeline."""

    kind: str
    """``started``, ``formed`` (the first group), ``grew``, ``shrank``, ``changed`` (nodes left and
    others came), ``restarted`` (the same nodes), ``stopped`` (no node is left), ``resumed`` (after
    that), ``ended``; and without a change of the group: ``task_exited``, ``agent_failed``,
    ``nodes_requeued``, ``parked``, ``excluded``, ``host_failure``, ``crash_loop``,
    ``tasks_restarted``, ``leader``, ``leader_failed``, ``hang``, ``straggler``, ``preflight``,
    ``start_failed``, ``gpus_not_measured``, ``warm_worker_died``, ``notice_command_failed``,
    ``slow_exit``, ``group_mismatch``, ``bad_loss``, ``checkpoint_failed``,
    ``checkpoint_recovered``, ``state_mismatch``, ``heal_failed``, ``state_unsaved``,
    ``growth_decision``, ``sweep_decision``, ``cancel``, ``preempt``, ``kill``, ``resume``."""
    time: float  # when it began, in Unix seconds
    causes: tuple[Cause, ...] = ()  # its causes
    nodes_before: int | None = None
    """Size of the group before; None if there was none, or it does not matter."""
    nodes_after: int | None = None  # size of the group after; None if there is none yet
    workers: int | None = None  # world size of the group after; None as above
    round: int | None = None  # number of the round after
    leader: str | None = None  # the host that leads from now on, if another led before
    cost: Cost = field(default_factory=Cost)  # its cost
    text: str = ""  # an error or a reason
    facts: dict[str, Any] = field(default_factory=dict)
    """More, by kind. started: host, task; formed: hosts, ready_s (seconds from the forming to the
    first step; so for new replicas); ended: status, rounds, restarts, lasted_s; nodes_requeued:
    nodes, hosts, all, delay_s, why; parked: hosts; excluded: host, hosts_left; host_failure: host,
    strikes; crash_loop: attempts, checkpoint; tasks_restarted: tasks, hosts, avoids; start_failed:
    task, host, state, reason, hosts, again; leader_failed: host, terms, again; checkpoint_failed:
    step; growth_decision: nodes, grows; sweep_decision: runs; hang, straggler, preflight,
    gpus_not_measured, warm_worker_died, notice_command_failed, slow_exit, group_mismatch, bad_loss,
    checkpoint_recovered, state_mismatch, heal_failed, state_unsaved, cancel, preempt, kill, resume:
    as in the event."""
    is_open: bool = False  # whether it goes on
    has_replicas: bool = False
    """Whether the nodes are replicas, and none of them was stopped (``ft=true``)."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def build_timeline(run: EventIndex) -> list[TimelineEntry]:
    """Return the timeline of a run, in order of time; missing events reduce the detail."""
    found = list[TimelineEntry]()
    if tasks := run.of("task"):
        facts = {"host": tasks[0].get("host"), "task": tasks[0]["task"]}
        found.append(TimelineEntry("started", time_of(tasks[0]), facts=facts))
    if run.rounds:
        first = run.rounds[0]
        hosts = [member.host for member in first.members]
        found.append(TimelineEntry(
            "formed", first.time, nodes_after=len(hosts), workers=first.world_size,
            round=first.number, leader=_host_of(run, run.leader_of.get(first.term)),
            facts={"hosts": hosts, "ready_s": _ready_s(first)},
        ))  # fmt: skip
        found += _of_replicas(run) if run.has_replicas else _of_group(run)
    begins = [*run.events[:1], *run.of("resume")]
    for generation, end in run.ends.items():
        facts = {key: end.get(key) for key in ("status", "rounds", "restarts")}
        facts["lasted_s"] = round(time_of(end) - time_of(begins[generation]), 1)
        text = str(end.get("failure") or "")
        found.append(TimelineEntry("ended", time_of(end), text=text, facts=facts))
    found += [*_asides(run), *_never_members(run)]
    return sorted(found, key=lambda e: (run.generation_at(e.time), e.kind == "ended", e.time))


_FACTS: dict[str, tuple[str, ...]] = {
    "nodes_requeued": ("nodes", "hosts", "all", "delay_s", "why"),
    "excluded": ("host", "hosts_left"),
    "node_drained": ("host", "state"),
    "nodes_given_back": ("job", "user", "needs", "hosts"),
    "left_out": ("hosts", "cut", "pairs"),
    "host_failure": ("host", "strikes"),
    "crash_loop": ("attempts", "checkpoint"),
    "start_failed": ("task", "host", "state", "reason", "hosts", "again"),
    "checkpoint_failed": ("step",),
    "growth_decision": ("nodes", "grows"),
    "sweep_decision": ("runs",),
    "leader_failed": ("host", "terms", "again"),
    **dict.fromkeys((
        "hang", "straggler", "preflight", "gpus_not_measured", "notice_command_failed",
        "warm_worker_died", "slow_exit", "group_mismatch", "bad_loss", "checkpoint_recovered",
        "state_mismatch", "heal_failed", "state_unsaved", "cancel", "preempt", "kill", "resume",
    ), ()),
}  # fmt: skip
"""Kind of event that changes no group -> the fields that its entry has as facts; none: all."""


def _asides(run: EventIndex) -> Iterator[TimelineEntry]:
    for event in run.of(*_FACTS, "scale_up_decision", "tasks_restarted"):
        kind, time = event["kind"], time_of(event)
        if kind == "scale_up_decision" and event.get("admit") == "not now":
            kind = "parked"
            facts: dict[str, Any] = {}
            facts["hosts"] = [run.host_at(task, time) for task in event.get("waiting", ())]
        elif kind == "tasks_restarted":
            tasks = [str(task) for task in event.get("tasks", ())]
            hosts = [run.host_at(task, time) for task in tasks]
            avoids = [str(host) for host in event.get("avoids", ())]
            facts = {"tasks": tasks, "hosts": hosts, "avoids": avoids}
        elif kind not in _FACTS or (kind == "nodes_requeued" and "nodes" not in event):
            continue  # the latter is a node's own requeue
        else:
            exclusion = run.excluded.get(str(event.get("host")))
            if kind == "host_failure" and exclusion and time_of(exclusion) - time < 1.0:
                continue  # it excludes the host
            others = [key for key in event if key not in ("v", "time", "kind", "task")]
            facts = {key: event.get(key) for key in _FACTS[kind] or others}
        yield TimelineEntry(kind, time, text=str(event.get("why", "")), facts=facts)


def _never_members(run: EventIndex) -> Iterator[TimelineEntry]:
    members = {member for round_ in run.rounds for member in round_.members}
    for attempt in run.attempts:
        started = attempt.started or 0.0
        end = run.ends.get(run.generation_at(started))
        if attempt in members or (end is not None and started > time_of(end)):
            continue
        for kind, event in attempt.ends_after(0.0).items():
            if kind in ("task_exited", "agent_failed"):
                yield TimelineEntry(kind, time_of(event), (_why_left(attempt, {}),))


# ---- the group: from each round to the next
# A round ends for all members, and the next one has other members: that is one entry, with all its
# causes. If no member is left there are two entries: the run was stopped in between.


_AT_ONCE_S = 1.0  # time within which a leader that gives up a member stops the round


def _of_group(run: EventIndex) -> Iterator[TimelineEntry]:
    for before, after in pairwise(run.rounds):
        yield from _change(run, before, after)
    if (run.end_event or {}).get("status") == "succeeded":
        return
    last = run.rounds[-1]  # nodes that leave after it
    stop, members = _stop_of(run, last), last.members
    departed = [m for m in members if m.notice is not None or m.ends_after(last.time)]
    causes = _joined(_why_left(m, run.excluded, since=last.time) for m in departed)
    if not causes:
        if stop is None or run.end_event is not None:
            return
        causes = (Cause("other", time_of(stop), detail=str(stop["reason"])),)
    is_all = len(departed) == len(members)
    yield TimelineEntry(
        "stopped" if is_all else _kind_of(departed, ()), min(c.time for c in causes), causes,
        len(members), 0 if is_all else None, cost=Cost(saved_step=(stop or {}).get("step")),
        is_open=run.end_event is None,
    )  # fmt: skip


def _stop_of(run: EventIndex, round_: Round, until: float = math.inf) -> Event | None:
    """Return the event that ended a round; None if there is none, because its leader died."""
    stops = run.of("round_stopped", after=round_.time, until=until)
    return next((e for e in stops if e.get("round", round_.number) == round_.number), None)


def _host_of(run: EventIndex, leader: Event | None) -> str | None:
    return None if leader is None else run.host_at(leader["task"], time_of(leader))


def _change(run: EventIndex, before: Round, after: Round) -> Iterator[TimelineEntry]:
    """Yield the entry of a round that followed another, or two if no member was left in between."""
    was, is_ = set(before.members), set(after.members)
    departed = [member for member in before.members if member not in is_]
    arrived = [member for member in after.members if member not in was]
    old, new = (run.leader_of.get(round_.term) for round_ in (before, after))
    # the host that leads now, if another task led before
    leader = _host_of(run, new) if old and new and old["task"] != new["task"] else None
    stop = _stop_of(run, before, until=after.time)
    saved: int | None = (stop or {}).get("step")
    stopped = [m.stopped[before.number] for m in before.members if before.number in m.stopped]
    broke_at = min(map(time_of, stopped if stop is None else [stop]), default=after.time)
    ends = stopped
    if not stopped:  # how far the workers came at least, which reported no end
        ends = [event for event in _first_steps(before) if not event.get("counted")]
        if (point := run.last_points.get(before.number)) is not None:
            ends.append({"step": point.step, "step_time": point.time})
    cost = _cost(
        ends, _first_steps(after), saved=saved, since=broke_at, until=after.time,
        is_least=not stopped,
    )  # fmt: skip
    losses = [  # of nodes that had not announced that they would leave
        event for event in run.of("node_lost", after=before.time, until=after.time)
        if not str(event.get("why", "")).startswith(LossReason.TO_BE_LEFT)
    ]  # fmt: skip
    left = []
    for member in departed:
        led = old is not None and old is not new and old["task"] == member.task
        # when it was given up without an announcement, or replaced as leader
        given_up = (time_of(event) for event in losses if event["task"] == member.task)
        gone_at = next(given_up, after.time if led else math.inf)
        cause = _why_left(member, run.excluded, since=before.time, led=led, without_it=gone_at)
        # no event has the time at which a leader died: the others stopped when they noticed
        left.append(cause if cause.time else replace(cause, time=broke_at))
    came = [_why_came(run, member, after.time) for member in arrived]
    size = len(after.members)
    if len(departed) == len(before.members):
        if not any(before.time <= time_of(end) <= after.time for end in run.ends.values()):
            time, causes = min([*(c.time for c in left), broke_at]), _joined(left)
            so_far = Cost(saved, cost.reached_step)
            yield TimelineEntry("stopped", time, causes, len(departed), 0, cost=so_far)
        yield TimelineEntry(
            "resumed", after.time, _joined(came), 0, size, after.world_size, after.number,
            _host_of(run, new), replace(cost, saved_step=None),
        )  # fmt: skip
        return
    why = []  # the round broke, apart from members that left or came
    for event in run.of("restart", after=before.time, until=after.time):
        hosts = (str(event["host"]),) if event.get("host") else ()
        why.append(Cause("worker_failed", broke_at, hosts, str(event.get("failure", ""))))
    if not departed and leader is not None:
        why.append(Cause("leader_changed", broke_at, (str(_host_of(run, old)),)))
    if stop is not None and stop.get("cause") == "agent_restarted":
        why.append(Cause("agent_restarted", broke_at, detail=str(stop["reason"])))
    if stop is not None and stop.get("cause") == "node_lost" and leader is None:
        # Members that were given up, and are members again. A leader that was replaced may have
        # been cut off itself, so its reports of others do not count. Those of the present leader
        # count if they ended the round.
        stayed = {member.task: member.host for member in was & is_}
        for event in losses:
            if event["task"] in stayed and time_of(event) > time_of(stop) - _AT_ONCE_S:
                why.append(Cause("unreachable", time_of(event), (stayed[event["task"]],)))
    if stop is not None and not (why or departed or arrived or leader):
        why = [Cause("other", broke_at, detail=str(stop.get("reason", "")))]
    causes = _joined([*left, *why, *came])
    known = [c.time for c in causes if c.what not in ("arrived", "returned")]
    yield TimelineEntry(
        _kind_of(departed, arrived), min([*known, broke_at]), causes, len(before.members), size,
        after.world_size, after.number, leader, cost,
    )  # fmt: skip


# ---- replicas, with ``ft=true``: none stops because of others
# A replica that leaves is an entry of its own, and so is a round that places new replicas. Replicas
# that leave together for one cause are one entry.


_TOGETHER_S = 5.0  # time within which replicas leave together
_LEFT_S = 30.0  # from the regular departure of a leader to the next leader, at most
_ANNOUNCED_CAUSES = {
    "preempted", "time_limit", "asked", "given_back", "requeued", "cancelled", "run_ended",
    "signalled",
}  # fmt: skip
"""Causes that leave time to save."""


@dataclass(frozen=True)
class _Departed:
    nodes: int  # number of the others
    cause: Cause
    successor: Event | None  # the event of the leader that replaced it; None if it did not lead


def _of_replicas(run: EventIndex) -> Iterator[TimelineEntry]:
    groups, recent = list[list[_Departed]](), dict[tuple[str, int], list[_Departed]]()
    for event in run.of("replica_left"):
        time = time_of(event)
        attempt = run.member_until(event["task"], time)
        successor = _successor(run, attempt, time)
        at = bisect_right(run.rounds, time, key=lambda round_: round_.time)
        rounds = (run.rounds[i] for i in range(at - 1, -1, -1))
        joined = next((round_.time for round_ in rounds if attempt in round_.members), 0.0)
        cause = _why_left(
            attempt, run.excluded, since=joined, led=successor is not None,
            without_it=time + _AT_ONCE_S,
        )  # fmt: skip
        cause = cause if cause.time else replace(cause, time=time)
        one = _Departed(int(event["nodes"]), cause, successor)
        at = int(cause.time // _TOGETHER_S)
        near = (recent.get((cause.what, when), []) for when in (at - 1, at, at + 1))
        close = (g for g in near if g and abs(cause.time - g[-1].cause.time) <= _TOGETHER_S)
        if (group := next(close, None)) is None:
            groups.append(group := [])
        group.append(one)
        recent[cause.what, at] = group
    for group in groups:
        causes, left = [one.cause for one in group], group[-1].nodes
        saves = all(cause.what in _ANNOUNCED_CAUSES for cause in causes)
        leaders = [one.successor for one in group if one.successor is not None]
        leader = max(leaders, key=lambda e: int(e["term"])) if leaders and left else None
        yield TimelineEntry(
            "shrank" if left else "stopped", min(cause.time for cause in causes), _joined(causes),
            group[0].nodes + 1, left, cost=Cost(lost_steps=0 if saves and left else None),
            leader=_host_of(run, leader), has_replicas=True,
        )  # fmt: skip
    yield from (_placement(run, *two) for two in pairwise(run.rounds))
    for before, after in pairwise(run.leaders):  # whose predecessor is still a replica
        time = time_of(after)
        around = run.of("replica_left", after=time - _LEFT_S, until=time + _TOGETHER_S)
        if before["task"] != after["task"] and before["task"] not in {e["task"] for e in around}:
            cause = Cause("leader_changed", time, (run.host_at(before["task"], time),))
            host = run.host_at(after["task"], time)
            yield TimelineEntry("leader", time, (cause,), leader=host, has_replicas=True)


def _successor(run: EventIndex, attempt: TaskAttempt, time: float) -> Event | None:
    """Return the event of the leader that replaced a replica; None if that did not lead."""
    of_task = run.successions.get(attempt.task, [])
    first = bisect_left(of_task, attempt.started or 0.0, key=lambda two: time_of(two[0]))
    found = (after for _, after in of_task[first : first + 1])
    return next((after for after in found if time_of(after) <= time + _TOGETHER_S), None)


def _placement(run: EventIndex, earlier: Round, round_: Round) -> TimelineEntry:
    time, members = round_.time, round_.members
    departed = run.of("replica_left", "nodes_requeued", after=earlier.time, until=time)
    left = {run.member_until(e["task"], time_of(e)) for e in departed if "hosts" not in e}
    before = set(earlier.members) - left
    placed = [member for member in members if member.task in (round_.placed or ())]
    arrived = [member for member in placed if member not in before]
    causes = []
    for member in placed:
        if member in before:
            restarts = reversed(run.of("restart", until=time))
            failed = (str(e["failure"]) for e in restarts if e.get("host") == member.host)
            causes.append(Cause("worker_failed", time, (member.host,), next(failed, "")))
    causes += [_why_came(run, member, time) for member in arrived]
    cost = Cost()
    if not before:  # that of the time without any replica
        stopped = run.of("workers_stopped", after=earlier.time, until=time)
        since = max(map(time_of, departed), default=time)
        cost = _cost(stopped, _first_steps(round_), saved=None, since=since, until=time)
    return TimelineEntry(
        _kind_of((), arrived) if before else "resumed", time, _joined(causes),
        len(before), len(members), round_.world_size, round_.number,
        cost=cost, facts={"ready_s": _ready_s(round_)}, has_replicas=True,
    )  # fmt: skip


# ---- costs and causes of a change


def _kind_of(departed: Sequence[object], arrived: Sequence[object]) -> str:
    if departed:
        return "changed" if arrived else "shrank"
    return "grew" if arrived else "restarted"


def _cost(
    before: Sequence[Event],
    after: Sequence[Event],
    *,
    saved: int | None,
    since: float,
    until: float,
    is_least: bool = False,
) -> Cost:
    """Return the cost of stopping workers and starting them again.

    ``before`` are the ``workers_stopped`` events of the workers before, or what is known instead;
    ``is_least``: there may have been further steps. ``after`` are the ``first_step`` events of
    those after it. ``since`` and ``until`` stand for the times of unknown steps: when training
    stopped, and when the group formed.
    """
    reached = max((int(e["step"]) for e in before if e.get("step") is not None), default=None)
    stood = max((float(e["step_time"]) for e in before if e.get("step_time")), default=since)
    on = min((float(e["time"]) for e in after), default=until)
    restored = next((e["restored"] for e in after if e.get("restored") is not None), None)
    steps = [int(e["step"]) for e in after if e.get("step") is not None and not e.get("counted")]
    resumed = None if after else saved
    if restored is not None:
        resumed = int(restored)
    elif steps:
        resumed = max(0, min(steps) - 1)
    lost = None if reached is None or resumed is None else max(0, reached - resumed)
    if lost is None and saved is not None and not after:
        lost = 0
    if lost == 0 and is_least and saved is None:
        lost = None  # nothing is known to be lost, and something may be
    is_least = is_least and lost is not None and saved is None
    pause_s = round(max(0.0, on - stood), 1)
    return Cost(saved, reached, resumed, lost, is_least, pause_s, trains=bool(after))


def lost_steps(costs: Iterable[tuple[int | None, bool]]) -> str:
    """Return the lost steps of several changes in words, by `Cost.lost_steps` and `is_least`."""
    known = [(lost or 0, lost is None or is_least) for lost, is_least in costs]
    total, is_open = sum(lost for lost, _ in known), any(is_least for _, is_least in known)
    if is_open and not total:
        return "an unknown number of steps lost"
    return f"{'at least ' if is_open else ''}{counted(total, 'step')} lost"


def _first_steps(round_: Round) -> list[Event]:
    number = round_.number
    return [m.first_steps[number] for m in round_.members if number in m.first_steps]


def _ready_s(round_: Round) -> float | None:
    """Return the seconds from a round to the first step of the workers that it started."""
    times = [float(event["time"]) for event in _first_steps(round_)]
    return round(max(0.0, max(times) - round_.time), 1) if times else None


def _why_left(
    attempt: TaskAttempt,
    excluded: Mapping[str, Event],
    *,
    since: float = 0.0,
    led: bool = False,
    without_it: float = math.inf,
) -> Cause:
    """Return why a node is no member any more, which left a round that began at ``since``.

    ``without_it`` is when it was given up, or the others continued without an announcement: a later
    notice is no cause, since Slurm ends a lost task when its node can be reached again.
    """
    where, notice = (attempt.host,), attempt.notice
    if notice is not None and time_of(notice) < without_it:
        exited = attempt.ends_after(0.0).get("task_exited", {})
        how, reason = exited.get("how"), str(notice["reason"])
        detail = attempt.preempted_by if reason == "asked" else str(exited.get("node") or "")
        if reason == "asked" and attempt.given_for:
            reason, detail = "given_back", attempt.given_for
        return Cause(
            str(exited.get("means") or "signalled") if reason == "signal" else reason,
            time_of(notice), where, detail,
            signal=notice.get("signal"), given_s=notice.get("given_s"),
            comes_back=None if how in (None, "stay") else how in ("requeue", "requeued", "replace"),
        )  # fmt: skip
    ends = attempt.ends_after(since)
    if "node_lost" in ends and time_of(ends["node_lost"]) > without_it:
        del ends["node_lost"]  # it was lost later, for another cause
    if ends.get("node_lost", {}).get("why") == LossReason.SILENT:
        ends.pop("nodes_requeued", None)  # it was requeued when it was reachable again
    if "nodes_requeued" in ends and attempt.host in excluded:
        event = excluded[attempt.host]
        return Cause("excluded", time_of(event), where, str(event.get("why", "")))
    for kind, key in (("agent_failed", "why"), ("agent_killed", "signal")):
        if kind in ends:
            return Cause(kind, time_of(ends[kind]), where, str(ends[kind].get(key, "")))
    if "nodes_requeued" in ends:
        event = ends["nodes_requeued"]
        delay_s = float(event.get("delay_s", 0.0))
        return Cause("nodes_requeued", time_of(event), where, given_s=delay_s, comes_back=True)
    lost = ends.get("node_lost", {})
    kind, time = "leader_lost" if led else "node_lost", time_of(lost) if lost else 0.0
    return Cause(kind, time, where, str(lost.get("why", "")))


def _why_came(run: EventIndex, attempt: TaskAttempt, at: float) -> Cause:
    """Return whether a node that became a member at a time has arrived, or returned.

    A node that was in the group before has returned, whichever task it had then. It was away until
    its agent started again, or, if it was only cut off or paused, until it was a member again.
    """
    time = at if attempt.started is None else attempt.started
    left = run.last_left(attempt.host, at)
    if left is None:
        return Cause("arrived", time, (attempt.host,))
    back = time if time > left else at
    return Cause("returned", back, (attempt.host,), away_s=round(back - left, 1))


def _joined(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Join causes that differ in the host only."""
    found: dict[Cause, Cause] = {}
    for cause in causes:
        key = replace(cause, time=0.0, hosts=(), away_s=None)
        if (same := found.get(key)) is not None:
            away_s = max((s for s in (same.away_s, cause.away_s) if s is not None), default=None)
            hosts = (*same.hosts, *cause.hosts)
            cause = replace(same, time=min(same.time, cause.time), hosts=hosts, away_s=away_s)
        found[key] = cause
    return tuple(found.values())
