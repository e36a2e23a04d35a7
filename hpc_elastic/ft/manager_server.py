"""Manager server: represents the workers of one replica group at the lighthouse.

It runs outside of the training processes, so the group keeps its membership whatever they do to the
interpreter lock. `messages` has the theory. The server combines what its workers send, notices
within milliseconds if one dies and within 0.1 s if one is stopped, and keeps what a new
lighthouse has to know. Without a connection to a lighthouse, workers go on as long as they need no
quorum, and their requests wait for one.

In a run it is a part of the agent. Elsewhere the Manager of group rank 0 starts it as a process of
its own (`start_server_process`), and its lighthouse is a standalone one. That process sends its own
heartbeats, reconnects for ever, and ends when its workers have disconnected. Its parent opens the
socket, so workers can connect before it has started. It needs only the standard library and this
package: it starts without site-packages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_elastic._util import readable
from hpc_elastic.ft import messages
from hpc_elastic.ft.manager_relay import Relay, RelayPort, RemoteWorker
from hpc_elastic.transport.auth import AuthenticationError, user_secret
from hpc_elastic.transport.connection import CONNECTION_ERRORS, ClientConnection, connect

_CHECK_EVERY_S = 0.025
_STOPPED_S = 0.075
"""A worker that a signal stops for longer counts as lost, since it holds up all members. If that
was too early, it costs little: the worker joins again when it continues."""
_TRACED_S = 0.5
"""The same for one that a debugger or profiler stops: those do so for moments, again and again."""
_NO_CONNECTION = "there is no connection to the lighthouse"
_ACCEPT_AGAIN_S = 0.1
_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


class ManagerServer:
    """The server of one replica group; everything happens in one event loop.

    Attributes:
        has_left: The group has left the quorum as announced: its workers wait to be stopped.
        on_mismatch: Called when a worker's state differs from its counterparts'; may be replaced.
    """

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

        Args:
            path: Of its Unix socket, in a folder that only the owner can enter.
            replica_id: The group's name among all groups.
            send: Queues a message for the lighthouse; called only while it is connected.
            listener: The socket, if it is open already (`open_listener`).
            on_empty: Called when the last of its workers has disconnected.
            relays: Accepts the relays of the other nodes of the group, if it may have any.
        """
        self.relays = relays
        self._relay: Relay | None = None
        """The connection to the server of the group, if that is on another node."""
        self._path = path
        self._replica_id = replica_id
        self._send = send
        self._listener = listener
        self._on_empty = on_empty
        self._is_connected = False
        self._disconnect_reason = _NO_CONNECTION
        self._size: int | None = None
        self.has_left = False
        self.on_mismatch: Callable[[messages.StateMismatch], None] = lambda _: None
        self._leave_at: float | None = None
        self._checker: asyncio.Task[None] | None = None
        self._connections: set[WorkerConnection] = set()
        """All of this node, also those without a `Hello`."""
        self._workers: dict[int, AnyWorker] = {}
        self._number = 0
        """Of the last request, over the life of this server."""
        self._reset()

    def _reset(self) -> None:
        self._stopped: set[AnyWorker] = set()
        self._done_ranks: dict[int, messages.Shutdown] = {}
        self._lost_reason: str | None = None
        self._requests: dict[int, messages.QuorumRequest] = {}
        self._sent: messages.QuorumRequest | None = None
        """The group's request, without an answer so far."""
        self._result: messages.QuorumResult | None = None
        self._is_aborted = False
        self._quorum_step = 0
        self._proposal_number = 0
        self._switch_votes: dict[int, messages.SwitchVote] = {}
        self._commit_votes = CommitVotes()

    # ---- life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Accept connections of workers from now on.

        Raises:
            OSError: The socket's path is taken, or too long for the system.
        """
        if self._listener is None:
            self._listener = open_listener(str(self._path))
        asyncio.get_running_loop().add_reader(self._listener, self._accept_all)
        self._checker = asyncio.create_task(self._check_for_stopped())
        if self.relays is not None:
            self.relays.start(self)

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

    def expect_workers(
        self, group_world_size: int, entry: int = 0, relay: Callable[[], Relay] | None = None
    ) -> None:
        """Forget the present workers, and wait for new ones, which the agent starts.

        Args:
            group_world_size: Number of workers of the group, those on other nodes included.
            entry: Index of the log entry that placed the group.
            relay: Connects to the server of the group, which is on another node; None: this is it.
        """
        if self._workers and not self._is_done and not self.has_left and self._relay is None:
            self._lose_workers("its workers are started again")
        self._close_connections()
        self._reset()
        self._size = group_world_size
        self.has_left = False
        if relay is not None:
            self._relay = relay()
        elif self.relays is not None:
            self.relays.expect(entry)

    def on_relayed(self, rank: int, message: messages.Message) -> None:
        """Pass an answer of the group's server, on another node, to a worker of this node."""
        match message:
            case messages.QuorumResults():
                self._result = message.ranks[0]
            case messages.LeaveGranted():
                self.has_left = True
        self._send_down((rank,), message)

    def on_relay_end(self, reason: str) -> None:
        """Handle the end of the connection to the group's server: its workers have lost it."""
        _log.warning("%s", reason)
        self._close_connections()

    @property
    def was_in_quorum(self) -> bool:
        """Whether the present workers have been in a quorum."""
        return self._result is not None

    def announce_leave(self, left_s: float) -> None:
        """Announce that the node is lost within this number of seconds."""
        if self._relay is not None:
            self._relay.send({"type": "leave", "left_s": left_s})
            return
        self._leave_at = asyncio.get_running_loop().time() + left_s
        self._send_up(messages.LeaveNotice(left_s))

    # ---- the lighthouse -----------------------------------------------------------------

    def on_connect(self) -> None:
        """Report the group's state to a newly connected lighthouse, and repeat its request."""
        self._is_connected = True
        if self._relay is not None:
            return
        result = self._result
        if result is None:
            self._send_up(messages.ReplicaStatus(messages.NO_QUORUM, 0, 0, 0, is_aborted=False))
        else:
            rank, size = result.replica_rank, result.replica_world_size
            self._send_up(
                messages.ReplicaStatus(
                    result.quorum_id, rank, size, self._quorum_step, self._is_aborted
                )
            )
        if self._lost_reason is not None:
            self._send_up(messages.WorkersLost(self._lost_reason))
        if self._leave_at is not None:
            left_s = self._leave_at - asyncio.get_running_loop().time()
            self._send_up(messages.LeaveNotice(max(0.0, left_s)))
        if self._is_done:
            self._send_shutdown()
        self._repeat_request()

    def on_disconnect(self, reason: str = _NO_CONNECTION) -> None:
        """Handle the loss of the connection. May be repeated, to give another reason."""
        self._is_connected = False
        self._disconnect_reason = reason
        self._send_down(self._requests, messages.QuorumWaiting(reason))

    def on_message(self, message: messages.Message) -> None:
        """Handle a message of the lighthouse; raise ValueError if it is not for a group."""
        match message:
            case messages.QuorumResults():
                self._on_results(message)
            case messages.QuorumAborted():
                self._abort_quorum(message)
            case messages.ProposeSwitch():
                self._proposal_number, self._switch_votes = message.number, {}
                self._send_down(self._workers, message)
            case messages.ConfirmSwitch():
                self._send_down(self._workers, message)
            case messages.LeaveGranted() | messages.CheckpointBeforeLeave():
                self.has_left |= isinstance(message, messages.LeaveGranted)
                self._requests, self._sent = {}, None
                self._send_down(self._workers, message)
            case messages.QuorumWaiting():
                self._send_down(self._requests, message)
            case _:
                raise ValueError(f"not for a group: {message}")

    def _send_up(self, message: messages.Message) -> None:
        if self._is_connected:
            self._send(message)

    def _on_results(self, results: messages.QuorumResults) -> None:
        ranks = results.ranks
        if self._sent is None or len(ranks) != self._size:
            quorum_id = ranks[0].quorum_id if ranks else messages.NO_QUORUM
            reason = f"{self._replica_id} had given up waiting for it"
            self._send_up(messages.QuorumAborted(quorum_id, reason))
            return
        if results.number != self._sent.number:
            return  # of an older request: the newer one aborts that quorum at the lighthouse
        requests, self._requests, self._sent = self._requests, {}, None
        self._result, self._is_aborted, self._quorum_step = ranks[0], False, 0
        for rank, result in enumerate(ranks):
            self._workers[rank].send(messages.QuorumResults((result,), requests[rank].number))

    def _abort_quorum(self, aborted: messages.QuorumAborted) -> bool:
        """Notify all workers, all in the same order relative to decisions; return if it is news."""
        result = self._result
        if result is None or aborted.quorum_id != result.quorum_id or self._is_aborted:
            return False
        self._is_aborted = aborted.after_step < 0
        self._send_down(self._workers, aborted)
        return True

    # ---- workers ------------------------------------------------------------------------

    def on_worker_message(self, worker: AnyWorker, message: messages.Message) -> None:
        """Handle a message of a worker; raise ValueError if it is none, or out of order."""
        if isinstance(message, messages.Hello):
            self._add_worker(worker, message)
            return
        rank = worker.rank
        if rank is None:
            raise ValueError("a message before Hello")
        if self._relay is not None:
            self._relay.send_message(rank, message)
            return
        match message:
            case messages.QuorumRequest():
                self._requests[rank] = message
                self._request_if_complete()
            case messages.CancelRequest():
                self._requests.pop(rank, None)
                if self._sent is not None:
                    self._sent = None
                    self._send_up(message)
            case messages.QuorumAborted():
                if self._abort_quorum(message):
                    self._send_up(message)
            case messages.SwitchVote():
                self._on_switch_vote(rank, message)
            case messages.CommitVote():
                self._commit_votes.add_vote(rank, message)
                self._decide_commit()
            case messages.StateMismatch():
                self.on_mismatch(message)
            case messages.Shutdown():
                self._done_ranks[rank] = message
                self._requests.pop(rank, None)
                if self._is_done:
                    self._send_shutdown()
            case _:
                raise ValueError(f"not from a worker: {message}")

    def on_worker_disconnect(self, worker: AnyWorker, reason: str) -> None:
        """Handle the end of a worker's connection or process."""
        if isinstance(worker, WorkerConnection):
            self._connections.discard(worker)
        self._stopped.discard(worker)
        rank = worker.rank
        if rank is not None and self._relay is not None:
            del self._workers[rank]
            self._relay.send({"type": "lost", "rank": rank, "why": reason})
        elif rank is not None:
            del self._workers[rank]
            self._requests.pop(rank, None)
            if rank not in self._done_ranks and not self.has_left:
                self._lose_workers(f"rank {rank} of {self._replica_id}: {reason}")
            if not self._workers:
                self._on_empty()

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
                self._connections.add(WorkerConnection(connection, self))
            except OSError as e:
                _log.warning("a worker's connection was refused: %s", e)
                connection.close()

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept_all)

    def _add_worker(self, worker: AnyWorker, hello: messages.Hello) -> None:
        if self._size is None:
            self._size = hello.group_world_size
        if hello.group_world_size != self._size or not 0 <= hello.group_rank < self._size:
            raise ValueError(
                f"rank {hello.group_rank} of {hello.group_world_size}, in a group of {self._size}"
            )
        known = self._workers.get(hello.group_rank)
        if known is not None:
            raise ValueError(f"rank {hello.group_rank} is process {known.pid} already")
        if worker.rank is not None:
            raise ValueError(f"it is rank {worker.rank} already")
        worker.rank = hello.group_rank
        self._done_ranks.pop(hello.group_rank, None)
        self._workers[hello.group_rank] = worker
        if self._relay is not None:
            self._relay.send_message(hello.group_rank, hello)
        else:
            worker.send(messages.Welcome(self._replica_id))

    def _close_connections(self) -> None:
        for worker in {*self._connections, *self._workers.values()}:
            worker.close()
        self._connections.clear()
        self._workers.clear()
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _lose_workers(self, reason: str) -> None:
        """Report that the group cannot go on, so that no worker waits for its next quorum."""
        _log.warning("%s", reason)
        self._lost_reason = reason
        if not self._is_complete(self._requests):
            self._sent = None
        self._send_up(messages.WorkersLost(reason))
        if self._result is not None:
            self._abort_quorum(messages.QuorumAborted(self._result.quorum_id, reason))
        self._decide_commit()

    def _send_shutdown(self) -> None:
        """Report that the group is done, with the last step that all its workers completed."""
        self._send_up(min(self._done_ranks.values(), key=lambda done: done.quorum_step))

    @property
    def _is_done(self) -> bool:
        return self._is_complete(self._done_ranks)

    def _is_complete(self, by_rank: Sized) -> bool:
        return len(by_rank) == self._size

    def _send_down(self, ranks: Iterable[int], message: messages.Message) -> None:
        for rank in list(ranks):
            if rank in self._workers:
                self._workers[rank].send(message)

    # ---- what the group sends as one ----------------------------------------------------

    def _request_if_complete(self) -> None:
        if not self._is_complete(self._requests):
            ranks = (str(r) for r in range(self._size or 0) if r not in self._requests)
            text = f"rank {', '.join(ranks)} of this replica group has not requested a quorum yet"
            self._send_down(self._requests, messages.QuorumWaiting(text))
        elif not self._is_connected:
            self._send_down(self._requests, messages.QuorumWaiting(self._disconnect_reason))
        elif self._sent is None:
            self._number += 1
            self._sent = replace(combine_requests(self._requests), number=self._number)
            self._repeat_request()

    def _repeat_request(self) -> None:
        """Send the request to a lighthouse that may not have it, or has dropped a lost group."""
        if self._sent is None:
            self._request_if_complete()
        elif not self._stopped:
            self._lost_reason = None
            self._send_up(self._sent)

    def _on_switch_vote(self, rank: int, vote: messages.SwitchVote) -> None:
        self._quorum_step = max(self._quorum_step, vote.quorum_step)
        if vote.number != self._proposal_number:
            return
        self._switch_votes[rank] = vote
        if self._is_complete(self._switch_votes):
            votes = self._switch_votes.values()
            furthest, rate = max(v.quorum_step for v in votes), max(v.rate for v in votes)
            ok = all(v.ok for v in votes)
            self._send_up(replace(vote, ok=ok, quorum_step=furthest, rate=rate))

    def _decide_commit(self) -> None:
        all_live = self._is_complete(self._workers)
        decision = self._commit_votes.decide(self._size or 1, all_live=all_live)
        if decision is not None:
            self._send_down(self._workers, decision)

    async def _check_for_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            for rank, worker in list(self._workers.items()):
                if self._workers.get(rank) is not worker:
                    continue  # lost meanwhile
                is_stopped = worker.is_stopped(loop.time())
                if self._relay is not None:
                    if is_stopped is not None and is_stopped != (worker in self._stopped):
                        self._relay.send({"type": "stopped", "rank": rank, "now": is_stopped})
                        self._stopped ^= {worker}
                    continue
                if is_stopped is False and worker in self._stopped:
                    self._stopped.discard(worker)
                    self._repeat_request()
                if not is_stopped or worker in self._stopped or self.has_left:
                    continue
                self._stopped.add(worker)
                self._lose_workers(
                    f"rank {rank} of {self._replica_id}: process {worker.pid} is stopped"
                )


class WorkerConnection:
    """The server's end of one worker: its socket, and the life of its process.

    The kernel reports which process has connected (SO_PEERCRED), its death (a pidfd, since forked
    children may keep its socket open), and its state (/proc): a worker that holds the interpreter
    lock for minutes is healthy, one that a signal has stopped is not.

    Attributes:
        pid: The process's, in the process namespace of this process.
        rank: The worker's, once it has sent its `Hello`.
    """

    def __init__(self, connection: socket.socket, server: ManagerServer) -> None:
        """Take over a connection, in the running event loop.

        Raises:
            PermissionError: It is another user's.
            OSError: The process has ended already.
        """
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
        """Drop the connection, without a report. May be repeated."""
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
        """Return whether the process is stopped for long; None if only for a moment so far."""
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
        if not data:
            is_dead = readable(self._pidfd, timeout_s=0)
            self._disconnect(f"process {self.pid} ended" if is_dead else "it closed its connection")
            return
        self._handle(data)

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


AnyWorker = WorkerConnection | RemoteWorker
"""A worker of this node, or of another one behind its relay."""


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


# ---- messages of several workers combined into one of their group (pure)


def combine_requests(requests: Mapping[int, messages.QuorumRequest]) -> messages.QuorumRequest:
    """Return the request of a group, given those of all its workers by rank.

    Workers at different steps, or one with a version of its own, are no copy of the model: the
    group gets a state version of its own at the least step, so that it heals.
    """
    ranks = [requests[rank] for rank in sorted(requests)]
    first = ranks[0]
    step = min(q.step for q in ranks)
    version = first.state_version
    if len({(q.step, q.state_version) for q in ranks}) > 1:
        text = "|".join(f"{q.step}:{q.state_version}" for q in ranks)
        version = hashlib.blake2b(f"torn|{text}".encode(), digest_size=16).hexdigest()
    return replace(
        first,
        quorum_step=max(q.quorum_step for q in ranks),
        step=step,
        state_version=version,
        quorum_id=max(q.quorum_id for q in ranks),
        commit_failures=max(q.commit_failures for q in ranks),
        min_replicas=max(q.min_replicas for q in ranks),
        shrink_only=any(q.shrink_only for q in ranks),
        metadata=tuple(text for q in ranks for text in q.metadata),
        is_saved=all(q.is_saved for q in ranks),
    )


class CommitVotes:
    """The votes of a group's workers on one step after the other."""

    def __init__(self) -> None:
        self._votes: dict[int, messages.CommitVote] = {}
        self._is_decided = False

    def add_vote(self, rank: int, vote: messages.CommitVote) -> None:
        """Add a vote; ignore one on a step before the last."""
        known = next(iter(self._votes.values()), None)
        if known is not None and _step_of(vote) < _step_of(known):
            return
        if known is not None and _step_of(vote) > _step_of(known):
            self._votes, self._is_decided = {}, False
        self._votes[rank] = vote

    def decide(self, group_world_size: int, *, all_live: bool) -> messages.CommitDecision | None:
        """Return the decision on the last step, once there is one: one no, or a death, decides."""
        if self._is_decided or not self._votes:
            return None
        commit = all_live and all(vote.commit for vote in self._votes.values())
        if commit and len(self._votes) < group_world_size:
            return None
        self._is_decided = True
        vote = next(iter(self._votes.values()))
        return messages.CommitDecision(vote.quorum_id, vote.quorum_step, commit)


def _step_of(vote: messages.CommitVote) -> tuple[int, int]:
    return vote.quorum_id, vote.quorum_step


# ---- the server as a process of its own, where there is no agent


_RETRY_S = 0.05
_RETRY_UNAUTHENTICATED_S = 0.25
"""Another program listens there, or one with another key, unless it is just ending."""
_REST_S = 0.25
"""Wait for the server of a group at the end of its rank 0: most often all ranks end together."""
_ORPHANED_S = 5.0
"""How long the workers of a group may outlive its rank 0."""
_BEATS_PER_SILENCE = 5
_SILENCE_S = 5.0
"""Until the lighthouse has sent its own."""

_SOURCE = str(Path(__file__).parents[2])
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from hpc_elastic.ft.manager_server import main
main(*sys.argv[2:])
"""
"""Site-packages and the working directory are left out."""


@dataclass(frozen=True)
class ManagerServerProcess:
    """A running manager server; it ends by itself, after all workers have disconnected.

    Attributes:
        path: The Unix socket for `manager_client.ManagerClient`.
        process: Its process; None if another process has started it.
    """

    path: Path
    process: subprocess.Popen[bytes] | None = None

    def wait(self, timeout_s: float = 5.0, *, is_last: bool = True) -> None:
        """Wait for the process's end, once the client is closed; kill it if it takes longer.

        Args:
            timeout_s: Longest wait, above 0.
            is_last: No other worker needs it; else it is left to end with the last of them.
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
    import tempfile  # not in the server's own process

    messages.parse_address(lighthouse_addr)
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
        _remove_socket(path)
        raise
    return ManagerServerProcess(path, process)


def _remove_socket(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


# ---- in that process


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
        _remove_socket(Path(path))


async def _serve(
    path: Path, listener: socket.socket, parent: int, size: int, link: LighthouseLink
) -> None:
    over = asyncio.Event()
    server = ManagerServer(path, link.replica_id, link.send, listener=listener, on_empty=over.set)
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
        self._address = messages.parse_address(lighthouse)
        self._stream: ClientConnection | None = None
        self._silence_s = _SILENCE_S
        self._has_received = False

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
            beating = asyncio.create_task(self._send_heartbeats(stream))
            try:
                server.on_connect()
                while True:
                    raw = await stream.receive()
                    if raw["type"] == "ft":
                        server.on_message(messages.unpack(raw["message"]))
                    elif raw["type"] == "terms":
                        self._silence_s = float(raw["silence_s"])
                    self._has_received = True
            except CONNECTION_ERRORS as e:
                server.on_disconnect(f"the connection to the lighthouse is lost: {e}")
            finally:
                beating.cancel()
                self._stream = None
                await stream.close()

    async def _send_heartbeats(self, stream: ClientConnection) -> None:
        """Send heartbeats, and drop the connection to a lighthouse that does not answer them."""
        silent_s = 0.0
        while silent_s < self._silence_s:
            stream.send({"type": "heartbeat"})
            self._has_received = False
            pause_s = self._silence_s / _BEATS_PER_SILENCE
            await asyncio.sleep(pause_s)
            silent_s = 0.0 if self._has_received else silent_s + pause_s
        stream.abort()
