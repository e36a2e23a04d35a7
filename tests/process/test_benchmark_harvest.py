"""The benchmark of holes: the log that it makes, the slots, the peers' models, and its driver."""

import itertools
import random
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harvest import holes, picture
from harvest.account import Account
from harvest.holes import Holes
from harvest.ours import Costs, ElasticRun, Script, rules
from harvest.peers import Chain, Restarts
from harvest.slots import SHAPES, Slot, fill, slot_length

pytestmark = pytest.mark.long

HOUR = 3600.0
DAY_LIMIT = 24 * HOUR


def holes_of(*spans: tuple[float, float]) -> Holes:
    """Return idle spans from begins and ends."""
    starts, ends = zip(*sorted(spans), strict=True)
    return Holes(np.array(starts, float), np.array(ends, float))


def preempted(task: int, begin_s: float, end_s: float) -> Slot:
    """Return a slot that another job ends."""
    return Slot(task, begin_s, end_s, DAY_LIMIT)


# ---- the log


def test_made_log_has_the_figures_of_the_real_one():
    """Lengths and group sizes are close; the same seed makes the same log."""
    made = holes.make()
    of, real = holes.figures(made), holes.REAL
    for name in ("median_min", "mean_min", "p90_min", "p99_min", "short_time"):
        assert getattr(of, name) == pytest.approx(getattr(real, name), rel=0.2), name
    assert of.group_begin == real.group_begin
    low, _, high = of.idle_quartiles
    assert high > 4 * low  # quiet hours and others
    assert np.array_equal(made.end_s, holes.make().end_s)


def test_log_begins_again_at_its_end():
    """A time that goes beyond the end contains the spans of the beginning."""
    log = holes_of((0, 600), (5000, 3 * HOUR))
    ahead = log.from_hour(2.0, 2 * HOUR)
    assert ahead.start_s.tolist() == [0.0, HOUR]
    assert ahead.end_s.tolist() == [HOUR, HOUR + 600]


# ---- slots


@pytest.mark.parametrize(
    ("shape", "left_s", "length_s"),
    [
        ("qos", 599, 599), ("ladder", 599, 480), ("ladder", 100, None), ("qos", 59, None),
        ("ladder", 3 * HOUR, 5400),
    ],
)  # fmt: skip
def test_slot_fits_into_what_is_left(shape, left_s, length_s):
    """Each shape takes its part of a hole."""
    assert slot_length(left_s, shape) == length_s


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_share_neither_node_nor_task(shape):
    """At no time more tasks run than nodes are idle, and a task has one node at a time."""
    log = holes.make(hours=6.0)
    slots = fill(log, 20, shape, random.Random(1))
    by_task = defaultdict(list)
    for slot in slots:
        by_task[slot.task].append(slot)
    assert len(by_task) == 20
    for own in by_task.values():
        assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(own))
    times = np.arange(0.0, 6 * HOUR, 10.0) + 5.0
    taken = np.array([sum(s.begin_s <= t < s.end_s for s in slots) for t in times])
    assert (taken <= log.idle_at(times)).all()


def test_fitted_limits_fill_holes_of_any_length():
    """Slots end within two minutes before their holes, with a limit of their own."""
    log = holes_of((0, 1000), (0, 5000), (0, 100))
    slots = fill(log, 2, "time_min", random.Random(1))
    assert sorted(slot.end_s for slot in slots[:2]) == [960.0, 4920.0]
    assert not any(slot.is_preempted for slot in slots)


# ---- peers


def test_restart_stops_all():
    """A join stops all for its time, and the last pause counts; a loss as well."""
    peer = Restarts("peer", loss_s=20.0, join_s=10.0, start_s=5.0)
    slots = [preempted(0, 0.0, 1000.0), preempted(1, 100.0, 500.0)]
    account = peer.run(slots, 1000.0)
    alone, both, after = 105 - 15, 500 - 115, 1000 - 520
    assert account.trained_s == alone + 2 * both + after


def test_restart_loses_steps_and_reads_the_state():
    """Each span of training is shorter by the restore, and by what was not saved."""
    peer = Restarts("peer", 20.0, 10.0, 5.0, lost_s=30.0)
    account = peer.run([preempted(0, 0.0, 1000.0)], 1000.0, restore_s=20.0)
    assert account.trained_s == 1000 - 5 - 10 - 20 - 30


def test_chain_waits_for_all_its_nodes():
    """A job begins when its nodes are idle for its whole length, and no sooner."""
    log = holes_of((0, 9000), (500, 3000), (1000, 4650), (5000, 9000))
    account = Chain(2, HOUR, start_s=10.0).run(log, jobs=5)
    jobs = [(span.begin_s, span.end_s) for span in account.spans]
    assert jobs == [(1030.0, 4620.0), (5020.0, 8610.0)]


# ---- the account


def test_work_is_done_within_a_span():
    """The end is interpolated; None if it is not reached."""
    account = Account()
    account.add(0.0, 100.0, 2, 200.0)
    account.add(150.0, 250.0, 1, 50.0)
    assert account.done_at(225.0) == 200.0
    assert account.done_at(251.0) is None


def test_stalls_at_the_same_time_count_once():
    """Two newcomers that heal together hold up the others for the longer time."""
    account = Account()
    account.change(4, 0.0)
    account.hold_up(10.0, 50.0)
    account.hold_up(10.0, 55.0)
    account.change(0, 100.0)
    assert account.trained_s == 4 * (100 - 15)


# ---- ours: the real leader


def ours(slots, until_s=HOUR, *, costs=None, script=None, **changes) -> Account:
    """Run slots of at most four nodes."""
    run = ElasticRun(slots, rules(4, **changes), costs or Costs(), script or Script(), seed=1)
    return run.run(until_s)


def test_newcomer_costs_one_short_pause():
    """Both nodes train but for the start of each, and one restart of both without a lost step."""
    account = ours([preempted(0, 0.0, 2 * HOUR), preempted(1, 600.0, 2 * HOUR)])
    held_s = HOUR + HOUR - 600
    assert held_s - 15 < account.trained_s < held_s - 2 * Costs.start_s
    assert account.num_rounds == 2


def test_node_that_is_preempted_leaves_at_a_checkpoint():
    """No step is lost, the node is left within seconds, and the others go on."""
    slots = [preempted(task, 0.0, 1800.0 if task else 2 * HOUR) for task in range(3)]
    account = ours(slots)
    assert account.trained_s > HOUR + 2 * 1800 - 3 * 10
    assert 0 < account.overtime_s < 2 * 5


def test_end_of_the_leader_is_no_end_of_the_run():
    """The next node claims the next term, and all go on from the agreed checkpoint."""
    slots = [preempted(task, 0.0, 2 * HOUR if task else 1800.0) for task in range(3)]
    account = ours(slots)
    assert account.trained_s > 2 * HOUR + 1800 - 3 * 10


@pytest.mark.parametrize("ft", [False, True])
def test_node_leaves_before_its_time_limit(ft):
    """It is gone when the limit ends, and seconds before at the earliest."""
    slots = [Slot(0, 0.0, DAY_LIMIT, DAY_LIMIT), Slot(1, 0.0, 600.0, 600.0)]
    account = ours(slots, ft=ft)
    assert account.overtime_s == 0.0
    earliest_s = 60 if ft else 3
    assert HOUR + 600 - earliest_s - 10 < account.trained_s < HOUR + 600


def test_restart_that_is_not_repaid_is_not_made():
    """A node whose slot is shorter than the restart that takes it in does not join."""
    costs = Costs(restore_s=100.0)
    slots = [Slot(0, 0.0, DAY_LIMIT, DAY_LIMIT), Slot(1, 0.0, 1000.0, 1000.0)]
    # the restart at 1,000 s is measured; the last one would cost more than it brings
    joins = [*slots, Slot(2, 2000.0, 2150.0, 150.0)]
    assert ours(joins, costs=costs).num_rounds == ours(slots, costs=costs).num_rounds


def test_script_that_polls_while_a_newcomer_waits_is_not_held_for_minutes():
    """A newcomer that comes while the state is read joins soon after the first step."""
    costs = Costs(restore_s=20.0)
    slots = [preempted(0, 0.0, 2 * HOUR), preempted(1, 10.0, 2 * HOUR)]
    account = ours(slots, costs=costs)
    assert account.trained_s > 2 * HOUR - 2 * 20 - 2 * 25 - 20


def test_replica_heals_beside_the_others():
    """With ft=true a newcomer misses the time of its healing, and the others a short stall."""
    costs = Costs(heal_s=60.0, heal_stall_s=3.0)
    slots = [preempted(0, 0.0, 2 * HOUR), preempted(1, 600.0, 2 * HOUR)]
    account = ours(slots, costs=costs, ft=True)
    expected = 2 * HOUR - 600 - 2 * Costs.start_s - 60 - 3
    assert account.trained_s == pytest.approx(expected, abs=3.0)


def test_picture_shows_idle_nodes_and_nodes_that_train():
    """The curves of both are drawn, and the nodes that train are no more than those."""
    log = holes_of((0, 2 * HOUR), (600, 2 * HOUR))
    account = ours([preempted(0, 0.0, 2 * HOUR), preempted(1, 600.0, 2 * HOUR)])
    drawn = picture.draw(log, account, 4, 1.0)
    assert drawn.startswith("<svg")
    assert drawn.count("<path") == 2
