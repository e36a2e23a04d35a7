"""Spares: one process per worker slot of a node that has imported torch ahead of its use.

A restart of the worker group costs an interpreter's start and `import torch` in every worker, which
is most of it. A spare has done both: it is started with the worker's own command line, imports what
`launcher.agent.preload` names (`hpc_elastic.agent.prewarm`), and then blocks in a read. To make it
a worker, the agent sends it what a new process would inherit, and closes the socket:

    spare to agent   {"failed": {module: why}, "holds_gpu": bool} in a line, when it has imported
    agent to spare   {"env": {...}} as JSON up to the end of the stream, and with its first byte the
                     descriptors of the worker's stdout and stderr

The end of the stream with nothing before it means that the agent is gone or has no use for it. One
that still imports when it is needed is used all the same: it is further along than a new process.

What a process reads once, when it starts, can not be handed over: `prewarm.fits` says when a spare
differs there, and a new process is started instead.

All calls come from the agent's main thread: Linux ends a child with the *thread* that started it
(PR_SET_PDEATHSIG, which every worker asks for).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.agent.prewarm import fits
from hpc_elastic.agent.signals import name_of
from hpc_elastic.agent.worker import SPARE_VARIABLE

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_END_S = 5.0
"""A killed spare is waited for at most this long; one that hangs in the kernel is left behind."""


@dataclass
class _Spare:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    env: dict[str, str]
    cwd: Path | None
    ready: bool = False
    told: bytes = b""

    def report(self) -> dict[str, Any] | None:
        """Return what it tells when it has imported, once; None before and after."""
        if self.ready:
            return None
        with contextlib.suppress(OSError):  # BlockingIOError: nothing new
            self.told += self.channel.recv(1 << 16)
        if not self.told.endswith(b"\n"):
            return None
        self.ready = True
        return dict(json.loads(self.told))

    def send(self, env: Mapping[str, str], outputs: Sequence[int]) -> bool:
        """Make it a worker; False if it can not take all at once, which would block the agent."""
        message = json.dumps({"env": dict(env)}).encode()
        with self.channel:
            try:
                return socket.send_fds(self.channel, [message], list(outputs)) == len(message)
            except OSError:
                return False

    def end(self) -> None:
        """Kill it; it holds nothing that is worth a goodbye."""
        self.channel.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)


class Spares:
    """The spares of one node, by worker slot.

    Args:
        slots: Workers of the node; 0 keeps no spares.
        command: The workers' whole command line.
        num_warming: How many may import at a time while the workers train.
    """

    def __init__(self, slots: int, command: Sequence[str], *, num_warming: int = 1) -> None:
        self._slots = slots
        self._command = tuple(command)
        self._num_warming = num_warming
        self._spares: dict[int, _Spare] = {}
        self._missing: list[int] = []
        self._dead: list[int] = []
        """Exit codes of those that nobody was told of."""
        self._warned: set[str] = set()

    def fill(self, *, paced: bool) -> None:
        """Start a spare for every slot that has none.

        Args:
            paced: The workers train: let them have the CPU, and start few at a time; `tend` starts
                the others. Without it all start at once, at full speed.
        """
        self._missing = [slot for slot in range(self._slots) if slot not in self._spares]
        if paced:
            self._look()
            return
        while self._missing:
            self._start(self._missing.pop(0), paced=False)

    def tend(self) -> list[int]:
        """Hear what the spares tell, bury the dead, and start the next ones.

        Returns:
            The exit codes of those that have ended by themselves since the last call.
        """
        self._look()
        dead, self._dead = self._dead, []
        return dead

    def _look(self) -> None:
        for slot, spare in list(self._spares.items()):
            keep = self._hear(spare)
            if (code := spare.process.poll()) is not None:
                _log.warning("the spare of slot %d ended by itself, with exit code %d", slot, code)
                self._dead.append(code)
            if not keep or code is not None:
                self._spares.pop(slot).end()
        warming = sum(not spare.ready for spare in self._spares.values())
        while self._missing and warming < self._num_warming:
            self._start(self._missing.pop(0), paced=True)
            warming += 1

    def resize(self, slots: int) -> None:
        """Keep spares for so many slots from now on."""
        self._slots = slots
        for slot in [slot for slot in self._spares if slot >= slots]:
            self._spares.pop(slot).end()

    def await_imports(self, timeout_s: float) -> bool:
        """Wait for so long at most; return whether all spares have imported, or died."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            if all(spare.ready for spare in self._spares.values()):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)

    @property
    def pids(self) -> list[int]:
        """The processes of the spares there are."""
        return [spare.process.pid for spare in self._spares.values()]

    def take(
        self, slot: int, command: Sequence[str], env: Mapping[str, str], outputs: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Make the spare of a slot a worker.

        Args:
            slot: The worker's local rank.
            command: Its command line.
            env: Its whole environment.
            outputs: Descriptors for its stdout and stderr; the spare gets copies.

        Returns:
            The worker's process; None where a new one must be started.
        """
        spare = self._spares.pop(slot, None)
        self._missing = [other for other in self._missing if other != slot]
        if spare is None:
            return None
        self._hear(spare)
        if self._usable(spare, command, env) and spare.send(env, outputs):
            state = "had imported" if spare.ready else "was still importing"
            _log.info("slot %d: process %d, which %s", slot, spare.process.pid, state)
            return spare.process
        if (code := spare.process.poll()) is not None:
            self._dead.append(code)
        _log.info("slot %d: its spare can not be used, a new process is started", slot)
        spare.end()
        return None

    def close(self) -> None:
        """End all spares."""
        self._missing = []
        while self._spares:
            self._spares.popitem()[1].end()

    def _usable(self, spare: _Spare, command: Sequence[str], env: Mapping[str, str]) -> bool:
        lives = spare.process.poll() is None
        same = tuple(command) == self._command and spare.cwd == _cwd()
        return lives and same and fits(spare.env, env)

    def _start(self, slot: int, *, paced: bool) -> None:
        """Start a spare as torch starts a worker; one that can not be started is done without."""
        env, cwd = dict(os.environ), _cwd()
        try:
            ours, theirs = socket.socketpair()
        except OSError as e:
            _log.warning("no spare for slot %d: %s", slot, e)
            return
        how = f"{theirs.fileno()} {'paced' if paced else 'at once'}"
        try:
            process = subprocess.Popen(
                self._command,
                env={**env, SPARE_VARIABLE: how},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as e:
            ours.close()
            _log.warning("no spare for slot %d: %s", slot, e)
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self._spares[slot] = _Spare(process, ours, env, cwd)

    def _hear(self, spare: _Spare) -> bool:
        """Log what a spare tells, each thing once; return whether it may be kept."""
        report = spare.report()
        if report is None:
            return True
        for module, why in report["failed"].items():
            self._warn(f"launcher.agent.preload: {module} is not imported ahead: {why}")
        if report["holds_gpu"]:
            self._warn("launcher.agent.preload: a module opens the GPU; such spares are not kept")
        return not report["holds_gpu"]

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


def ending(exit_code: int) -> str:
    """Return how a process ended (pure): ``SIGKILL``, or ``exit code 1``."""
    return name_of(-exit_code) if exit_code < 0 else f"exit code {exit_code}"


def _cwd() -> Path | None:
    """Return the working directory; None if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
