"""`hpc-elastic logs` over files that lie there: what it prints, refuses, and explains."""

import json
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from helps import not_in_help
from hpc_elastic.cli.logs import Writer, json_of, parse_time
from hpc_elastic.cli.main import main
from hpc_elastic.report.log_files import LogLine, LogSource
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import write_atomic
from output_files import EPOCH, Output, make_run
from specs import set_launcher

EVENTS_ARE_INCOMPLETE = True
"""They are written by the tests, which need only some of their fields."""

NOON = datetime(2030, 1, 31, 12, 0, 0).timestamp()
OUT = LogSource(Path("o"), "out", "7_0", 0, 1, 3, "node1.cluster.org")
ERR = LogSource(Path("e"), "err", "7_1", 0, 1, 12, "node22")
SLURM = LogSource(Path("s"), "slurm", "7_1")


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A run of two tasks that has ended; lines of rank 0 lie before and after one of rank 1."""
    found = make_run(tmp_path)
    first = found.attempt("7_0", 0) / "round-1.rank-0.out"
    first.unlink()
    output = Output(first)
    output.write("loss 3\n", 1)
    output.write("\x1b[31mloss 1\x1b[0m\n", 3)
    second = found.attempt("7_1", 0) / "round-1.rank-1.out"
    second.unlink()
    Output(second, 1).write("loss 2\n", 2)
    write_atomic(found.result, json.dumps({"status": "succeeded"}))
    return found


def logs(capsys, run, *options) -> list[str]:
    """Lines of standard output."""
    assert main(["logs", str(run.path), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_all_workers_come_in_order_of_time(capsys, run):
    """With day, time, node and rank; no colours where nobody sees them."""
    first = datetime.fromtimestamp(EPOCH + 1)
    assert logs(capsys, run, "--grep", "loss") == [
        f"{first:%Y-%m-%d %H:%M:%S}.0 n1 r0 | loss 3",
        f"{datetime.fromtimestamp(EPOCH + 2):%Y-%m-%d %H:%M:%S}.0 n2 r1 | loss 2",
        f"{datetime.fromtimestamp(EPOCH + 3):%Y-%m-%d %H:%M:%S}.0 n1 r0 | loss 1",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rank", "0", "--round", "1"], ["loss 3", "loss 1", "err"]),
        (["--rank", "0-1", "--grep", "(?i)LOSS [12]"], ["loss 2", "loss 1"]),
        (["--node", "n[2-3]", "--grep", "loss"], ["loss 2"]),
        (["--grep", "loss", "--tail", "1"], ["loss 1"]),
        (["--grep", "loss", "--since", f"@{EPOCH + 2}"], ["loss 2", "loss 1"]),
        (["--attempt", "1"], ["err", "out"]),
        (["--attempt", "1", "--agent"], ["agent", "slurm", "err", "out"]),
    ],
)
def test_only_what_is_asked_for_is_printed(capsys, run, options, expected):
    """By rank, node, attempt, round, time, text and number."""
    found = [json.loads(line)["text"] for line in logs(capsys, run, "--json", *options)]
    assert sorted(found) == sorted(expected) if "err" in expected else found == expected


def test_following_a_run_that_has_ended_shows_its_last_lines_and_ends(capsys, run):
    """Ten of them, without being asked."""
    assert main(["logs", str(run.path), "--follow", "--grep", "loss"]) == 0
    printed = capsys.readouterr()
    assert [line[-6:] for line in printed.out.splitlines()] == ["loss 3", "loss 2", "loss 1"]
    assert printed.err == "hpc-elastic: it has ended: succeeded\n"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--rank", "5"], 1, "--rank 5: the run has no such rank; it has ranks 0-1"),
        (["--node", "n9"], 1, "--node n9: the run has no such node; it has nodes n1, n2, n3"),
        (["--grep", "nowhere"], 1, "no output; it has ended: succeeded"),
        (["--grep", "("], 2, r"write \( \[ \* \. for the character itself"),
        (["--rank", "first"], 2, "give a rank, or ranks such as 0-3,8"),
        (["--node", "n["], 2, "give a node, or nodes such as node[1-3]"),
        (["--since", "tomorrow"], 2, "'tomorrow' is not a time; give one of: 10m (ago"),
        (["--tail", "-3"], 2, "-3"),
    ],
)
def test_what_can_not_be_shown_is_explained(capsys, run, options, code, words):
    """With what there is, or how it is written."""
    assert main(["logs", str(run.path), *options]) == code
    printed = capsys.readouterr()
    assert words in " ".join(printed.err.split()) and not printed.out


def test_whoever_reads_no_further_is_no_failure(run):
    """`hpc-elastic logs RUN | head` ends with 0, and quietly."""
    with (run.attempt("7_0", 0) / "round-1.rank-0.err").open("a") as f:
        f.write("much more than a pipe holds\n" * 20_000)
    argv = [sys.executable, "-m", "hpc_elastic", "logs", str(run.path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    with process.stderr as errors:
        assert (process.wait(60), errors.read()) == (0, b"")


def test_following_ends_with_ctrl_c(run):
    """As an interrupted command does, having shown what there was."""
    run.result.unlink()
    (run.path.parent / ".hpc_elastic" / "local-tasks.json").write_text("{")  # nobody knows
    set_launcher(run, "local")
    argv = [sys.executable, "-m", "hpc_elastic", "logs", str(run.path), "--follow"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process.stdout as out, process.stderr as errors:
        assert out.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in errors.read()


def test_a_run_without_output_says_what_it_is_doing(capsys, tmp_path):
    """Nobody has to ask Slurm as well."""
    run = make_run(tmp_path)
    for file in run.path.glob("tasks/*/*/round-*"):
        file.unlink()
    write_atomic(run.result, json.dumps({"status": "failed"}))
    assert main(["logs", str(run.path)]) == 1
    told = capsys.readouterr().err
    assert "no output of workers yet; it has ended: failed" in told and "--agent" in told


def test_output_and_errors_and_ranks_are_told_apart():
    """In columns that hold, the day on each line, for it may be filtered."""
    writer = Writer(on_terminal=False, now=NOON)
    lines = [
        LogLine(NOON + 0.37, OUT, "a"),
        LogLine(NOON + 1, ERR, "b"),
        LogLine(NOON + 2, SLURM, "c"),
    ]
    writer.make_room([OUT, ERR, SLURM])
    assert list(writer.rows(lines)) == [
        "2030-01-31 12:00:00.3 node1     r3 | a",
        "2030-01-31 12:00:01.0 node22   r12 ! b",
        "2030-01-31 12:00:02.0 7_1    slurm : c",
    ]


def test_a_terminal_gets_colours_and_a_line_for_another_day():
    """Errors in red; the text's own colours do not go beyond it."""
    writer = Writer(on_terminal=True, now=NOON)
    day = 86_400
    rows = list(
        writer.rows([LogLine(NOON, ERR, "\x1b[32mgreen"), LogLine(NOON + day, OUT, "next")])
    )
    assert rows[0].endswith("\x1b[32mgreen\x1b[0m") and "\x1b[31m\x1b[1m!" in rows[0]
    assert "2030-01-31" not in rows[0] and "-- 2030-02-01 --" in rows[1] and len(rows) == 3


def test_scripts_get_all_that_is_known():
    """These keys stay."""
    told = json.loads(json_of(LogLine(NOON, ERR, "\x1b[1mtext", timed=False)))
    assert told == {
        "time": NOON, "timed": False, "host": "node22", "task": "7_1", "attempt": 0, "round": 1,
        "rank": 12, "stream": "err", "text": "text",
    }  # fmt: skip
    assert not not_in_help("logs", told)
    assert json.loads(json_of(LogLine(NOON, SLURM, "")))["host"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOON - 90),
        ("1.5h", NOON - 5400),
        ("2d", NOON - 2 * 86_400),
        ("11:30", NOON - 1800),
        ("9:00:30", NOON - 3 * 3600 + 30),
        ("12:30", NOON - 86_400 + 1800),
        ("2030-01-31", NOON - 12 * 3600),
        ("2030-01-31 11:59", NOON - 60),
        ("2030-01-31T11:59:30", NOON - 30),
        (f"@{NOON}", NOON),
    ],
)
def test_points_in_time_are_written_as_people_write_them(text, expected):
    """Ago, today or yesterday, on a day, or in Unix seconds."""
    assert parse_time(text, NOON) == expected


@pytest.mark.parametrize("text", ["", "10", "10x", "25:00", "@", "2030-02-31", "soon"])
def test_what_is_no_time_is_refused(text):
    """By one error."""
    with pytest.raises(ValueError):
        parse_time(text, time.time())
