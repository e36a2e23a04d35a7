"""The manager server of a replica group as a process of its own, where there is no agent.

Outside of a run, the Manager of group rank 0 starts it (`start_server_process`), and its lighthouse
is a standalone one. It sends its own heartbeats, so a worker may hold the interpreter lock for any
time. It reconnects for ever, and ends when its workers have disconnected.

The parent opens the socket, so workers can connect before this process has started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.ft.manager_server import ManagerServer, open_listener
from hpc_elastic.ft.messages import (
    LIGHTHOUSE_PURPOSE,
    LIGHTHOUSE_SESSION,
    Message,
    parse_address,
    to_frame,
    unpack,
)
from hpc_elastic.transport.auth import AuthenticationError, user_secret
from hpc_elastic.transport.connection import CONNECTION_ERRORS, ClientConnection, connect

_RETRY_S = 0.05
_RETRY_UNAUTHENTICATED_S = 0.25
"""Another program listens there, or one with another key, unless it is just ending."""
_ORPHANED_S = 5.0
"""How long the workers of a group may outlive its rank 0."""
_BEATS_PER_SILENCE = 5
_SILENCE_S = 5.0
"""Until the lighthouse has sent its own."""

_SOURCE = str(Path(__file__).parents[2])
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from hpc_elastic.ft.manager_server_process import main
main(*sys.argv[2:])
"""
"""It needs only the standard library and this package: site-packages and the working directory are
left out."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManagerServerProcess:
    """A running manager server; it ends by itself, after all workers have disconnected.

    Attributes:
        path: The Unix socket for `manager_client.ManagerClient`.
        process: Its process; None if another process has started it.
    """

    path: Path
    process: subprocess.Popen[bytes] | None = None

    def wait(self, timeout_s: float = 5.0) -> None:
        """Wait for the process's end, once the clients are closed; kill it if it takes longer."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _remove(self.path)


def start_server_process(
    lighthouse_addr: str, replica_id: str, group_world_size: int
) -> ManagerServerProcess:
    """Start the server of this replica group; return at once, its socket accepts connections.

    Args:
        lighthouse_addr: ``host:port`` or ``http://host:port``.
        replica_id: The group's name, different from that of any other.
        group_world_size: Number of its workers.

    Raises:
        ConfigError: The address has another form.
        OSError: The socket or the process cannot be created.
    """
    parse_address(lighthouse_addr)
    path = Path(tempfile.mkdtemp(prefix="hpc-elastic-ft-")) / "socket"
    try:
        with open_listener(str(path)) as listener:
            numbers = [str(n) for n in (listener.fileno(), os.getpid(), group_world_size)]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, _SOURCE, str(path), *numbers,
                 lighthouse_addr, replica_id],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
    except BaseException:
        _remove(path)
        raise
    return ManagerServerProcess(path, process)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


# ---- in the process


def main(
    path: str, listener_fd: str, parent: str, size: str, lighthouse: str, replica_id: str
) -> None:
    """Serve one replica group until its workers have disconnected."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the training
        signal.signal(number, signal.SIG_IGN)
    link = LighthouseLink(lighthouse, replica_id)
    listener = socket.socket(fileno=int(listener_fd))
    try:
        asyncio.run(_serve(Path(path), listener, int(parent), int(size), link))
    finally:
        _remove(Path(path))


async def _serve(
    path: Path, listener: socket.socket, parent: int, size: int, link: LighthouseLink
) -> None:
    over = asyncio.Event()
    server = ManagerServer(path, link.replica_id, link, listener=listener, on_empty=over.set)
    server.expect_workers(size)
    await server.start()
    _end_after(parent, over)
    linking = asyncio.create_task(link.run(server))
    try:
        await over.wait()
    finally:
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        await server.stop()


def _end_after(parent: int, over: asyncio.Event) -> None:
    """Set the event some time after the parent process has ended."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        over.set()
        return

    def on_end() -> None:
        loop.remove_reader(pidfd)
        loop.call_later(_ORPHANED_S, over.set)

    loop.add_reader(pidfd, on_end)
    if os.getppid() != parent:  # it had ended, and the id may be another process's
        over.set()


class LighthouseLink:
    """The connection to the lighthouse, made again whenever it is lost."""

    def __init__(self, lighthouse: str, replica_id: str) -> None:
        self.replica_id = replica_id
        self._address = parse_address(lighthouse)
        self._stream: ClientConnection | None = None
        self._silence_s = _SILENCE_S
        self._has_received = False
        self._failure: str | None = None

    def send(self, message: Message) -> None:
        """See `manager_server.LighthouseConnection`."""
        if self._stream is not None:
            self._stream.send(to_frame(message))

    async def run(self, server: ManagerServer) -> None:
        """Connect, exchange messages, and connect again; until cancelled, which sends the queue."""
        secret = user_secret(LIGHTHOUSE_PURPOSE)
        hello = {"replica": self.replica_id}
        while True:
            try:
                stream = await connect(*self._address, secret, LIGHTHOUSE_SESSION, hello)
            except OSError as e:
                await self._pause_after(e, server)
                continue
            self._failure = None
            await self._receive_all(stream, server)

    async def _pause_after(self, error: Exception, server: ManagerServer) -> None:
        is_unauthenticated = isinstance(error, AuthenticationError | ConnectionResetError)
        host, port = self._address
        failure = f"the lighthouse at {host}:{port} does not answer: {error}"
        if is_unauthenticated:
            failure += (
                ". Is it `hpc-elastic lighthouse`, of the same user? Hosts with homes of their own "
                "need the same ~/.config/hpc_elastic/key"
            )
        if failure != self._failure:
            self._failure = failure
            server.on_disconnect(failure)
            if is_unauthenticated:
                _log.warning("%s", failure)
        await asyncio.sleep(_RETRY_UNAUTHENTICATED_S if is_unauthenticated else _RETRY_S)

    async def _receive_all(self, stream: ClientConnection, server: ManagerServer) -> None:
        self._stream = stream
        beating = asyncio.create_task(self._send_heartbeats(stream))
        try:
            server.on_connect()
            while True:
                self._handle(await stream.receive(), server)
                self._has_received = True
        except CONNECTION_ERRORS as e:
            server.on_disconnect(f"the connection to the lighthouse is lost: {e}")
        finally:
            beating.cancel()
            self._stream = None
            await stream.close()

    def _handle(self, raw: dict[str, Any], server: ManagerServer) -> None:
        match raw["type"]:
            case "ft":
                server.on_message(unpack(raw["message"]))
            case "terms":
                self._silence_s = float(raw["silence_s"])

    async def _send_heartbeats(self, stream: ClientConnection) -> None:
        """Send heartbeats, and drop the connection to a lighthouse that does not answer them."""
        silent_s = 0.0
        while silent_s < self._silence_s:
            stream.send({"type": "beat"})
            self._has_received = False
            pause_s = self._silence_s / _BEATS_PER_SILENCE
            await asyncio.sleep(pause_s)
            silent_s = 0.0 if self._has_received else silent_s + pause_s
        stream.abort()
