"""hpc_elastic.slurm.job_state: what Slurm's words mean for a run."""

from __future__ import annotations

import time

import pytest

from hpc_elastic.run import job_of, queue_name
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.parsing import FIELDS, SQUEUE_FORMAT, parse_squeue, parse_time_left


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        ("PENDING CONFIGURING REQUEUED REQUEUE_HOLD SPECIAL_EXIT SUSPENDED STOPPED", Phase.PENDING),
        ("RUNNING SIGNALING", Phase.RUNNING),
        ("COMPLETING STAGE_OUT A_STATE_OF_TOMORROW", Phase.COMPLETING),
        (
            "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY",
            Phase.ENDED,
        ),
    ],
)
def test_every_state_has_a_phase(states, phase):
    """A state we do not know is neither waited for nor given up."""
    assert {TaskState("1_0", state).phase for state in states.split()} == {phase}


def line(*fields, preempted="N/A", start="N/A"):
    """Return a line as squeue prints it in our format."""
    return "|".join([*fields[:-1], preempted, start, fields[-1]]) + "|\n"


def test_the_format_cuts_nothing():
    """Width 0 is squeue's word for as wide as it must be."""
    assert ",".join(f"{name}:0|" for name in FIELDS) == SQUEUE_FORMAT


def test_pending_elements_of_an_array_are_taken_apart():
    """One line of squeue holds them all; a running element has its own."""
    tasks = parse_squeue(
        line("7", "3-7:2,9%2", "7", "PENDING", "0", "", "UNLIMITED", "JobArrayTaskLimit")
        + line("7", "1", "9", "RUNNING", "2", "n1", "1:30:00", "None")
    )
    waiting = {
        f"7_{i}": TaskState(f"7_{i}", "PENDING", "JobArrayTaskLimit", "", 0) for i in (3, 5, 7, 9)
    }
    assert tasks == {**waiting, "7_1": TaskState("7_1", "RUNNING", "", "n1", 2, 5400.0)}


def test_a_job_that_is_no_array_goes_by_its_job_id():
    """It may have several nodes, and a reason with spaces and bars."""
    text = line("8", "N/A", "8", "PENDING", "", "", "INVALID", "Nodes down, DRAINED | reserved")
    reason = "Nodes down, DRAINED | reserved"
    assert parse_squeue(text) == {"8": TaskState("8", "PENDING", reason, "", None)}


def test_what_is_left_of_cancelled_elements_is_no_task():
    """One line without an index stands for them."""
    tasks = parse_squeue(
        line("7", "N/A", "7", "CANCELLED", "0", "", "UNLIMITED", "None")
        + line("7", "1", "9", "RUNNING", "0", "n1", "2:03", "None")
    )
    assert list(tasks) == ["7_1"]


def test_a_preempted_task_is_told_from_others():
    """Slurm sets the time of the preemption with its first signal, and clears it at the requeue."""
    text = line(
        *("7", "1", "9", "RUNNING", "0", "n1", "2:03", "None"),
        preempted="2026-11-21T15:01:22", start="2026-11-21T15:01:20",
    )  # fmt: skip
    task = parse_squeue(text, now=0.0)["7_1"]
    assert (task.preempted, task.starts_in_s) == (True, None)


@pytest.mark.parametrize(
    ("reason", "ahead_s", "held"),
    [
        ("BeginTime", 120, True),
        ("None", 120, True),  # for a second after the requeue
        ("BeginTime", 2, False),
        ("Resources", 120, False),  # Slurm's own estimate
        ("JobHeldUser", 120, False),
    ],
)
def test_the_two_minutes_are_told_from_other_waits(reason, ahead_s, held):
    """A task is held if a time keeps it waiting that lies ahead."""
    now = time.mktime((2026, 11, 21, 15, 1, 20, 0, 0, -1))
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + ahead_s))
    text = line("7", "1", "9", "PENDING", "1", "", "1:00", reason, start=start)
    task = parse_squeue(text, now)["7_1"]
    assert (task.starts_in_s, task.is_held) == (ahead_s, held)
    assert not parse_squeue(text)["7_1"].is_held


def test_a_task_without_a_time_to_start_is_not_held():
    """Slurm says N/A while it has none."""
    text = line("7", "1", "9", "PENDING", "1", "", "1:00", "BeginTime")
    assert parse_squeue(text, 0.0)["7_1"].starts_in_s is None
    assert not parse_squeue(text, 0.0)["7_1"].is_held


def test_no_lines_are_no_tasks():
    """Slurm has forgotten them all."""
    assert parse_squeue("\n") == {}


@pytest.mark.parametrize(
    "text", ["squeue: hello", line("x", "1", "9", "RUNNING", "0", "n1", "2:03", "None"), "7|1|9"]
)
def test_other_output_is_refused(text):
    """A message in the place of a table is no task."""
    with pytest.raises(ValueError, match="not a line of squeue"):
        parse_squeue(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784.0), ("364-23:59:31", 31535971.0), ("2:03:04", 7384.0),
        ("59:59", 3599.0), ("2:03", 123.0), ("0:00", 0.0),
        *[(text, None) for text in ("UNLIMITED", "NOT_SET", "INVALID", "N/A", "", "-0:05", "12")],
        *[(text, None) for text in ("1-2", "2:03\n4:05")],
    ],
)  # fmt: skip
def test_the_time_left_is_a_length_of_time(text, seconds):
    """No limit, a limit that has passed and words of tomorrow are no number."""
    assert parse_time_left(text) == seconds


@pytest.mark.parametrize(
    ("task", "name", "job"), [("7_3", "7_3", "7"), ("8", "8", "8"), ("8.1", "8", "8")]
)
def test_a_node_of_a_larger_job_goes_by_the_job(task, name, job):
    """Slurm requeues and postpones the job as a whole."""
    assert (queue_name(task), job_of(task)) == (name, job)


def test_times_in_unix_seconds_are_not_local_time(monkeypatch):
    """In the hour in which daylight saving ends a local time has two meanings."""
    fields = "7|N/A|7|PENDING|0||1:00|N/A|1793494800|BeginTime|"
    assert parse_squeue(fields, 1793494740.0)["7"].starts_in_s == 60.0
