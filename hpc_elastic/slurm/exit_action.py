"""Decision table of a task's exit: requeue, resubmit, stay or end. Pure.

SIGTERM has no reason with it, so Slurm is queried. Its answer distinguishes the cases (each
measured on Slurm 22.05):

- While a preemption's grace lasts, the task is RUNNING, with PreemptMode=REQUEUE as with CANCEL. It
  can requeue itself then; one that just *ends* within the grace is FAILED, and never comes back.
- One restart more than the attempt has, in any phase: another attempt takes the task's place, on
  another node if Slurm had given this one up while it lived (its slurmd was dead). What Slurm
  reports is about that attempt, which must not be requeued.
- Once its processes are being ended, it is COMPLETING. If Slurm requeues it, it counts one
  restart more than the attempt has. If not, a preempted one has a PreemptTime, one whose time was
  up has the reason TimeLimit, and one that was cancelled has neither: it must not be requeued, for
  it would come back against its user's will.
- Tasks that have ended as PREEMPTED, TIMEOUT, NODE_FAIL, FAILED or OUT_OF_MEMORY can be requeued
  by a peer for as long as Slurm knows them, unless they were submitted with ``--no-requeue``. While
  a task runs, its owner can permit the requeue after all; once it has ended, only another task can
  take its place.
- FAILED is any exit code but 0. For its own agent that is the end. A peer that had the agent in its
  group, and lost it while the run went on, takes it for killed: ``kill -9``, or the kernel, which
  was out of memory. A task that failed before its agent joined is a peer's as well: it is tried on
  another node, a few times (`rendezvous.task_recovery`).
- On a cluster with PreemptMode=SUSPEND,GANG there is no grace in any partition, and no PreemptTime:
  that such a task was preempted is known when it has ended as PREEMPTED, to its peers.
- A suspended task (PreemptMode=SUSPEND) gets no signal that a process could see: it stands still
  and goes on. There is nothing to do.

What stays open: a task that is cancelled while it is preempted with PreemptMode=CANCEL looks
preempted for good.

`requeue` carries out what is decided here, for the task itself, or with another task in the place
of one that Slurm does not requeue; `scheduler` does so for a task that was lost (the leader).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, Phase, TaskState


class Reason(Enum):
    """Why a task has to exit."""

    SIGNAL = "signal"  # SIGTERM: Slurm has the meaning
    TIME_LIMIT = "time_limit"
    ASKED = "asked"  # a file, the user's code or signal: leave, and come back
    LOST = "lost"  # reported by a peer


class ExitAction(Enum):
    """How a task exits."""

    REQUEUE = "requeue"
    REQUEUED = "requeued"  # by somebody else: Slurm, a user, or another node of the same job
    REPLACE = "replace"  # another task is submitted in its place
    EXIT = "exit"
    STAY = "stay"


class Meaning(Enum):
    """What SIGTERM meant to a task, by Slurm's answer."""

    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # by `scontrol requeue`, or by Slurm, which took its node out of service
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    RUN_ENDED = "run_ended"


@dataclass(frozen=True)
class ExitFacts:
    """What is known when a task has to exit.

    ``state`` is None if Slurm has no such task any more, ``attempt`` (the number of its requeues)
    if unknown, ``requeues_left`` without a limit.
    """

    reason: Reason
    state: TaskState | None
    attempt: int | None = None
    run_ended: bool = False
    requeues_left: int | None = None


@dataclass(frozen=True)
class ExitRule:
    """One row of the table: a situation, and how the task exits then."""

    name: str
    applies: Callable[[ExitFacts, TaskState], bool]
    action: ExitAction


def _was_requeued(facts: ExitFacts, state: TaskState) -> bool:
    return state.has_replaced(facts.attempt)


def _was_preempted(facts: ExitFacts, state: TaskState) -> bool:
    had_preempt_time = state.preempted and state.state not in ("COMPLETED", "CANCELLED")
    return state.phase in _OVER and (state.state == "PREEMPTED" or had_preempt_time)


def _had_no_time_left(facts: ExitFacts, state: TaskState) -> bool:
    return state.phase in _OVER and (state.state == "TIMEOUT" or state.reason == "TimeLimit")


_OVER = (Phase.COMPLETING, Phase.ENDED)
_FAILED = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL")
_UNKNOWN = TaskState("", "")
"""Stands for the state of a task that Slurm does not list."""

TABLE: tuple[ExitRule, ...] = (
    ExitRule("run finished", lambda f, s: f.run_ended, ExitAction.EXIT),
    ExitRule("suspended", lambda f, s: s.state in ("SUSPENDED", "STOPPED"), ExitAction.STAY),
    ExitRule("requeued already", _was_requeued, ExitAction.REQUEUED),
    ExitRule(
        "out of budget",
        lambda f, s: f.requeues_left is not None and f.requeues_left <= 0,
        ExitAction.EXIT,
    ),
    ExitRule("its launcher has ended", lambda f, s: s.reason == LAUNCHER_ENDED, ExitAction.EXIT),
    ExitRule("unknown to the scheduler", lambda f, s: f.state is None, ExitAction.EXIT),
    ExitRule("waits already", lambda f, s: s.phase is Phase.PENDING, ExitAction.REQUEUED),
    ExitRule(
        "preempted, in its grace",
        lambda f, s: s.phase is Phase.RUNNING and s.preempted and f.reason is not Reason.LOST,
        ExitAction.REQUEUE,
    ),
    ExitRule(
        "lost, and still called running",  # Slurm will requeue it, or end it
        lambda f, s: s.phase is Phase.RUNNING and f.reason is Reason.LOST,
        ExitAction.STAY,
    ),
    ExitRule(
        "time limit ahead",
        lambda f, s: s.phase is Phase.RUNNING and f.reason is Reason.TIME_LIMIT,
        ExitAction.REQUEUE,
    ),
    ExitRule("leaves of its own accord", lambda f, s: s.phase is Phase.RUNNING, ExitAction.REQUEUE),
    ExitRule("preempted for good", _was_preempted, ExitAction.REQUEUE),
    ExitRule("time limit reached", _had_no_time_left, ExitAction.REQUEUE),
    ExitRule("node failure", lambda f, s: s.state == "NODE_FAIL", ExitAction.REQUEUE),
    ExitRule(
        "agent killed, or never started",
        lambda f, s: f.reason is Reason.LOST and s.state in _FAILED,
        ExitAction.REQUEUE,
    ),
    ExitRule("cancelled or ended", lambda f, s: True, ExitAction.EXIT),
)
"""The first row that applies decides. REQUEUE becomes REPLACE where Slurm refuses to requeue."""


def row_of(facts: ExitFacts) -> ExitRule:
    """Return the row that applies, for the log."""
    return next(row for row in TABLE if row.applies(facts, facts.state or _UNKNOWN))


def decide(facts: ExitFacts) -> ExitAction:
    """Return how a task exits (its own agent; the leader for one that was lost)."""
    return row_of(facts).action


def meaning(facts: ExitFacts) -> Meaning | None:
    """Return what SIGTERM meant to a task; None if unknown.

    Any process may have sent it: a task that runs on, and is not preempted, has no reason for it.
    """
    if facts.run_ended:
        return Meaning.RUN_ENDED
    state = facts.state
    if state is None:
        return None
    if state.preempted or state.state == "PREEMPTED":
        return Meaning.PREEMPTED
    if _had_no_time_left(facts, state):
        return Meaning.TIME_LIMIT
    is_back = state.phase is Phase.PENDING or state.state == "NODE_FAIL"
    if is_back or _was_requeued(facts, state):
        return Meaning.REQUEUED
    was_ended = state.phase is Phase.COMPLETING or state.state == "CANCELLED"
    return Meaning.CANCELLED if was_ended else None
