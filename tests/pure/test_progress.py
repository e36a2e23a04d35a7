"""Progress of runs: the cells of a row, lines in a log file, the live table, the final table."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hpc_elastic.launcher.run_handle import RunHandle
from hpc_elastic.launcher.wait import (
    Progress,
    _table,
    console_for,
    fitting,
    is_worth_a_line,
    line_interval_s,
    line_of,
    location,
    results_table,
    row_of,
)
from hpc_elastic.report.run_view import RunEnd, RunReading, overrides_label
from hpc_elastic.run.directory import RunDir
from hpc_elastic.slurm.job_state import TaskState

RUNNING = TaskState("7_0", "RUNNING", node="n1")
PENDING = TaskState("7_1", "PENDING", "Resources")
RUN = RunHandle(Path("/s/0"), "lr=0.1", ("7_0", "7_1"), Path("/s/.hpc_elastic"), None)
STATUS = {
    "phase": "training",
    "nodes": 2,
    "step": 120,
    "loss": 0.123456,
    "restarts": 1,
    "max_restarts": 3,
}
ROW = {"run": "0", "overrides": "a=[1,2]", "state": "queued"}


def row(status=None, states=None, end=None) -> dict[str, str]:
    """Return the row of the run."""
    tasks = None if states is None else {state.task: state for state in states}
    view = RunReading(RunDir(RUN.dir), status=status or {}).view(tasks)
    return row_of(RUN, replace(view, ended=end))


def test_a_row_shows_status_and_queue():
    """Tasks that do not run, and why; the group as its leader sees it; the share that is done."""
    cells = row({**STATUS, "total_steps": 480, "steps_per_s": 2.0}, [RUNNING, PENDING])
    assert cells == {
        "run": "0", "overrides": "lr=0.1", "state": "training", "nodes": "2 of 2",
        "queue": "1 task PENDING (Resources)", "progress": "25%", "step": "120", "total": "480",
        "loss": "0.1235", "time left": "3 min", "restarts": "1 of 3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "states", "state"),
    [
        (None, None, "unknown"),
        (None, [PENDING], "queued"),
        (None, [RUNNING, PENDING], "starting"),
        ({"phase": "waiting", "nodes": 0}, [RUNNING], "waiting"),
        ({"phase": "waiting", "nodes": 0}, [PENDING], "queued"),  # an old status
        ({"phase": "requeued"}, [RUNNING], "requeued"),
        (STATUS, [RUNNING], "training"),
        (STATUS, [], "training"),  # its result may be delayed
        (STATUS, None, "training"),
    ],
)
def test_the_state_of_a_run_is_that_of_its_view(status, states, state):
    """As `hpc-elastic status` shows it; until the end is known, as its leader reported."""
    assert row(status, states)["state"] == state


def test_a_run_that_has_ended_has_no_tasks_and_no_time_left():
    """Its tasks may still be listed as running for a moment."""
    status = {**STATUS, "total_steps": 120, "steps_per_s": 2.0}
    cells = row(status, [RUNNING, PENDING], RunEnd("succeeded", 0.0))
    expected = "[0] lr=0.1: succeeded, step 120 of 120 (100%), loss 0.1235, 1 of 3 restarts"
    assert line_of(cells) == expected


def test_lines_come_on_change_only():
    """A log file gets a line when something happens, and one on steps now and then."""
    first = row({"phase": "training", "nodes": 2, "step": 1, "total_steps": 1200})
    later = {**first, "step": "2", "loss": "0.1", "time left": "61 s"}
    assert is_worth_a_line(first, None, since_s=0, every_s=10)
    assert not is_worth_a_line(first, first, since_s=99, every_s=10)
    assert not is_worth_a_line(later, first, since_s=1, every_s=10)
    assert is_worth_a_line(later, first, since_s=10, every_s=10)
    assert is_worth_a_line({**first, "nodes": "1 of 2"}, first, since_s=0, every_s=10)
    assert line_of(later) == (
        "[0] lr=0.1: training on 2 of 2 nodes, step 2 of 1,200 (0%), loss 0.1, 61 s left"
    )


def test_lines_on_steps_come_more_rarely_as_a_run_continues():
    """A day in a log file is some 200 lines for each run, and no minute of its start is silent."""
    assert [line_interval_s(age) for age in (0, 100, 1000, 86_400)] == [10, 10, 100, 600]
    at, num_lines = 0.0, 0
    while at < 86_400:
        at, num_lines = at + line_interval_s(at), num_lines + 1
    assert 150 < num_lines < 250


def text_of(rows, **console) -> str:
    """Return what is written for rows that are shown twice."""
    out = io.StringIO()
    with Progress(Console(file=out, width=120, **console)) as progress:
        progress.print_message("[hello] [bold]world")
        progress.show_rows(rows)
        progress.show_rows(rows)
    return out.getvalue()


def test_a_log_file_gets_rows_once_and_markup_as_it_is():
    """Square brackets in overrides are no markup."""
    assert text_of([ROW]).splitlines() == ["[hello] [bold]world", "[0] a=[1,2]: queued"]


def test_a_terminal_shows_a_table_with_a_bar():
    """The rows stand in one table, of the columns that have any text."""
    cells = {**ROW, "state": "training", "step": "5", "total": "10", "progress": "50%"}
    text = text_of([cells], force_terminal=True)
    assert all(t in text for t in ("a=[1,2]", "training", "━━━━━╌╌╌╌╌ 50%", "[hello]"))
    assert "restarts" not in text and "queue" not in text


def test_runs_that_continue_are_shown_first_where_not_all_fit():
    """A sweep of 200 does not fit on a screen; runs that have ended are less interesting."""
    rows = [{"run": str(n), "state": "lost" if n < 3 else "queued"} for n in range(6)]
    assert [r["run"] for r in fitting(rows, 4)] == ["3", "4", "5", "0"]
    assert fitting(rows, 6) == rows


@pytest.mark.parametrize(("value", "start"), [(0.975, "0.975"), ([0.5] * 1_000_000, "[0.5, 0.5")])
def test_the_final_table_shows_every_run_with_the_start_of_its_result(value, start):
    """A list of a million numbers would fill the terminal for minutes."""
    out = io.StringIO()
    table = results_table([RUN], [RunEnd("succeeded", 0.0, restarts=2, values={0: value})])
    Console(file=out, width=300).print(table)
    assert all(text in out.getvalue() for text in ("lr=0.1", "succeeded", start, " 2 "))
    assert len(out.getvalue()) < 2000


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_the_output_cannot_encode_is_escaped(encoding):
    """A file's name in an error may be no text; a locale other than C.UTF-8 refuses its bytes."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict", write_through=True)
    Progress(console_for(stream)).print_message("no file a\udcff.tar \u2501")
    line = "\u2501" if encoding == "utf-8" else "\\u2501"
    assert written.getvalue().decode(encoding) == f"no file a\\udcff.tar {line}\n"


def test_the_location_of_the_runs_is_one_line(tmp_path, monkeypatch):
    """As short as possible: relative to the working directory, and the table names the rest."""
    dirs = [tmp_path / "0", tmp_path / "1"]
    monkeypatch.chdir(tmp_path.parent)
    assert location(dirs, tmp_path) == f"runs in {tmp_path.name}/"
    monkeypatch.chdir(tmp_path)
    assert location(dirs[:1], tmp_path) == "run in 0/"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert location(dirs, tmp_path) == f"runs in {tmp_path}/"


def test_overrides_are_shown_as_they_were_typed():
    """Hydra's sweeper escapes what its grammar could misread; launcher settings are no label."""
    overrides = [r"nodes=1\:2", r"+text=a\,b", "launcher=slurm", "+launcher.time=5", "lr=0.1"]
    assert overrides_label(overrides) == "nodes=1:2 +text=a,b lr=0.1"
    assert overrides_label(["launcher.partition=a", "lr=1"]) == "launcher.partition=a lr=1"


def test_a_run_that_waits_says_why_in_its_line_and_below_the_table():
    """Of many runs that wait, the table names the first reasons only."""
    row = {"run": "0", "overrides": "", "state": "queued", "queue": "1 task PENDING (Licenses)"}
    row["waits"] = "all licences that it asks for are in use"
    assert line_of(row) == f"[0]: queued, 1 task PENDING (Licenses): {row['waits']}"
    rows = [{**row, "run": str(n)} for n in range(9)]
    assert _table(rows, 4).caption == f"and 5 more\n0 waits: {row['waits']}"
