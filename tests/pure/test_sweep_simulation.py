"""Runs of one sweep on a few nodes: how long nodes are held without a step, or are left idle."""

from pathlib import Path

import pytest

from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.launcher.plan import RunRequest, make_plan
from hpc_elastic.run.directory import Entry
from hpc_elastic.site.value import StepTimeModel
from simulation.sweep import Figures, Scaling, SweepSimulation

AIM_S = 20.0


def order(nodes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the tasks of a sweep as they stand in the queue."""
    settings = (RunSettings(NodeRange(low, high), 1, SlurmSettings()) for low, high in nodes)
    runs = [
        RunRequest(Path(f"/sweep/{n}"), s, Entry("function", "f", "f.py"))
        for n, s in enumerate(settings)
    ]
    (array,) = make_plan(runs, Path("/sweep/.hpc_elastic"), max_array_size=1001).arrays
    return [(task.run, task.slot) for task in array.tasks]


def one_each_first(nodes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the tasks with the first node of every run in front."""
    most = max(high for _, high in nodes)
    return [
        (run, slot) for slot in range(most) for run, (_, high) in enumerate(nodes) if slot < high
    ]


def simulated(nodes: list[tuple[int, int]], *, seed: int = 0, **changes) -> Figures:
    """Run a sweep on four nodes."""
    arguments = {"order": order(nodes), "num_nodes": 4, **changes}
    return SweepSimulation(nodes, seed=seed, **arguments).run()


SWEEPS = {
    "2:3 x 4": [(2, 3)] * 4,
    "2:3 x 3": [(2, 3)] * 3,
    "2:3 x 5": [(2, 3)] * 5,
    "3 x 4": [(3, 3)] * 4,
    "3:4 x 4": [(3, 4)] * 4,
    "mixed": [(3, 3), (2, 2), (1, 2), (4, 4), (2, 4)],
    "2 x 20": [(2, 2)] * 20,
    "3 x 12": [(3, 3)] * 12,
}


@pytest.mark.parametrize("nodes", SWEEPS.values(), ids=SWEEPS)
@pytest.mark.parametrize("seed", range(10))
def test_no_node_is_held_in_vain_or_left_idle(nodes, seed):
    """The two aims of a sweep: twenty seconds at most, each; the tasks start and end rarely."""
    figures = simulated(nodes, seed=seed)
    assert figures.held_s <= AIM_S and figures.idle_s <= AIM_S
    assert figures.took_s < 7200.0


@pytest.mark.parametrize("seed", range(10))
def test_tasks_in_any_order_come_to_their_turns(seed):
    """Where every run has one node at first, as Slurm may give them, later runs give way."""
    nodes = [(2, 3)] * 4
    figures = simulated(nodes, seed=seed, order=one_each_first(nodes))
    assert figures.held_s <= AIM_S and figures.idle_s <= AIM_S


def test_without_turns_nodes_are_held_for_minutes():
    """The simulation sees the fault: every run has one node, and waits for below_min_timeout_s."""
    nodes = [(2, 3)] * 4
    figures = simulated(nodes, order=one_each_first(nodes), takes_turns=False)
    assert figures.held_s > 300.0


def test_the_order_alone_leaves_a_node_held_where_the_minimum_does_not_divide_the_cluster():
    """Three of four nodes: without turns, the next run holds the fourth for minutes."""
    assert simulated([(3, 3)] * 4, takes_turns=False, work_s=400.0).held_s > 300.0


@pytest.mark.parametrize("name", ["3 x 4", "3:4 x 4", "3 x 12", "mixed"])
def test_less_than_two_percent_of_the_held_node_time_is_without_a_step(name):
    """The minima together exceed the cluster; each run trains for ten minutes."""
    assert simulated(SWEEPS[name], work_s=600.0).share_in_vain < 0.02


@pytest.mark.parametrize("every_s", [0.0, 37.0, 250.0])
@pytest.mark.parametrize("nodes", [[(3, 3)] * 3, SWEEPS["mixed"]], ids=["3 x 3", "mixed"])
def test_independent_runs_of_a_user_hold_few_nodes_in_vain(nodes, every_s):
    """Each in an array of its own; they find each other within a minute, at whatever times."""
    arrays = {
        "order": [(run, slot) for run, (_, high) in enumerate(nodes) for slot in range(high)],
        "submitted": [run * every_s for run in range(len(nodes))],
        "discovery_s": 60.0,
    }
    figures = simulated(nodes, work_s=900.0, **arrays)
    assert figures.share_in_vain < 0.05 and figures.held_s <= AIM_S
    alone = simulated(nodes, work_s=900.0, takes_turns=False, **arrays)
    assert alone.share_in_vain > 0.05, "each run alone"


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_loses_its_minimum_gives_back_what_is_left(seed):
    """Its node dies while another run trains: it goes on once there are two nodes again."""
    figures = simulated([(2, 3)] * 2, seed=seed, work_s=200.0, lost=[(50.0, "node4")])
    assert figures.held_s <= AIM_S and figures.idle_s <= AIM_S
    assert figures.took_s < 600.0


@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_other_users_leave_are_seen(seed):
    """A run that gave way to what cannot be had starts when other jobs have left the nodes."""
    foreign = [(0.0, 150.0, 2)]
    figures = simulated([(2, 2)] * 3, seed=seed, work_s=400.0, foreign=foreign)
    assert figures.idle_s <= AIM_S and figures.took_s < 1000.0


@pytest.mark.parametrize("first", [0, 1])
def test_further_nodes_go_to_the_run_that_ends_first(first):
    """Two runs on a node each, and two more nodes after some minutes; one has little left to do."""
    model, work_s = StepTimeModel(0.02, 2.0, 0.0), [4000.0, 4000.0]
    work_s[first] = 1500.0
    pool = [(0.0, 2), (300.0, 3), (420.0, 4)]

    def means(soonest: bool) -> Figures:
        scaling = Scaling([(model, each) for each in work_s], pool, 5.0, soonest)
        return simulated([(1, 4)] * 2, scaling=scaling)

    equal, soonest = means(False), means(True)
    assert soonest.mean_s < 0.95 * equal.mean_s
    assert soonest.share_in_vain < 0.02


def test_a_run_that_waits_for_its_turn_does_not_wait_for_ever():
    """The longest of three runs on two nodes that come and go."""
    model = StepTimeModel(0.02, 2.0, 0.0)
    scaling = Scaling(
        [(model, work_s) for work_s in (600.0, 900.0, 3000.0)],
        [(120.0 * n, (2, 1)[n % 2]) for n in range(40)], 5.0, soonest=True,
    )  # fmt: skip
    figures = simulated([(1, 2)] * 3, scaling=scaling)
    assert figures.took_s < 4500.0
