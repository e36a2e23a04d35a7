"""Members of process groups: each a real process, which does what it is told, also at once."""

import multiprocessing as mp
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

PATIENCE_S = 60.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "hpc_elastic.ft.process_group", "pytest"])


class Member:
    """One process with a `ProcessGroupGloo`; what it is told to do runs on a thread each."""

    def __init__(self) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._told = 0

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Let it call ``function(group, *args)``; return what waits for the answer."""
        self._told += 1
        number = self._told
        self._pipe.send((number, function, args))
        return lambda: self._answer(number)

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Let it call a function, and return what that returned, or the error as text."""
        return self.begin(function, *args)()

    def stop(self) -> None:
        """Send SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self.process.kill()
        self.process.join()

    def _answer(self, number: int) -> Any:
        while number not in self._answers:
            assert self._pipe.poll(PATIENCE_S), "no answer"
            answered, result = self._pipe.recv()
            self._answers[answered] = result
        return self._answers.pop(number)


@contextmanager
def members(count: int) -> Iterator[list[Member]]:
    """Start members, and end them."""
    made = [Member() for _ in range(count)]
    try:
        yield made
    finally:
        for member in made:
            member.kill()


@contextmanager
def store() -> Iterator[str]:
    """Host a TCPStore; give its address."""
    from torch.distributed import TCPStore

    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{hosted.port}"


def together(
    them: list[Member], function: Callable[..., Any], *args: Any, ranked: bool = False
) -> list[Any]:
    """Let all do the same at once; ``ranked``: each is told its place in the list first."""
    waits = [m.begin(function, *((i,) if ranked else ()), *args) for i, m in enumerate(them)]
    return [wait() for wait in waits]


def configure(group: Any, rank: int, address: str, size: int, quorum: int) -> str:
    """Meet in a quorum."""
    group.configure(f"{address}/q/{quorum}", f"replica_{rank}", rank, size, quorum)
    return "configured"


def _serve(pipe: Any) -> None:
    import torch

    from hpc_elastic.ft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    group, lock = ProcessGroupGloo(timedelta(seconds=30)), threading.Lock()

    def call(number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = function(group, *args)
        except RuntimeError as e:
            result = f"{type(e).__name__}: {e}"
        except BaseException:
            result = traceback.format_exc()
        with lock:
            pipe.send((number, result))

    while True:
        try:
            number, function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        threading.Thread(target=call, args=(number, function, args), daemon=True).start()


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection that is none of gloo's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other
