"""Events of small runs, as their tasks would have written them."""

from collections.abc import Iterable
from typing import Any

from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.timeline import TimelineEntry, build_timeline

Event = dict[str, Any]


def event(time: float, kind: str, slot: int = 0, **fields: object) -> Event:
    """An event of the task of a slot."""
    return {"v": 1, "time": time, "kind": kind, "task": f"7_{slot}", **fields}


def node(time: float, slot: int, attempt: int = 0) -> Event:
    """A node has started."""
    return event(time, "task", slot, attempt=attempt, host=f"node{slot}", pid=1)


def begun(*slots: int) -> list[Event]:
    """Nodes have started, and the first leads."""
    return [*(node(1.0, slot) for slot in slots), event(1.5, "leader", slots[0], term=1)]


def group(time: float, number: int, *slots: int, term: int = 1, **fields: object) -> Event:
    """A round of these slots; one above 9 is the slot of its last digit in its second attempt."""
    members = [
        {"task": f"7_{s % 10}", "attempt": s // 10, "slot": s % 10, "host": f"node{s % 10}",
         "nproc": 1}
        for s in slots
    ]  # fmt: skip
    return event(
        time, "round", number=number, index=number, term=term, nodes=len(slots),
        world_size=len(slots), members=members, restarts=0, **fields,
    )  # fmt: skip


def stop(time: float, round_: int, cause: str, step: int | None = None) -> Event:
    """A round is stopped."""
    at = {} if step is None else {"step": step}
    reason = f"because of {cause}"
    return event(
        time, "round_stopped", reason=reason, cause=cause, round=round_, nodes=2, hosts=[], **at
    )


def stopped(time: float, slot: int, round_: int, step: int, attempt: int = 0) -> Event:
    """Workers were stopped, right after their last step."""
    seen = {"step": step, "step_time": time}
    return event(time, "workers_stopped", slot, attempt=attempt, round=round_, **seen)


def trains(time: float, slot: int, round_: int, restored: int, attempt: int = 0) -> Event:
    """Workers have made their first step after the one that was restored."""
    made = {"step": restored + 1, "restored": restored}
    return event(time, "first_step", slot, attempt=attempt, round=round_, **made)


def notice(time: float, slot: int, reason: str = "signal", **fields: object) -> Event:
    """A node is to be left."""
    given = {"signal": "SIGTERM", "given_s": 5.0} if reason == "signal" else {}
    return event(time, "preemption_notice", slot, reason=reason, left_s=3.3, **given, **fields)


def left(
    time: float, slot: int, how: str = "requeue", reason: str = "signal", **fields: object
) -> Event:
    """A node was left: after a preemption, where nothing else is said."""
    means = {"means": "preempted"} if reason == "signal" and not fields else fields
    return event(time, "task_exited", slot, reason=reason, how=how, **means)


def gone(time: float, slot: int, why: str) -> Event:
    """A node was lost."""
    return event(time, "node_lost", slot, host=f"node{slot}", why=why)


def timeline(events: Iterable[Event]) -> list[TimelineEntry]:
    """The timeline of these events."""
    return build_timeline(EventIndex(events))
