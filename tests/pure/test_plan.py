"""Which runs share an array, and in which order their nodes stand in the queue."""

from pathlib import Path

import pytest

from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher.plan import Plan, RunRequest, make_plan
from hpc_elastic.run.directory import Entry


def run(name: str, nodes: int, launcher=None, *, low: int = 1) -> RunRequest:
    """Return a run of up to so many nodes."""
    settings = RunSettings(NodeRange(low, nodes), 1, launcher or SlurmSettings())
    return RunRequest(Path("/sweep", name), settings, Entry("function", "f", "f.py"))


def plan(*runs: RunRequest, size: int = 1001, first: int = 0) -> Plan:
    """Return the plan for these runs."""
    return make_plan(runs, Path("/sweep/.hpc_elastic"), max_array_size=size, first_array=first)


def order(planned: Plan, array: int = 0) -> list[tuple[int, int]]:
    """Return (run, slot) of an array's tasks, by index."""
    return [(task.run, task.slot) for task in planned.arrays[array].tasks]


def test_breadth_first_gives_every_run_a_first_node_first():
    """With a minimum of one, no run has two nodes in the queue before each has one."""
    assert order(plan(run("a", 3), run("b", 1), run("c", 2))) == [
        *[(0, 0), (1, 0), (2, 0)],
        *[(0, 1), (2, 1)],
        (0, 2),
    ]


def test_breadth_first_queues_the_minimum_of_one_run_after_the_other():
    """With fewer nodes than runs, the first runs can begin: no run holds a node for nothing."""
    assert order(plan(run("a", 3, low=2), run("b", 2, low=2), run("c", 4, low=1))) == [
        *[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)],
        *[(0, 2), (2, 1)],
        *[(2, 2), (2, 3)],
    ]


def test_depth_first_queues_one_run_after_the_other():
    """With queue_order=depth_first all nodes of a run stand before those of the next."""
    by_nodes = SlurmSettings(queue_order="depth_first")
    planned = plan(run("a", 2, by_nodes), run("b", 2, by_nodes))
    assert order(planned) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_runs_with_different_resources_get_arrays_of_their_own():
    """A partition is a property of the whole array, so runs that differ in it are kept apart."""
    gpu = SlurmSettings(partition="gpu")
    planned = plan(run("a", 1, gpu), run("b", 1), run("c", 1, gpu))
    assert [order(planned, k) for k in (0, 1)] == [[(0, 0), (2, 0)], [(1, 0)]]
    assert [array.launcher.partition for array in planned.arrays] == ["gpu", None]


def test_runs_that_differ_in_what_slurm_does_not_see_share_an_array():
    """max_restarts, env and the like are read by the agents, not by sbatch."""
    planned = plan(run("a", 1, SlurmSettings(max_restarts=0)), run("b", 1))
    assert len(planned.arrays) == 1


def test_an_array_has_at_most_max_array_size_tasks():
    """The highest index is MaxArraySize - 1; a run may lie across two arrays."""
    planned = plan(run("a", 3), run("b", 2), size=2)
    assert [order(planned, k) for k in range(3)] == [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2)]]
    assert planned.tasks == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1)]]


def test_a_second_batch_goes_on_counting_arrays():
    """A sweeper that submits in batches must not overwrite the arrays of the first."""
    assert [array.number for array in plan(run("a", 3), size=2, first=4).arrays] == [4, 5]


def test_array_file_names_run_and_slot_by_index():
    """array-<k>.json is what a task finds its run by."""
    planned = plan(run("a", 1), run("b", 2))
    assert planned.array_file(planned.arrays[0]) == {
        "runs": [
            {"dir": "/sweep/a", "slot": 0},
            {"dir": "/sweep/b", "slot": 0},
            {"dir": "/sweep/b", "slot": 1},
        ]
    }


COALLOCATED = SlurmSettings(coallocate_min=True)


def laid_out(planned: Plan) -> list[tuple[int, bool, int | None, list[tuple[int, int]]]]:
    """Return (number, coallocated, after, tasks) of all arrays."""
    return [
        (array.number, array.coallocated, array.after, order(planned, at))
        for at, array in enumerate(planned.arrays)
    ]


def test_min_nodes_are_one_job_and_an_array_for_the_other_nodes():
    """The array waits until the job has started: below min nodes nothing is held."""
    planned = plan(run("a", 5, COALLOCATED, low=3), first=4)
    assert laid_out(planned) == [
        (4, True, None, [(0, 0), (0, 1), (0, 2)]),
        (5, False, 4, [(0, 3), (0, 4)]),
    ]
    assert planned.tasks == [[(4, 0), (4, 1), (4, 2), (5, 0), (5, 1)]]
    assert planned.array_file(planned.arrays[0])["coallocated"] is True
    assert "coallocated" not in planned.array_file(planned.arrays[1])
    assert str(planned).splitlines() == [
        "1 run, 5 tasks, 1 co-allocated job, 1 array",
        "  array 4: 3 nodes, co-allocated",
        "  array 5: 2 tasks of 1 run, once array 4 has started",
    ]


def test_a_job_of_all_nodes_has_no_array():
    """min == max leaves nothing for one."""
    assert laid_out(plan(run("a", 2, COALLOCATED, low=2))) == [(0, True, None, [(0, 0), (0, 1)])]


def test_breadth_first_every_coallocated_job_stands_before_any_further_node():
    """And runs without one keep their shared array."""
    planned = plan(run("a", 2, COALLOCATED), run("b", 3), run("c", 2, COALLOCATED), run("d", 1))
    assert laid_out(planned) == [
        (0, True, None, [(0, 0)]),
        (1, True, None, [(2, 0)]),
        (2, False, 0, [(0, 1)]),
        (3, False, 1, [(2, 1)]),
        (4, False, None, [(1, 0), (3, 0), (1, 1), (1, 2)]),
    ]


def test_depth_first_a_job_and_its_array_stand_together():
    """All nodes of a run are queued before those of the next."""
    by_nodes = SlurmSettings(coallocate_min=True, queue_order="depth_first")
    planned = plan(run("a", 2, by_nodes), run("b", 2, by_nodes))
    assert [(coallocated, after) for _, coallocated, after, _ in laid_out(planned)] == [
        *[(True, None), (False, 0)],
        *[(True, None), (False, 2)],
    ]


def test_the_array_beside_a_job_is_split_at_max_array_size_as_well():
    """Both parts wait for the job, which has no index set and is never split."""
    planned = plan(run("a", 6, COALLOCATED, low=3), size=2)
    assert [(after, len(tasks)) for _, _, after, tasks in laid_out(planned)] == [
        *[(None, 3), (0, 2), (0, 1)]
    ]


def test_settings_of_the_whole_submission_may_not_differ():
    """A sweep over launcher.wait is refused, naming the key and both values."""
    with pytest.raises(ConfigError, match=r"launcher\.wait=\[True, False\]"):
        plan(run("a", 1), run("b", 1, SlurmSettings(wait=False)))


def test_a_sweep_has_one_launcher():
    """launcher=slurm,local can not be waited for as one submission."""
    with pytest.raises(ConfigError, match="one launcher"):
        plan(run("a", 1), run("b", 1, LocalSettings()))


def test_a_plan_can_be_printed():
    """str() tells how much will be queued."""
    assert str(plan(run("a", 2), run("b", 2))).splitlines() == [
        "2 runs, 4 tasks, 1 array",
        "  array 0: 4 tasks of 2 runs",
    ]
