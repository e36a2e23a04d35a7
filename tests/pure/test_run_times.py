"""How long jobs run of their limits, and the queue that is played with it."""

import math
import random
from dataclasses import replace

import pytest

from hpc_elastic.site.forecast import TaskTerms, learned_starts, outlook
from hpc_elastic.site.queue_model import Demand, RunTimes, StartTimes, Survival, play_queue
from hpc_elastic.slurm.parsing import RESERVED, JobRun, QueuedJob, parse_runs

NOW, HOUR = 1_900_000_000.0, 3600.0


def begins(num_nodes, demands, runs_s, **more):
    """When each demand of a queue begins, in seconds from now."""
    found = play_queue(num_nodes, demands, runs_s, NOW, len(demands) - 1, **more)
    return [at - NOW for at in found]


def ended(used, user="eve", limit_s=HOUR, ago_s=60.0, number=10):
    """Jobs of a user that have used a part of their limit, one after the other."""
    return [
        JobRun(f"{user}{i}", user, "gpu", used * limit_s, limit_s, NOW - ago_s * (i + 1))
        for i in range(number)
    ]


def median_h(runs, job):
    """The middle of the run time of a job that begins, in hours."""
    return RunTimes(runs, "sacct", NOW).survival_of(job).quantile(0.5, 0.0) * job.limit_s / HOUR


def test_a_job_starts_with_a_pass_of_the_scheduler():
    """These are as far apart as the cluster has it."""
    demands = [Demand(1, HOUR, began_at=NOW - 60), Demand(1, HOUR)]
    assert begins(1, demands, [72.0, HOUR])[-1] == 30.0
    assert begins(1, demands, [72.0, HOUR], pass_s=10.0)[-1] == 12.0
    assert begins(1, demands, [72.0, HOUR], pass_s=120.0)[-1] == 120.0


def test_the_product_limit_estimate_counts_jobs_that_still_run():
    """Kaplan and Meier by hand: of 4 jobs one ends, of the 2 that are left after a loss one."""
    found = Survival.fit(
        [(-1, 0.2, True, 1), (-1, 0.3, False, 1), (-1, 0.5, True, 1), (-1, 1, False, 1)]
    )
    assert found.shares == [0.0, 0.2, 0.5] and found.longer == pytest.approx([1, 0.75, 0.375])
    assert found.quantile(0.2, 0.0) == 0.2 and found.quantile(0.7, 0.0) == 1.0
    assert found.quantile(0.4, 0.2) == 0.5, "of those that have run beyond 0.2, half"


def test_a_job_seen_late_counts_from_then_on_only():
    """Else long jobs, which are seen more often than short ones, would make all seem long."""
    drawn = random.Random(1)
    runs = [(drawn.uniform(0, 500), drawn.choice([0.1, 0.9])) for _ in range(300_000)]
    seen = [
        (max(0.0, 400 - at) - 1e-9, min(used, 400.5 - at), at + used <= 400.5, 1.0)
        for at, used in runs
        if at < 400.5 and at + used > 400
    ]
    found = Survival.fit(seen)
    assert found.quantile(0.4, 0.0) == pytest.approx(0.1) and found.quantile(0.6, 0.0) > 0.8


def test_jobs_of_the_same_user_and_limit_count_most():
    """Then those of the user, of all; and the prior where nothing is known."""
    job = QueuedJob("PENDING", limit_s=HOUR, job="9", partitions=("gpu",))
    mine = JobRun("9", "eve", "gpu", 0.0, HOUR, None)
    others = ended(0.9, "bob", number=50)
    assert median_h([mine, *ended(0.2), *others], job) == pytest.approx(0.2)
    assert median_h([mine, *ended(0.2, limit_s=8 * HOUR), *others], job) < 0.6
    assert median_h([mine, *others], job) == pytest.approx(0.9)
    assert 0.3 < median_h([], job) < 0.7
    assert RunTimes([], "sacct", NOW).survival_of(replace(job, limit_s=None)) is None


def test_a_queue_is_played_as_backfill_plans_it():
    """A job that is blocked keeps its plan by limits; one behind it starts where it fits."""
    held = Demand(3, HOUR, began_at=NOW - 60)
    large, small, long = Demand(4, HOUR), Demand(1, HOUR / 2), Demand(1, 2 * HOUR)
    found = begins(4, [held, large, small, long], [600.0, 300.0, HOUR / 2, HOUR])
    assert found[1:] == [HOUR / 2, 0.0, HOUR / 2 + 300]
    gap = replace(long, least_s=600.0)
    assert begins(4, [held, large, gap], [600.0, 300.0, 2 * HOUR])[2] == 0.0
    assert begins(4, [held, Demand(5, HOUR), long], [600.0, 1.0, 1.0])[2] == 0.0
    assert begins(1, [held, Demand(9, HOUR)], [600.0, 1.0])[1] == math.inf


def test_a_reservation_ahead_keeps_long_tasks_away():
    """A task without a time limit starts behind a maintenance, one that fits before it."""
    maintenance = Demand(2, HOUR, began_at=NOW + HOUR)
    for limit_s, at in ((HOUR, 0.0), (1.5 * HOUR, 2 * HOUR), (math.inf, 2 * HOUR)):
        assert begins(2, [maintenance, Demand(1, limit_s)], [HOUR, 60.0])[1] == at


def test_the_same_input_gives_the_same_quantiles_and_more_of_the_cluster_gives_later_ones():
    """Jobs of others that wait come first; without a record there is no forecast."""
    states = {"n1": "allocated", "n2": "allocated"}
    runs = [QueuedJob("RUNNING", (n,), ends_at=NOW + HOUR, limit_s=2 * HOUR, job=n) for n in states]
    waits = QueuedJob("PENDING", limit_s=HOUR, job="7", partitions=("gpu",), reason="Priority")
    reserved = QueuedJob(RESERVED, ("n1", "n2"), NOW + 1800, limit_s=HOUR)
    record = RunTimes(ended(0.6, limit_s=2 * HOUR), "sacct", NOW)

    def start(*more, limit_s=600.0):
        jobs = [*runs, *more]
        found = outlook(states, jobs, NOW)
        return learned_starts(
            found, jobs, TaskTerms(limit_s), (1, 2), record, NOW, partitions=["gpu"]
        )

    first = start()
    assert first == start() and isinstance(first[1], StartTimes)
    assert NOW < first[1].p10 <= first[1].p50 <= first[2].p50 <= first[2].p90 <= NOW + HOUR + 60
    assert first[1].p50 < start(waits, waits)[1].p50 < NOW + 2 * HOUR
    assert start(reserved, limit_s=math.inf)[1].p10 >= NOW + 1800 + HOUR
    found = outlook(states, runs, NOW)
    nothing = RunTimes(ended(0.6, number=4), "squeue", NOW)
    assert learned_starts(found, runs, TaskTerms(600.0), (1,), nothing, NOW) == {}
    note = "by time limits: nothing is learned from 4 ended jobs (squeue)"
    assert nothing.describe_record(is_learned=False) == note


def test_own_tasks_keep_their_place_in_the_queue():
    """Those that are held back until a time start no sooner, whatever is free."""
    jobs = [
        QueuedJob(
            "PENDING", job="5", priority=9, reason="Priority", partitions=("gpu",), limit_s=60
        ),
        QueuedJob("PENDING", starts_at=NOW + 600, job="6", reason="BeginTime", partitions=("gpu",)),
    ]
    record, found = RunTimes(ended(0.6), "sacct", NOW), outlook({"n1": "idle"}, jobs, NOW)
    for own, at in (("5", NOW), ("6", NOW + 600)):
        start = learned_starts(
            found, jobs, TaskTerms(60.0), (1,), record, NOW, partitions=["gpu"], own=[own]
        )
        assert start[1].p10 == pytest.approx(at, abs=60)


def test_what_squeue_and_sacct_print_of_jobs_is_read():
    """A node that failed has not ended the job's work; sacct names who cancelled a job."""
    found = parse_runs(
        "7_1|COMPLETED|eve|gpu|00:10:00|1-00:00:00|1900000000\n"
        "8|RUNNING|bob|gpu|1:05|UNLIMITED|N/A\n"
        "9|CANCELLED by 0|bob|gpu|00:00:30|01:00:00|1900000000\n"
        "10|NODE_FAIL|bob|gpu|00:00:30|01:00:00|1900000000\n"
        "a word of the site\n"
    )
    assert found == [
        JobRun("7", "eve", "gpu", 600.0, 86_400.0, NOW),
        JobRun("8", "bob", "gpu", 65.0, None, None),
        JobRun("9", "bob", "gpu", 30.0, HOUR, NOW),
        JobRun("10", "bob", "gpu", 30.0, HOUR, None),
    ]
