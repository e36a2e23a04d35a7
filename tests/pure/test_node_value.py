"""The value of a further node: step times at sizes never measured, and who gets the next nodes."""

import math
import random

import pytest

from hpc_elastic.site.value import (
    NodeDemand,
    StepTimeModel,
    most_useful_nodes,
    share_nodes,
)


def ring(n: int) -> float:
    """Return the step of data-parallel training, whose gradients are summed in a ring."""
    return 0.02 + 1.6 / n + 0.09 * (1 - 1 / n) + 0.0004 * (n - 1)


def small(n: int) -> float:
    """Return the step of a small model: its time is mostly overhead, and latency grows."""
    return 0.05 + 0.1 / n + 0.003 * (n - 1)


def overlapped(n: int) -> float:
    """Return a step in which most of the communication is hidden behind the computation."""
    return max(0.9 / n, 0.11 * (1 - 1 / n)) + 0.03 + 0.1 / n


def stragglers(n: int) -> float:
    """Return a step that ends with the slowest of n nodes."""
    return 0.01 + 0.8 / n + 0.012 * math.log(n)


CURVES = [ring, small, overlapped, stragglers]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("seed", range(5))
def test_step_times_at_sizes_never_seen_are_predicted_within_ten_percent(curve, seed):
    """From four sizes, each measured with an error of one percent; up to the largest of them."""
    rng = random.Random(seed)
    measured = {n: curve(n) * rng.gauss(1.0, 0.01) for n in (1, 3, 8, 16)}
    model = StepTimeModel.fit(measured)
    assert model is not None
    unseen = [n for n in range(1, 17) if n not in measured]
    errors = [abs(model.step_s(n) / curve(n) - 1.0) for n in unseen]
    assert max(errors) < 0.10


@pytest.mark.parametrize("curve", CURVES)
def test_two_sizes_predict_those_between_them(curve):
    """What a run knows after it has grown once."""
    model = StepTimeModel.fit({2: curve(2), 6: curve(6)})
    assert model is not None
    assert max(abs(model.step_s(n) / curve(n) - 1.0) for n in (3, 4, 5)) < 0.10


def test_one_size_predicts_nothing():
    """How the time depends on the size is not known."""
    assert StepTimeModel.fit({}) is None and StepTimeModel.fit({4: 1.0}) is None


@pytest.mark.parametrize("times", [{1: 1.0, 2: 0.4}, {1: 1.0, 2: 1.5}, {2: 1.0, 3: 1.0, 4: 1.0}])
def test_no_term_is_negative(times):
    """Whatever was measured: better than linear, worse than nothing, or flat."""
    model = StepTimeModel.fit(times)
    assert model is not None
    assert min(model.fixed_s, model.divided_s, model.per_node_s) >= 0.0
    assert all(model.step_s(n) > 0.0 for n in range(1, 100))


def test_a_perfect_run_gains_a_whole_share_from_a_further_node():
    """And one whose step takes the same time on any number of nodes gains nothing."""
    assert StepTimeModel(0.0, 1.0, 0.0).gain(4) == pytest.approx(1.0)
    assert StepTimeModel(1.0, 0.0, 0.0).gain(4) == pytest.approx(0.0)
    assert StepTimeModel(1.0, 0.0, 0.1).gain(4) < 0.0


def test_the_most_useful_size_is_the_last_one_worth_its_nodes():
    """With a tenth that is not divided, 3 nodes are worth 80 %, 9 nodes 50 %."""
    model = StepTimeModel(0.1, 0.9, 0.0)
    sizes = [most_useful_nodes(model, least, range(1, 17)) for least in (0.0, 0.5, 0.65, 0.8, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16 and sizes[-1] == 1
    for size, least in zip(sizes[1:4], (0.5, 0.65, 0.8), strict=True):
        assert model.gain(size) < least <= model.gain(size - 1)
    assert most_useful_nodes(model, 0.5, range(4, 17, 4)) == 8


def demand(nodes: int, times=None, left=None, low: int = 1, **fields) -> NodeDemand:
    """Return a run of at most 16 nodes."""
    fields = {"max_nodes": 16, **fields}
    return NodeDemand(nodes, low, step_times=times or {}, steps_left=left, **fields)


def times(curve) -> dict[int, float]:
    """Return the step times of a run that has had three sizes."""
    return {n: curve(n) for n in (1, 4, 8)}


def test_the_next_nodes_go_where_they_add_most():
    """A large model gains more than a small one, which has as much left to do."""
    runs = [demand(4, times(small), 1000), demand(4, times(ring), int(1000 * small(1) / ring(1)))]
    assert share_nodes(runs, 3) == [0, 3]


def test_of_equal_runs_the_one_that_ends_first_gets_them():
    """All others wait for its nodes."""
    runs = [demand(2, times(ring), 900), demand(2, times(ring), 300), demand(2, times(ring), 600)]
    assert share_nodes(runs, 2) == [0, 2, 0]


def test_equal_runs_end_one_after_the_other():
    """The first one in order comes first."""
    runs = [demand(2, times(ring), 300) for _ in range(3)]
    given = share_nodes(runs, 2)
    assert given[0] == 2


def test_no_run_gets_less_than_its_minimum_or_more_than_its_maximum():
    """A run that waits starts with its minimum, or not at all; nodes come in units."""
    assert share_nodes([demand(0, low=4)], 3) == [0]
    assert share_nodes([demand(0, low=4)], 4) == [4]
    assert share_nodes([demand(15, times(ring), 5)], 4) == [1]
    assert share_nodes([demand(2, low=2, unit_nodes=2, max_nodes=6)], 3) == [2]


def test_a_run_that_was_never_measured_counts_as_one_like_the_others():
    """It does not come before all others because nothing is known of it."""
    known = [demand(2, times(ring), 100), demand(2, times(ring), 100)]
    assert share_nodes([*known, demand(2)], 2)[2] == 0
    assert share_nodes([demand(2, {2: ring(2)}, 50), *known], 1) == [1, 0, 0]
    assert sum(share_nodes([demand(1), demand(1)], 4)) == 4
