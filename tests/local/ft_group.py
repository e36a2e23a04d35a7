"""A replica group's server on a thread, the keeper's side of it, and workers as processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.ft.manager_client import ManagerClient
from hpc_elastic.ft.manager_server import ManagerServer
from hpc_elastic.ft.messages import Message, QuorumRequest, QuorumResult, QuorumResults

T = TypeVar("T")
PATIENCE_S = 10.0


class Heard:
    """What a server has told the keeper, in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._changed = threading.Condition()

    def send(self, message: Message) -> None:
        """Take down what a server says."""
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def next(self, type_: type[T]) -> T:
        """Wait for the next message of a type; forget it, and all before it."""

        def found() -> int | None:
            return next((i + 1 for i, m in enumerate(self.messages) if isinstance(m, type_)), None)

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), f"no {type_}: {self.messages}"
            message = self.messages[found() - 1]
            del self.messages[: found()]
            return message


class Server:
    """A group's server in an event loop of its own."""

    def __init__(self, folder: Path, size: int = 1) -> None:
        self.path = folder / "socket"
        self.keeper = Heard()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = ManagerServer(self.path, "group-a", self.keeper)
        self._run(self.server.start())
        self.do(self.server.expect, size)

    def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do something in its event loop; return what it returns."""

        async def doing() -> T:
            return work(*arguments)

        return self._run(doing())

    def hears(self, message: Message) -> None:
        """The keeper says something."""
        self.do(self.server.heard, message)

    def place(self, quorum_id: int, size: int = 1, number: int | None = None) -> None:
        """The keeper places the group in a quorum of two, in answer to its last ask."""
        place = QuorumResult(quorum_id, 0, 2, "h:1", 5, "token", 0, 2)
        self.hears(QuorumResults((place,) * size, number or self.server._number))

    def stop(self) -> None:
        """End it."""
        self._run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


def ask_of(
    link: ManagerClient, rank: int = 0, *, step: int = 5, failures: int = 0
) -> QuorumRequest:
    """Return the ask of a worker at its call."""
    return QuorumRequest(
        link.call, step, "token", link.quorum_id, failures, 1, False, "h:1", (f"m{rank}",)
    )


_WORKER = """
import ctypes, os, re, sys, time
from pathlib import Path
from hpc_elastic.ft.manager_client import ManagerClient
from hpc_elastic.ft.messages import LeaveGranted, QuorumRequest
from hpc_elastic.ft import quorum

def tell(*what):
    print(*what, flush=True)

where, attendant = sys.argv[1], None
if where.startswith("http"):
    from hpc_elastic.ft.manager_server_process import start_attendant
    attendant = start_attendant(where, sys.argv[2], 1)
    where = attendant.path
broken = lambda q, why: tell("broken", q, why)
link = ManagerClient(Path(where), 0, 1, on_broken=broken, timeout_s=10)
tell("linked", attendant.process.pid if attendant else 0, where)
for line in sys.stdin:
    what, _, number = line.strip().partition(" ")
    if what == "step":
        if not link.needs_quorum(failed=False):
            tell("on", link.call)
            continue
        known = quorum.known(0, 0)
        ask = QuorumRequest(link.call, 0, known, link.quorum_id, 0, 1, False, "h:1", ("m",))
        try:
            place = link.ask(ask, float(number or 30))
        except TimeoutError as e:
            tell("late", e)
            continue
        if isinstance(place, LeaveGranted):
            tell("farewell")
        else:
            tell("placed", place.quorum_id, place.replica_rank, place.replica_world_size)
    elif what == "hold":  # the interpreter lock
        ctypes.PyDLL(None).sleep(int(number))
        tell("held")
    elif what == "fork":
        kept = os.dup(link._socket.fileno())  # as a child would that was not forked by Python
        pid = os.fork()
        if not pid:
            time.sleep(float(number))
            os._exit(0)
        os.close(kept)
        tell("forked", pid)
    elif what == "close":
        link.close()
        if attendant:
            attendant.end()
        tell("closed")
"""


class Worker:
    """A worker in a process of its own, which does what it is told by lines.

    Attributes:
        attendant: The process id of its attendant, if it has started one.
        path: The socket of its server.
        place: Its quorum, its rank and the number of members, as it has said last; None: none.
    """

    place: list[str] | None = None

    def __init__(self, where: Path | str, replica_id: str = "", **environment: str) -> None:
        """Start it.

        Args:
            where: The server's socket; or the URL of a lighthouse: it starts an attendant.
            replica_id: The group's name, then.
            environment: What is unlike this process's.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(where), replica_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        _, attendant, path = self.says("linked")
        self.attendant, self.path = int(attendant), Path(path)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def tell(self, line: str) -> None:
        """Give it something to do."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def says(self, what: str | tuple[str, ...], timeout_s: float = 30.0) -> list[str]:
        """Wait for a line that begins with a word; return its words, forget those before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(what), timeout_s)
            words = self.has_said(what)
            assert words is not None, f"no {what!r} in {self._lines}"
            return words

    def has_said(self, what: str | tuple[str, ...]) -> list[str] | None:
        """Return the same if it has been said, else None."""
        with self._changed:
            found = self._find(what)
            if not found:
                return None
            words = self._lines[found - 1].split()
            del self._lines[:found]
            if words[0] in ("placed", "broken"):
                self.place = words[1:] if words[0] == "placed" else None
            return words

    def _find(self, what: str | tuple[str, ...]) -> int:
        """Return how many lines there are up to it; 0: it is not there."""
        return next((i + 1 for i, line in enumerate(self._lines) if line.startswith(what)), 0)

    def step(self) -> list[str]:
        """Begin a step, and wait until it goes on, or has a place in a new quorum."""
        self.tell("step")
        return self.says(("on", "placed"))

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.stdin.close()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.strip())
                self._changed.notify_all()
