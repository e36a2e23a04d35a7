"""The stacks of a worker that is stuck, by py-spy where it may look, else by faulthandler."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_elastic.agent import stacks
from hpc_elastic.agent.hang_watch import describe_place, parse_main_thread, waiting_collective

WORKER = textwrap.dedent(
    """
    import ctypes, sys, threading, time
    from pathlib import Path
    from hpc_elastic.agent import stacks

    def get_stuck(how):
        print("stuck", flush=True)
        libc = ctypes.PyDLL(None) if how == "gil" else ctypes.CDLL(None)  # which keeps the lock
        while True:  # a signal interrupts it
            time.sleep(3600) if how == "sleep" else libc.sleep(3600)

    def beside():
        while True:
            time.sleep(0.01)

    how, control, offers = sys.argv[1:]
    if offers == "yes":
        stacks.register_handler(Path(control), 0)
    threading.Thread(target=beside, daemon=True).start()
    get_stuck(how)
    """
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where the worker's script is, and its control page would be."""
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


@pytest.fixture
def patient(monkeypatch) -> None:
    """A stack is waited for, however busy the machine is."""
    for name, seconds in {"_PY_SPY": 60.0, "_WRITTEN": 30.0}.items():
        monkeypatch.setattr(stacks, f"{name}_WITHIN_S", seconds)
    monkeypatch.setattr(stacks, "_SETTLED_S", 0.5)


@pytest.fixture
def start(folder) -> Iterator:
    """Return what starts a worker and waits until it is stuck."""
    workers = []

    def begin(how: str, *, offers: bool = True) -> subprocess.Popen[str]:
        argv = [sys.executable, str(folder / "worker.py"), how, str(folder)]
        argv += ["yes" if offers else "no"]
        worker = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        workers.append(worker)
        assert worker.stdout is not None and worker.stdout.readline() == "stuck\n"
        return worker

    yield begin
    for worker in workers:
        worker.kill()
        worker.communicate()


@pytest.fixture
def no_py_spy(monkeypatch, tmp_path) -> None:
    """It is neither on PATH nor beside Python."""
    monkeypatch.setattr(stacks.shutil, "which", lambda *args, **kwargs: None)


def py_spy(pid: int) -> None:
    """Skip where py-spy is missing, or may not look into a child of this process."""
    command = shutil.which("py-spy") or shutil.which(Path(sys.executable).with_name("py-spy"))
    if command is None:
        pytest.skip("py-spy is not installed: pip install hpc_elastic[stacks]")
    tried = subprocess.run([command, "dump", "--pid", str(pid)], capture_output=True, text=True)
    if "ermission" in tried.stderr:
        pytest.skip(f"py-spy may not look here: {tried.stderr.strip().splitlines()[-1]}")


@pytest.mark.parametrize("how", ["sleep", "c", "gil"])
def test_py_spy_sees_a_worker_wherever_it_is_stuck(folder, start, patient, how):
    """Without the worker's help: this one has not even offered its stacks."""
    worker = start(how, offers=False)
    py_spy(worker.pid)
    text = stacks.take_stacks(worker.pid, stacks.stacks_file(folder, 0))
    assert text is not None and "py-spy" not in text and "beside" in text
    frames = parse_main_thread(text)
    assert frames[0].function in ("get_stuck", "sleep")
    assert str(folder / "worker.py") in {frame.file for frame in frames}, "paths are whole"
    assert describe_place(frames).startswith("worker.py:") and describe_place(frames).endswith(
        " in get_stuck"
    )


def test_py_spy_shows_a_wait_in_a_collective(folder, start, patient):
    """By the path of torch's module, which tells it from a file of the user with such a name."""
    module = folder / "site-packages" / "torch" / "distributed" / "c10d.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import time\ndef all_reduce():\n    print('stuck', flush=True)\n    time.sleep(3600)\n"
    )
    calls = f"import runpy\nrunpy.run_path({str(module)!r})['all_reduce']()\n"
    (folder / "worker.py").write_text(calls)
    worker = start("sleep", offers=False)
    py_spy(worker.pid)
    text = stacks.take_stacks(worker.pid, stacks.stacks_file(folder, 0))
    assert text is not None and waiting_collective(parse_main_thread(text)) == "all_reduce"


@pytest.mark.parametrize("how", ["sleep", "c", "gil"])
def test_faulthandler_does_where_there_is_no_py_spy(folder, start, patient, no_py_spy, how):
    """Its handler is C, and runs while the interpreter's lock is held for good."""
    worker = start(how)
    text = stacks.take_stacks(worker.pid, stacks.stacks_file(folder, 0))
    assert text is not None
    assert describe_place(parse_main_thread(text)).endswith(" in get_stuck")
    assert worker.poll() is None, "asking does no harm"


def test_faulthandler_does_where_py_spy_may_not_look(folder, start, patient, monkeypatch, tmp_path):
    """As in a container without the right to trace."""
    refuses = tmp_path / "bin" / "py-spy"
    refuses.parent.mkdir()
    refuses.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", str(refuses.parent), prepend=":")
    worker = start("sleep")
    text = stacks.take_stacks(worker.pid, stacks.stacks_file(folder, 0))
    assert text is not None and describe_place(parse_main_thread(text)).endswith(" in get_stuck")


def test_a_worker_without_the_handler_survives_the_query(folder, start, no_py_spy):
    """The signal would end a process that has no handler for it."""
    worker = start("sleep", offers=False)
    assert stacks.take_stacks(worker.pid, stacks.stacks_file(folder, 0)) is None
    assert worker.poll() is None


def test_a_worker_that_is_stopped_has_no_stack_but_a_state(folder, start, no_py_spy):
    """Nothing runs in it, no handler either."""
    worker = start("sleep")
    worker.send_signal(signal.SIGSTOP)
    try:
        text = stacks.take_stacks(worker.pid, stacks.stacks_file(folder, 0))
        assert text is None and stacks.process_state(worker.pid) == "T"
    finally:
        worker.send_signal(signal.SIGCONT)


RECORD = """
{"entries": [
 {"process_group": ["0", "default_pg"], "collective_seq_id": 7, "is_p2p": false,
  "profiling_name": "nccl:all_reduce", "state": "completed"},
 {"process_group": ["0", "default_pg"], "collective_seq_id": 8, "is_p2p": false,
  "profiling_name": "nccl:broadcast", "state": "scheduled"},
 {"process_group": ["0", "default_pg"], "collective_seq_id": 8, "is_p2p": true,
  "profiling_name": "nccl:send 0->1", "state": "scheduled"},
 {"process_group": ["a1", "tp"], "collective_seq_id": 3, "is_p2p": false,
  "profiling_name": "nccl:all_gather", "state": "completed"}
]}
"""
EXPECTED = {"0": [8, "broadcast", False], "a1": [3, "all_gather", True]}


def test_a_worker_answers_with_its_last_collectives(tmp_path, monkeypatch):
    """By a pipe and a thread, as often as it is asked. One that does not answer costs a second."""
    record = SimpleNamespace(**{stacks._RECORD: lambda *_: RECORD})
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", record)
    stacks.answer_collectives(tmp_path, 0)
    os.mkfifo(tmp_path / "worker-1.ask")
    for _ in range(3):
        assert stacks.take_collectives(tmp_path, [0, 1, 2]) == {0: EXPECTED}
    reader = os.open(tmp_path / "worker-1.ask", os.O_RDONLY | os.O_NONBLOCK)
    assert stacks.take_collectives(tmp_path, [0, 1]) == {0: EXPECTED}
    os.close(reader)


def test_a_worker_whose_folder_is_gone_trains_on(tmp_path, monkeypatch):
    """The end of the user's last ssh session may clear it; it is asked for in a step."""
    record = SimpleNamespace(**{stacks._RECORD: lambda *_: RECORD})
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", record)
    stacks.answer_collectives(tmp_path / "gone", 0)
    assert stacks.take_collectives(tmp_path / "gone", [0]) == {}
