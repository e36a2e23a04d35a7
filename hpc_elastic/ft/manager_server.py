"""The server of a replica group: speaks for its workers to the keeper of the quorum.

It lives outside of the training processes, in the agent of a run or in an
`manager_server_process`, so that
nothing that they do to the interpreter lock costs the group its membership. `messages` has the
theory. It combines what its workers say (`manager_server`), sees within milliseconds when one dies
and within a second when one is stopped (`manager_server`), and keeps what a new keeper has to be
told. While there is none (`down`), workers go on as long as they need no quorum, and asks wait for
`up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hpc_elastic._util import readable
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    CommitDecision,
    CommitVote,
    ConfirmSwitch,
    Hello,
    LeaveGranted,
    LeaveNotice,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    QuorumWaiting,
    ReplicaStatus,
    Shutdown,
    SwitchVote,
    Welcome,
    WorkersLost,
    pack,
    unpack,
)

_LOOK_S = 0.25
_STOPPED_S = 0.5
"""A worker that is stopped for longer holds all members up: it is given up."""
_DOWN = "there is no connection to the coordinator of the quorum"

_log = logging.getLogger(__name__)


class Upstream(Protocol):
    """The connection to the keeper."""

    def send(self, message: Message) -> None:
        """Queue a message; called between `ManagerServer.up` and `ManagerServer.down` only."""


class ManagerServer:
    """Serves one replica group; everything happens in one event loop."""

    def __init__(
        self,
        path: Path,
        replica_id: str,
        upstream: Upstream,
        *,
        listener: socket.socket | None = None,
        on_deserted: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `start` serves.

        Args:
            path: Where its Unix socket is to be: in a folder that only the owner may enter.
            replica_id: The group's name among all.
            upstream: Takes what is for the keeper.
            listener: The socket, where it is open already (`workers.listen`).
            on_deserted: Called when the last of its workers has gone.
        """
        self._path = path
        self._replica_id = replica_id
        self._upstream = upstream
        self._listener = listener
        self._on_deserted = on_deserted
        self._down = _DOWN
        self._size: int | None = None
        self._up = False
        self._left = False
        self._notice_at: float | None = None
        self._watch: asyncio.Task[None] | None = None
        self._connections: set[WorkerConnection] = set()
        """All, those that have not said who they are among them."""
        self._workers: dict[int, WorkerConnection] = {}
        self._number = 0
        """The last ask's, for the life of this server."""
        self._forget()

    def _forget(self) -> None:
        self._stopped: set[WorkerConnection] = set()
        self._byes: set[int] = set()
        self._lost: str | None = None
        self._asks: dict[int, QuorumRequest] = {}
        self._asked: QuorumRequest | None = None
        """What has been sent to a keeper, and not been answered."""
        self._place: QuorumResult | None = None
        self._broken = False
        self._call = 0
        self._proposed = 0
        self._ats: dict[int, SwitchVote] = {}
        self._ballot = CommitVotes()

    # ---- life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Take connections of workers from now on.

        Raises:
            OSError: the socket's path is taken, or too long for the system.
        """
        if self._listener is None:
            self._listener = listen(str(self._path))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, accept_all, self._listener, self._take)
        self._watch = asyncio.create_task(self._watch_for_stopped())

    async def stop(self) -> None:
        """Close all connections and remove the socket. May be repeated."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        for worker in list(self._connections):
            self._drop(worker)

    def expect(self, group_world_size: int) -> None:
        """Forget the workers before, and wait for so many new ones (the agent starts them)."""
        if self._workers and not self._is_done and not self._left:
            self._lose("its workers are started again")
        for worker in list(self._connections):
            self._drop(worker)
        self._forget()
        self._size = group_world_size
        self._left = False

    @property
    def has_left(self) -> bool:
        """The group is out of the quorum as announced: its workers stand still, for good."""
        return self._left

    @property
    def was_placed(self) -> bool:
        """The workers that are expected now have been in a quorum."""
        return self._place is not None

    def notice(self, left_s: float) -> None:
        """Announce that the node is to be left within so many seconds."""
        self._notice_at = asyncio.get_running_loop().time() + left_s
        self._tell(LeaveNotice(left_s))

    # ---- the keeper ---------------------------------------------------------------------

    def up(self) -> None:
        """A connection to a keeper stands: say who is here, and what it has to answer."""
        self._up = True
        place = self._place
        if place is None:
            self._tell(ReplicaStatus(NO_QUORUM, 0, 0, 0, broken=False))
        else:
            self._tell(ReplicaStatus(place.quorum_id, place.replica_rank, place.replica_world_size,
                            self._call, self._broken))  # fmt: skip
        if self._lost is not None:
            self._tell(WorkersLost(self._lost))
        if self._notice_at is not None:
            left_s = self._notice_at - asyncio.get_running_loop().time()
            self._tell(LeaveNotice(max(0.0, left_s)))
        if self._is_done:
            self._tell(Shutdown())
        self._ask_again()

    def down(self, why: str = _DOWN) -> None:
        """The connection is gone; the keeper may be. May be repeated, to give another reason."""
        self._up = False
        self._down = why
        self._send(self._asks, QuorumWaiting(self._down))

    def heard(self, message: Message) -> None:
        """Take a message of the keeper.

        Raises:
            ValueError: it is not for a group.
        """
        match message:
            case QuorumResults():
                self._placed(message)
            case QuorumAborted():
                self._break(message)
            case ProposeSwitch():
                self._proposed, self._ats = message.number, {}
                self._send_all(message)
            case ConfirmSwitch():
                self._send_all(message)
            case LeaveGranted():
                self._left = True
                self._answer(message)
            case CheckpointBeforeLeave():
                self._answer(message)
            case QuorumWaiting():
                self._send(self._asks, message)
            case _:
                raise ValueError(f"not for a group: {message}")

    def _tell(self, message: Message) -> None:
        if self._up:
            self._upstream.send(message)

    def _placed(self, placements: QuorumResults) -> None:
        ranks = placements.ranks
        if self._asked is None or len(ranks) != self._size:
            quorum_id = ranks[0].quorum_id if ranks else NO_QUORUM
            self._tell(QuorumAborted(quorum_id, f"{self._replica_id} had given up waiting for it"))
            return
        if placements.number != self._asked.number:
            return  # an older ask's: the keeper breaks that quorum when it hears the newer one
        asks, self._asks, self._asked = self._asks, {}, None
        self._place, self._broken, self._call = ranks[0], False, 0
        for rank, placement in enumerate(ranks):
            self._workers[rank].send(QuorumResults((placement,), asks[rank].number))

    def _answer(self, message: LeaveGranted | CheckpointBeforeLeave) -> None:
        self._asks, self._asked = {}, None
        self._send_all(message)

    def _break(self, broken: QuorumAborted) -> bool:
        """Tell all workers, in the same order with respect to verdicts; whether it is news."""
        if self._place is None or broken.quorum_id != self._place.quorum_id or self._broken:
            return False
        self._broken = True
        self._send_all(broken)
        return True

    # ---- workers ------------------------------------------------------------------------

    def said(self, worker: WorkerConnection, message: Message) -> None:
        """See `workers.WorkerHost`."""
        if isinstance(message, Hello):
            self._welcome(worker, message)
            return
        rank = self._rank_of(worker)
        match message:
            case QuorumRequest():
                self._asks[rank] = message
                self._ask_if_complete()
            case CancelRequest():
                self._withdraw(rank)
            case QuorumAborted():
                if self._break(message):
                    self._tell(message)
            case SwitchVote():
                self._answered(rank, message)
            case CommitVote():
                self._ballot.cast(rank, message)
                self._decide()
            case Shutdown():
                self._bye(rank)
            case _:
                raise ValueError(f"not from a worker: {message}")

    def left(self, worker: WorkerConnection, why: str) -> None:
        """See `workers.WorkerHost`."""
        self._connections.discard(worker)
        self._stopped.discard(worker)
        rank = next((r for r, w in self._workers.items() if w is worker), None)
        if rank is not None:
            del self._workers[rank]
            self._asks.pop(rank, None)
            if rank not in self._byes and not self._left:
                self._lose(f"rank {rank} of {self._replica_id}: {why}")
            if not self._workers:
                self._on_deserted()

    def _take(self, connection: socket.socket) -> None:
        try:
            self._connections.add(WorkerConnection(connection, self))
        except OSError as e:
            _log.warning("a worker was not let in: %s", e)
            connection.close()

    def _welcome(self, worker: WorkerConnection, hello: Hello) -> None:
        if self._size is None:
            self._size = hello.group_world_size
        if hello.group_world_size != self._size or not 0 <= hello.group_rank < self._size:
            raise ValueError(
                f"rank {hello.group_rank} of {hello.group_world_size}, in a group of {self._size}"
            )
        before = self._workers.get(hello.group_rank)
        if before is not None and before is not worker:
            raise ValueError(f"rank {hello.group_rank} is process {before.pid} already")
        self._byes.discard(hello.group_rank)
        self._workers[hello.group_rank] = worker
        worker.send(Welcome(self._replica_id))

    def _rank_of(self, worker: WorkerConnection) -> int:
        for rank, known in self._workers.items():
            if known is worker:
                return rank
        raise ValueError("it has not said who it is")

    def _drop(self, worker: WorkerConnection) -> None:
        worker.close()
        self._connections.discard(worker)
        self._workers = {rank: w for rank, w in self._workers.items() if w is not worker}

    def _lose(self, why: str) -> None:
        """Tell everybody that this group can not go on, before any of its workers waits in vain."""
        _log.warning("%s", why)
        self._lost = why
        if not self._is_complete(self._asks):
            self._asked = None
        self._tell(WorkersLost(why))
        if self._place is not None:
            self._break(QuorumAborted(self._place.quorum_id, why))
        self._decide()

    def _bye(self, rank: int) -> None:
        self._byes.add(rank)
        self._asks.pop(rank, None)
        if self._is_done:
            self._tell(Shutdown())

    @property
    def _is_done(self) -> bool:
        return self._is_complete(self._byes)

    def _is_complete(self, given: Iterable[int]) -> bool:
        return self._size is not None and len(list(given)) == self._size

    def _send_all(self, message: Message) -> None:
        self._send(self._workers, message)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        for rank in list(ranks):
            if rank in self._workers:
                self._workers[rank].send(message)

    # ---- what they say together ---------------------------------------------------------

    def _ask_if_complete(self) -> None:
        if not self._is_complete(self._asks):
            assert self._size is not None or not self._asks
            self._send(self._asks, QuorumWaiting(missing(self._asks, self._size or 0)))
        elif not self._up:
            self._send(self._asks, QuorumWaiting(self._down))
        elif self._asked is None:
            self._number += 1
            self._asked = replace(combined_ask(self._asks), number=self._number)
            self._ask_again()

    def _ask_again(self) -> None:
        """Ask the keeper, who may not have heard it, or has forgotten a group that was lost."""
        if self._asked is None:
            self._ask_if_complete()
        elif not self._stopped:
            self._lost = None
            self._tell(self._asked)

    def _withdraw(self, rank: int) -> None:
        self._asks.pop(rank, None)
        if self._asked is not None:
            self._asked = None
            self._tell(CancelRequest())

    def _answered(self, rank: int, at: SwitchVote) -> None:
        self._call = max(self._call, at.call)
        if at.number != self._proposed:
            return
        self._ats[rank] = at
        if self._is_complete(self._ats):
            self._tell(combined_at(self._ats))

    def _decide(self) -> None:
        verdict = self._ballot.decide(self._size or 1, complete=len(self._workers) == self._size)
        if verdict is not None:
            self._send_all(verdict)

    async def _watch_for_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            for worker in list(self._workers.values()):
                with contextlib.suppress(ValueError):
                    self._look_at(worker, worker.stopped_for(loop.time()))

    def _look_at(self, worker: WorkerConnection, stopped_s: float) -> None:
        if stopped_s >= _STOPPED_S and worker not in self._stopped and not self._left:
            self._stopped.add(worker)
            rank = self._rank_of(worker)
            self._lose(f"rank {rank} of {self._replica_id}: process {worker.pid} is stopped")
        elif stopped_s == 0 and worker in self._stopped:
            self._stopped.discard(worker)
            self._ask_again()


# ---- A server's end of one worker: its socket, whether its process lives, whether it is stopped
# The kernel says whose process has connected (SO_PEERCRED), when it dies (a pidfd: forked
# children may keep its socket open), and in which state it is (/proc): a worker that holds the
# interpreter lock for minutes is well, one that was stopped by a signal is not.


_READ_BYTES = 1 << 16
_PAUSE_S = 0.1
_CREDENTIALS = struct.Struct("3i")


class WorkerHost(Protocol):
    """The server, as a `WorkerConnection` reports to it."""

    def said(self, worker: WorkerConnection, message: Message) -> None:
        """A message has come. A `ValueError` ends the connection."""

    def left(self, worker: WorkerConnection, why: str) -> None:
        """The connection has ended, or the process; called once."""


class WorkerConnection:
    """One connection to the server.

    Attributes:
        pid: The process's, as this one's process namespace knows it.
    """

    def __init__(self, connection: socket.socket, host: WorkerHost) -> None:
        """Take over a connection, in the running event loop.

        Raises:
            PermissionError: it is another user's.
            OSError: the process has ended already.
        """
        self.pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.getuid():
            raise PermissionError(f"process {self.pid} is user {uid}'s")
        self._host = host
        self._lines = Lines()
        self._unsent = b""
        self._open = True
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
        self._loop.add_reader(self._pidfd, self._died)
        self._loop.add_reader(connection, self._read)

    def send(self, message: Message) -> None:
        """Queue a message; one that does not read for a MiB is dropped."""
        if not self._open:
            return
        waits = bool(self._unsent)
        self._unsent += to_line(message)
        if len(self._unsent) > MAX_LINE_BYTES:
            self._end("it does not read")
        elif not waits:
            self._write()

    def close(self) -> None:
        """Drop the connection, without a report. May be repeated."""
        if not self._open:
            return
        self._open = False
        for file in (self._pidfd, self._socket.fileno()):
            self._loop.remove_reader(file)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        os.close(self._pidfd)
        os.close(self._stat)

    def stopped_for(self, now: float) -> float:
        """Return for how long the process has been stopped by a signal, as far as was looked."""
        if not self._is_stopped():
            self._stopped_since = None
            return 0.0
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since

    def _is_stopped(self) -> bool:
        try:
            line = os.pread(self._stat, 4096, 0)
        except OSError:
            return False  # it is dead: the pidfd says so
        return line[line.rfind(b")") + 2 :][:1] in (b"T", b"t")

    # ---- what the event loop calls ------------------------------------------------------

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._loop.call_soon(self._end, str(e))  # not inside of the sender's own work
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            self._end(str(e))
            return
        if not data:
            dead = readable(self._pidfd, timeout_s=0)
            self._end(f"process {self.pid} ended" if dead else "it closed its connection")
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                if self._open:
                    self._host.said(self, message)
        except (ValueError, TypeError) as e:
            self._end(f"it talks nonsense: {e}")

    def _died(self) -> None:
        """Hear its last words first, for it may have said that it leaves in peace."""
        with contextlib.suppress(OSError):
            while self._open and (data := self._socket.recv(_READ_BYTES)):
                self._take(data)
        self._end(f"process {self.pid} ended")

    def _end(self, why: str) -> None:
        if self._open:
            self.close()
            self._host.left(self, why)


def listen(path: str) -> socket.socket:
    """Open a Unix socket for workers, to which only this user can connect.

    Raises:
        OSError: the path is taken, or longer than the 107 bytes that the system allows.
    """
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


Take = Callable[[socket.socket], None]


def accept_all(listener: socket.socket, take: Take) -> None:
    """Hand what has connected to ``take`` (in the event loop, whenever it is readable)."""
    while True:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as e:  # most likely too many open files: it would stay readable
            _log.warning("no worker can be taken for now: %s", e)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_PAUSE_S, _go_on, listener, take)
            return
        take(connection)


def _go_on(listener: socket.socket, take: Take) -> None:
    if listener.fileno() >= 0:
        asyncio.get_running_loop().add_reader(listener, accept_all, listener, take)


# ---- What the workers of one replica group say together (pure; `manager_server` sends it)


def combined_ask(asks: Mapping[int, QuorumRequest]) -> QuorumRequest:
    """Return the ask of a group, all of whose workers ask.

    Workers at different steps are no copy of the model any more: the group gets a token of its own
    at the least step, so that it heals.
    """
    ranks = [asks[rank] for rank in sorted(asks)]
    first = ranks[0]
    step = min(ask.step for ask in ranks)
    lineage = first.lineage
    if any(ask.step != step for ask in ranks):
        text = "|".join(f"{ask.step}:{ask.lineage}" for ask in ranks)
        lineage = hashlib.blake2b(f"torn|{text}".encode(), digest_size=16).hexdigest()
    return replace(
        first,
        call=max(ask.call for ask in ranks),
        step=step,
        lineage=lineage,
        quorum_id=max(ask.quorum_id for ask in ranks),
        commit_failures=max(ask.commit_failures for ask in ranks),
        min_replicas=max(ask.min_replicas for ask in ranks),
        shrink_only=any(ask.shrink_only for ask in ranks),
        metadata=tuple(text for ask in ranks for text in ask.metadata),
        is_saved=all(ask.is_saved for ask in ranks),
    )


def combined_at(answers: Mapping[int, SwitchVote]) -> SwitchVote:
    """Return the answer of a group, all of whose workers have answered one proposal."""
    ats = list(answers.values())
    return replace(
        ats[0],
        ok=all(at.ok for at in ats),
        call=max(at.call for at in ats),
        rate=max(at.rate for at in ats),
    )


class CommitVotes:
    """The votes of a group's workers on their steps, one step after the other."""

    def __init__(self) -> None:
        self._votes: dict[int, CommitVote] = {}
        self._is_decided = False

    def cast(self, rank: int, vote: CommitVote) -> None:
        """Count a vote; one on a step before the last is too late."""
        known = next(iter(self._votes.values()), None)
        if known is not None and _step_of(vote) < _step_of(known):
            return
        if known is not None and _step_of(vote) > _step_of(known):
            self._votes, self._is_decided = {}, False
        self._votes[rank] = vote

    def decide(self, group_world_size: int, *, complete: bool) -> CommitDecision | None:
        """Return the verdict on the last step, once there is one. One no decides.

        Args:
            group_world_size: So many must say yes.
            complete: Whether all workers live; one that is dead says no.
        """
        if self._is_decided or not self._votes:
            return None
        refused = not complete or not all(vote.yes for vote in self._votes.values())
        if not refused and len(self._votes) < group_world_size:
            return None
        self._is_decided = True
        vote = next(iter(self._votes.values()))
        return CommitDecision(vote.quorum_id, vote.call, commit=not refused)


def _step_of(vote: CommitVote) -> tuple[int, int]:
    return vote.quorum_id, vote.call


def missing(asked: Mapping[int, object], group_world_size: int) -> str:
    """Return which workers of the group have not asked."""
    ranks = [str(rank) for rank in range(group_world_size) if rank not in asked]
    return f"rank {', '.join(ranks)} of this replica group has not asked for a quorum yet"


# ---- JSON lines between a worker and the server of its group, which are on one node (pure)
# Nothing is signed: the socket lies in a folder that only its owner may enter, and the server
# asks the kernel whose process has connected.


MAX_LINE_BYTES = 1 << 20
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def to_line(message: Message) -> bytes:
    """Return a message as one line."""
    return _to_json(pack(message)).encode() + b"\n"


class Lines:
    """Puts messages together from what is read of a socket."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with these bytes.

        Raises:
            ValueError: a line is no message, or longer than `MAX_LINE_BYTES`.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            raise ValueError(f"a line longer than {MAX_LINE_BYTES} bytes")
        return [_message(line) for line in lines]


def _message(line: bytes) -> Message:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("not an object")
    return unpack(raw)
