"""What a run of weeks costs its readers: in proportion to its length, and no more."""

import json

import pytest
from long_history import growths, long_history, points_of, work_of

from hpc_elastic.report import charts
from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.node_time import account
from hpc_elastic.report.report import About, report
from hpc_elastic.report.timeline import build_timeline


def report_of(num_rounds: int, num_nodes: int, *, replicas: bool = False):
    """The report of a long run."""
    events = list(long_history(num_rounds, num_nodes, replicas=replicas))
    points, until = list(points_of(num_rounds, num_nodes)), events[-1]["time"] + 60.0
    history = EventIndex(events, points)
    return report(
        About("run-1", "/runs/1", until=until, phase="training"),
        account(history, points, now=until), points, build_timeline(history), made=until,
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [False, True])
def test_twice_the_rounds_are_twice_the_work(replicas):
    """For the index, the timeline, the account and the report together."""
    grown = growths(
        lambda rounds: work_of(lambda: report_of(rounds, 4, replicas=replicas)), 150, 300, 600
    )
    assert max(grown) < 2.1


@pytest.mark.parametrize("replicas", [False, True])
def test_twice_the_nodes_are_twice_the_work(replicas):
    """Whatever is read of each node of a round is read once."""
    grown = growths(
        lambda nodes: work_of(lambda: report_of(20, nodes, replicas=replicas)), 32, 64, 128
    )
    assert max(grown) < 2.1


def test_an_event_costs_its_readers_a_few_lines():
    """A run of a month has 120,000, most of them of a kind that the timeline does not show."""
    events = list(long_history(100, 16))
    assert work_of(lambda: build_timeline(EventIndex(events))) < 38 * len(events)


@pytest.mark.parametrize("replicas", [False, True])
def test_a_chart_of_many_faults_is_as_large_as_one_of_few(replicas):
    """Faults of one column are one rule, which names their number."""
    made = report_of(1200, 4, replicas=replicas).to_json()
    assert sum(change["fault"] for change in made["changes"]) > 700
    (step,) = [chart.spec for chart in charts.charts(made) if chart.name == "step"]
    rules = next(x for x in step["layer"] if x["mark"]["type"] == "rule")["data"]["values"]
    assert len(rules) <= 200 and any("more" in rule["what"] for rule in rules)
    assert len(json.dumps(step)) < 400_000
