"""A run's report as values: costs, thinning, secrets, and what is said where little is known."""

import json
import math
import random
import re
import sys
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path

import pytest

from hpc_elastic._util import counted
from hpc_elastic.cli.main import main
from hpc_elastic.cli.report import render
from hpc_elastic.rendezvous.log_entry import Failure
from hpc_elastic.report import KINDS
from hpc_elastic.report import charts as charts_module
from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.charts import charts
from hpc_elastic.report.details import report_of
from hpc_elastic.report.node_time import account
from hpc_elastic.report.page import alike, by_cause, spec, tiles, unusual
from hpc_elastic.report.progress_log import Point
from hpc_elastic.report.report import (
    About,
    Report,
    WorkerFailure,
    changes,
    hints,
    report,
)
from hpc_elastic.report.run_view import read_view
from hpc_elastic.report.sentences import sentence
from hpc_elastic.report.timeline import build_timeline
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.run.events import LossReason
from hpc_elastic.run.redaction import redact, redact_argument
from made_events import (
    begun,
    event,
    gone,
    group,
    left,
    node,
    notice,
    stop,
    stopped,
    timeline,
    trains,
)
from specs import spec_of, started_run

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

from generate import OBJECTS, attributes, report_page

ROOT = Path(__file__).parents[2]
LOST = [
    *begun(0, 1), event(1.8, "joined", 0, host="node0"), event(1.9, "joined", 1, host="node1"),
    group(2.0, 1, 0, 1), trains(4.0, 0, 1, 0), trains(4.0, 1, 1, 0),
    gone(14.0, 1, LossReason.CONNECTION_CLOSED), stop(14.0, 1, "node_lost"),
    stopped(14.0, 0, 1, 20),
    group(15.0, 2, 0), trains(20.0, 0, 2, 10),
]  # fmt: skip
"""Two train from 4 on, one is lost at 14, the other goes on from step 10 at 20."""
POINTS = [
    Point(5.0, round=1, nodes=2, step=2, loss=3.0),
    Point(9.0, round=1, nodes=2, step=10, loss=2.0, checkpoint=10),
    Point(13.9, round=1, nodes=2, step=20, loss=1.0, checkpoint=10),
    Point(30.0, round=2, nodes=1, step=31, loss=math.nan, checkpoint=30),
]


def reported(events=LOST, points=POINTS, until: float = 30.0, **more) -> Report:
    """The report of a run that goes on."""
    spent = account(EventIndex(events), points, now=until)
    about = About("run-1", "/runs/1", until=until, phase="training")
    return report(about, spent, points, timeline(events), made=until, **more)


# ---- costs --------------------------------------------------------------------------------


def test_a_change_costs_what_is_not_useful_until_the_next_one():
    """The costs of all add up to what the goodput lacks but for checkpoints."""
    found = reported()
    (lost,) = found.changes
    assert (lost.fault, lost.cause, lost.hosts) == (True, "node_lost", ["node1"])
    assert (lost.lost_steps, lost.pause_s) == (10, 6.0)
    kinds = found.spent.by_kind
    assert kinds["replayed"] == pytest.approx(4.5), "steps 11 to 20, of 20 in ten seconds"
    assert found.first_node_s + lost.node_s == pytest.approx(
        found.spent.node_s - kinds["useful"] - kinds["checkpoint"]
    )
    assert found.first_node_s == pytest.approx(6.0), "two nodes for three seconds"
    assert [row["cause"] for row in by_cause([vars(lost)])] == ["node_lost"]


def test_the_page_says_what_went_back_for_jobs_of_others_and_what_it_cost():
    """A tile, where something did."""
    given = [
        event(13.0, "nodes_given_back", job="8", user="ada", needs=1, tasks=["7_1"],
              hosts=["node1"]),
        notice(13.1, 1, "asked"), stop(14.0, 1, "regroup", 20), left(14.1, 1, reason="asked"),
        stopped(14.0, 0, 1, 20), group(15.0, 2, 0), trains(17.0, 0, 2, 20),
    ]  # fmt: skip
    found = reported([*LOST[:-5], *given], POINTS[:2])
    assert (found.spent.given_back.jobs, found.spent.given_back.nodes) == (1, 1)
    (lost,) = found.changes
    assert found.spent.return_node_s == lost.node_s > 0.0
    tile = next(tile for tile in tiles(found.to_json()) if tile[0] == "Given back")
    assert "1 node, for 1 job; it cost" in tile[2]
    assert not [tile for tile in tiles(reported().to_json()) if tile[0] == "Given back"]


def test_nodes_that_come_are_no_fault():
    """They have a cost all the same."""
    grown = [
        *begun(0), event(1.8, "joined", 0, host="node0"), group(2.0, 1, 0), trains(4.0, 0, 1, 0),
        node(6.0, 1), event(7.0, "joined", 1, host="node1"),
        stop(10.0, 1, "regroup", 9), stopped(10.0, 0, 1, 9), group(11.0, 2, 0, 1),
        trains(13.0, 0, 2, 9), trains(13.0, 1, 2, 9),
    ]  # fmt: skip
    (change,) = reported(grown, []).changes
    assert (change.kind, change.fault, change.cause) == ("grew", False, "arrived")
    assert change.node_s == pytest.approx(2 * 3.0)


def test_the_loss_of_all_nodes_costs_until_they_train_again():
    """Its coming back is no change of its own, and the sums hold."""
    came_back = [
        *begun(0), event(1.8, "joined", 0, host="node0"), group(2.0, 1, 0), trains(4.0, 0, 1, 0),
        notice(14.0, 0), stop(15.0, 1, "regroup", 20), stopped(15.0, 0, 1, 20), left(16.0, 0),
        node(60.0, 0, 1), event(61.0, "leader", 0, term=2),
        event(62.0, "joined", 0, host="node0"), group(63.0, 2, 10, term=2),
        trains(70.0, 0, 2, 20, 1),
    ]  # fmt: skip
    found = reported(came_back, [], until=80.0)
    (change,) = found.changes
    assert (change.kind, change.fault, change.cause) == ("stopped", True, "preempted")
    assert (change.lost_steps, change.pause_s) == (0, 55.0)
    kinds = found.spent.by_kind
    assert found.first_node_s + change.node_s == pytest.approx(
        found.spent.node_s - kinds["useful"] - kinds["checkpoint"]
    )
    assert change.node_s >= 10.0 and "was preempted" in change.sentence


def test_a_node_that_left_outside_of_a_group_has_no_cost_of_its_own():
    """The others did not notice."""
    told = timeline([
        *LOST, node(22.0, 2),
        event(25.0, "preemption_notice", 2, reason="time_limit", left_s=3.0),
        event(26.0, "task_exited", 2, reason="time_limit", how="requeue"),
    ])  # fmt: skip
    _, found = changes(told, account(EventIndex(LOST), POINTS, now=30.0).nodes)
    kinds = [(c.kind, c.cause) for c in found]
    assert kinds == [("shrank", "node_lost"), ("task_exited", "time_limit")]
    assert found[1].node_s == 0.0 and found[1].fault


def test_replicas_that_live_on_lose_no_time():
    """A replica that dies costs its own time; the others train on."""
    tasks = ["7_0", "7_1"]
    lost = [
        *begun(0, 1), event(1.8, "joined", 0, host="node0"),
        event(1.9, "joined", 1, host="node1"),
        group(2.0, 1, 0, 1, placed=tasks), trains(4.0, 0, 1, 0), trains(4.0, 1, 1, 0),
        gone(14.0, 1, ""), event(14.0, "replica_left", 1, host="node1", nodes=1),
    ]  # fmt: skip
    spent = account(EventIndex(lost), [], now=24.0)
    found = report(About("r", "/r", ft=True), spent, [], timeline(lost), made=24.0)
    (fault,) = found.changes
    found_cost = (fault.kind, fault.cause, fault.node_s, fault.pause_s)
    assert found_cost == ("shrank", "node_lost", 0.0, None)
    assert found.spent.by_kind["useful"] == pytest.approx(20.0 + 10.0)


# ---- what is known ------------------------------------------------------------------------


def test_a_loss_that_is_none_is_null_and_is_said():
    """JSON knows no NaN, and neither does a browser."""
    found = reported()
    text = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(text)["progress"][-1]["loss"] is None
    assert "the loss was nan at step 31" in found.notes[0]
    assert [c["step"] for c in found.checkpoints.announced] == [10, 30]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([Point(5.0, round=1, nodes=2)], "no step is known"),
        ([Point(5.0, round=1, nodes=2, step=3)], "reports no loss"),
        ([], None),
    ],
)
def test_what_the_script_does_not_report_is_said(points, said):
    """And the charts of it are not there."""
    found = reported(points=points)
    assert (said in found.notes[0]) if said else not found.notes
    assert [chart.name for chart in charts(found.to_json())] == ["bar", "lanes", "group"]


def test_a_rank_that_is_slow_is_noted_until_it_keeps_up():
    """It stands at the top of the page."""
    slow = event(16.0, "straggler", 0, rank=1, host="node1", ratio=1.6, slow=True)
    again = {**slow, "time": 18.0, "slow": False}
    assert "rank 1 on node1 is slow" in reported([*LOST, slow]).notes[0]
    assert not any("rank 1" in note for note in reported([*LOST, slow, again]).notes)


def test_nothing_is_known_of_a_run_that_never_started():
    """There is nothing to draw, and no goodput."""
    found = reported([], [])
    assert (found.spent.node_s, found.spent.goodput, found.changes) == (0.0, None, [])
    assert charts(found.to_json()) == []
    assert "No task of this run has started" in json.dumps(spec(found.to_json()))


def test_keys_are_those_that_are_described():
    """Each class's docstring names its fields, and docs/reference/report.md lists them."""
    for title, made_of in OBJECTS:
        assert is_dataclass(made_of)
        assert [name for name, _ in attributes(made_of)] == [f.name for f in fields(made_of)], title
    assert (ROOT / "docs/reference/report.md").read_text() == report_page()
    assert all(f"`{kind}`" in report_page() for kind in KINDS)
    assert set(reported().to_json()) == {f.name for f in fields(Report)}


# ---- drawing ------------------------------------------------------------------------------


def test_short_stretches_are_drawn_as_what_fills_most_of_them():
    """And nothing is left out, nor moved."""
    kinds = [
        ("useful", 0, 50),
        ("import", 50, 50.4),
        ("replayed", 50.4, 51.2),
        ("useful", 51.2, 90),
    ]
    given = [{"begin": b, "end": e, "kind": kind} for kind, b, e in kinds]
    drawn = charts_module.thinned_stretches(given, 1.0)
    assert [(s["begin"], s["end"], s["kind"]) for s in drawn] == [
        (0, 50, "useful"), (50, 51.2, "replayed"), (51.2, 90, "useful"),
    ]  # fmt: skip
    assert charts_module.thinned_stretches(given, 0.1) == given
    assert charts_module.thinned_stretches(given, 500.0) == [
        {"begin": 0, "end": 90, "kind": "useful"}
    ]
    assert charts_module.thinned_stretches([], 1.0) == []


def test_a_thinned_line_keeps_its_spikes():
    """Its first and last points, and the highest and lowest of each column."""
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321], points[8765] = (4321.0, 9.0), (8765.0, -9.0)
    kept = charts_module.series(points, 50)
    assert len(kept) <= 200 and {points[0], points[-1], points[4321], points[8765]} <= set(kept)
    assert kept == sorted(kept) and charts_module.series(points[:10], 50) == points[:10]


def test_every_kind_has_a_colour_and_a_meaning():
    """In both themes, and no two have the same."""
    assert all(charts_module.SPENT_ON.values())
    for theme in charts_module.PAGE:
        assert set(charts_module.KIND[theme]) == set(charts_module.SPENT_ON)
        assert len(set(charts_module.KIND[theme].values())) == len(charts_module.SPENT_ON)


@pytest.mark.parametrize(
    ("part", "shown"), [(None, "–"), (0.0, "0.0 %"), (0.0001, "< 0.1 %"), (0.99999, "99.9 %")]
)
def test_a_share_is_never_rounded_to_all_or_nothing(part, shown):
    """What was lost is to be seen."""
    assert charts_module.share(part) == shown


def test_throughput_gpus_and_the_scripts_metrics_are_drawn():
    """Each over time; names that mean something to Vega or HTML are shown as they are."""
    names = ("lr", "time", "a.b[0]", "<b>")
    points = [
        replace(p, samples_per_s=9.0, gpu_use=0.5, gpu_memory=0.25, metrics=dict.fromkeys(names, 1))
        for p in POINTS
    ]
    found = reported(points=points)
    drawn = {chart.name: chart for chart in charts(found.to_json())}
    assert {"throughput", "gpus", *(f"metric-{n}" for n in range(4))} <= drawn.keys()
    assert [drawn[f"metric-{n}"].title for n in range(4)] == list(names)
    axis = drawn["throughput"].spec["layer"][1]["encoding"]["y"]
    assert (axis["field"], axis["title"]) == ("value", "samples/s")
    page = render(found, "html").decode()
    assert "full to 25.0 % at most" in page and "&lt;b&gt; over time" in page


def test_no_layer_of_the_steps_is_without_values():
    """Vega warns of a scale without values in the console of the browser: before a checkpoint."""
    values = reported(points=POINTS).to_json()
    for announced in ([], [{"time": 5.0, "step": 3}]):
        values["checkpoints"]["announced"] = announced
        (steps,) = (chart for chart in charts(values) if chart.name == "step")
        _faults, line, *marks = steps.spec["layer"]
        assert line["encoding"]["y"]["field"] == "step"
        assert [len(mark["data"]["values"]) for mark in marks] == [1] * len(announced)


def held(task: str, host: str, begin: float, end: float) -> dict:
    """An attempt of a task that had a node and trained all the time."""
    trained = [{"begin": begin, "end": end, "kind": "useful"}]
    return {"task": task, "attempt": 0, "host": host, "begin": begin, "end": end,
            "ended_by": None, "intervals": trained}  # fmt: skip


def test_each_node_has_a_line_with_its_name():
    """A task that waits is drawn at its last node; tasks that share a node are told apart."""
    values = reported([], []).to_json()
    values["nodes"] = [
        held("7_0", "node10", 1.0, 5.0), held("7_1", "node2", 1.0, 20.0),
        held("7_2", "both", 1.0, 20.0), held("7_3", "both", 2.0, 20.0),
        held("7_0", "node9", 8.0, 20.0), held("7_4", "node10", 6.0, 20.0),
    ]  # fmt: skip
    values["queue"] = [
        {"task": "7_0", "begin": 0.0, "end": 1.0}, {"task": "7_0", "begin": 5.0, "end": 8.0},
        {"task": "7_5", "begin": 0.0, "end": 20.0},
    ]  # fmt: skip
    (lanes,) = (chart for chart in charts(values) if chart.name == "lanes")
    bars, _ends = lanes.spec["layer"]
    names = ["both task 7_2", "both task 7_3", "node2", "node9", "node10", "task 7_5"]
    assert bars["encoding"]["y"]["scale"]["domain"] == names
    waits = [row for row in bars["data"]["table"]["rows"] if row[2] == "queue"]
    assert [row[:2] for row in waits] == [
        ["node10", "7_0"], ["node10", "7_0"], ["task 7_5", "7_5"],
    ]  # fmt: skip
    assert ["node9", "7_0", "useful", 8.0, 20.0] in bars["data"]["table"]["rows"]


def drawn_line(name: str, points: list[Point]) -> list[list]:
    """The points of a line as it is drawn."""
    (chart,) = (c for c in charts(reported(points=points).to_json()) if c.name == name)
    return chart.spec["layer"][1]["data"]["table"]["rows"]


def test_a_line_shows_where_nothing_was_trained():
    """The steps fall at the moment when the run resumed; throughput and loss have a gap."""
    points = [
        *(replace(p, samples_per_s=9.0) for p in POINTS[:3]), Point(14.5, "waiting", round=1),
        Point(16.0, round=2), Point(21.0, round=2, step=11, loss=1.5, samples_per_s=4.0),
        Point(25.0, round=2, step=15, loss=1.4, samples_per_s=4.0),
    ]  # fmt: skip
    assert drawn_line("step", points) == [
        [4.0, 2], [8.0, 10], [12.9, 20], [20.0, 20], [20.0, 11], [24.0, 15],
    ]  # fmt: skip
    assert drawn_line("loss", points)[2:5] == [[12.9, 1.0], [15.0, None], [20.0, 1.5]]
    assert drawn_line("throughput", points)[2:5] == [[12.9, 9.0], [15.0, None], [20.0, 4.0]]
    (chart,) = (c for c in charts(reported(points=points).to_json()) if c.name == "throughput")
    assert chart.spec["layer"][1]["encoding"]["y"]["scale"] == {"zero": True}


# ---- what is unknown, alike or usual ------------------------------------------------------


def shown(report: Report) -> dict[str, tuple[str, str]]:
    """The figures at the top of a page: title -> value and remark."""
    return {name: more for name, *more in tiles(report.to_json())}


def test_what_is_unknown_is_not_zero():
    """Pauses, checkpoints, restarts and the time of nodes, if no event or file shows them."""
    (lost,) = reported().changes
    unknown = vars(replace(lost, pause_s=None))
    assert [row["pause_s"] for row in by_cause([unknown])] == [None]
    assert [row["pause_s"] for row in by_cause([vars(lost), unknown])] == [6.0]
    blind = reported([], POINTS, kept=None)
    assert shown(blind)["Faults"][0] == shown(blind)["Node time"][0] == "–"
    assert shown(blind)["Checkpoints"] == ["2", "saved; – on disk now"]
    assert shown(blind)["Restarts"] == ["–", "of – allowed"]
    assert shown(reported(points=[]))["Checkpoints"][0] == "–"
    assert shown(reported([], []))["Faults"] == ["0", "0 steps lost"]
    page = render(blind, "html").decode()
    assert "Faults (–)" in page and "No event of this run is known" in page
    assert "Nothing yet" not in page and "0.0 node-s" not in page
    assert "nothing was spent" not in page and "Which are on disk now is unknown" in page


@pytest.mark.parametrize(("status", "has_started"), [("lost", False), ("failed", True)])
def test_a_run_without_events_has_started_if_it_has_a_result(status, has_started):
    """The scheduler's word that its tasks are gone does not show that one was ever there."""
    found = reported([], [])
    ended = {"status": status, "time": 3.0, "why": None}
    page = render(replace(found, about=replace(found.about, ended=ended)), "html").decode()
    assert ("No task of this run has started" not in page) == has_started


def test_identical_failures_are_one():
    """By error and traceback, whatever the rank and node; the one that ended the run is first."""
    failures = [
        WorkerFailure(float(n), f"rank {n} on node{n % 2}: CUDA error", f"node{n % 2}",
                      last_lines="last words" if n == 3 else "")
        for n in range(5)
    ]  # fmt: skip
    end = WorkerFailure(9.0, "rank 0 on node7: boom", "node7", traceback="tb", ended_run=True)
    first, cuda = alike([vars(f) for f in (*failures, end)])
    assert (first["error"], first["hosts"], first["ended_run"]) == ("boom", [("node7", 1)], True)
    assert (cuda["error"], cuda["hosts"]) == ("CUDA error", [("node0", 3), ("node1", 2)])
    assert (cuda["shown"]["time"], cuda["last"]["time"]) == (3.0, 4.0)
    page = render(reported(failures=[*failures, end]), "html").decode()
    assert "5 × CUDA error on node0 (3), node1 (2), last " in page
    assert "</time> rank 0 on node7: boom: it ended the run" in " ".join(page.split())
    again = alike([vars(replace(end, error="rank 1 on node7: boom", traceback="other")), vars(end)])
    assert len(again) == 2


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"exception": "ValueError", "exit_code": 1}, "exit code 1: ValueError: boom"),
        ({"message": "ended by SIGKILL", "signal": "SIGKILL"}, "ended by SIGKILL"),
        ({"phase": "hang"}, "hung: boom"),
        ({"phase": "start"}, "boom"),
    ],
)
def test_failures_are_identical_as_runs_write_them(facts, error):
    """Their ranks, tasks and nodes differ, and not their errors."""
    made = [
        Failure(f"7_{n}", f"node{n}", n, 0, 1.0, **{"message": "boom", **facts}) for n in range(2)
    ]
    found = [vars(WorkerFailure(f.time, f.summary(), f.host)) for f in made]
    assert [each["error"] for each in alike(found)] == [error]


def test_settings_that_are_not_the_defaults_stand_apart():
    """At any depth; the nodes always do."""
    settings = spec_of("r", 2, 4, 8, 3, Entry("hydra", "m", "t.py"), "/s", [(0, 0)]).settings
    changed = settings.as_config()
    changed["launcher"] = {**changed["launcher"], "env": {"A": "b"}, "time": "4:00:00"}
    changed["launcher"]["agent"] = {**changed["launcher"]["agent"], "hang_timeout_s": 60.0}
    found = unusual(json.loads(json.dumps(changed)))
    assert found["nodes"] == "2:4" and found["nproc_per_node"] == 8 and "ft" not in found
    assert found["launcher"].items() >= {"env": {"A": "b"}, "time": "4:00:00"}.items()
    assert found["launcher"]["agent"] == {"hang_timeout_s": 60.0}
    assert "rendezvous" not in found["launcher"] and unusual(None) is None


# ---- hints --------------------------------------------------------------------------------


def test_hints_name_what_wastes_node_time():
    """With a remedy; a short run, and shares that are usual, have none."""
    kinds = {**dict.fromkeys(KINDS, 0.0), "useful": 7000.0, "import": 2100.0, "restore": 100.0}
    idle = [Point(float(t), gpu_use=0.2) for t in range(20)]
    of_import, of_gpus = hints(kinds, 9200.0, idle)
    assert of_import.startswith("23% of the node time is import: list the slow imports")
    assert "busy for 20% of the time" in of_gpus
    assert not list(hints({k: s / 100 for k, s in kinds.items()}, 92.0, idle))
    assert not list(hints({**kinds, "import": 0.0}, 7100.0, POINTS))


# ---- secrets ------------------------------------------------------------------------------


def test_secrets_are_hidden():
    """By the names of their keys, below env, and in URLs; the rest stays."""
    given = {
        "lr": 0.1, "tokens": 5, "max_token_length": 7, "wandb": {"api_key": "abc"},
        "launcher": {"env": {"HOME": "/x", "EMPTY": ""}}, "hub_token": "t", "password": None,
        "db": "postgres://me:pw@host/x", "list": [{"secret": 1}],
    }  # fmt: skip
    assert redact(given) == {
        "lr": 0.1, "tokens": 5, "max_token_length": 7, "wandb": {"api_key": "***"},
        "launcher": {"env": {"HOME": "***", "EMPTY": ""}}, "hub_token": "***", "password": None,
        "db": "postgres://me:***@host/x", "list": [{"secret": "***"}],
    }  # fmt: skip
    assert redact_argument("+launcher.env.WANDB=abc") == "+launcher.env.WANDB=***"
    assert redact_argument("lr=0.1") == "lr=0.1" and redact_argument("-m") == "-m"


# ---- the command --------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run directory with the events above, a damaged one and half a line."""
    submission = tmp_path / ".hpc_elastic"
    submission.mkdir()
    files = RunDir(tmp_path / "0")
    env = {"WANDB_API_KEY": "hidden-one"}
    started_run(files, spec_of(
        "run-1", 1, 2, 1, 3, Entry("function", "f", args=[{"token": "hidden-two"}]),
        str(submission), [(0, 0), (0, 1)], launcher="local", env=env,
        provenance={"argv": ["a.py", "launcher.env.X=hidden-three"], "environment": {"P": "/p"}},
    ))  # fmt: skip
    files.hydra.mkdir()
    overrides = ["lr=1", "wandb.api_key=hidden-four"]
    (files.hydra / "overrides.yaml").write_text(json.dumps(overrides))
    lines = [*map(json.dumps, LOST), '{"v": 1, "time": 3.0, "kind": "round", "task": "7_0"}']
    files.events("7_0").write_text("\n".join(lines) + '\n{"v": 1, "ti')
    progress = [asdict(point) for point in POINTS]
    files.progress.write_text("".join(f"{json.dumps(p)}\n" for p in progress) + '{"time": 3')
    return files


def test_damaged_events_are_left_out_and_that_is_said(run):
    """The rest is reported."""
    found = report_of(read_view(run.path))
    assert "damaged events are left out: 1" in found.notes
    assert [change.cause for change in found.changes] == ["node_lost"]
    assert (found.about.phase, found.about.launcher) == ("not submitted", "local")


def test_failures_are_shown_with_their_traceback_and_log(run, tmp_path):
    """And nothing of a file outside of the run, which a forged event may name."""
    private = tmp_path / "private"
    private.write_text("the key")
    log = run.tasks / "7_0" / "attempt-0" / "round-1.rank-0.err"
    log.parent.mkdir(parents=True)
    log.write_text("\x1b[31mbefore it\x1b[0m\nhttps://me:pw@host <script>\n")
    events = [
        event(20.0 + n, "restart", restarts=n, host="node1", failure=f"rank {n} on node1: boom",
              rank=n, round=1, traceback="Traceback: <b>", log=str(file))
        for n, file in enumerate((log, private))
    ]  # fmt: skip
    with run.events("7_0").open("w") as file:
        file.writelines(f"{json.dumps(e)}\n" for e in (*LOST, *events))
    run.result.write_text(json.dumps({
        "status": "failed", "ended": 30.0,
        "failure": {"host": "node2", "rank": 3, "round": 2, "message": "it broke", "log": None},
    }))  # fmt: skip
    first, forged, last = report_of(read_view(run.path)).failures
    assert (first.rank, first.round, first.traceback) == (0, 1, "Traceback: <b>")
    assert first.last_lines == "before it\nhttps://me:***@host <script>"
    assert (
        forged.last_lines == ""
        and "the key" not in render(report_of(read_view(run.path)), "json").decode()
    )
    assert last.ended_run and (last.host, last.rank) == ("node2", 3) and "broke" in last.error
    page = render(report_of(read_view(run.path)), "html").decode()
    assert "Failures of workers (3)" in page and "host &lt;script&gt;" in page


@pytest.mark.parametrize("form", ["json", "html"])
def test_no_secret_is_in_a_report(run, form):
    """Neither of the settings, nor of the arguments, nor of the command line."""
    text = render(report_of(read_view(run.path)), form).decode()
    assert "hidden-" not in text and "***" in text and "WANDB_API_KEY" in text
    assert "lr=1 wandb.api_key=***" in text


def test_json_goes_to_standard_output(run, capsysbinary):
    """It is the default there; a page needs a file."""
    assert main(["report", str(run.path), "--format", "json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["version"] == 1
    assert main(["report", str(run.path)]) == 2
    assert b"-o report.html" in capsysbinary.readouterr().err


def test_the_format_follows_the_name(run, tmp_path, capsys):
    """And a file that can not be written is an error with a remedy."""
    for name, begin in (("r.png", b"\x89PNG"), ("r.json", b"{"), ("r", b"<!DOCTYPE html>")):
        assert main(["report", str(run.path), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().lstrip().startswith(begin)
    assert main(["report", str(run.path), "-o", str(tmp_path / "no" / "r.json")]) == 1
    assert "give another file" in capsys.readouterr().err
    assert main(["report", str(run.path), "-o", str(tmp_path / "r.pdf")]) == 2
    assert "html, png, json" in capsys.readouterr().err and not (tmp_path / "r.pdf").exists()
    assert main(["report", str(run.path), "-o", str(tmp_path / "r.v2"), "--format", "json"]) == 0


def test_scripts_are_told_what_was_written(run, tmp_path, capsys):
    """Where, and how large; the report itself would be JSON as well, so that a file is needed."""
    argv = ["report", str(run.path), "--json"]
    assert main([*argv, "-o", str(tmp_path / "r.html")]) == 0
    told = json.loads(capsys.readouterr().out)
    file = tmp_path / "r.html"
    assert told == {
        "run_id": run.load().run_id, "run": str(run.path), "file": str(file), "format": "html",
        "num_bytes": file.stat().st_size,
    }  # fmt: skip
    for to_standard_output in (["--format", "json"], ["--format", "json", "-o", "-"], []):
        assert main([*argv, *to_standard_output]) == 2
        out, err = capsys.readouterr()
        assert "-o report." in err and json.loads(out)["error"]["code"] == "usage-error"
    assert main(["report", "--help"]) == 0
    assert set(told) <= set(re.findall(r"\w+", capsys.readouterr().out))


def test_a_missing_library_is_named(run, tmp_path, monkeypatch, capsys):
    """With the command that installs it; a page has no charts then, and JSON does without."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    out = tmp_path / "r.png"
    assert main(["report", str(run.path), "-o", str(out)]) == 1
    assert "pip install 'hpc_elastic[report]'" in capsys.readouterr().err and not out.exists()
    for form in ("html", "json"):
        assert main(["report", str(run.path), "-o", str(tmp_path / f"r.{form}")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "no charts: charts need vl-convert" in page and 'id="chart-' not in page


@pytest.mark.parametrize(
    ("length_s", "expected"), [(40.0, "%H:%M:%S"), (3600.0, "%H:%M"), (20 * 3600.0, "%b %d %H:%M")]
)
def test_the_axis_of_time_has_a_clock_of_24_hours(length_s, expected):
    """As the sentences beside it: without a format Vega writes 10:37 for 22:37."""
    drawn = charts(reported(until=1.0 + length_s).to_json())
    found = {chart.name: formats(chart.spec) for chart in drawn if chart.name != "bar"}
    assert found.keys() == {"lanes", "group", "step", "loss"}
    assert all(axis == {expected} for axis in found.values()), found


def formats(spec: object) -> set[str]:
    """Return the formats of all axes of time in a chart."""
    parts = spec if isinstance(spec, list) else spec.values() if isinstance(spec, dict) else ()
    found = set().union(*map(formats, parts))
    if isinstance(spec, dict) and "axis" in spec and spec.get("type") == "temporal":
        found.add(str(spec["axis"].get("format")))
    return found


# ---- one account of lost steps --------------------------------------------------------------


@dataclass
class History:
    """The events and the progress of a run, and how many steps it lost by each change."""

    events: list = field(default_factory=list)
    points: list = field(default_factory=list)
    lost: list = field(default_factory=list)

    @classmethod
    def draw(cls, rng: random.Random) -> "History":
        """Rounds of one or two nodes, which stop, or are killed with or without a witness."""
        run, now, saved = cls(begun(0, 1)), 2.0, 0
        for number in range(1, rng.randint(3, 6)):
            slots = rng.choice([(0,), (1,), (0, 1)])
            attempt = [slot + 10 * (number - 1) for slot in slots] if number < 2 else list(slots)
            run.events.append(group(now, number, *attempt))
            reached, now = saved + rng.randint(1, 30), now + 10.0
            run.events += [trains(now - 9.0, slot, number, saved) for slot in slots]
            seen = rng.choice([None, rng.randint(saved + 1, reached)])
            if seen is not None:
                run.points.append(Point(now - 1.0, round=number, nodes=len(slots), step=seen))
            survivors = [slot for slot in slots if rng.random() < 0.5]
            run.events += [stopped(now, slot, number, reached) for slot in survivors]
            saved = rng.randint(saved, reached)
            run.lost.append(reached - saved)
            now += 5.0
        run.lost.pop()  # nothing has followed the last round
        return run


def test_events_report_and_truth_agree_on_the_steps_that_were_lost():
    """Over random histories: each number is exact, or said to be the least, or unknown."""
    rng, num_unknown, num_least = random.Random(3), 0, 0
    for _ in range(300):
        history = History.draw(rng)
        index = EventIndex(history.events, history.points)
        entries = [e for e in build_timeline(index) if e.cost.resumed_step is not None]
        assert len(entries) == len(history.lost)
        for entry, truth in zip(entries, history.lost, strict=True):
            known, is_least = entry.cost.lost_steps, entry.cost.is_least
            assert known is None or known == truth or (is_least and 0 < known <= truth)
            num_unknown, num_least = num_unknown + (known is None), num_least + is_least
            told = sentence(entry)
            assert (f"lost at least {known} step" in told) == is_least
            assert (f"lost {known} step" in told) == (known is not None and not is_least)
        found = report(
            About("run-1", "/runs/1", until=999.0, phase="training"),
            account(index, history.points, now=999.0), history.points, build_timeline(index),
            made=999.0,
        )  # fmt: skip
        tile = next(remark for title, _, remark in tiles(asdict(found)) if title == "Faults")
        faults = [c for c in found.changes if c.fault]
        total = sum(c.lost_steps or 0 for c in faults)
        if all(c.lost_steps is not None and not c.is_least for c in faults):
            assert tile == f"{counted(total, 'step')} lost"
        elif total:
            assert tile == f"at least {counted(total, 'step')} lost"
        else:
            assert tile == "an unknown number of steps lost"
    assert min(num_unknown, num_least) > 30


def test_the_only_node_that_trains_is_killed_while_another_waits():
    """Its progress shows the steps that the other has to make again."""
    killed = [
        *begun(0, 1), group(2.0, 1, 0), trains(4.0, 0, 1, 0), event(60.0, "leader", 1, term=2),
        group(61.0, 2, 1, term=2), trains(63.0, 1, 2, 13),
    ]  # fmt: skip
    points = [Point(50.0, round=1, nodes=1, step=240)]
    found = [e for e in build_timeline(EventIndex(killed, points)) if e.cost.lost_steps]
    (entry,) = found
    assert (entry.cost.lost_steps, entry.cost.is_least) == (227, True)
    assert "lost at least 227 steps (from 240 back to 13)" in sentence(entry)
