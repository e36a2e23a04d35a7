"""When a worker is taken for hung, and what a stack tells of it (pure)."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_elastic.agent import hang_watch
from hpc_elastic.agent.hang_watch import (
    Frame,
    StepClock,
    WorkerSample,
    is_at_work,
    main_thread,
    moves,
    place,
    waits_in,
)
from hpc_elastic.worker.shared_page import WorkerStatus

BLANK = WorkerStatus(None, None, None, None, None, None, 0)


def stepping(after_s: float | None, step_s: float, num_steps: int = 10) -> StepClock:
    """A clock that has seen so many steps, the last one at ``step_s * num_steps``."""
    clock = StepClock(after_s, 0.0)
    for step in range(1, num_steps + 1):
        clock.look(replace(BLANK, step=step), step * step_s)
    return clock


def wait(clock: StepClock, worker: WorkerStatus, since: float, for_s: float) -> None:
    """Look twice a second at a worker that publishes nothing new."""
    for i in range(1, int(2 * for_s) + 1):
        clock.look(worker, since + i / 2)


@pytest.mark.parametrize(
    ("after_s", "step_s", "limit_s"),
    [(None, 1.0, 60.0), (None, 4.0, 60.0), (30.0, 1.0, 30.0), (0, 1.0, None)],
)
def test_the_limit_is_ten_median_steps_or_a_minute_or_the_setting(after_s, step_s, limit_s):
    """0 is never."""
    clock = stepping(after_s, step_s)
    assert clock.limit_s == limit_s


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
        (None, BLANK, None),
        (5.0, BLANK, 600.0),
        (120.0, BLANK, 1200.0),
        (None, replace(BLANK, step=0), 600.0),
        (0, replace(BLANK, step=0), None),
    ],
)
def test_before_the_second_step_there_is_more_time(after_s, worker, limit_s):
    """Compiling and the first batches take long; by default nothing before the first counts."""
    clock = StepClock(after_s, 0.0)
    clock.look(worker, 1.0)
    assert clock.limit_s == limit_s


def test_it_is_due_after_the_limit_and_again_a_limit_later():
    """Somebody was asked meanwhile, and the group was found to be at work."""
    clock = stepping(2.0, 0.1)
    wait(clock, replace(BLANK, step=10), 1.0, 1.5)
    assert not clock.is_due(2.9) and clock.is_due(3.1)
    clock.asked(3.1)
    assert not clock.is_due(5.0) and clock.is_due(5.2)
    assert clock.stalled_s(5.2) == pytest.approx(4.2)


@pytest.mark.parametrize(
    "sign",
    [
        {"step": 11}, {"pulse": 1}, {"boundary": 10}, {"passed": 11}, {"samples": 3},
        {"busy": 1}, {"held": 2},
    ],
)  # fmt: skip
def test_a_sign_of_life_starts_the_clock_anew(sign):
    """Another step, any report, a checkpoint, a question; and what is no step stops it."""
    clock = stepping(2.0, 0.1)
    clock.look(replace(BLANK, **{"step": 10, **sign}), 2.9)
    assert not clock.is_due(3.5)


def test_who_waits_for_the_leader_is_not_hung():
    """His word on a proposed step may take a while."""
    clock = stepping(2.0, 0.1)
    clock.look(replace(BLANK, step=10), 2.9, awaited=True)
    assert not clock.is_due(3.5)


def test_time_in_which_the_agent_slept_does_not_count():
    """Agent and workers were suspended together."""
    clock = stepping(2.0, 0.1)
    clock.look(replace(BLANK, step=10), 1000.0)
    assert not clock.is_due(1000.0)


def test_after_the_last_step_nothing_is_a_hang():
    """The script has said which one that is, and does what it likes after it."""
    clock = stepping(2.0, 0.1)
    clock.look(replace(BLANK, step=10, total_steps=10), 1.1)
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
    frames = main_thread(text)
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
    found = main_thread(text)
    assert waits_in(found) == "all_reduce" and place(found) == "train.py:25 in step"


def test_of_a_dump_that_was_cut_the_current_thread_is_taken():
    """More than a hundred threads: the main one is not there."""
    cut = (
        FAULTHANDLER.replace("\n\nCurrent", "\n\nCurrent")
        + "\nThread 0x1 (most recent call first):\n"
    )
    cut += '  File "a.py", line 1 in other\n...\n'
    assert main_thread(cut)[0].function == "all_reduce"


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
    assert waits_in(stack) == waits
    assert f":{stands} in" in place(stack)


def test_saving_and_compiling_are_work():
    """They take long, and are no step."""
    assert is_at_work(frames(f"{SITE}/torch/serialization.py:1:_save", USER))
    assert is_at_work(frames(f"{SITE}/torch/_inductor/compile_fx.py:1:f", USER))
    assert not is_at_work(frames(f"{SITE}/torch/_dynamo/eval_frame.py:1:f", USER))


def test_a_stack_moves_if_two_looks_differ():
    """Be it by one line."""
    still, other = frames(USER), frames("/home/u/hpc_elastic/train.py:41:step")
    assert not moves([still, still, still]) and moves([still, other, still]) and not moves([])


def test_one_that_reports_without_a_step_is_alive_and_one_that_steps_is_not_waited_for():
    """A validation; and a rank that goes on without those that hang."""
    validating, training = stepping(4.0, 0.1), stepping(4.0, 0.1)
    for i in range(1, 9):
        validating.look(replace(BLANK, step=10, pulse=i), 1.0 + i / 2)
        training.look(replace(BLANK, step=10 + i), 1.0 + i / 2)
    assert validating.is_alive(5.5) and not training.is_alive(5.5)
    assert not validating.is_alive(8.0)


USERS = (Frame("/u/t.py", 4, "step"),)
SAVING = (Frame(f"{SITE}/torch/serialization.py", 1, "_save"), *USERS)
WAITING = (Frame(str(Path(hang_watch.__file__).parents[1] / "ft" / "link.py"), 1, "ask"), *USERS)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (WorkerSample(None, [], BLANK), "done"),
        (WorkerSample("Z", [], BLANK), "done"),
        (WorkerSample("T", [], replace(BLANK, busy=1)), "stopped"),
        (WorkerSample("S", [USERS], replace(BLANK, busy=1)), "busy"),
        (WorkerSample("S", [USERS], replace(BLANK, held=3)), "busy"),
        (WorkerSample("S", [USERS], BLANK, alive=True), "busy"),
        (WorkerSample("S", [WAITING], BLANK, alone=True), "busy"),
        (WorkerSample("S", [WAITING], BLANK), "stands"),
        (WorkerSample("t", [], BLANK), "moves"),
        (WorkerSample("D", [], BLANK), "silent"),
        (WorkerSample("R", [USERS, USERS], BLANK, computes=True), "moves"),
        (WorkerSample("S", [USERS, SAVING], BLANK), "moves"),
        (WorkerSample("S", [SAVING, SAVING], BLANK), "moves"),
        (WorkerSample("S", [USERS, USERS], BLANK), "stands"),
    ],
)
def test_what_a_rank_is_at(seen, state):
    """Out of its process, its stacks, and what it publishes."""
    assert seen.state == state
