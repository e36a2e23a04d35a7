"""How a task goes when it has to: one table, a row for each thing that can be the matter. Pure.

SIGTERM says neither why nor what comes next, so Slurm is asked. What it says tells the cases apart
(each measured on Slurm 22.05):

- While a preemption's grace lasts, the task is RUNNING, with PreemptMode=REQUEUE as with CANCEL. It
  can requeue itself then; one that just *ends* within the grace is FAILED, and never comes back.
- Once its processes are being ended, it is COMPLETING. If Slurm requeues it, one restart more is
  counted than the attempt knows of. If not, a preempted one has a PreemptTime, one whose time was
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

`requeue` carries out what is decided here for the task itself, `requeue` for one that can not
be requeued, and a peer (the leader) for a task that was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, Phase, TaskState


class Reason(Enum):
    """Why a task is to go, as its agent knows it; LOST is what a peer says of it."""

    SIGNAL = "signal"  # SIGTERM: Slurm has to say what it means
    TIME_LIMIT = "time_limit"
    ASKED = "asked"  # a file, the user's code or his signal: leave, and come back
    LOST = "lost"


class ExitAction(Enum):
    """How a task goes."""

    REQUEUE = "requeue"
    REQUEUED = "requeued"  # by somebody else: Slurm, a user, or another node of the same job
    REPLACE = "replace"  # another task is submitted in its place
    EXIT = "exit"
    STAY = "stay"


class Meaning(Enum):
    """What SIGTERM meant to a task, as far as Slurm says."""

    PREEMPTED = "preempted"
    REQUEUED = "requeued"  # by `scontrol requeue`, or by Slurm, which took its node out of service
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    RUN_ENDED = "run_ended"


@dataclass(frozen=True)
class ExitFacts:
    """What is known when a task has to go.

    Attributes:
        reason: Why it has to.
        state: What Slurm says of it now; None if it does not know it any more.
        attempt: How often it had been requeued when this attempt began; None if unknown.
        run_ended: Whether the run has its result.
        requeues_left: How often it may come back; None: as often as it has to.
        refused: Whether Slurm has refused to requeue it.
    """

    reason: Reason
    state: TaskState | None
    attempt: int | None = None
    run_ended: bool = False
    requeues_left: int | None = None
    refused: bool = False

    @property
    def phase(self) -> Phase | None:
        """What the task's state means; None if Slurm does not know it."""
        return None if self.state is None else self.state.phase

    @property
    def has_gone(self) -> bool:
        """Whether its processes are being ended, or have been."""
        return self.phase in (Phase.LEAVING, Phase.ENDED)


@dataclass(frozen=True)
class ExitRule:
    """One row of the table: what is the matter, and how the task goes then."""

    name: str
    applies: Callable[[ExitFacts], bool]
    departure: ExitAction


def _is_suspended(facts: ExitFacts) -> bool:
    return facts.state is not None and facts.state.state in ("SUSPENDED", "STOPPED")


def _was_requeued(facts: ExitFacts) -> bool:
    if facts.state is None or facts.attempt is None:
        return False
    return facts.phase is not Phase.RUNNING and (facts.state.restarts or 0) > facts.attempt


def _was_preempted(facts: ExitFacts) -> bool:
    if facts.state is None or not facts.has_gone:
        return False
    if facts.state.state == "PREEMPTED":
        return True
    return facts.state.preempted and facts.state.state not in ("COMPLETED", "CANCELLED")


def _had_no_time_left(facts: ExitFacts) -> bool:
    if facts.state is None or not facts.has_gone:
        return False
    return facts.state.state == "TIMEOUT" or facts.state.reason == "TimeLimit"


def _lost_its_node(facts: ExitFacts) -> bool:
    return facts.state is not None and facts.state.state == "NODE_FAIL"


_FAILED = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL")


def _was_killed(facts: ExitFacts) -> bool:
    lost = facts.reason is Reason.LOST
    return lost and facts.state is not None and facts.state.state in _FAILED


def _may_not_come_back(facts: ExitFacts) -> bool:
    return facts.requeues_left is not None and facts.requeues_left <= 0


def _has_lost_launcher(facts: ExitFacts) -> bool:
    return facts.state is not None and facts.state.reason == LAUNCHER_ENDED


def _runs(facts: ExitFacts) -> bool:
    return facts.phase is Phase.RUNNING


def _is_being_preempted(facts: ExitFacts) -> bool:
    if facts.reason is Reason.LOST:
        return False  # Slurm will requeue it, or end it
    return _runs(facts) and facts.state is not None and facts.state.preempted


TABLE: tuple[ExitRule, ...] = (
    ExitRule("run finished", lambda f: f.run_ended, ExitAction.EXIT),
    ExitRule("suspended", _is_suspended, ExitAction.STAY),
    ExitRule("requeued already", _was_requeued, ExitAction.REQUEUED),
    ExitRule("out of budget", _may_not_come_back, ExitAction.EXIT),
    ExitRule("its launcher has ended", _has_lost_launcher, ExitAction.EXIT),
    ExitRule("unknown to the scheduler", lambda f: f.state is None, ExitAction.EXIT),
    ExitRule("waits already", lambda f: f.phase is Phase.PENDING, ExitAction.REQUEUED),
    ExitRule("preempted, in its grace", _is_being_preempted, ExitAction.REQUEUE),
    ExitRule(
        "lost, and still called running",
        lambda f: f.reason is Reason.LOST and _runs(f),
        ExitAction.STAY,
    ),
    ExitRule(
        "time limit ahead", lambda f: f.reason is Reason.TIME_LIMIT and _runs(f), ExitAction.REQUEUE
    ),
    ExitRule("leaves of its own accord", _runs, ExitAction.REQUEUE),
    ExitRule("preempted for good", _was_preempted, ExitAction.REQUEUE),
    ExitRule("time limit reached", _had_no_time_left, ExitAction.REQUEUE),
    ExitRule("node failure", _lost_its_node, ExitAction.REQUEUE),
    ExitRule("agent killed, or never started", _was_killed, ExitAction.REQUEUE),
    ExitRule("cancelled or ended", lambda _: True, ExitAction.EXIT),
)
"""The first row that applies decides. REQUEUE becomes REPLACE where Slurm refuses to requeue."""


def meaning(facts: ExitFacts) -> Meaning | None:
    """Return what SIGTERM meant to a task; None: Slurm does not say.

    It may come from anybody: a task that runs on, and is not preempted, says nothing of its reason.
    """
    if facts.run_ended:
        return Meaning.RUN_ENDED
    if facts.state is None:
        return None
    if facts.state.preempted or facts.state.state == "PREEMPTED":
        return Meaning.PREEMPTED
    if _had_no_time_left(facts):
        return Meaning.TIME_LIMIT
    if _was_requeued(facts) or facts.phase is Phase.PENDING or _lost_its_node(facts):
        return Meaning.REQUEUED
    was_ended = facts.phase is Phase.LEAVING or facts.state.state == "CANCELLED"
    return Meaning.CANCELLED if was_ended else None


def row_of(facts: ExitFacts) -> ExitRule:
    """Return the row that applies, for the log."""
    return next(row for row in TABLE if row.applies(facts))


def decide(facts: ExitFacts) -> ExitAction:
    """Return how a task goes (its own agent; the leader for one that was lost)."""
    departure = row_of(facts).departure
    if facts.refused and departure is ExitAction.REQUEUE:
        return ExitAction.REPLACE
    return departure
