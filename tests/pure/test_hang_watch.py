"""Hangs of a node's workers: the step clock, what a stack shows, and the answer to the leader."""

import itertools
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.agent import hang_watch, stacks
from hpc_elastic.agent.hang_watch import (
    FirstStepLimit,
    Frame,
    HangWatch,
    StepClock,
    WatchedWorker,
    WorkerSample,
    describe_place,
    first_step_limit,
    parse_main_thread,
    waiting_collective,
)
from hpc_elastic.agent.worker_process import NodeIdentity, WorkerFiles
from hpc_elastic.config.schema import AgentSettings
from hpc_elastic.rendezvous.hang_diagnosis import ANSWER_S
from hpc_elastic.worker.shared_page import WorkerStatus

BLANK = WorkerStatus(None, None, None, None, None, None, 0)


def stepping(after_s: float | None, step_s: float, num_steps: int = 10) -> StepClock:
    """A clock that has seen so many steps, the last one at ``step_s * num_steps``."""
    clock = StepClock(after_s, 0.0)
    for step in range(1, num_steps + 1):
        clock.update(replace(BLANK, step=step), step * step_s)
    return clock


def wait(clock: StepClock, worker: WorkerStatus, since: float, for_s: float) -> None:
    """Look twice a second at a worker that publishes nothing new."""
    for i in range(1, int(2 * for_s) + 1):
        clock.update(worker, since + i / 2)


def test_a_replica_waits_for_a_slow_one_for_longer_than_a_collective():
    """Its collective gives up, and the quorum leaves the slow one out: that is no hang."""
    from hpc_elastic.ft.process_group import DEFAULT_TIMEOUT  # imports torch

    clock = StepClock(None, 0.0, least_s=hang_watch.REPLICA_MIN_LIMIT_S)
    for step in range(1, 10):
        clock.update(replace(BLANK, step=step), float(step))
    assert clock.limit_s == 150.0 > 2 * DEFAULT_TIMEOUT.total_seconds()


@pytest.mark.parametrize(
    ("after_s", "step_s", "limit_s"),
    [(None, 1.0, 60.0), (None, 4.0, 60.0), (30.0, 1.0, 30.0), (0, 1.0, None)],
)
def test_the_limit_is_ten_median_steps_or_a_minute_or_the_setting(after_s, step_s, limit_s):
    """0 is never."""
    assert stepping(after_s, step_s).limit_s == limit_s


def test_a_worker_whose_function_has_returned_does_not_hang():
    """Its process may take minutes to end; that has a limit of its own."""
    clock = stepping(None, 1.0)
    clock.update(replace(BLANK, step=10, returned=True), 11.0)
    assert clock.limit_s is None and not clock.is_due(500.0)
    sample = WorkerSample("S", [()], replace(BLANK, step=10, returned=True))
    assert sample.state == "done"


def test_long_steps_have_long_limits():
    """Ten times the median; it is looked between the steps."""
    clock, now = StepClock(None, 0.0), 0.0
    for step in range(1, 6):
        wait(clock, replace(BLANK, step=step), now, 20.0)
        now += 20.0
    assert clock.limit_s == pytest.approx(200.0, rel=0.05)


@pytest.mark.parametrize(
    ("after_s", "worker", "limit_s"),
    [
        (None, BLANK, 1800.0),
        (5.0, BLANK, 600.0),
        (120.0, BLANK, 1200.0),
        (0, BLANK, None),
        (None, replace(BLANK, step=0), 600.0),
        (0, replace(BLANK, step=0), None),
    ],
)
def test_before_the_second_step_there_is_more_time(after_s, worker, limit_s):
    """Compiling and the first batches take long."""
    clock = StepClock(after_s, 0.0, first_step_limit(None, after_s, None).limit_s)
    clock.update(worker, 1.0)
    assert clock.limit_s == limit_s


@pytest.mark.parametrize(
    ("wanted_s", "hang_s", "start_s", "limit"),
    [
        (None, None, None, FirstStepLimit(1800.0, is_assumed=True)),
        (None, None, 20.0, FirstStepLimit(600.0)),
        (None, None, 200.0, FirstStepLimit(2000.0)),
        (None, 0, 200.0, FirstStepLimit(None)),
        (0, None, 200.0, FirstStepLimit(None)),
        (90.0, 0, None, FirstStepLimit(90.0)),
    ],
)
def test_the_first_step_has_a_limit_from_measured_starts(wanted_s, hang_s, start_s, limit):
    """Ten times the longest; it is off by choice only."""
    assert first_step_limit(wanted_s, hang_s, start_s) == limit


def test_it_is_due_after_the_limit_and_again_a_limit_later():
    """Somebody was asked meanwhile, and the group was found to be at work."""
    clock = stepping(2.0, 0.1)
    wait(clock, replace(BLANK, step=10), 1.0, 1.5)
    assert not clock.is_due(2.9) and clock.is_due(3.1)
    clock.postpone(3.1)
    assert not clock.is_due(5.0) and clock.is_due(5.2)
    assert clock.stalled_s(5.2) == pytest.approx(4.2)


@pytest.mark.parametrize(
    ("sign", "options"),
    [
        ({"step": 11}, {}), ({"pulse": 1}, {}), ({"boundary": 10}, {}), ({"passed": 11}, {}),
        ({"samples": 3}, {}), ({"busy": 1}, {}), ({"paused": 2}, {}), ({}, {"awaited": True}),
    ],
)  # fmt: skip
def test_a_sign_of_life_starts_the_clock_anew(sign, options):
    """Another step, any report, a checkpoint, a question; what is no step stops it.

    So does a wait for the leader's word on a proposed step.
    """
    clock = stepping(2.0, 0.1)
    clock.update(replace(BLANK, **{"step": 10, **sign}), 2.9, **options)
    assert not clock.is_due(3.5)


def test_time_in_which_the_agent_slept_does_not_count():
    """Agent and workers were suspended together."""
    clock = stepping(2.0, 0.1)
    clock.update(replace(BLANK, step=10), 1000.0)
    assert not clock.is_due(1000.0)


def test_after_the_last_step_nothing_is_a_hang():
    """The script has said which one that is, and does what it likes after it."""
    clock = stepping(2.0, 0.1)
    clock.update(replace(BLANK, step=10, total_steps=10), 1.1)
    assert clock.limit_s is None and not clock.is_due(4.0)


FAULTHANDLER = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/u/train.py", line 40 in step
  File "/home/u/train.py", line 99 in main
  File "<frozen runpy>", line 88 in _run_code
"""  # noqa: E501
PY_SPY = """Process 7: python -m x
Python v3.11.2 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    wrapper (/v/site-packages/torch/distributed/c10d_logger.py:81)
    step (/home/u/train.py:40)
Thread 9 (active): "Thread-1"
    wait (threading.py:327)
"""


@pytest.mark.parametrize("text", [FAULTHANDLER, PY_SPY])
def test_the_main_thread_is_found_in_either_form(text):
    """faulthandler writes it last, py-spy gives its name."""
    frames = parse_main_thread(text)
    assert frames[0].function == "all_reduce" and frames[0].line == 2810
    assert Frame("/home/u/train.py", 40, "step") in frames


def test_py_spy_names_functions_by_where_they_are_defined():
    """Their own name tells a collective from what is wrapped around it."""
    torch = f"{SITE}/torch/distributed"
    text = (
        'Thread 7 (idle): "MainThread"\n'
        f"    Store.all_reduce ({torch}/distributed_c10d.py:3252)\n"
        f"    _exception_logger.<locals>.wrapper ({torch}/c10d_logger.py:83)\n"
        "    Trainer.step (/home/u/train.py:25)\n"
    )
    found = parse_main_thread(text)
    assert (
        waiting_collective(found) == "all_reduce" and describe_place(found) == "train.py:25 in step"
    )


def test_of_a_dump_that_was_cut_the_current_thread_is_taken():
    """More than a hundred threads: the main one is not there."""
    cut = FAULTHANDLER + "\nThread 0x1 (most recent call first):\n"
    cut += '  File "a.py", line 1 in other\n...\n'
    assert parse_main_thread(cut)[0].function == "all_reduce"


def frames(*lines: str) -> tuple[Frame, ...]:
    """Frames out of ``file:line:function``, the innermost first."""
    made = (line.rsplit(":", 2) for line in lines)
    return tuple(Frame(file, int(line), function) for file, line, function in made)


SITE = "/v/lib/python3.11/site-packages"
USER = "/home/u/hpc_elastic/train.py:40:step"


@pytest.mark.parametrize(
    ("stack", "waits", "stands"),
    [
        (frames(f"{SITE}/torch/distributed/distributed_c10d.py:1:barrier", USER), "barrier", 40),
        (frames(f"{SITE}/torch/autograd/graph.py:1:_run", f"{SITE}/torch/_tensor.py:2:backward",
                USER), "backward", 40),
        (frames(USER), None, 40),
        (frames("/home/u/deep.py:7:f", f"{SITE}/torch/distributed/x.py:1:hook", USER), None, 7),
        (frames("/usr/lib/python3.11/socket.py:5:recv", USER), None, 40),
    ],
)  # fmt: skip
def test_what_a_stack_waits_in(stack, waits, stands):
    """A collective below the user's innermost frame; DDP's is in the backward pass."""
    assert waiting_collective(stack) == waits
    assert f":{stands} in" in describe_place(stack)


def test_one_that_reports_without_a_step_is_alive_and_one_that_steps_is_not_waited_for():
    """A validation; and a rank that goes on without those that hang."""
    validating, training = stepping(4.0, 0.1), stepping(4.0, 0.1)
    for i in range(1, 9):
        validating.update(replace(BLANK, step=10, pulse=i), 1.0 + i / 2)
        training.update(replace(BLANK, step=10 + i), 1.0 + i / 2)
    assert validating.is_alive(5.5) and not training.is_alive(5.5)
    assert not validating.is_alive(8.0)


USERS = (Frame("/u/t.py", 4, "step"),)
MOVED = (Frame("/u/t.py", 5, "step"),)
SAVING = (Frame(f"{SITE}/torch/serialization.py", 1, "_save"), *USERS)
COMPILING = (Frame(f"{SITE}/torch/_inductor/compile_fx.py", 1, "f"), *USERS)
COMPILED = (Frame(f"{SITE}/torch/_dynamo/eval_frame.py", 1, "f"), *USERS)
WAITING = (Frame(str(Path(hang_watch.__file__).parents[1] / "ft" / "link.py"), 1, "ask"), *USERS)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (WorkerSample(None, [], BLANK), "done"),
        (WorkerSample("Z", [], BLANK), "done"),
        (WorkerSample("T", [], replace(BLANK, busy=1)), "stopped"),
        (WorkerSample("S", [USERS], replace(BLANK, busy=1)), "busy"),
        (WorkerSample("S", [USERS], replace(BLANK, paused=3)), "busy"),
        (WorkerSample("S", [USERS], BLANK, alive=True), "busy"),
        (WorkerSample("S", [WAITING], BLANK, alone=True), "busy"),
        (WorkerSample("S", [WAITING], BLANK), "stands"),
        (WorkerSample("t", [], BLANK), "moves"),
        (WorkerSample("D", [], BLANK), "silent"),
        (WorkerSample("R", [USERS, USERS], BLANK, computes=True), "moves"),
        (WorkerSample("S", [USERS, SAVING], BLANK), "moves"),
        (WorkerSample("S", [SAVING, SAVING], BLANK), "moves"),
        (WorkerSample("S", [COMPILING, COMPILING], BLANK), "moves"),
        (WorkerSample("S", [USERS, MOVED, USERS], BLANK), "moves"),
        (WorkerSample("S", [COMPILED, COMPILED], BLANK), "stands"),
        (WorkerSample("S", [USERS, USERS], BLANK), "stands"),
    ],
)
def test_what_a_rank_is_at(seen, state):
    """Out of its process, its stacks, and what it publishes."""
    assert seen.state == state


STACK = 'Thread 0x01 (most recent call first):\n  File "/u/t.py", line {} in step\n'
NUM_WORKERS = 8


class Leader:
    """Asks what the workers are at, and takes the answer."""

    checkpoint_request = None

    def __init__(self) -> None:
        self.stacks = 0
        self.answers = {}
        self.answered = threading.Event()

    def report(self, answer) -> None:
        """Keep it."""
        self.answers[answer.number] = [rank.state for rank in answer.ranks]
        self.answered.set()


class Page:
    """What a worker has published."""

    def __init__(self, published=BLANK) -> None:
        self.published = published
        self.is_sampled = threading.Event()

    def read(self):
        """Return it."""
        published = self.published
        if threading.current_thread().name == "stack":
            self.is_sampled.set()
        return published


class Node:
    """Workers, of which as many as wanted are at a checkpoint, and their watch."""

    def __init__(self, folder: Path, *, num_busy: int = 0) -> None:
        busy = replace(BLANK, busy=1)
        self.leader = Leader()
        self.pages = [Page(busy if rank < num_busy else BLANK) for rank in range(NUM_WORKERS)]
        place = NodeIdentity("7_0", "n1", folder)
        self.files = [WorkerFiles(place, 1, rank, rank) for rank in range(NUM_WORKERS)]
        workers = [
            WatchedWorker(page, files, folder / f"worker-{rank}.stack")
            for rank, (page, files) in enumerate(zip(self.pages, self.files, strict=True))
        ]
        self._watch = HangWatch(self.leader, workers, AgentSettings(hang_timeout_s=0))

    def ask(self, within_s: float = ANSWER_S) -> list[str]:
        """Ask as the leader does, and return the states of the workers."""
        self.leader.answered.clear()
        self.leader.stacks += 1
        asked_at = time.monotonic()
        while not self.leader.answered.wait(0.05):
            assert time.monotonic() < asked_at + within_s, "no answer in time"
            self._watch.update(dict.fromkeys(range(NUM_WORKERS), os.getpid()), time.monotonic())
        return self.leader.answers[self.leader.stacks]


@pytest.fixture
def shown(monkeypatch):
    """Return what decides what a look at a worker's stack shows, by its local rank."""

    def show(stack_of) -> None:
        def take(pid, dump):
            return stack_of(int(dump.stem.rpartition("-")[2]))

        monkeypatch.setattr(stacks, "take_stacks", take)

    monkeypatch.setattr(hang_watch, "_BUSY_SHARE", 1e9)  # all are this process, which computes
    return show


def test_eight_slow_looks_are_answered_in_time(tmp_path, shown):
    """A second each, as py-spy may take; workers that save are not sampled."""
    lines = itertools.count()

    def slow(rank):
        assert rank >= 2, "busy workers are not sampled"
        time.sleep(1.0)
        return STACK.format(next(lines) if rank == 7 else 4)

    shown(slow)
    states = Node(tmp_path, num_busy=2).ask(within_s=ANSWER_S / 2)
    assert states == ["busy", "busy", *["stands"] * 5, "moves"]


def test_a_look_that_hangs_costs_the_others_nothing(tmp_path, shown, monkeypatch):
    """Its worker is out of reach; the states of the others are reported."""
    over, lines = threading.Event(), itertools.count()
    monkeypatch.setattr(hang_watch, "WITHIN_S", 3.0)

    def hang(rank):
        if rank == 0:
            over.wait(60)
        return STACK.format(next(lines))

    shown(hang)
    states = Node(tmp_path).ask(within_s=10.0)
    over.set()
    assert states == ["silent", *["moves"] * 7]


def test_a_worker_that_ends_its_save_during_the_sample_is_not_silent(tmp_path, shown):
    """It has no stacks, since it was not looked into while it was busy."""
    node = Node(tmp_path, num_busy=1)

    def end_save(rank):
        assert node.pages[0].is_sampled.wait(60)
        node.pages[0].published = BLANK
        return STACK.format(4)

    shown(end_save)
    assert node.ask()[0] == "busy"


def test_a_file_system_that_hangs_keeps_no_answer(tmp_path, shown, monkeypatch):
    """The stacks are written when it can be; all ranks may be waiting for it themselves."""
    answers, real = threading.Event(), Path.open

    def hang(self, *args, **options):
        if self.name.endswith(".stack.txt"):
            assert answers.wait(60)
        return real(self, *args, **options)

    shown(lambda rank: STACK.format(4))
    monkeypatch.setattr(hang_watch, "_WRITTEN_WITHIN_S", 0.1)
    monkeypatch.setattr(Path, "open", hang)
    node = Node(tmp_path)
    for _ in range(2):
        assert node.ask(within_s=10.0) == ["stands"] * NUM_WORKERS
    answers.set()
    deadline = time.monotonic() + 10
    while not node.files[-1].stack.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "/u/t.py" in node.files[0].stack.read_text()
