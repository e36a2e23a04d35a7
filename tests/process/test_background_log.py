"""An agent's log is written whole however the agent ends, and keeps it from nothing."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from hpc_elastic.agent import task_main
from hpc_elastic.agent.task_main import BackgroundLog

AGENT = textwrap.dedent(
    """
    import atexit, logging, os, signal, sys, time
    from pathlib import Path
    from types import SimpleNamespace
    from hpc_elastic.agent import task_main

    def run(task, caught, times):
        atexit.register(logging.warning, "late")
        for n in range(1000):
            logging.info("line %d", n)
        try:
            1 / 0
        except ZeroDivisionError:
            logging.exception("an error")
        {end}

    os.environ["SLURM_JOB_ID"] = "7"
    folder = Path(sys.argv[1])
    spec, state = SimpleNamespace(submission=str(folder)), SimpleNamespace(is_over=False)
    task = SimpleNamespace(superseded=False, run=state, logs=folder,
                           spec=spec, name="7_0")
    task_main.find_task, task_main._run = lambda *_: task, run
    task_main.OutputTimes = lambda _: SimpleNamespace(start=lambda: None, close=lambda: None)
    sys.exit(task_main.start(["array-0.json"], None))
    """
)


def agent(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    """Let an agent log, and end."""
    argv = [sys.executable, "-c", AGENT.replace("{end}", end), str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 0", 0),
        ("raise RuntimeError", 1),
        ("raise SystemExit(143)", 143),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
    ],
)
def test_no_line_is_lost_however_the_agent_ends(tmp_path, end, code):
    """Nor one that comes after that; errors, with their traceback, go to standard error too."""
    done = agent(tmp_path, end)
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "agent.log").read_text().splitlines()
    messages = [line.partition("INFO root: ")[2] for line in lines[:1000]]
    assert messages == [f"line {n}" for n in range(1000)]
    assert "ERROR root: an error" in lines[1000] and "ZeroDivisionError" in lines[-2]
    assert lines[-1].endswith("WARNING root: late")
    assert "an error\nTraceback" in done.stderr and "late" not in done.stderr


def test_an_agent_whose_log_hangs_ends_all_the_same(tmp_path):
    """With its own exit code."""
    os.mkfifo(tmp_path / "agent.log")
    reader = os.open(tmp_path / "agent.log", os.O_RDWR)  # which never reads
    try:
        assert agent(tmp_path, "logging.info('x' * 100_000); return 143").returncode == 143
    finally:
        os.close(reader)


def test_a_forked_child_logs_by_itself(tmp_path):
    """The thread that writes is not in it."""
    fork = "[logging.info('the child'), os._exit(0)] if not os.fork() else os.wait(); return 0"
    assert agent(tmp_path, fork).returncode == 0
    assert (tmp_path / "agent.log").read_text().count("the child") == 1


class Broken(logging.Handler):
    """Can not open its file, and says so on standard error."""

    def handle(self, _record) -> bool:
        """Fail."""
        raise OSError(28, "No space left on device")


class Kept(logging.Handler):
    """Writes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.may_write = [], threading.Event()

    def emit(self, record) -> None:
        """Keep what is logged."""
        assert self.may_write.wait(60)
        self.lines.append(record.getMessage())


def test_a_handler_that_fails_costs_its_own_lines_and_one_that_hangs_no_memory(monkeypatch, caplog):
    """The others are written; what is too much is lost."""
    monkeypatch.setattr(task_main, "_MOST", 10)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    caplog.set_level(logging.INFO)
    handlers = [Broken(), kept := Kept()]
    log = BackgroundLog(lambda: handlers)
    for n in range(1000):
        logging.info("%d", n)
    kept.may_write.set()
    log.close()
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
    assert kept.lines[:10] == [str(n) for n in range(10)] and len(kept.lines) <= 11
