"""The progress of a run over time, and the pace that it shows."""

import json
import math
from dataclasses import asdict

import pytest

from hpc_elastic.report import progress_log
from hpc_elastic.report.progress_log import Point, Rates, rates, read_points


def steady(num: int, every_s: float = 5.0, per_s: float = 2.0, **more) -> list[Point]:
    """Points of a group of two that makes steps at one pace."""
    return [
        Point(i * every_s, round=1, nodes=2, step=int(i * every_s * per_s), **more)
        for i in range(num)
    ]


def test_lines_come_back_in_order_of_time(tmp_path):
    """Two leaders may write at once; a torn line, and fields of a later version, do no harm."""
    lines = [
        '{"time": 7, "step": 3, "new": 1}',
        '{"time": 5, "ste',
        "7",
        '{"time": 6, "loss": null}',
    ]
    (tmp_path / "progress.jsonl").write_text("\n".join(lines))
    points = read_points(tmp_path / "progress.jsonl")
    assert [(p.time, p.step, p.loss) for p in points] == [(6, None, None), (7, 3, None)]
    assert read_points(tmp_path / "none") == []


def test_what_a_leader_writes_is_what_is_read(tmp_path):
    """All fields that a point has."""
    point = Point(1.5, "waiting", 3, 2, 4, 7, 10, 70, 0.5, 1.0, 6, 2.0, 20.0, 0.8, 0.4, {"lr": 2})
    invalid = {**asdict(point), "time": 2, "metrics": {"a": "x", "b": math.nan, "lr": 1}}
    others = [{**invalid, "time": 3, "metrics": [1]}]
    lines = map(json.dumps, (asdict(point), invalid, *others))
    (tmp_path / "progress.jsonl").write_text("\n".join(lines))
    first, *rest = read_points(tmp_path / "progress.jsonl")
    assert first == point and [p.metrics for p in rest] == [{"lr": 1}, {}]


def test_a_steady_pace_and_when_it_is_done():
    """Steps, samples, and what is left of them."""
    points = steady(20, total_steps=290)
    points = [Point(**{**asdict(p), "samples": 32 * p.step}) for p in points]
    assert rates(points) == Rates(2.0, 64.0, pytest.approx(50.0))


@pytest.mark.parametrize("pause_s", [20, 60])
def test_a_pause_does_not_show(pause_s):
    """A long checkpoint among many steps; the mean would be a tenth or a third lower."""
    before = steady(20)
    after = [Point(p.time + 100 + pause_s, round=1, nodes=2, step=p.step + 200) for p in steady(20)]
    assert rates(before + after).steps_per_s == pytest.approx(2.0, rel=0.05)


def test_steps_that_take_longer_than_points_are_apart():
    """One step in seven seconds, looked at every five."""
    points = [Point(5.0 * i, round=1, nodes=2, step=int(5 * i / 7)) for i in range(30)]
    assert rates(points).steps_per_s == pytest.approx(1 / 7, rel=0.05)


def test_earlier_groups_and_earlier_hours_do_not_count():
    """The pace is that of the group as it is now, over the last minutes."""
    slow = [Point(p.time, round=1, nodes=1, step=p.step) for p in steady(10, per_s=1.0)]
    now = [Point(p.time + 100, round=2, nodes=2, step=p.step + 50) for p in steady(5, per_s=2.0)]
    assert rates(slow + now).steps_per_s == pytest.approx(2.0)
    hours = [Point(p.time, round=1, nodes=2, step=p.step) for p in steady(1000, per_s=1.0)]
    late = [
        Point(p.time + 5000, round=1, nodes=2, step=p.step + 5000) for p in steady(100, per_s=3.0)
    ]
    assert rates(hours + late).steps_per_s == pytest.approx(3.0)


def test_points_that_are_minutes_apart_do():
    """As in a run of weeks."""
    assert rates(steady(50, every_s=600.0)).steps_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("between", [[], [Point(101.0, round=2, nodes=2)]])
def test_what_a_leader_still_heard_of_the_group_before_does_not_count(between):
    """Its first look at a new group may show the step that the one before had come to."""
    stale = [Point(100.0, round=2, nodes=2, step=500)]
    now = [Point(p.time + 110, round=2, nodes=2, step=p.step + 480) for p in steady(5)]
    assert rates(stale + between + now).steps_per_s == pytest.approx(2.0)


def test_the_first_seconds_of_a_group_have_the_leaders_own_pace():
    """A single point tells nothing by itself."""
    assert rates([Point(1.0, step=5, steps_per_s=1.5, total_steps=8)]) == Rates(1.5, None, 2.0)


def test_a_group_that_does_not_train_has_no_pace():
    """Nor one that nobody knows of."""
    assert rates([*steady(10), Point(60.0, "waiting")]) == Rates() == rates([])


def test_of_too_many_points_the_newest_are_kept(tmp_path, monkeypatch):
    """A run may go on for years; what it did last is what its readers ask for."""
    monkeypatch.setattr(progress_log, "_MOST_POINTS", 3)  # a million are a minute
    lines = [json.dumps({"time": n, "step": n}) for n in range(10)]
    (tmp_path / "progress.jsonl").write_text("\n".join(lines))
    assert [point.step for point in read_points(tmp_path / "progress.jsonl")] == [7, 8, 9]
