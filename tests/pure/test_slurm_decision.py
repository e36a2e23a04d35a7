"""How a task goes, for everything that can be the matter. States are as Slurm 22.05 gave them."""

import pytest

from hpc_elastic.slurm.exit_action import (
    TABLE,
    ExitAction,
    ExitFacts,
    Meaning,
    Reason,
    decide,
    meaning,
    row_of,
)
from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, TaskState


def facts(reason, state=None, attempt=0, **more):
    """What is known; a state is its word and what differs from a task that just runs."""
    known = {} if state is None or isinstance(state, str) else state[1]
    word = state if state is None or isinstance(state, str) else state[0]
    task = None if word is None else TaskState("7_0", word, **{"restarts": 0, **known})
    of_state = {"run_ended", "requeues_left", "refused"}
    assert set(more) <= of_state
    return ExitFacts(reason, task, attempt, **more)


PREEMPTED = {"preempted": True}
AT_LIMIT = {"reason": "TimeLimit"}
OWN_ACCORD = "leaves of its own accord"
AGAIN = {"restarts": 1}
ORPHANED = {"reason": LAUNCHER_ENDED}
REQUEUED = {**PREEMPTED, **AGAIN}

CASES = [
    (facts(Reason.SIGNAL, ("RUNNING", PREEMPTED)), "preempted, in its grace", ExitAction.REQUEUE),
    (facts(Reason.SIGNAL, ("COMPLETING", REQUEUED)), "requeued already", ExitAction.REQUEUED),
    (facts(Reason.SIGNAL, ("RUNNING", AGAIN)), "requeued already", ExitAction.REQUEUED),
    (facts(Reason.ASKED, ("RUNNING", REQUEUED)), "requeued already", ExitAction.REQUEUED),
    (facts(Reason.TIME_LIMIT, ("RUNNING", AGAIN)), "requeued already", ExitAction.REQUEUED),
    (facts(Reason.SIGNAL, ("COMPLETING", PREEMPTED)), "preempted for good", ExitAction.REQUEUE),
    (facts(Reason.SIGNAL, "SUSPENDED"), "suspended", ExitAction.STAY),
    (facts(Reason.TIME_LIMIT, "RUNNING"), "time limit ahead", ExitAction.REQUEUE),
    (facts(Reason.SIGNAL, ("COMPLETING", AT_LIMIT)), "time limit reached", ExitAction.REQUEUE),
    (facts(Reason.SIGNAL, "RUNNING"), OWN_ACCORD, ExitAction.REQUEUE),
    (facts(Reason.ASKED, "RUNNING"), OWN_ACCORD, ExitAction.REQUEUE),
    (facts(Reason.SIGNAL, "COMPLETING"), "cancelled or ended", ExitAction.EXIT),
    (facts(Reason.SIGNAL, "CANCELLED"), "cancelled or ended", ExitAction.EXIT),
    (facts(Reason.SIGNAL, None), "unknown to the scheduler", ExitAction.EXIT),
    (facts(Reason.SIGNAL, "RUNNING", run_ended=True), "run finished", ExitAction.EXIT),
    (facts(Reason.SIGNAL, "RUNNING", requeues_left=0), "out of budget", ExitAction.EXIT),
    (facts(Reason.ASKED, "RUNNING", requeues_left=1), OWN_ACCORD, ExitAction.REQUEUE),
    (facts(Reason.ASKED, ("RUNNING", ORPHANED)), LAUNCHER_ENDED, ExitAction.EXIT),
    (facts(Reason.LOST, "RUNNING"), "lost, and still called running", ExitAction.STAY),
    (facts(Reason.LOST, ("RUNNING", PREEMPTED)), "lost, and still called running", ExitAction.STAY),
    (facts(Reason.LOST, ("PENDING", AGAIN)), "requeued already", ExitAction.REQUEUED),
    (facts(Reason.LOST, "PENDING", attempt=None), "waits already", ExitAction.REQUEUED),
    (facts(Reason.LOST, ("NODE_FAIL", {"reason": "NodeDown"})), "node failure", ExitAction.REQUEUE),
    (facts(Reason.LOST, ("PREEMPTED", PREEMPTED)), "preempted for good", ExitAction.REQUEUE),
    (facts(Reason.LOST, ("PREEMPTED", {})), "preempted for good", ExitAction.REQUEUE),
    (facts(Reason.LOST, ("FAILED", PREEMPTED)), "preempted for good", ExitAction.REQUEUE),
    (facts(Reason.LOST, ("TIMEOUT", AT_LIMIT)), "time limit reached", ExitAction.REQUEUE),
    (facts(Reason.LOST, "FAILED"), "agent killed, or never started", ExitAction.REQUEUE),
    (facts(Reason.LOST, "OUT_OF_MEMORY"), "agent killed, or never started", ExitAction.REQUEUE),
    (facts(Reason.LOST, "BOOT_FAIL"), "agent killed, or never started", ExitAction.REQUEUE),
    (facts(Reason.LOST, "FAILED", requeues_left=0), "out of budget", ExitAction.EXIT),
    (facts(Reason.SIGNAL, "FAILED"), "cancelled or ended", ExitAction.EXIT),
    (facts(Reason.LOST, "COMPLETED"), "cancelled or ended", ExitAction.EXIT),
    (facts(Reason.LOST, ("CANCELLED", PREEMPTED)), "cancelled or ended", ExitAction.EXIT),
]  # fmt: skip


@pytest.mark.parametrize(("known", "row", "expected"), CASES)
def test_what_is_the_matter_decides(known, row, expected):
    """Each row of the table is met, and says what is to be done."""
    assert (row_of(known).name, decide(known)) == (row, expected)


def test_every_row_is_met():
    """A row that nothing meets would be an error, or no longer needed."""
    assert {row_of(known).name for known, _, _ in CASES} == {row.name for row in TABLE}


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(Reason.SIGNAL, ("RUNNING", PREEMPTED)), Meaning.PREEMPTED),
        (facts(Reason.SIGNAL, ("COMPLETING", REQUEUED)), Meaning.PREEMPTED),
        (facts(Reason.SIGNAL, ("COMPLETING", PREEMPTED)), Meaning.PREEMPTED),
        (facts(Reason.SIGNAL, "PREEMPTED"), Meaning.PREEMPTED),
        (facts(Reason.SIGNAL, ("COMPLETING", AGAIN)), Meaning.REQUEUED),
        (facts(Reason.SIGNAL, ("PENDING", AGAIN)), Meaning.REQUEUED),
        (facts(Reason.SIGNAL, "PENDING", attempt=None), Meaning.REQUEUED),
        (facts(Reason.SIGNAL, "NODE_FAIL"), Meaning.REQUEUED),
        (facts(Reason.SIGNAL, ("COMPLETING", AT_LIMIT)), Meaning.TIME_LIMIT),
        (facts(Reason.SIGNAL, "COMPLETING"), Meaning.CANCELLED),
        (facts(Reason.SIGNAL, "CANCELLED"), Meaning.CANCELLED),
        (facts(Reason.SIGNAL, "COMPLETING", run_ended=True), Meaning.RUN_ENDED),
        (facts(Reason.SIGNAL, "RUNNING"), None),
        (facts(Reason.SIGNAL, "FAILED"), None),
        (facts(Reason.SIGNAL, None), None),
    ],
)
def test_what_sigterm_means_is_said_only_where_slurm_says_it(known, expected):
    """`scontrol requeue` is no preemption; a signal from somewhere is no word of Slurm's."""
    assert meaning(known) is expected
