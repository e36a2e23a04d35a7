"""The driver's side: nurseries, the workers that they fork, and what those tell."""

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft.nursery import Lines

PATIENCE_S = 60.0
_LOOK_S = 0.5
Done = Callable[[], bool]


@dataclass
class Step:
    """One step of one worker, in seconds of the machine's monotonic clock."""

    begun: float
    ended: float
    committed: bool
    participants: int
    number: int


@dataclass
class Member:
    """A worker; ``events`` are what it told but for steps, of which failed ones count too."""

    name: str
    log: Path
    pid: int = 0
    lines: Lines | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    gone: bool = False
    started: float = 0.0

    def tell(self, order: dict[str, Any]) -> None:
        assert self.lines is not None, f"{self.name} has not connected"
        self.lines.send(order)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def first(self, key: str) -> Any | None:
        return next((e[key] for e in self.events if key in e), None)

    @property
    def commits(self) -> list[Step]:
        return [s for s in self.steps if s.committed]

    @property
    def error(self) -> str | None:
        found: str | None = self.first("error")
        return found


class Crew:
    """Starts workers and listens to them. One thread; nothing is read but in `wait`."""

    def __init__(self, folder: Path, tasks: str = "ft.worker") -> None:
        self.folder = folder
        self._tasks = tasks
        self._path = folder / "driver"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._nurseries: dict[str, Member] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._count = itertools.count()
        self.members: dict[str, Member] = {}

    def start(self, library: str, task: str, **arguments: Any) -> Member:
        """Have a worker forked that does the task; it connects later."""
        name = f"{library}-{task}-{next(self._count)}"
        member = Member(name, self.folder / f"{name}.log", started=time.monotonic())
        self.members[name] = member
        order = {"name": name, "task": task, "log": str(member.log), "arguments": arguments}
        self._nursery(library).tell(order)
        return member

    def wait(self, done: Done, timeout_s: float = PATIENCE_S) -> bool:
        """Listen until it is done; return whether it was, in that time."""
        deadline = time.monotonic() + timeout_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(min(left, _LOOK_S)):
                self._hear(key)
        return True

    def need(self, done: Done, what: str, timeout_s: float = PATIENCE_S) -> None:
        """Listen until it is done; RuntimeError: it was not in time, with the ends of the logs."""
        if not self.wait(done, timeout_s):
            raise RuntimeError(f"{what}: not within {timeout_s:g} s\n{self.last_words()}")

    def listen(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def last_words(self) -> str:
        """Return the ends of the logs of the workers that are alive or crashed."""
        words = []
        for member in self.members.values():
            lines = member.log.read_text().splitlines()[-5:] if member.log.exists() else []
            words.append("\n  ".join([f"{member.name} ({len(member.commits)} commits):", *lines]))
        return "\n".join(words)

    def end(self, *members: Member) -> None:
        for member in members:
            if not member.gone and member.pid:
                with contextlib.suppress(ProcessLookupError):
                    member.signal(signal.SIGKILL)
        self.wait(lambda: all(m.gone for m in members))
        for member in members:
            self.members.pop(member.name, None)

    def close(self) -> None:
        self.end(*self.members.values())
        for process in self._processes:
            process.kill()
            process.wait()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _nursery(self, library: str) -> Member:
        if library not in self._nurseries:
            name = f"nursery-{library}"
            script = Path(__file__).with_name("nursery.py")
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), library, str(self._path), self._tasks],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
            member = self.members[name] = Member(name, self.folder / name)
            process = self._processes[-1]
            self.need(
                lambda: member.lines is not None or process.poll() is not None,
                f"{library} can be imported",
            )
            if member.lines is None:
                raise RuntimeError(f"{library} can not be imported: see above")
            self._nurseries[library] = self.members.pop(name)
        return self._nurseries[library]

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, (Lines(connection), None))
            return
        lines, member = key.data
        messages, lives = lines.arrived()
        for message in messages:
            if member is None:
                member = self.members[message["name"]]
                member.lines, member.pid = lines, message["pid"]
                self._selector.modify(key.fileobj, selectors.EVENT_READ, (lines, member))
            elif isinstance(message, list):
                member.steps.append(Step(*message))
            else:
                member.events.append(message)
        if not lives:
            self._selector.unregister(key.fileobj)
            lines.close()
            if member is not None:
                member.gone = True


@contextlib.contextmanager
def crew(tasks: str = "ft.worker") -> Iterator[Crew]:
    """A crew that ends with the block; its workers do the tasks of that module."""
    with tempfile.TemporaryDirectory(prefix="ft-") as name:
        made = Crew(Path(name), tasks)
        try:
            yield made
        finally:
            made.close()
