"""The process beside a worker that keeps its place in the quorum, where no agent does.

Outside of a run, the Manager of group rank 0 starts it (`start_attendant`). It is a `ManagerServer`
whose keeper is a lighthouse: heartbeats are its own, so that a worker may hold the interpreter lock
for as long as it likes. It connects again for ever, and ends when its workers have gone.

The socket is opened by the parent: workers can connect before this process has started.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_elastic._util import readable
from hpc_elastic.ft.manager_server import ManagerServer, listen
from hpc_elastic.ft.messages import PURPOSE, SESSION_EPOCH, Message, frame, parse_address, unpack
from hpc_elastic.transport.auth import AuthenticationError, user_secret
from hpc_elastic.transport.connection import CONNECTION_ERRORS, ClientConnection, connect

_RETRY_S = 0.05
_RETRY_STRANGE_S = 0.25
"""Somebody else listens there, or with another key, if it is not just ending."""
_ORPHANS_S = 5.0
"""How long the workers of a group outlive its rank 0 at most."""
_BEATS_A_SILENCE = 5
_SILENCE_S = 5.0
"""Until the lighthouse has said otherwise."""

_SOURCE = str(Path(__file__).parents[2])
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from hpc_elastic.ft.manager_server_process import main, Path
sys.exit(main(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
"""
"""Nothing but the standard library and this package is needed: the site's packages are left out,
and what lies in the working directory is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManagerServerProcess:
    """A process that was started; it ends by itself, after the links of all workers are closed.

    Attributes:
        path: The Unix socket to give to `link.ManagerClient`.
        process: The process; to be waited for by `end`.
    """

    path: Path
    process: subprocess.Popen[bytes]

    def end(self, timeout_s: float = 5.0) -> None:
        """Wait for its end, once the links are closed; kill it if it takes longer."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _remove(self.path)


@dataclass(frozen=True)
class _Orders:
    lighthouse: str
    replica_id: str
    group_world_size: int


_spare: ManagerServerProcess | None = None
"""One that has been started, and waits for its orders."""
_spare_of: int = 0
"""Whose it is: a forked process inherits the variable, not the child."""


def prewarm() -> None:
    """Start a process now that `start_attendant` will take: it needs 0.1 s for its own imports.

    Called where a Manager is likely to follow, before torch is imported. It ends with this process.
    """
    global _spare, _spare_of
    if _spare is None or _spare_of != os.getpid():
        _spare, _spare_of = _spawn(), os.getpid()
        atexit.register(_dismiss, _spare)


def start_attendant(
    lighthouse_addr: str, replica_id: str, group_world_size: int
) -> ManagerServerProcess:
    """Start the server of this replica group; returns at once, its socket takes connections.

    Args:
        lighthouse_addr: ``host:port`` or ``http://host:port``.
        replica_id: The group's name, unlike that of any other.
        group_world_size: Its workers.

    Raises:
        ConfigError: the address is none.
        OSError: no socket or no process could be had.
    """
    global _spare
    parse_address(lighthouse_addr)
    attendant, _spare = _spare, None
    if attendant is None or _spare_of != os.getpid() or attendant.process.poll() is not None:
        attendant = _spawn()
    orders = _Orders(lighthouse_addr, replica_id, group_world_size)
    assert attendant.process.stdin is not None
    with attendant.process.stdin as stdin:
        stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
    return attendant


def _spawn() -> ManagerServerProcess:
    path = Path(tempfile.mkdtemp(prefix="hpc-elastic-ft-")) / "socket"
    try:
        listener = listen(str(path))
        try:
            arguments = [_SOURCE, str(path), str(listener.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        finally:
            listener.close()
    except BaseException:
        _remove(path)
        raise
    return ManagerServerProcess(path, process)


def _dismiss(spare: ManagerServerProcess) -> None:
    if spare is _spare and _spare_of == os.getpid() and spare.process.stdin is not None:
        spare.process.stdin.close()  # there will be no orders
        spare.end()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


# ---- the process ------------------------------------------------------------------------


def main(path: Path, listener: int, parent: int) -> int:
    """Wait for orders, and attend one replica group until its workers have gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the training
        signal.signal(number, signal.SIG_IGN)
    try:
        orders = _ordered(parent)
        if orders is not None:
            asyncio.run(_attend(orders, path, socket.socket(fileno=listener), parent))
    finally:
        _remove(path)
    return 0


def _ordered(parent: int) -> _Orders | None:
    """Return what the parent writes once it knows; None if it ends before.

    Its own forked children may keep the pipe open, so that its end is no sign.
    """
    pidfd = _pidfd_of(parent)
    if pidfd is None:
        return None
    ready = readable(sys.stdin, pidfd)
    os.close(pidfd)
    text = sys.stdin.readline() if sys.stdin in ready else ""
    return _Orders(**json.loads(text)) if text else None


def _pidfd_of(parent: int) -> int | None:
    """Return a descriptor that is readable once the parent has ended; None if it has."""
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        return None
    if os.getppid() == parent:
        return pidfd
    os.close(pidfd)
    return None


async def _attend(orders: _Orders, path: Path, listener: socket.socket, parent: int) -> None:
    over = asyncio.Event()
    line = _Line(orders)
    server = ManagerServer(path, orders.replica_id, line, listener=listener, on_deserted=over.set)
    server.expect(orders.group_world_size)
    await server.start()
    _end_after(parent, over)
    keeping = asyncio.create_task(line.keep(server))
    try:
        await over.wait()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await server.stop()


def _end_after(parent: int, over: asyncio.Event) -> None:
    """Watch the process that this one belongs to, in the running event loop."""
    loop = asyncio.get_running_loop()
    pidfd = _pidfd_of(parent)
    if pidfd is None:
        over.set()
        return

    def ended() -> None:
        loop.remove_reader(pidfd)
        loop.call_later(_ORPHANS_S, over.set)

    loop.add_reader(pidfd, ended)


class _Line:
    """The connection to the lighthouse, again and again."""

    def __init__(self, orders: _Orders) -> None:
        self._orders = orders
        self._address = parse_address(orders.lighthouse)
        self._stream: ClientConnection | None = None
        self._silence_s = _SILENCE_S
        self._heard = False
        self._trouble: str | None = None

    def send(self, message: Message) -> None:
        """See `group_server.Upstream`."""
        if self._stream is not None:
            self._stream.send(frame(message))

    async def keep(self, server: ManagerServer) -> None:
        """Connect, talk, and connect again; until cancelled, which sends what is queued."""
        secret = user_secret(PURPOSE)
        hello = {"replica": self._orders.replica_id}
        while True:
            try:
                stream = await connect(*self._address, secret, SESSION_EPOCH, hello)
            except OSError as e:
                await self._wait_after(e, server)
                continue
            self._trouble = None
            await self._talk(stream, server)

    async def _wait_after(self, error: Exception, server: ManagerServer) -> None:
        is_strange = isinstance(error, AuthenticationError | ConnectionResetError)
        host, port = self._address
        why = f"the lighthouse at {host}:{port} does not answer: {error}"
        if is_strange:
            why += (
                ". Is it `hpc-elastic lighthouse`, of the same user? Hosts with homes of their own "
                "need the same ~/.config/hpc_elastic/key"
            )
        if why != self._trouble:
            self._trouble = why
            server.down(why)
            if is_strange:
                _log.warning("%s", why)
        await asyncio.sleep(_RETRY_STRANGE_S if is_strange else _RETRY_S)

    async def _talk(self, stream: ClientConnection, server: ManagerServer) -> None:
        self._stream = stream
        beating = asyncio.create_task(self._beat(stream))
        try:
            server.up()
            while True:
                self._take(await stream.receive(), server)
                self._heard = True
        except CONNECTION_ERRORS as e:
            server.down(f"the connection to the lighthouse is lost: {e}")
        finally:
            beating.cancel()
            self._stream = None
            await stream.close()

    def _take(self, raw: dict[str, Any], server: ManagerServer) -> None:
        match raw["type"]:
            case "ft":
                server.heard(unpack(raw["message"]))
            case "terms":
                self._silence_s = float(raw["silence_s"])

    async def _beat(self, stream: ClientConnection) -> None:
        """Show that this side lives, and give up a lighthouse that does not."""
        silent_s = 0.0
        while silent_s < self._silence_s:
            stream.send({"type": "beat"})
            self._heard = False
            pause_s = self._silence_s / _BEATS_A_SILENCE
            await asyncio.sleep(pause_s)
            silent_s = 0.0 if self._heard else silent_s + pause_s
        stream.abort()
