"""The benchmark of fault tolerance: what its tables say follows from its samples."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from evidence.result import Figure, exponent
from ft.crew import Member, Step
from ft.overhead import lower_quartile
from ft.report import Row, cell
from ft.sharded import Outcome, rows
from ft.training import delays, has_gone_on, longest_gap, median_step

pytestmark = pytest.mark.long


def member(*ended, participants=2, failed=()):
    """A worker whose steps take half a second each."""
    made = Member("m", Path("log"))
    made.steps = [Step(t - 0.5, t, t not in failed, participants, i) for i, t in enumerate(ended)]
    return made


def test_delay_is_to_the_end_of_a_step_begun_after_the_fault():
    """A commit whose step had begun before does not count, nor does a failed step."""
    found = delays([member(10.0, 10.4, 11.0, 12.0, failed=(11.0,))], since=10.2)
    assert found == [pytest.approx(1.8)]
    assert has_gone_on([member(10.0, 12.0)], 10.2)
    assert not has_gone_on([member(10.0, 12.0), member(10.0)], 10.2)


def test_gaps_reach_to_both_ends():
    """A replica that has stopped committing has a gap until the end."""
    m = member(10.0, 11.0, 12.5, 20.0)
    assert longest_gap(m, 9.8, 13.0) == pytest.approx(1.5)
    assert longest_gap(m, 9.8, 19.0) == pytest.approx(6.5)
    assert median_step([m], 2) == pytest.approx(1.5)


def test_row_knows_whether_its_targets_are_met():
    """A limit and a share of the peer's are both aimed at; more may be better."""
    row = Row("", "", "s", [0.1, 0.2, 0.3], [0.5], limit=0.2, of_peer=0.5)
    assert [t.met for t in row.targets] == [True, True]
    row = Row("", "", "s", [0.3], [0.5], limit=0.4, of_peer=0.5)
    assert [t.met for t in row.targets] == [True, False]
    assert Row("", "", "GB/s", [4.0], limit=3.0, more_is_better=True).targets[0].met is True
    assert Row("", "", "s", [], [0.5], limit=0.2).targets[0].met is None
    assert Row("", "", "s", [1.0], [0.5]).ratio == 2.0


def test_nothing_is_compared_with_noise():
    """Where the peer's cost may be none at all, there is neither a verdict nor a ratio."""
    row = Row("", "", "ms", [-6.0, -5.0], [-2.0, 3.0, 4.0], of_peer=0.5)
    assert row.ratio is None
    [target] = row.targets
    assert target.met is None
    assert "noise" in target.verdict
    cheaper = Row("", "", "ms", [-6.0], [3.0, 4.0], of_peer=0.5)
    assert cheaper.ratio is None
    assert cheaper.targets[0].met is True


def test_what_never_came_about_is_counted():
    """It is no sample of the median."""
    assert cell([1.0, 2.0, 4.0]) == Figure(2.0, 1.0, 4.0, 3)
    assert cell([1.0, math.nan, 2.0]) == "1.5 (1 to 2), 1 of 3 never"
    assert cell([math.nan]) == "1 of 1 never"
    assert Row("", "", "s", [1.0, math.nan], [math.nan], of_peer=1.0).targets == []


def test_exponent_of_a_power():
    """The growth exponent of a power law is its power."""
    assert exponent({n: 3 * n**1.5 for n in (16, 64, 256)}) == pytest.approx(1.5)


def test_sharded_rows_count_every_sample():
    """One heal in which the bits differ misses the target, and so does one second failed step."""
    ours = [Outcome(True, 0, ""), Outcome(True, 2, ""), Outcome(False, 1, "")]
    lost = Outcome(False, 3, "the survivor ended: a reason")
    equal, failed = rows("fsdp, sync", {"ours": ours, "torchft": [lost, lost]})
    assert equal.ours == [pytest.approx(2 / 3)] and equal.peer == [0.0]
    assert equal.note == "ours 2 of 3; torchft 0 of 2: the survivor ended: a reason"
    assert failed.ours == [2.0] and math.isnan(failed.peer[0])
    assert [t.met for row in (equal, failed) for t in row.targets] == [False, False]
    equal, failed = rows("fsdp, sync", {"ours": ours[:1], "torchft": []})
    assert [t.met for row in (equal, failed) for t in row.targets] == [True, True]


def test_disturbed_steps_do_not_count():
    """What else runs on the machine only adds: a quarter of the steps is enough."""
    assert lower_quartile([9.0, 1.0, 8.0, 1.1, 7.0, 1.2, 6.0, 1.3]) == 1.2
    assert lower_quartile([3.0, 2.0]) == 2.0
