"""A state whose content tells its step, and processes that save it until they are killed."""

import multiprocessing as mp
import os
import random
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions
from hpc_elastic.checkpoint.owner import MARK

PATIENCE_S = 400.0
SIZE = 300_000


class Counter:
    """A state of a few tensors and values, all of them a function of the step and the writer."""

    def __init__(self, writer: int = 0, size: int = SIZE) -> None:
        self.tensors = [torch.zeros(size // n, dtype=torch.float32) for n in (1, 3)]
        self.values: dict[str, Any] = {}
        self.writer = writer
        self.restored_writer = -1
        self.step = 0

    def set(self, step: int) -> None:
        """Train to a step."""
        self.step = step
        for n, tensor in enumerate(self.tensors):
            tensor.copy_(torch.arange(tensor.numel()) % 1000 + (n + step) + 10_000 * self.writer)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {"step": self.step, "writer": self.writer, "tensors": tuple(self.tensors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over; every number has to be as it was set."""
        assert isinstance(state["tensors"], tuple)
        expected = Counter(state["writer"], self.tensors[0].numel())
        expected.set(state["step"])
        for found, right in zip(state["tensors"], expected.tensors, strict=True):
            assert torch.equal(found, right)
        self.step, self.restored_writer = state["step"], state["writer"]


def checkpointer(
    folder: Path, counter: Counter, keep_last: int = 2, **options: Any
) -> Checkpointer:
    """Make a Checkpointer of a counter."""
    state = {"counter": counter}
    return Checkpointer(state, folder, keep_last=keep_last, options=CheckpointOptions(**options))


def save_at(c: Checkpointer, counter: Counter, step: int) -> bool:
    """Train to a step and save."""
    counter.set(step)
    return c.save(step)


def restored(folder: Path) -> int | None:
    """Return the step that a new process would go on from; its content is checked."""
    counter = Counter()
    step = checkpointer(folder, counter, asynchronous=False).load_latest()
    assert step in (None, counter.step)
    return step


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder of checkpoints, but for the mark that it always has."""
    return sorted(path.name for path in folder.iterdir() if path.name != MARK)


def flip_a_bit(path: Path, bit: int | None = None) -> None:
    """Change one bit of a file, somewhere if it is not said which."""
    data = bytearray(path.read_bytes())
    bit = random.randrange(8 * len(data)) if bit is None else bit
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def count_on(folder: Path, writer: int, tell: int) -> None:
    """Restore, and save on and on; write a line about what is surely committed, each time."""
    counter = Counter(writer)
    with checkpointer(folder, counter) as c:
        step = c.load_latest() or 0
        os.write(tell, f"{step}\n".encode())
        while True:
            step += 1
            save_at(c, counter, step)
            if step % 3 == 0:
                c.wait()
                os.write(tell, f"{step}\n".encode())


def fork(target: Callable[..., None], *args: Any) -> int:
    """Run a function in a fork of this process, which must have no threads; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        target(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def exit_code(pid: int) -> int:
    """Wait for the end of a fork; minus the signal, if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_nursery(scenario: Callable[..., None], *args: Any, **env: str) -> None:
    """Run a function in a process that has imported everything, and may `fork`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor"])
    tell, told = context.Pipe()
    process = context.Process(target=_nurse, args=(tell, scenario, args, env))
    process.start()
    tell.close()
    try:
        assert told.poll(PATIENCE_S), "it takes too long"
        problem = told.recv()
    finally:
        process.kill()
    assert problem is None, problem


def _nurse(tell: Connection, scenario: Callable[..., None], args: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as name:  # what is imported late, is imported now
            counter = Counter()
            c = checkpointer(Path(name), counter, asynchronous=False)
            save_at(c, counter, 1)
            assert c.load_latest() == 1
        scenario(*args)
        tell.send(None)
    except BaseException:
        tell.send(traceback.format_exc())


class Crash:
    """Ends the process at one of the calls that change a file system, as a kill would."""

    CALLS = ("open", "write", "fsync", "rename", "mkdir", "rmdir", "unlink", "close")

    def __init__(self, at: int, after: bool) -> None:
        self.at = at
        self.after = after
        self.count = 0

    def plant(self) -> None:
        """From now on."""
        for name in self.CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count != self.at:
                return call(*args, **kwargs)
            if name == "write" and self.after:
                call(args[0], args[1][: len(args[1]) // 2])  # torn in the middle
            elif self.after:
                call(*args, **kwargs)
            os._exit(9)

        return wrapped
