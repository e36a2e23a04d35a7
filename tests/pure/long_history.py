"""The events of a run of weeks, and the work that a reader does with them."""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

from hpc_elastic.report.progress_log import Point
from hpc_elastic.run.events import Event, LossReason
from made_events import event, gone, left, notice

ROUND_S = 500.0


def long_history(num_rounds: int, num_nodes: int, *, replicas: bool = False) -> Iterator[Event]:
    """Yield the events of a run whose rounds end by a lost, a preempted or a failing node in turn.

    The node's task starts again in the next round. Every tenth time the leader is lost. With
    `replicas` each node is one (ft): the others go on, and every tenth round loses all.
    """
    attempts, leader, term = [0] * num_nodes, 0, 1
    yield from (_task(1.0, slot, 0) for slot in range(num_nodes))
    yield event(1.5, "leader", leader, term=term)
    yield from (event(2.0, "joined", slot, host=f"node{slot}") for slot in range(num_nodes))
    before, loses_all = set[int](), False
    for number in range(1, num_rounds + 1):
        now, all_ = number * ROUND_S, range(num_nodes)
        leaves, how = number % num_nodes, number % 3
        started = [s for s in all_ if s not in before] if replicas else list(all_)
        members = [
            {"task": f"7_{slot}", "attempt": attempts[slot], "slot": slot, "host": f"node{slot}",
             "nproc": 8}
            for slot in all_
        ]  # fmt: skip
        placed = {"placed": [f"7_{slot}" for slot in started]} if replicas else {}
        yield event(
            now, "round", leader, number=number, index=number, term=term, nodes=num_nodes,
            world_size=8 * num_nodes, members=members, restarts=0, **placed,
        )  # fmt: skip
        for slot in started:
            made = {"step": 10 * number + 1, "restored": 10 * number, "restore_s": 1.0}
            yield event(now + 9.0, "first_step", slot, attempt=attempts[slot], round=number, **made)
        loses_all = replicas and number % 10 == 0
        leaving = list(all_) if loses_all else [leaves]
        end = now + ROUND_S - 20.0
        if how == 0:
            yield from (gone(end, slot, LossReason.SILENT) for slot in leaving)
        elif how == 1:
            yield from (notice(end, slot) for slot in leaving)
            yield from (left(end + 5.0, slot) for slot in leaving)
        else:
            failure = {"restarts": 1, "host": f"node{leaves}", "failure": "RuntimeError"}
            yield event(end, "restart", leader, **failure)
        for slot in leaving if replicas else all_:
            seen = {"step": 10 * number + 12, "step_time": end}
            yield event(end + 1.0, "workers_stopped", slot, attempt=attempts[slot], round=number,
                        **seen)  # fmt: skip
        if replicas:
            for nodes, slot in zip(range(num_nodes - 1, -1, -1), leaving, strict=False):
                yield event(end + 6.0, "replica_left", slot, host=f"node{slot}", nodes=nodes)
        else:
            cause = ("node_lost", "regroup", "failed")[how]
            yield event(end, "round_stopped", leader, reason=cause, cause=cause, round=number,
                        nodes=num_nodes, hosts=[])  # fmt: skip
            waiting = [f"7_{slot}" for slot in leaving]
            yield event(end, "scale_up_decision", leader, waiting=waiting, admit="not now", why="")
        if number % 10 == 0:
            leader, term = (leader + 1) % num_nodes, term + 1
            yield event(end + 7.0, "leader", leader, term=term)
        for slot in leaving if how < 2 else ():
            attempts[slot] += 1
            yield _task(end + 10.0, slot, attempts[slot])
            yield event(end + 12.0, "joined", leader, host=f"node{slot}") | {"task": f"7_{slot}"}
        before = set(all_) - set(leaving)


def _task(time: float, slot: int, attempt: int) -> Event:
    return event(time, "task", slot, attempt=attempt, host=f"node{slot}", pid=1, started=time)


def points_of(num_rounds: int, num_nodes: int) -> Iterator[Point]:
    """Yield the progress of that run: each round has made ten steps, and two that are lost."""
    for number in range(1, num_rounds + 1):
        at = number * ROUND_S + 100.0
        for step in (10 * number + 5, 10 * number + 10):
            yield Point(
                at, round=number, nodes=num_nodes, world_size=8 * num_nodes, step=step,
                checkpoint=10 * number, loss=1.0 / number,
            )  # fmt: skip
            at += 100.0


def work_of(call: Callable[[], Any], package: str = "hpc_elastic") -> int:
    """Return the number of lines of a package that a call executes, each turn of a loop anew."""
    found = 0

    def trace_line(frame: FrameType, what: str, _: object) -> Any:
        nonlocal found
        found += what == "line"
        return trace_line

    def trace_call(frame: FrameType, what: str, _: object) -> Any:
        return trace_line if package in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return found


def growths(work: Callable[[int], int], *sizes: int) -> list[float]:
    """Return by which factor the work grows from each size to the next."""
    found = [work(size) for size in sizes]
    return [after / before for before, after in pairwise(found)]
