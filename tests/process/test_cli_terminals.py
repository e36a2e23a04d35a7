"""What the commands do on a terminal: they ask, watch until Ctrl-C, and have colours."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import CTRL_C, PATIENCE_S, Terminal

from arrays import ME, run_of, write_table
from ended import sleeping
from helps import not_in_help
from hpc_elastic.run import registry
from hpc_elastic.run.directory import RunDir, Submission
from hpc_elastic.slurm.local_queue import start_ticks
from output_files import make_run

EVENTS_ARE_INCOMPLETE = True
"""They are written by the tests, which need only some of their fields."""

COLOUR = re.compile(r"\x1b\[(\d+;)*(3[0-8]|4[0-8]|9[0-7]|10[0-7])(;\d+)*m")
ASKED = "[y/N]"


@pytest.fixture
def terminal(tmp_path, request):
    """Starts a command on a terminal; it does not outlive the test."""

    def start(*arguments: str | Path, **environ: str) -> Terminal:
        made = Terminal(*arguments, cwd=tmp_path, environ=environ)
        request.addfinalizer(lambda: made.__exit__())
        return made

    return start


def local_run(folder: Path, **entry) -> RunDir:
    """A run of one process, as its launcher has written that down."""
    run = run_of(folder, "7", [(0, 0)], launcher="local")
    task = {"state": "RUNNING", **(entry or ME)}
    write_table(Submission(folder / ".hpc_elastic"), **{"7_0": task})
    return run


# ---- cancel asks -------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path):
    """A process that stands for a run's only task."""
    with sleeping(Submission(tmp_path / ".hpc_elastic").array(0).tasks) as process:
        yield process


@pytest.fixture
def run(tmp_path, agent) -> RunDir:
    """Its run, whose launcher has ended."""
    left = {"node": "local-0", "launcher": None}
    return local_run(tmp_path, pid=agent.pid, started=start_ticks(agent.pid), **left)


@pytest.mark.parametrize(("answer", "code"), [("n\r", 1), ("\r", 1), (f"{CTRL_C}\r", 130)])
def test_a_run_is_left_alone_where_its_end_is_not_confirmed(terminal, run, agent, answer, code):
    """It is said what would be cancelled.

    A Ctrl-C that comes just before Python reads takes effect behind the line that it reads.
    """
    shown = terminal("cancel", run.path)
    shown.until(ASKED)
    assert "Cancel r: 1 running (on local-0)?" in shown.shown
    shown.type(answer)
    assert shown.end() == code, shown.shown
    assert ("not cancelled" in shown.shown) == (code == 1)
    assert agent.poll() is None and not run.cancelled.exists() and shown.is_restored


def test_a_script_is_told_that_nothing_was_cancelled(terminal, run, agent):
    """Whoever reads JSON finds it."""
    shown = terminal("cancel", run.path, "--json")
    shown.until(ASKED)
    shown.type("n\r")
    assert shown.end() == 1
    told = json.loads(shown.shown[shown.shown.rindex("{") :])
    assert (told["run_id"], told["cancelled"], told["left"]) == ("r", [], [])
    assert agent.poll() is None


def test_a_run_is_cancelled_once_that_is_confirmed(terminal, run, agent):
    """By who sits there."""
    shown = terminal("cancel", run.path)
    shown.until(ASKED)
    shown.type("y\r")
    assert shown.end() == 0, shown.shown
    assert agent.wait(PATIENCE_S) == -signal.SIGTERM and run.cancelled.exists()
    assert "hpc-elastic resume" in shown.shown


def test_who_says_yes_is_not_asked(terminal, run, agent):
    """On a terminal either."""
    shown = terminal("cancel", run.path, "--yes")
    assert shown.end() == 0, shown.shown
    assert ASKED not in shown.shown and agent.wait(PATIENCE_S) == -signal.SIGTERM


def without_terminal(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Call the command as a script would."""
    return subprocess.run(
        [sys.executable, "-m", "hpc_elastic", *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def test_nobody_is_asked_where_no_terminal_is(run, agent):
    """As in a script, or a job."""
    done = without_terminal("cancel", run.path, "--json")
    assert done.returncode == 0 and ASKED not in done.stdout + done.stderr
    assert agent.wait(PATIENCE_S) == -signal.SIGTERM
    told = json.loads(done.stdout)
    assert (told["result"], told["cancelled"], told["left"]) == (None, ["7_0"], [])
    assert not not_in_help("cancel", told)


def test_what_is_left_after_the_time_is_named(run, agent):
    """It was told to end, and is looked for once more by who calls again."""
    agent.send_signal(signal.SIGSTOP)
    text = without_terminal("cancel", run.path, "--wait-s", "0.2")
    told = without_terminal("cancel", run.path, "--wait-s", "0.2", "--json")
    assert (text.returncode, told.returncode) == (1, 1)
    assert text.stderr.startswith("still there after 0.2 s: 7_0 (RUNNING")
    assert json.loads(told.stdout)["left"] == ["7_0"] and agent.poll() is None


# ---- status is watched -------------------------------------------------------------------


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_a_watch_that_is_ended_leaves_the_terminal_as_it_was(terminal, tmp_path, by):
    """The page is redrawn in place, without a cursor, as long as it lasts."""
    shown = terminal("status", local_run(tmp_path).path, "--watch", "--every", "0.1")
    shown.until("● starting")
    assert not shown.is_restored, "the cursor is hidden"
    if by == "Ctrl-C":
        shown.type(CTRL_C)
    else:
        shown.process.terminate()
    assert shown.end() == 130, shown.shown
    assert shown.is_restored and "Traceback" not in shown.shown


@pytest.mark.parametrize(("status", "code"), [("succeeded", 0), ("failed", 1)])
def test_a_watch_ends_with_the_run(terminal, tmp_path, status, code):
    """Its exit code says how that ended."""
    run = local_run(tmp_path)
    shown = terminal("status", run.path, "--watch", "--every", "0.1")
    shown.until("● starting")
    run.result.write_text(json.dumps({"status": status}))
    assert shown.end() == code, shown.shown
    assert f"● {status}" in shown.shown and shown.is_restored
    done = without_terminal("status", run.path, "--watch", "--json")
    assert done.returncode == code and done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["phase"] == status


# ---- colours -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "list", "logs", "doctor"])
def test_colours_are_for_terminals_that_want_them(terminal, tmp_path, monkeypatch, command):
    """Not for a pipe, nor where NO_COLOR is set, nor where the terminal has none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path / "no-slurm"))
    run = make_run(tmp_path)
    run.result.write_text(json.dumps({"status": "succeeded"}))
    (run.attempt("7_0", 0) / "round-1.rank-0.out").write_text("\x1b[32mthe script's own\x1b[0m\n")
    registry.add({"id": run.path})
    argv = [command, *([str(run.path)] if command in ("status", "logs") else [])]
    code = int(command == "doctor")  # there is no Slurm

    def printed(**environ: str) -> str:
        shown = terminal(*argv, **environ)
        assert shown.end() == code, shown.shown
        return shown.shown

    assert COLOUR.search(printed())
    plain = printed(NO_COLOR="1")
    assert len(plain) > 20 and not COLOUR.search(plain)
    assert "\x1b" not in printed(TERM="dumb")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_elastic", *argv], cwd=tmp_path, capture_output=True,
        text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code and len(done.stdout) > 20 and "\x1b" not in done.stdout
