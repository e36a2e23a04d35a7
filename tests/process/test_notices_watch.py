"""Signals and the end of the wall time become notices, in a process of its own."""

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import pytest

from hpc_elastic.agent import preemption
from hpc_elastic.agent.preemption import (
    DrainController,
    PreemptionState,
    PreemptionWatcher,
    TimeLimitSource,
    why_leave_now,
)
from hpc_elastic.config.schema import AgentSettings, SlurmSettings
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.rendezvous.messages import PreemptionNotice
from hpc_elastic.run.directory import Pool, PoolTerms
from hpc_elastic.run.events import EventLog, read_events
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.worker.shared_page import SharedPage

WATCHED = textwrap.dedent(
    """
    import json, os, signal, sys, time
    from hpc_elastic.agent.signals import SignalPipe
    caught = SignalPipe()
    os.kill(os.getpid(), signal.SIGTERM)  # before anybody watches
    from pathlib import Path
    from types import SimpleNamespace
    from hpc_elastic.agent.preemption import PreemptionState, PreemptionWatcher, TimeLimitSource
    from hpc_elastic.config.schema import SlurmSettings
    from hpc_elastic.run.directory import Pool, PoolTerms
    from hpc_elastic.run.events import EventLog
    from hpc_elastic.slurm.exit_action import ExitAction

    class Leader:
        told = []
        def add_notice(self, notice):
            self.told.append(notice.reason.value)

    scheduler = TimeLimitSource(lambda: ExitAction.EXIT, lambda: None)
    notices = PreemptionState(EventLog(Path(sys.argv[1]), "7_1"))
    pool = Pool(range(1), SlurmSettings(), PoolTerms(60, 30, whole_nodes=False), 1.0)
    watch = PreemptionWatcher(caught, pool, notices, scheduler)
    watch.start()
    while len(Leader.told) < 1:
        time.sleep(0.01)
        notices.connect(Leader())
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    while notices.current.by - time.monotonic() > 26:
        time.sleep(0.01)
    watch.close()
    print(json.dumps([notices.current.reason.value, Leader.told]))
    """
)


def test_a_signal_that_came_before_everything_else_is_a_notice(tmp_path):
    """It ends no process; Slurm is asked what it means, and the deadline comes nearer."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path / "7_1.jsonl")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reason, told = json.loads(done.stdout)
    assert reason == "signal" and {*told} == {"signal"}
    assert [e["left_s"] for e in read_events(tmp_path)] == pytest.approx([55, 25], abs=10)


class SignalPipe:
    """No signal comes."""

    def __init__(self) -> None:
        self.waited: list[float | None] = []
        self._is_awake = threading.Event()

    def wait(self, timeout_s: float | None) -> list[signal.Signals]:
        """Wait until a call of `wake`."""
        self._is_awake.wait(timeout_s)
        return []

    def wake(self) -> None:
        """End the wait."""
        self._is_awake.set()


@pytest.fixture
def watch_of(tmp_path, monkeypatch):
    """Return a function that makes a watch whose clock a test sets, and its notices."""
    clock = {"now": 0.0}
    monkeypatch.setattr("hpc_elastic.agent.preemption.time.monotonic", lambda: clock["now"])
    monkeypatch.setattr(preemption, "_in_background", lambda call: call())

    def make(left: list[float | Exception | None], **fields):
        def time_left_s() -> float | None:
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        notices = PreemptionState(EventLog(tmp_path / "7_1.jsonl", "7_1"))
        scheduler = TimeLimitSource(lambda: None, time_left_s, **fields)
        pool = Pool(range(1), SlurmSettings(), PoolTerms(60, 30, whole_nodes=False), 1.0)
        return PreemptionWatcher(SignalPipe(), pool, notices, scheduler), notices, clock

    return make


def at(watch: PreemptionWatcher, clock: dict[str, float], now: float) -> float | None:
    """Let the watch look at a time; return how long it waits then."""
    clock["now"] = now
    watch._check_clock()
    return watch._wait_s()


def test_the_end_of_the_wall_time_is_a_notice(watch_of):
    """It is asked for once, and again shortly before the notice is due."""
    watch, notices, clock = watch_of([3600.0, 123.0])
    assert at(watch, clock, 0.0) == 3600 - 120 - 2
    assert at(watch, clock, 3478.0) == pytest.approx(3.0)
    assert notices.current is None
    at(watch, clock, 3481.0)
    assert notices.current == PreemptionNotice(Reason.TIME_LIMIT, 3601 - 5)


def test_a_limit_that_was_extended_is_no_notice(watch_of):
    """The look shortly before finds it out."""
    watch, notices, clock = watch_of([3600.0, 7200.0])
    at(watch, clock, 0.0)
    at(watch, clock, 3478.0)
    assert at(watch, clock, 3490.0) > 3600 and notices.current is None


def test_what_slurm_told_at_the_start_is_believed_until_then(watch_of):
    """SLURM_JOB_END_TIME saves a question."""
    watch, notices, clock = watch_of([2.0], known_left_s=1000.0)
    assert watch._wait_s() == 1000 - 100 - 2
    at(watch, clock, 898.0)
    assert notices.current is not None


def test_a_query_that_hangs_delays_no_notice(watch_of, monkeypatch):
    """The one shortly before the notice; its answer, once it comes, plans no second one."""
    watch, notices, clock = watch_of([2000.0], known_left_s=1000.0)
    hangs: list = []
    monkeypatch.setattr(preemption, "_in_background", hangs.append)
    assert at(watch, clock, 898.0) == pytest.approx(2.0)
    at(watch, clock, 900.0)
    notice = notices.current
    assert notice == PreemptionNotice(Reason.TIME_LIMIT, 1000 - 5, given_s=100.0)
    hangs[0]()
    at(watch, clock, 5000.0)
    assert notices.current == notice


def test_a_silent_slurm_is_asked_again(watch_of):
    """And a task without an end is never told of one."""
    watch, notices, clock = watch_of([SlurmCommandError(["squeue"], 1, "no answer"), None])
    assert at(watch, clock, 0.0) == 60
    assert at(watch, clock, 60.0) is None and notices.current is None


class Leader:
    """A session that has heard something, and notes what it is told."""

    def __init__(self) -> None:
        self.leader_notice: PreemptionNotice | None = None
        self.told: list[PreemptionNotice] = []
        self.left = 0

    def add_notice(self, notice: PreemptionNotice) -> None:
        """Note it."""
        self.told.append(notice)

    def leave_now(self) -> None:
        """Count it."""
        self.left += 1


@pytest.fixture
def node(tmp_path):
    """Return a leader, notices, a worker's page, and what they do about a notice."""
    leader, page = Leader(), SharedPage.create(tmp_path, 0)
    notices = PreemptionState(EventLog(tmp_path / "7_1.jsonl", "7_1"))
    notices.connect(leader)
    why_leave = partial(why_leave_now, since=0.0, saves_itself=True)
    return leader, notices, page, DrainController(leader, notices, [page], why_leave)


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """Watches with a notice_command until it gives notice; returns notices and reports."""
    monkeypatch.setattr(preemption, "_COMMAND_EVERY_S", 0.05)
    monkeypatch.setattr(preemption, "_COMMAND_S", 0.5)

    def watch(command: str):
        notices, reports, avoided = PreemptionState(EventLog(tmp_path / "e", "7_1")), [], []
        launcher = SlurmSettings(agent=AgentSettings(notice_command=command))
        pool = Pool(range(1), launcher, PoolTerms(60, 30, whole_nodes=False), 1.0)
        asks = TimeLimitSource(lambda: None, lambda: None)
        watcher = PreemptionWatcher(
            SignalPipe(), pool, notices, asks, reports.append, avoided.append
        )
        watcher.start()
        deadline = time.monotonic() + 30
        while notices.current is None and time.monotonic() < deadline:
            time.sleep(0.01)
        watcher.close()
        return notices.current, reports, avoided

    return watch


def test_a_command_gives_notice_once_it_has_output(hook, tmp_path):
    """Until then it has failed silently, as curl does without a notice."""
    file = tmp_path / "notice"
    threading.Timer(0.5, file.write_text, ["40 spot\n"]).start()
    notice, reports, avoided = hook(f"cat {file}")
    assert (notice.reason, notice.given_s) == (Reason.ASKED, 40) and avoided == [40]
    assert reports == []


def test_a_command_that_hangs_or_is_not_there_is_reported_once(hook, tmp_path):
    """It is called again, and counts when it works."""
    count = tmp_path / "count"
    is_late = f"echo >> {count}; test $(wc -l < {count}) -gt 3"
    for fails, word in {"sleep 60": "after 0.5 s", "no-such-hook": "exit code 127"}.items():
        count.unlink(missing_ok=True)
        notice, (why,), _ = hook(f"if {is_late}; then echo 40; else {fails}; fi")
        assert notice is not None and word in why


def test_a_script_can_ask_for_its_node_to_be_left(node):
    """Its deadline is its word; the run is told once."""
    leader, notices, page, drain = node
    page.poll_checkpoint(1)
    page.release_node(within_s=1e6)
    drain.poll(0.0)
    drain.poll(0.1)
    assert [notice.reason for notice in leader.told] == [Reason.ASKED] and not leader.left
    assert notices.current is not None and page.notice_left_s > 1e5


def test_the_leaders_word_is_a_notice(node):
    """Somebody has put a file there."""
    leader, notices, page, drain = node
    page.poll_checkpoint(1)
    leader.leader_notice = PreemptionNotice(Reason.ASKED, 1e9)
    drain.poll(0.0)
    assert notices.current == PreemptionNotice(Reason.ASKED, 1e9)


def test_the_run_is_told_before_anything_is_written(tmp_path):
    """The grace runs while a shared file system hangs; nor does the agent's end wait for it."""
    leader, hangs, goes_on = Leader(), threading.Event(), threading.Event()

    class Hanging(EventLog):
        def append(self, lines) -> None:
            hangs.set()
            assert goes_on.wait(60)

    notices = PreemptionState(Hanging(tmp_path / "7_1.jsonl", "7_1"))
    notices.connect(leader)
    thread = threading.Thread(target=notices.add, args=(PreemptionNotice(Reason.SIGNAL, 1e9),))
    thread.start()
    try:
        assert hangs.wait(60)
        assert [notice.reason for notice in leader.told] == [Reason.SIGNAL]
        notices.close()
    finally:
        goes_on.set()
        thread.join()


def test_the_node_is_left_once_at_its_deadline(node):
    """Whatever the workers do."""
    leader, notices, page, drain = node
    page.poll_checkpoint(1)
    notices.add(PreemptionNotice(Reason.SIGNAL, 100.0))
    drain.poll(99.0)
    assert not leader.left
    drain.poll(100.0)
    drain.poll(101.0)
    assert leader.left == 1


def test_a_deadline_that_hardly_moves_is_not_told_again(tmp_path):
    """Two sources of the same thing are one notice."""
    notices = PreemptionState(EventLog(tmp_path / "7_1.jsonl", "7_1"))
    for by in (100.0, 99.5, 90.0):
        notices.add(PreemptionNotice(Reason.TIME_LIMIT, by))
    assert len(read_events(tmp_path)) == 2
