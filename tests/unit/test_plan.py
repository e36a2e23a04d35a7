"""Which runs share an array, and in which order their nodes stand in the queue."""

from pathlib import Path

import pytest

from hpc_elastic.config import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.submit.plan import Plan, PlannedRun, make_plan


def run(name: str, nodes: int, launcher=None) -> PlannedRun:
    """Return a run of up to so many nodes."""
    settings = RunSettings(NodeRange(1, nodes), 1, launcher or SlurmSettings())
    return PlannedRun(Path("/sweep", name), settings)


def plan(*runs: PlannedRun, size: int = 1001, first: int = 0) -> Plan:
    """Return the plan for these runs."""
    return make_plan(runs, Path("/sweep/.hpc_elastic"), max_array_size=size, first_array=first)


def order(planned: Plan, array: int = 0) -> list[tuple[int, int]]:
    """Return (run, slot) of an array's tasks, by index."""
    return [(task.run, task.slot) for task in planned.arrays[array].tasks]


def test_spread_runs_gives_every_run_a_first_node_first():
    """With spread=runs no run has two nodes in the queue before each has one."""
    assert order(plan(run("a", 3), run("b", 1), run("c", 2))) == [
        *[(0, 0), (1, 0), (2, 0)],
        *[(0, 1), (2, 1)],
        (0, 2),
    ]


def test_spread_nodes_queues_one_run_after_the_other():
    """With spread=nodes all nodes of a run stand before those of the next."""
    by_nodes = SlurmSettings(spread="nodes")
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
    assert planned.tasks() == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1)]]


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
