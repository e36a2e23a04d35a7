"""The lines of progress.jsonl that a leader selects."""

from hpc_elastic.rendezvous.run_status import DENSE_S, SHORTEST_S, ProgressLog, spacing_s
from hpc_elastic.report.progress_log import Point


def status(step: int | None = None, **more) -> dict:
    """The content of status.json of a group that trains."""
    known = {"phase": "training", "round": 1, "term": 1, "nodes": 2, "world_size": 2}
    return {**known, "step": step, "samples": None, "members": ["not of interest"], **more}


def test_a_line_every_few_seconds():
    """However often the leader adds a status."""
    log = ProgressLog()
    lines = [line for t in range(60) for line in log.add_status(status(t), float(t), 0.0)]
    assert [line["time"] for line in lines] == list(range(0, 60, int(SHORTEST_S)))
    assert "members" not in lines[0]


def test_a_change_of_the_group_is_written_at_once_after_the_last_status_before_it():
    """No step between two lines is lost when a group is stopped."""
    log = ProgressLog()
    log.add_status(status(1), 100.0, 0.0)
    assert log.add_status(status(3), 101.0, 0.0) == []
    lines = log.add_status(status(None, phase="waiting", nodes=0), 102.0, 0.0)
    assert [(x["time"], x["step"], x["nodes"]) for x in lines] == [(101, 3, 2), (102, None, 0)]
    lines = log.add_status(status(None, round=2), 103.0, 0.0)
    assert [x["time"] for x in lines] == [103], "a written line is not written again"


def test_the_file_of_a_long_run_is_bounded():
    """The older the run, the further apart its lines."""
    assert spacing_s(0.0) == spacing_s(DENSE_S) == SHORTEST_S
    num, age_s = 0, 0.0
    while age_s < 365 * 86400:
        num, age_s = num + 1, age_s + spacing_s(age_s)
    assert num < 20_000


def test_the_rates_cover_the_last_half_minute():
    """Steps and samples per second; None before the second status."""
    log = ProgressLog()
    log.add_status(status(0, samples=0), 0.0, 0.0)
    assert log.rates == {"steps_per_s": None, "samples_per_s": None}
    for t in range(1, 100):
        step = t if t < 50 else 50 + 3 * (t - 50)
        log.add_status(status(step, samples=8 * t), float(t), 0.0)
    assert log.rates == {"steps_per_s": 3.0, "samples_per_s": 8.0}


def test_a_new_group_resets_the_rates():
    """A return to a checkpoint does as well."""
    log = ProgressLog()
    for t in range(10):
        log.add_status(status(t), float(t), 0.0)
    log.add_status(status(4), 10.0, 0.0)
    assert log.rates["steps_per_s"] is None
    log.add_status(status(5), 11.0, 0.0)
    assert log.rates["steps_per_s"] == 1.0
    log.add_status(status(6, round=2), 12.0, 0.0)
    assert log.rates["steps_per_s"] is None


def test_lines_are_points():
    """The report reads what the leader writes."""
    (line,) = ProgressLog().add_status(status(7, loss=0.5, blocked_s=1.0, checkpoint=5), 9.0, 0.0)
    assert Point.of(line, line["time"]) == Point(
        9.0, "training", 1, 2, 2, 7, None, None, 0.5, 1.0, 5
    )
