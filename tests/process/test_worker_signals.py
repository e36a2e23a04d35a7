"""Signals of a notice do nothing to workers and their data loaders; the agent's own ends them."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from group import eventually
from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling, worker

from ended import is_gone
from hpc_elastic.agent.signals import STOP

WORKER = textwrap.dedent(
    """
    import multiprocessing.process, os, signal, subprocess, sys, threading, time
    from hpc_elastic.agent import signals
    signals.set_up_worker()
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    signals.keep_loaders()

    class Numbers(IterableDataset):
        def __iter__(self):
            while True:
                time.sleep(3600 if sys.argv[1] == "stuck" else 0.001)
                yield 1

    def kill_and_see_it_dead(child):
        kill(child)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    def fork(pids):
        pid = os.fork()
        while not pid:
            signal.pause()
        pids.append(pid)

    if __name__ == "__main__":
        loader = iter(DataLoader(Numbers(), num_workers=2))
        if sys.argv[1] == "stuck":
            print("stuck", flush=True)
            sys.stdin.readline()
            from hpc_elastic.agent.worker_main import _exit_process
            kill = multiprocessing.process.BaseProcess.kill
            multiprocessing.process.BaseProcess.kill = kill_and_see_it_dead
            _exit_process(7)
        next(loader)
        forked = []
        fork(forked)
        thread = threading.Thread(target=fork, args=(forked,))
        thread.start()
        thread.join()
        program = subprocess.Popen(["sleep", "3600"])
        print(*forked, program.pid, flush=True)
        for line in sys.stdin:
            print(next(loader).item(), flush=True)
    """
)


@pytest.fixture
def started():
    """Return a function that starts the worker in a mode; nothing of it outlives the test."""
    running = []

    def start(mode: str) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, mode], text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def test_a_notice_ends_neither_worker_nor_loaders_and_the_agent_ends_both(started):
    """Forked children and programs have the defaults: whoever started them may end them."""
    process = started("train")
    others = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    children = psutil.Process(process.pid).children()
    loaders = [child for child in children if child not in others]
    assert len(loaders) == 2
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        for target in (psutil.Process(process.pid), *loaders):
            target.send_signal(number)
    for _ in range(20):  # prefetched batches are not enough
        process.stdin.write("next\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1\n"
    assert all(loader.is_running() for loader in loaders)
    for other in others:
        other.terminate()
    eventually(lambda: all(is_gone(other.pid) for other in others))
    os.killpg(process.pid, STOP)  # as the agent does
    assert process.wait(30) == -STOP
    assert not psutil.wait_procs(loaders, timeout=30)[1]


SPAWNS = textwrap.dedent(
    """
    import sys, time
    from hpc_elastic.agent import signals
    from torch.utils.data import DataLoader, IterableDataset

    class Numbers(IterableDataset):
        def __iter__(self):
            while True:
                time.sleep(0.001)
                yield 1

    if __name__ == "__main__":
        signals.set_up_worker()
        signals.keep_fork_server()
        signals.keep_loaders()
        options = {"multiprocessing_context": sys.argv[1], "prefetch_factor": 2}
        loader = iter(DataLoader(Numbers(), num_workers=1, **options))
        next(loader)
        print("ready", flush=True)
        for line in sys.stdin:
            print(next(loader).item(), flush=True)
    """
)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_notice_does_not_end_loaders_that_are_programs_of_their_own(method, tmp_path):
    """Nor the server that forks them; Slurm signals all processes of a task."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    children: list[psutil.Process] = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script, method], **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) >= 2, "a tracker of resources, and the loader or its server"
            for child in children:
                child.send_signal(signal.SIGTERM)
            for _ in range(20):  # prefetched batches are not enough
                process.stdin.write("next\n")
                process.stdin.flush()
                assert process.stdout.readline() == "1\n"
            assert all(child.is_running() for child in children)
        finally:  # the server outlives its parent while it has children
            for each in (psutil.Process(process.pid), *children):
                each.kill()


def test_loaders_that_are_stuck_do_not_keep_the_worker_from_its_end(started):
    """multiprocessing would wait for them, its SIGTERM doing nothing.

    The first is dead before the second is killed: torch has a handler that raises then.
    """
    process = started("stuck")
    process.stdout.readline()
    process.stdin.write("end\n")
    process.stdin.flush()
    assert process.wait(30) == 7


def test_an_open_executor_does_not_keep_the_worker_from_its_end():
    """torch.compile leaves one open. What it still has to do is done, then what atexit has."""
    code = """if True:
        import atexit, sys, time
        from concurrent.futures import ThreadPoolExecutor
        from hpc_elastic.agent.worker_main import _exit_process
        atexit.register(print, "registered")
        executor = ThreadPoolExecutor(2)
        executor.submit(lambda: (time.sleep(0.2), print("done")))
        _exit_process(7)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (7, b"done\nregistered\n"), ended.stderr
    assert not ended.stderr


def test_torch_still_sets_a_loaders_handlers_where_we_replace_it():
    """Otherwise loaders would die of a notice, silently, and the training with them.

    The main function is taken from the module at each start.
    """
    assert "target=_utils.worker._worker_loop," in inspect.getsource(dataloader)
    assert "_set_worker_signal_handlers" in vars(signal_handling)
    assert "signal_handling._set_worker_signal_handlers()" in inspect.getsource(worker._worker_loop)
