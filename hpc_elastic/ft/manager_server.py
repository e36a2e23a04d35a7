"""Manager server: represents the workers of one replica group at the lighthouse.

It runs outside of the training processes, so the group keeps its membership whatever they do to the
interpreter lock. `messages` has the theory, `manager_state` the decisions, this module the sockets.
The server combines what its workers send, notices within milliseconds if one dies and within 0.1 s
if one is stopped, and keeps what a new lighthouse has to know. Without a connection to a
lighthouse, workers go on as long as they need no quorum, and their requests wait for one.

A replica group of several nodes has its server on its first node. On each other node a `Relay`
passes on what the workers send and what the server answers, over one authenticated connection, and
watches its workers, whose processes only their own node can see. Frames of this connection, beside
messages with the ``rank`` of a worker:

``lost``     ``rank``, ``why``: a worker's connection has ended.
``stopped``  ``rank``, ``now``: whether a worker is stopped for long, or runs again.
``leave``    ``left_s``: the relay's node is lost within this number of seconds.
``beat``     answered by the server, and sent where no leader notices that a node is lost: an end
             that receives none for `SILENCE_S` gives up the other.

In a run it is a part of the agent. Elsewhere the Manager of group rank 0 starts it as a process of
its own (`start_server_process`), and its lighthouse is a standalone one. That process sends its own
heartbeats, reconnects for ever, and ends when its workers have disconnected. Its parent opens the
socket, so workers can connect before it has started. It needs only the standard library and this
package: it starts without site-packages. On each other host a process of the same kind relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_elastic._util import readable
from hpc_elastic.ft import messages
from hpc_elastic.ft.manager_state import ManagerState, NodeConnection, RemoteNodes
from hpc_elastic.transport.auth import AuthenticationError, sign, user_secret
from hpc_elastic.transport.connection import (
    BEATS_PER_SILENCE,
    CONNECTION_ERRORS,
    ClientConnection,
    Listener,
    connect,
)

STORE_KEY = "hpc_elastic/ft/server"
"""Key in a group's store: where its server accepts relays, as ``[address, port]`` in JSON."""
SILENCE_S = 5.0
"""How long one end of a relay waits for a sign of the other, where there is no leader."""
_SESSION = 0
_RELAY_FRAMES = "relay of a replica group"
_TRIES, _TRY_AGAIN_S = 20, 0.25
_CHECK_EVERY_S = 0.025
_STOPPED_S = 0.075
"""A worker that a signal stops for longer counts as lost, since it holds up all members. If that
was too early, it costs little: the worker joins again when it continues."""
_TRACED_S = 0.5
"""The same for one that a debugger or profiler stops: those do so for moments, again and again."""
_ACCEPT_AGAIN_S = 0.1
_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


class ManagerServer(ManagerState):
    """The server of one replica group, or a relay; everything happens in one event loop."""

    def __init__(
        self,
        path: Path,
        replica_id: str,
        send: Callable[[messages.Message], None],
        *,
        listener: socket.socket | None = None,
        on_empty: Callable[[], None] = lambda: None,
        relays: RelayPort | None = None,
    ) -> None:
        """Create the server; `start` starts it.

        ``path`` is that of its Unix socket, in a folder that only the owner can enter; ``listener``
        is the socket, if it is open already (`open_listener`). ``send`` queues a message for the
        lighthouse, and is called only while it is connected. ``on_empty`` is called when the last
        worker has disconnected. ``relays`` accepts the relays of the other nodes of the group, if
        it may have any.
        """
        super().__init__(replica_id, send, on_empty=on_empty, relays=relays)
        self._path = path
        self._listener = listener
        self.relays = relays
        self._checker: asyncio.Task[None] | None = None

    # ---- life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Accept connections of workers; raise OSError if the path is taken or too long."""
        if self._listener is None:
            self._listener = open_listener(str(self._path))
        asyncio.get_running_loop().add_reader(self._listener, self._accept_all)
        self._checker = asyncio.create_task(self._check_for_stopped())
        if self.relays is not None:
            self.relays.start(self)

    def restore_socket(self) -> None:
        """Open the socket again if its path was removed (`checkpoint.node_memory.AgentFolder`)."""
        if self._listener is not None and not self._path.exists():
            opened = open_listener(str(self._path))
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = opened
            self._resume_accepting()

    async def stop(self) -> None:
        """Close all connections and remove the socket. May be repeated."""
        if self._checker is not None:
            self._checker.cancel()
            await asyncio.gather(self._checker, return_exceptions=True)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        self._close_connections()
        if self.relays is not None:
            self.relays.stop()

    def on_relay_end(self, reason: str) -> None:
        """Log the reason, too."""
        _log.warning("%s", reason)
        super().on_relay_end(reason)

    def _lose_workers(self, reason: str) -> None:
        _log.warning("%s", reason)
        super()._lose_workers(reason)

    def _accept_all(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:  # most likely too many open files: it would stay readable
                _log.warning("no worker can connect for now: %s", e)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                loop.call_later(_ACCEPT_AGAIN_S, self._resume_accepting)
                return
            try:
                self.add_connection(WorkerConnection(connection, self))
            except OSError as e:
                _log.warning("a worker's connection was refused: %s", e)
                connection.close()

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept_all)

    async def _check_for_stopped(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            self.check_workers()


class WorkerConnection:
    """The server's end of one worker: its socket, and the life of its process.

    The kernel reports which process has connected (SO_PEERCRED), its death (a pidfd, since forked
    children may keep its socket open), and its state (/proc): a worker that holds the interpreter
    lock for minutes is healthy, one that a signal has stopped is not.
    """

    def __init__(self, connection: socket.socket, server: ManagerServer) -> None:
        """Take a connection; PermissionError if another user's, OSError if its process ended."""
        self.pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.getuid():
            raise PermissionError(f"process {self.pid} is user {uid}'s")
        self.rank: int | None = None
        self._server = server
        self._lines = messages.LineReader()
        self._unsent = b""
        self._is_open = True
        self._stopped_since: float | None = None
        self._pidfd = os.pidfd_open(self.pid)
        try:
            self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY)
        except OSError:
            os.close(self._pidfd)
            raise
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_death)
        self._loop.add_reader(connection, self._read)

    def send(self, message: messages.Message) -> None:
        """Queue a message; drop a worker that does not read for a MiB."""
        if not self._is_open:
            return
        is_waiting = bool(self._unsent)
        self._unsent += messages.to_line(message)
        if len(self._unsent) > messages.MAX_LINE_BYTES:
            self._disconnect("it does not read")
        elif not is_waiting:
            self._write()

    def close(self) -> None:
        """See `Worker`."""
        if not self._is_open:
            return
        self._is_open = False
        for file in (self._pidfd, self._socket.fileno()):
            self._loop.remove_reader(file)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        os.close(self._pidfd)
        os.close(self._stat)

    def is_stopped(self, now: float) -> bool | None:
        """See `Worker`."""
        line = b""
        with contextlib.suppress(OSError):  # it is dead: the pidfd reports it
            line = os.pread(self._stat, 4096, 0)
        state = line[line.rfind(b")") + 2 :][:1]
        if state not in (b"T", b"t"):
            self._stopped_since = None
            return False
        if self._stopped_since is None:
            self._stopped_since = now
        limit_s = _STOPPED_S if state == b"T" else _TRACED_S
        return now - self._stopped_since >= limit_s or None

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._loop.call_soon(self._disconnect, str(e))  # not inside of the sender's own work
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(messages.READ_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            self._disconnect(str(e))
            return
        if data:
            self._handle(data)
        else:
            is_dead = readable(self._pidfd, timeout_s=0)
            self._disconnect(f"process {self.pid} ended" if is_dead else "it closed its connection")

    def _handle(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                if self._is_open:
                    self._server.on_worker_message(self, message)
        except (ValueError, TypeError) as e:
            self._disconnect(f"invalid message: {e}")

    def _on_death(self) -> None:
        """Read the socket first: a `Shutdown` may be buffered."""
        with contextlib.suppress(OSError):
            while self._is_open and (data := self._socket.recv(messages.READ_BYTES)):
                self._handle(data)
        self._disconnect(f"process {self.pid} ended")

    def _disconnect(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._server.on_worker_disconnect(self, reason)


def open_listener(path: str) -> socket.socket:
    """Open a Unix socket for workers of this user; its path may have 107 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as e:
            raise OSError(
                e.errno, f"no socket at {path!r} ({e}); set TMPDIR to a short path"
            ) from e
        os.chmod(path, 0o600)  # noqa: PTH101
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


# ---- the other nodes of a group


class Relay:
    """The relaying end: one connection to the server of a group.

    ``entry`` is the index of the log entry that placed the group. ``on_message`` gets each answer
    for a worker and its rank, ``on_end`` once the reason why the connection has ended. A server
    that is silent for ``silence_s`` is given up, and gets heartbeats; None: a leader does that.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        entry: int,
        host: str,
        on_message: Callable[[int, messages.Message], None],
        on_end: Callable[[str], None],
        *,
        silence_s: float | None = None,
    ) -> None:
        self._silence_s = silence_s
        self._where = address, port
        self._secret = sign(secret, _RELAY_FRAMES).encode()
        self._hello = {"entry": entry, "host": host}
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: list[dict[str, Any]] = []
        """Frames until there is a connection."""
        self._stream: ClientConnection | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: dict[str, Any]) -> None:
        """See `RelayLink`."""
        if self._stream is None:
            self._unsent.append(frame)
        else:
            self._stream.send(frame)

    def send_message(self, rank: int, message: messages.Message) -> None:
        """See `RelayLink`."""
        self.send({**messages.to_frame(message), "rank": rank})

    def close(self) -> None:
        """See `RelayLink`."""
        self._running.cancel()

    async def _run(self) -> None:
        try:
            stream = await self._connect()
        except OSError as e:
            address, port = self._where
            reason = f"the server of the replica group at {address}:{port}: {e}"
            if self._silence_s is not None and isinstance(e, AuthenticationError):
                reason += ". Hosts with homes of their own need the same ~/.config/hpc_elastic/key"
            self._on_end(reason)
            return
        self._stream = stream

        def send_waiting() -> None:
            for frame in self._unsent:
                stream.send(frame)
            self._unsent.clear()

        async def beat(silence_s: float) -> None:
            await stream.send_heartbeats("beat", lambda: silence_s)
            _log.warning("the server of the replica group is silent for %g s", silence_s)

        def handle(frame: dict[str, Any]) -> None:
            if frame["type"] == "ft":
                self._on_message(int(frame["rank"]), messages.unpack(frame["message"]))

        beats = None if self._silence_s is None else beat(self._silence_s)
        peer = "server of the replica group"
        await _receive_all(stream, peer, send_waiting, handle, self._on_end, beats)

    async def _connect(self) -> ClientConnection:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(OSError):
                return await connect(*self._where, self._secret, _SESSION, self._hello)
            await asyncio.sleep(_TRY_AGAIN_S)
        return await connect(*self._where, self._secret, _SESSION, self._hello)


async def _receive_all(
    stream: ClientConnection,
    peer: str,
    begin: Callable[[], None],
    handle: Callable[[dict[str, Any]], None],
    on_end: Callable[[str], None],
    beats: Coroutine[Any, Any, None] | None,
) -> None:
    """Send what waits, and handle all that comes beside the heartbeats, until the end."""
    beating = None if beats is None else asyncio.create_task(beats)
    try:
        begin()
        while True:
            handle(await stream.receive())
    except CONNECTION_ERRORS as e:
        on_end(f"the connection to the {peer} is lost: {e}")
    finally:
        if beating is not None:
            beating.cancel()
        await stream.close()


class RelayPort(RemoteNodes):
    """The port of a server for the relays of the other nodes of its group.

    A relay that is silent for ``silence_s`` is lost; None: a leader detects that.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        listener: Listener | None = None,
        silence_s: float | None = None,
    ) -> None:
        super().__init__()
        self._address = address
        self._secret = sign(secret, _RELAY_FRAMES).encode()
        self._listener = listener or Listener(address)
        self._silence_s = silence_s
        self._heard_at: dict[NodeConnection, float] = {}
        self._checker: asyncio.TimerHandle | None = None

    @property
    def where(self) -> tuple[str, int]:
        """Its address and port."""
        return self._address, self._listener.port

    def start(self, owner: ManagerState) -> None:
        """Accept relays from now on, in the running event loop."""
        super().start(owner)
        self._listener.serve(self._secret, _SESSION, self)
        if self._silence_s is not None:
            self._check_for_silence(self._silence_s)

    def stop(self) -> None:
        """Close the port and all connections. May be repeated."""
        self._listener.close()
        if self._checker is not None:
            self._checker.cancel()

    def on_connect(self, connection: NodeConnection, hello: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        super().on_connect(connection, hello)
        self._heard_at[connection] = asyncio.get_running_loop().time()

    def on_message(self, connection: NodeConnection, message: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        self._heard_at[connection] = asyncio.get_running_loop().time()
        if message["type"] == "beat":
            connection.send(message)
        else:
            super().on_message(connection, message)

    def _check_for_silence(self, silence_s: float) -> None:
        loop = asyncio.get_running_loop()
        for connection, heard_at in list(self._heard_at.items()):
            if loop.time() - heard_at >= silence_s:
                connection.abort(f"it is silent for {silence_s:g} s")
        pause_s = silence_s / BEATS_PER_SILENCE
        self._checker = loop.call_later(pause_s, self._check_for_silence, silence_s)

    def on_disconnect(self, connection: NodeConnection, reason: str) -> None:
        """See `ConnectionOwner`."""
        self._heard_at.pop(connection, None)
        super().on_disconnect(connection, reason)


# ---- the server as a process of its own, where there is no agent


_RETRY_S = 0.05
_RETRY_UNAUTHENTICATED_S = 0.25
"""Another program listens there, or one with another key, unless it is just ending."""
_REST_S = 0.25
"""Wait for the server of a group at the end of its rank 0: most often all ranks end together."""
_ORPHANED_S = 5.0
"""How long the workers of a group may outlive its rank 0."""
_RELAY_PURPOSE = "replica group"
"""Purpose of the secret of a group's relays, which all its hosts derive from the user's key."""

_SOURCE = str(Path(__file__).parents[2])
_START = """
import gc, sys
gc.disable()
sys.modules["ssl"] = None
sys.path.insert(0, sys.argv[1])
from hpc_elastic.ft import manager_server
gc.enable()
getattr(manager_server, sys.argv[2])(*sys.argv[3:])
"""
"""Without site-packages, the working directory and TLS; no look for garbage, as a worker waits."""


@dataclass(frozen=True)
class ManagerServerProcess:
    """A running manager server; it ends by itself, after all workers have disconnected.

    Attributes:
        process: Its process; None if another process has started it.
        port: Where it accepts relays; 0 if it does not.
    """

    path: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    def wait(self, timeout_s: float = 5.0, *, is_last: bool = True) -> None:
        """Wait for the process's end, once the client is closed; kill it if it takes longer.

        If other workers need it (not ``is_last``), it is left to end with the last of them.
        """
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s if is_last else _REST_S)
        except subprocess.TimeoutExpired:
            if not is_last:
                threading.Thread(target=self.process.wait, name="ft-server", daemon=True).start()
                return
            self.process.kill()
            self.process.wait()
        _remove_socket(self.path)


def start_server_process(
    lighthouse_addr: str,
    replica_id: str,
    group_world_size: int,
    *,
    relay_address: str | None = None,
) -> ManagerServerProcess:
    """Start the server of this replica group; return at once, its socket accepts connections.

    ``relay_address`` is the address of this host at which it accepts relays; None: the group has
    none. Raises ConfigError if the lighthouse's address is not ``host:port`` or
    ``http://host:port``, and OSError if the socket, the port or the process cannot be created.
    """
    messages.parse_address(lighthouse_addr)
    if relay_address is None:
        return _start_process("serve_group", group_world_size, [lighthouse_addr, replica_id])
    port = Listener(relay_address)
    try:
        arguments = [lighthouse_addr, replica_id, relay_address, str(port.fileno())]
        started = _start_process("serve_group", group_world_size, arguments, port.fileno())
        return replace(started, port=port.port)
    finally:
        os.close(port.detach())


def start_relay_process(address: str, port: int, group_world_size: int) -> ManagerServerProcess:
    """Start a relay to the server of this group on another host, as `start_server_process`."""
    arguments = [address, str(port), socket.gethostname()]
    return _start_process("relay_group", group_world_size, arguments)


def _start_process(
    function: str, group_world_size: int, arguments: list[str], *files: int
) -> ManagerServerProcess:
    import tempfile  # not in the server's own process

    path = Path(tempfile.mkdtemp(prefix="hpc-elastic-ft-")) / "socket"
    try:
        with open_listener(str(path)) as listener:
            numbers = f"{listener.fileno()} {os.getpid()} {group_world_size}"
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, _SOURCE, function, str(path), numbers,
                 *arguments],
                pass_fds=[listener.fileno(), *files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
    except BaseException:
        _remove_socket(path)
        raise
    return ManagerServerProcess(path, process)


def _remove_socket(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


# ---- in that process


Make = Callable[[int, socket.socket, asyncio.Event], tuple["ManagerServer", Any]]
"""Returns, given the number of workers, the server, and what runs beside it, if anything."""


def serve_group(
    path: str,
    numbers: str,
    lighthouse: str,
    replica_id: str,
    relay_address: str = "",
    relay_fd: str = "",
) -> None:
    """Serve one replica group until its workers have disconnected."""
    link = LighthouseLink(lighthouse, replica_id)

    def make(size: int, listener: socket.socket, over: asyncio.Event) -> tuple[ManagerServer, Any]:
        relays = None
        if relay_fd:
            port = Listener(relay_address, opened=socket.socket(fileno=int(relay_fd)))
            secret = user_secret(_RELAY_PURPOSE)
            relays = RelayPort(relay_address, secret, listener=port, silence_s=SILENCE_S)
        server = ManagerServer(
            Path(path), replica_id, link.send, listener=listener, on_empty=over.set, relays=relays
        )
        server.expect_workers(size)
        return server, link.run(server)

    _run_process(path, numbers, make)


def relay_group(path: str, numbers: str, address: str, port: str, host: str) -> None:
    """Relay for the workers of this host until they have disconnected, or the server is lost."""

    def make(size: int, listener: socket.socket, over: asyncio.Event) -> tuple[ManagerServer, Any]:
        server = ManagerServer(
            Path(path), host, lambda _: None, listener=listener, on_empty=over.set
        )

        def on_end(reason: str) -> None:
            server.on_relay_end(reason)
            over.set()

        secret = user_secret(_RELAY_PURPOSE)
        relay = partial(
            Relay, address, int(port), secret, 0, host, server.on_relayed, on_end,
            silence_s=SILENCE_S,
        )  # fmt: skip
        server.expect_workers(size, 0, relay)
        return server, None

    _run_process(path, numbers, make)


def _run_process(path: str, numbers: str, make: Make) -> None:
    """Run a server until it is over; the numbers are its listener, its parent and its workers."""
    listener_fd, parent, size = map(int, numbers.split())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the training
        signal.signal(number, signal.SIG_IGN)

    async def serve() -> None:
        over = asyncio.Event()
        server, beside = make(size, socket.socket(fileno=listener_fd), over)
        await server.start()
        _end_after(parent, over)
        running = [] if beside is None else [asyncio.create_task(beside)]
        try:
            await over.wait()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await server.stop()

    try:
        asyncio.run(serve())
    finally:
        _remove_socket(Path(path))


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
        self._address = messages.parse_address(lighthouse)
        self._stream: ClientConnection | None = None
        self._silence_s = SILENCE_S  # until the lighthouse has sent its own

    def send(self, message: messages.Message) -> None:
        """Queue a message, if there is a connection."""
        if self._stream is not None:
            self._stream.send(messages.to_frame(message))

    async def run(self, server: ManagerServer) -> None:
        """Connect, exchange messages, and connect again; until cancelled, which sends the queue."""
        secret, (host, port) = user_secret(messages.LIGHTHOUSE_PURPOSE), self._address
        last_failure = None
        while True:
            try:
                hello = {"replica": self.replica_id}
                stream = await connect(host, port, secret, messages.LIGHTHOUSE_SESSION, hello)
            except OSError as e:
                unproved = isinstance(e, AuthenticationError | ConnectionResetError)
                failure = f"the lighthouse at {host}:{port} does not answer: {e}"
                if unproved:
                    failure += (
                        ". Is it `hpc-elastic lighthouse`, of the same user? Hosts with homes of "
                        "their own need the same ~/.config/hpc_elastic/key"
                    )
                if failure != last_failure:
                    server.on_disconnect(failure)
                    if unproved:
                        _log.warning("%s", failure)
                last_failure = failure
                await asyncio.sleep(_RETRY_UNAUTHENTICATED_S if unproved else _RETRY_S)
                continue
            last_failure = None
            self._stream = stream
            beats = stream.send_heartbeats("heartbeat", lambda: self._silence_s)
            begin, on_end = server.on_connect, server.on_disconnect
            handle = partial(self._handle, server)
            try:
                await _receive_all(stream, "lighthouse", begin, handle, on_end, beats)
            finally:
                self._stream = None

    def _handle(self, server: ManagerServer, raw: dict[str, Any]) -> None:
        if raw["type"] == "ft":
            server.on_message(messages.unpack(raw["message"]))
        elif raw["type"] == "terms":
            self._silence_s = float(raw["silence_s"])
