"""The forecast of the starts of a run's tasks, from what squeue, sinfo and sbatch print."""

import math
from dataclasses import replace

import pytest

from hpc_elastic.config.schema import SlurmSettings
from hpc_elastic.site.forecast import (
    NO_RESERVE_S,
    NodeOutlook,
    Shape,
    TaskTerms,
    ahead_of,
    expected_start,
    outlook,
    shapes,
    soonest,
    task_terms,
)
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import RESERVED, QueuedJob, parse_reservations

NOW = 1_900_000_000.0
HOUR = 3600.0
RUNS = QueuedJob("RUNNING", ("n2",), ends_at=NOW + 2 * HOUR, limit_s=4 * HOUR)
PLANNED = QueuedJob("PENDING", ("n1", "n2"), NOW + 2 * HOUR, limit_s=HOUR, num_nodes=2)
WAITS = QueuedJob("PENDING", limit_s=HOUR, partitions=("gpu",), reason="Priority")
STATES = {"n1": "idle", "n2": "allocated"}
HOLES = {"n1": "planned", "n2": "allocated"}


def starts(states, jobs, limit_s=4 * HOUR, **more):
    """When each node of a few may start a task, in hours from now."""
    found = outlook(states, jobs, NOW, **more)
    (own, *_) = shapes(found, [TaskTerms(limit_s)], range(1, 9), NOW)
    return [(at - NOW) / HOUR for at in own.starts]


def test_a_node_is_free_at_once_or_when_its_last_job_is_at_its_time_limit():
    """Of several jobs the last one counts; one that is over its time counts as now."""
    assert starts(STATES, [RUNS]) == [0, 2]
    assert starts(STATES, [RUNS, replace(RUNS, ends_at=NOW + HOUR)]) == [0, 2]
    assert starts(STATES, [replace(RUNS, ends_at=NOW - 60)]) == [0, 0]
    assert starts({"n1": "completing"}, []) == [0]


def test_a_task_starts_before_a_planned_job_only_if_its_time_limit_fits():
    """Else after that job; a planned start that has passed is now."""
    assert starts(HOLES, [RUNS, PLANNED], 2 * HOUR) == [0, 3]
    assert starts(HOLES, [RUNS, PLANNED], 4 * HOUR) == [3, 3]
    assert starts(HOLES, [RUNS, replace(PLANNED, starts_at=NOW - 5)], HOUR) == [1, 2]
    assert starts(HOLES, [RUNS, replace(PLANNED, limit_s=None)], 4 * HOUR) == []
    assert starts(HOLES, [RUNS, PLANNED], math.inf) == [3, 3]
    assert starts(HOLES, [RUNS, replace(PLANNED, limit_s=365 * 86400.0)]) == []


def test_a_reservation_ends_a_gap_as_a_planned_job_does():
    """A maintenance: until its end nothing starts on its nodes."""
    (reserved,) = parse_reservations(
        "ReservationName=r StartTime=2030-03-17T18:46:00 EndTime=2030-03-17T19:46:00 "
        "Duration=01:00:00 Nodes=n[1-2] NodeCnt=2 Flags=MAINT,SPEC_NODES State=INACTIVE\n"
    )
    assert reserved == QueuedJob(
        RESERVED, ("n1", "n2"), reserved.starts_at, limit_s=HOUR, reason="MAINT,SPEC_NODES"
    )
    reserved = replace(reserved, starts_at=NOW + HOUR)
    assert starts({"n1": "idle", "n3": "idle"}, [reserved], HOUR) == [0, 0]
    assert starts({"n1": "idle", "n3": "idle"}, [reserved], 2 * HOUR) == [0, 2]
    assert parse_reservations("No reservations in the system\n") == []


def test_what_is_behind_a_run_in_its_queue_ends_no_gap_for_it():
    """Nor its own plan; of two of its jobs, the one that is tried last counts."""
    own = QueuedJob("PENDING", partitions=("gpu",), job="9", priority=5)
    last, first, other = (
        replace(PLANNED, partitions=(where,), job="7", priority=priority)
        for where, priority in (("gpu", 4), ("gpu", 5), ("cpu", 4))
    )
    assert ahead_of([own, last, first, other, RUNS], ["9"]) == [first, other, RUNS]
    assert ahead_of([own, last, replace(own, priority=3)], ["9"]) == [last]
    assert ahead_of([last, RUNS], ["9"]) == [last, RUNS]


@pytest.mark.parametrize(
    ("states", "jobs", "known", "unknown"),
    [
        ({"n2": "allocated"}, [], [], (1, 0)),
        ({"n2": "allocated"}, [replace(RUNS, ends_at=None)], [], (1, 0)),
        ({"n2": "allocated"}, [replace(RUNS, ends_at=NOW + 365 * 86400)], [], (1, 0)),
        ({"n2": "mixed"}, [RUNS], [2], (0, 0)),
        ({"n1": "planned"}, [], [], (0, 1)),
        ({"n1": "idle-"}, [], [], (0, 1)),
        ({"n1": "idle~"}, [], [0], (0, 0)),
        ({"n1": "idle*", "n2": "drained", "n3": "reserved", "n4": "idle$"}, [], [], (0, 0)),
    ],
)
def test_a_node_whose_jobs_or_plan_are_not_visible_is_counted_as_unknown(
    states, jobs, known, unknown
):
    """Nothing is made up for it; nodes that take no jobs are neither."""
    assert starts(states, jobs) == known
    found = outlook(states, jobs, NOW)
    assert tuple(found.num_unknown(busy=busy) for busy in (True, False)) == unknown
    assert found.num_idle + found.num_busy + found.num_out == len(states)


def test_a_shared_node_with_a_visible_job_may_have_hidden_ones():
    """Where the site hides the jobs of others."""
    found = outlook({"n2": "mixed"}, [RUNS], NOW, are_jobs_hidden=True)
    assert found.num_unknown(busy=True) == 1
    assert not outlook({"n2": "allocated"}, [RUNS], NOW, are_jobs_hidden=True).num_unknown(
        busy=True
    )


def test_waiting_jobs_are_counted_if_they_wait_for_these_nodes():
    """Each element of an array; not those of other partitions, or that wait for something else."""
    planned = replace(PLANNED, partitions=("gpu",), num_tasks=3)
    jobs = [WAITS, replace(WAITS, num_tasks=4), replace(WAITS, partitions=("cpu",)),
            replace(WAITS, reason="Dependency"), planned]  # fmt: skip
    found = outlook(HOLES, jobs, NOW, partitions=["gpu"])
    assert (found.num_waiting, found.num_unplanned) == (8, 7)


def test_a_shorter_time_limit_is_shown_if_it_starts_sooner_or_on_more_nodes():
    """With a gap of two hours, two hours are; one hour brings nothing more."""
    found = outlook(HOLES, [RUNS, PLANNED], NOW)
    sizes = (1, 2)
    own, shorter = shapes(found, [TaskTerms(4 * HOUR)], sizes, NOW)
    assert (own.limit_s, shorter.limit_s) == (4 * HOUR, 2 * HOUR)
    assert soonest([own, shorter]) is shorter
    assert shapes(outlook(STATES, [RUNS], NOW), [TaskTerms(4 * HOUR)], sizes, NOW)[1:] == []
    more = outlook({**HOLES, "n3": "idle"}, [RUNS, PLANNED], NOW)
    own, shorter = shapes(more, [TaskTerms(4 * HOUR)], sizes, NOW)
    assert soonest([own, shorter]) is own and shorter.limit_s == 2 * HOUR


def test_a_task_that_reserves_nothing_starts_in_any_gap():
    """Measured: eight hours of a QOS with NoReserve started in a gap of one hour."""
    found = outlook(HOLES, [RUNS, PLANNED], NOW)
    (own,) = shapes(found, [TaskTerms(8 * HOUR, NO_RESERVE_S)], (1, 2), NOW)
    assert [(at - NOW) / HOUR for at in own.starts] == [0, 3]


@pytest.mark.parametrize(
    ("settings", "gap_s"),
    [
        ({}, None),
        ({"time_min": "20"}, 1200.0),
        ({"qos": "gaps"}, NO_RESERVE_S),
        ({"qos": "gaps", "time_min": "20"}, NO_RESERVE_S),
        ({"qos": "other", "time_min": "20"}, 1200.0),
    ],
)
def test_the_shortest_gap_is_one_rule_for_status_and_forecast(settings, gap_s):
    """Slurm's NoReserve counts before the least time limit."""
    launcher = SlurmSettings(time="60", **settings)
    assert task_terms(launcher, (), {"gaps"}) == TaskTerms(HOUR, gap_s)


def test_a_task_that_takes_what_is_left_of_a_gap_starts_in_one_of_its_least_length():
    """launcher.time_min: the gap of two hours is long enough for one hour, not for three."""
    found = outlook(HOLES, [RUNS, PLANNED], NOW)
    for least, hours in {HOUR: [0, 3], 3 * HOUR: [3, 3]}.items():
        own, *_ = shapes(found, [TaskTerms(8 * HOUR, least)], (1, 2), NOW)
        assert [(at - NOW) / HOUR for at in own.starts] == hours


def test_each_pool_has_its_nodes_and_its_number_of_tasks():
    """A node of two partitions is used once; a pool without nodes has no start."""
    found = outlook({"n1": "idle", "n2": "allocated", "n3": "idle"}, [RUNS], NOW)
    first = TaskTerms(HOUR, number=1, nodes=frozenset({"n1", "n3"}))
    rest = TaskTerms(4 * HOUR, number=3, nodes=frozenset({"n1", "n2"}))
    none = TaskTerms(HOUR, number=4, nodes=frozenset())
    own, *_ = shapes(found, [first, rest, none], range(1, 9), NOW)
    assert own.limit_s == 4 * HOUR and [(at - NOW) / HOUR for at in own.starts] == [0, 2]
    own, *_ = shapes(found, [replace(rest, nodes=None), first], (1, 2), NOW)
    assert [(at - NOW) / HOUR for at in own.starts] == [0, 0], "no more than the run's maximum"


def test_a_coallocated_minimum_needs_its_nodes_at_the_same_time():
    """A gap that ends before the second node is free is of no use."""
    gap = NodeOutlook(((NOW, NOW + HOUR), (NOW + 5 * HOUR, math.inf)))
    later = NodeOutlook(((NOW + 2 * HOUR, math.inf),))
    found = replace(outlook({}, [], NOW), nodes={"n1": gap, "n2": later})
    for coallocated, hours in {False: 2, True: 5}.items():
        (own, *_) = shapes(found, [TaskTerms(HOUR)], (2,), NOW, coallocated=coallocated)
        assert own.starts_at == NOW + hours * HOUR


def test_sbatch_counts_where_no_job_waits_or_a_node_is_unknown():
    """It adds the mean wait of all jobs to each estimate, also to that of a node that is idle."""
    sizes, tested = range(1, 9), {1: NOW + 600, 8: NOW + 3 * HOUR}
    own = Shape(HOUR, sizes, (NOW, NOW, NOW + HOUR), tested=tested)
    assert own.starts_at == NOW
    assert own.growth == [(2, NOW), (3, NOW + HOUR), (8, NOW + 3 * HOUR)]
    alone = replace(own, is_queue_empty=True)
    assert alone.starts_at == NOW + 600
    assert alone.growth[:2] == [(2, NOW + 600), (3, NOW + HOUR)]
    early = replace(own, tested={8: NOW})
    assert early.growth[-1] == (8, NOW + HOUR), "a run does not shrink"
    assert Shape(HOUR, sizes, (NOW,)).growth == [(1, NOW)]
    assert Shape(HOUR, sizes, ()).growth == [] and soonest([Shape(HOUR, sizes, ())]) is None


def test_a_run_grows_by_whole_units():
    """Of four nodes with a unit of two, three are two."""
    own = Shape(HOUR, (2, 4), (NOW, NOW, NOW + HOUR, NOW + 2 * HOUR))
    assert own.growth == [(2, NOW), (4, NOW + 2 * HOUR)]


def waiting(reason: str, starts_in_s: float | None = None) -> TaskState:
    """A task that waits."""
    return TaskState("7_1", "PENDING", reason, starts_in_s=starts_in_s)


@pytest.mark.parametrize(
    ("tasks", "at", "not_before", "why"),
    [
        ([waiting("Resources", 600.0), waiting("Priority", 900.0)], 600, None, None),
        ([waiting("Resources", -3.0)], 0, None, None),
        ([waiting("BeginTime", 60.0), waiting("Resources", 900.0)], 900, None, None),
        ([waiting("BeginTime", 60.0)], None, 60, "back in the queue"),
        ([waiting("Resources", 365 * 86400.0)], None, None, "in 365 d"),
        ([waiting("Resources"), waiting("Priority")], None, None,
         "no start (1 task Resources, 1 task Priority)"),
        ([waiting("BeginTime", 60.0), waiting("Priority")], None, None, "planned no start"),
        ([waiting("QOSMaxJobsPerUserLimit")], None, None, "1 task QOSMaxJobsPerUserLimit"),
        ([waiting("PartitionDown")], None, None, "no task can start"),
    ],
)  # fmt: skip
def test_the_next_node_of_a_run_is_expected_when_slurm_has_planned_it(tasks, at, not_before, why):
    """A hold after a requeue is no plan, and a start in a year is none; the reason is given."""
    found = expected_start([TaskState("7_0", "RUNNING"), *tasks], NOW)
    assert found.at == (None if at is None else NOW + at)
    assert found.not_before == (None if not_before is None else NOW + not_before)
    assert found.why is None if why is None else why in found.why


def test_a_run_without_a_waiting_task_expects_no_node():
    """All run, or have ended."""
    assert expected_start([TaskState("7_0", "RUNNING"), TaskState("7_1", "COMPLETED")], NOW) is None
