"""Time limits of waiting tasks: lengths of gaps, and which limit is tried where."""

from math import inf

import pytest

from hpc_elastic.run.directory import Entry
from hpc_elastic.site import limits as time_slots
from hpc_elastic.site.forecast import gap_ends
from hpc_elastic.site.limits import LADDER_S, LimitFitter, TimeSlots
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import RESERVED, QueuedJob
from specs import spec_of

FULL_S = 3600.0
NOW = 1_900_000_020.0  # a whole minute


def planned(nodes, starts_in_s, job="", partition="", priority=0):
    """A job that is to start on some nodes; a reservation, without a job id."""
    return QueuedJob(
        "PENDING" if job else RESERVED, nodes, None if starts_in_s is None else NOW + starts_in_s,
        partitions=(partition,), job=job, priority=priority,
    )  # fmt: skip


@pytest.fixture
def fitter():
    """Tasks of an hour, which are worth their start for four minutes."""
    return LimitFitter(FULL_S, 240.0)


def minutes(limits):
    """Return limits in minutes."""
    return {task: limit_s / 60 for task, limit_s in limits.items()}


def test_a_hole_ends_where_another_job_is_to_start():
    """The earliest claim on a node counts; a node without one is idle for good."""
    jobs = [
        planned(("n1", "n2"), 900.0, "7", "gpu", 5),
        planned(("n2",), 300.0),
        planned((), None, "8", "gpu", 9),
    ]
    found = gap_ends(["n1", "n2", "n3"], jobs, ["9"])
    assert found == {"n1": NOW + 900, "n2": NOW + 300, "n3": inf}


@pytest.mark.parametrize(
    ("partition", "priority", "length_s"),
    [("gpu", 4, inf), ("gpu", 5, 60.0), ("gpu", 6, 60.0), ("other", 4, 60.0)],
)
def test_a_job_behind_the_run_in_the_same_queue_ends_no_hole(partition, priority, length_s):
    """Backfill plans it around a task that starts now; the run's own plans end none either."""
    jobs = [
        planned(("n1",), 30.0, "9", "gpu", 5),
        planned(("n1",), 60.0, "7", partition, priority),
    ]
    assert gap_ends(["n1"], jobs, ["9"]) == {"n1": NOW + length_s}


def test_the_first_tasks_get_the_longest_gaps(fitter):
    """In whole minutes, with time for the next pass of backfill; the others get the full limit."""
    gaps = {"n1": 630.0, "n2": inf, "n3": 1200.0, "n4": 269.0}
    limits = fitter.limits(list("abcd"), gaps)
    assert minutes(limits) == {"a": 60, "b": 19, "c": 10, "d": 60}, "n4 is too short"


def test_a_hole_that_shrinks_is_followed(fitter):
    """A task that has not started gets less, and nothing once the rest is too short."""
    assert minutes(fitter.limits(["a"], {"n1": 400.0})) == {"a": 6}
    assert minutes(fitter.limits(["a"], {"n1": 340.0})) == {"a": 5}
    assert minutes(fitter.limits(["a"], {"n1": 240.0})) == {"a": 60}


def test_a_node_that_remains_idle_is_tried_with_shorter_limits(fitter):
    """Down the ladder to the least limit, and then with the longest one again."""
    tried = [fitter.limits(["a"], {"n1": inf})["a"] / 60 for _ in range(60)]
    assert list(dict.fromkeys(tried)) == [60, 56, 34, 22, 14, 8, 6, 4]
    assert tried.count(60) > tried.count(4), "it begins again"
    assert minutes(fitter.limits(["a"], {"n2": inf})) == {"a": 60}, "another node is another gap"


@pytest.mark.parametrize(("pass_s", "limit", "checks"), [(10, 10, 2), (30, 10, 4), (120, 8, 16)])
def test_a_pass_of_backfill_is_as_long_as_the_site_says(pass_s, limit, checks):
    """A gap ends sooner by a pass; a shorter limit is tried after two."""
    fitter = LimitFitter(FULL_S, 240.0, pass_s)
    tried = [fitter.limits(["a"], {"n1": 630.0})["a"] / 60 for _ in range(checks + 1)]
    assert tried[:-1] == [limit] * checks and tried[-1] < limit


def test_nobody_watches_tasks_of_a_run_that_has_no_node(fitter):
    """One of them fits into any gap; those that fit into one already are not touched."""
    limits = minutes(fitter.limits(list("abcdefghi"), {"n1": inf}, is_watched=False))
    assert list(limits.values()) == [60, 60, 56, 34, 22, 14, 8, 6, 4]
    assert minutes(fitter.limits(["a", "b"], {}, is_watched=False)) == {"a": 22, "b": 4}
    tasks = [f"7_{i}" for i in range(30)]
    limits = minutes(fitter.limits(tasks, {}, is_watched=False))
    assert {limits[t] for t in tasks[20:]} == {60}, "Slurm keeps a record of each"
    assert set(minutes(fitter.limits(tasks, {})).values()) == {60}, "with a leader all are full"


class Queue:
    """A client with a running and two waiting tasks; records the limits that are set."""

    def __init__(self, idle: str = "planned") -> None:
        self.idle = idle
        self.set: dict[str, float] = {}
        self.asked: list[str] = []

    def tasks(self, jobs):
        """The first has started."""
        states = ["RUNNING", "PENDING", "PENDING"]
        tasks = (TaskState(f"7_{i}", s, time_left_s=FULL_S) for i, s in enumerate(states))
        return {task.task: task for task in tasks}

    def config(self):
        """Backfill each 90 seconds."""
        self.asked.append("config")
        return {"SchedulerParameters": "bf_max_job_test=100,bf_interval=90"}

    def each_node(self, partition):
        """One is idle, and two are busy."""
        self.asked.append("each_node")
        return {"n1": self.idle, "n2": "allocated", "n3": "mixed", "n4": "drained"}

    def queue(self, *, only_waiting):
        """The node is needed in eleven minutes."""
        assert only_waiting
        self.asked.append("queue")
        return [planned(("n1",), 660.0), planned(("n2",), 1500.0), planned(("n4",), 3000.0)]

    def set_time_limit(self, tasks, limit_s):
        """Record it."""
        self.set |= dict.fromkeys(tasks, limit_s / 60)


@pytest.mark.parametrize(
    ("is_ladder", "idle"), [(False, "planned"), (False, "idle~"), (True, "planned")]
)
def test_a_ladder_does_not_look_at_other_jobs(monkeypatch, is_ladder, idle):
    """Its limits are spread over the lengths, although a leader watches; else a gap is filled."""
    monkeypatch.setattr(time_slots, "jobs_of", lambda spec: ["7"])
    monkeypatch.setattr(time_slots.time, "time", lambda: NOW)
    monkeypatch.setattr(time_slots, "current_names", lambda spec: ["7_0", "7_1", "7_2"])
    queue = Queue(idle)
    spec = spec_of(
        "r", 1, 3, 1, 0, Entry("m", "f"), "/s", [(0, 0), (0, 1), (0, 2)],
        time="60", time_min="4", harvest="ladder" if is_ladder else "off",
    )  # fmt: skip
    slots = TimeSlots([(spec, spec.pools[0])], None, queue, leads=True)
    assert slots.fit() and slots.fit()
    assert queue.set == ({"7_1": 22, "7_2": 4} if is_ladder else {"7_1": 9})
    check = ["each_node", "queue"]
    assert queue.asked == ([] if is_ladder else ["config", *check, *check])


def test_a_task_that_was_moved_fills_the_holes_of_the_partition_where_it_waits(monkeypatch):
    """By `scontrol update` or a plugin of the site: neither the setting nor the environment."""
    monkeypatch.setattr(time_slots, "jobs_of", lambda spec: ["7"])
    monkeypatch.setattr(time_slots, "current_names", lambda spec: ["7_0", "7_1", "7_2"])
    queue, looked_at = Queue(), []
    monkeypatch.setattr(queue, "each_node", lambda name: looked_at.append(name) or {"n1": "idle"})
    moved = [planned((), None, "7", "new"), planned((), None, "8", "low")]
    monkeypatch.setattr(queue, "queue", lambda **_: moved)
    spec = spec_of(
        "r", 1, 3, 1, 0, Entry("m", "f"), "/s", [(0, 0), (0, 1), (0, 2)],
        time="60", time_min="4", partition="low",
    )  # fmt: skip
    slots = TimeSlots([(spec, spec.pools[0])], "other", queue, leads=True)
    assert slots.fit() and slots.fit()
    assert looked_at == ["low", "new"]


def test_the_next_tasks_fit_where_a_job_may_end_early(fitter):
    """With limits of the ladder, since each change is a command; the others have the full one."""
    limits = fitter.limits(list("abcde"), {"n1": 630.0}, [1500.0, 100.0, 700.0, inf])
    assert minutes(limits) == {"a": 10, "b": 60, "c": 22, "d": 8, "e": 60}
    assert minutes(fitter.limits(["a"], {}, [1500.0])) == {"a": 22}
    assert minutes(fitter.limits(["a"], {}, [265.0])) == {"a": 60}, "too short for the least limit"


def test_plans_are_listed_once_a_pass_while_no_node_is_idle(monkeypatch):
    """Between two lists the gaps of busy nodes become shorter."""
    monkeypatch.setattr(time_slots, "jobs_of", lambda spec: ["7"])
    monkeypatch.setattr(time_slots, "current_names", lambda spec: ["7_0", "7_1", "7_2"])
    times = {"time": NOW, "monotonic": 5000.0}
    for name in times:
        monkeypatch.setattr(time_slots.time, name, lambda name=name: times[name])
    queue = Queue()
    queue.each_node = lambda partition: {"n1": "allocated", "n3": "allocated"}
    spec = spec_of(
        "r", 1, 3, 1, 0, Entry("m", "f"), "/s", [(0, 0), (0, 1), (0, 2)],
        time="60", time_min="4",
    )  # fmt: skip
    slots = TimeSlots([(spec, spec.pools[0])], None, queue, leads=True)
    seen = []
    for passed_s in (0.0, 45.0, 100.0):
        times |= {"time": NOW + passed_s, "monotonic": 5000.0 + passed_s}
        assert slots.fit()
        seen.append((queue.asked.count("queue"), queue.set.get("7_2")))
    assert seen == [(1, 8), (1, 8), (2, 6)]


def test_the_least_limit_may_be_all_there_is():
    """time_min = time: the limit never changes."""
    assert LimitFitter(600.0, 600.0).limits(["a"], {"n1": 650.0}, is_watched=False) == {"a": 600}
    assert list(LADDER_S) == sorted(LADDER_S, reverse=True)
