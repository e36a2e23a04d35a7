"""The server of a replica group: speaks for its workers to the keeper of the quorum.

It lives outside of the training processes, in the agent of a run or in an `attendant`, so that
nothing that they do to the interpreter lock costs the group its membership. `protocol` has the
theory. It combines what its workers say (`group`), sees within milliseconds when one dies and
within a second when one is stopped (`workers`), and keeps what a new keeper has to be told. While
there is none (`down`), workers go on as long as they need no quorum, and asks wait for `up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hpc_elastic.ft.group import Ballot, combined_ask, combined_at, missing
from hpc_elastic.ft.protocol import (
    NO_QUORUM,
    Ask,
    At,
    Broken,
    Bye,
    Confirm,
    Farewell,
    Hello,
    Here,
    Lost,
    Message,
    Notice,
    Placement,
    Placements,
    Propose,
    SaveFirst,
    Vote,
    Waiting,
    Welcome,
    Withdraw,
)
from hpc_elastic.ft.workers import Worker, accept_all, listen

_LOOK_S = 0.25
_STOPPED_S = 0.5
"""A worker that is stopped for longer holds all members up: it is given up."""
_DOWN = "there is no connection to the coordinator of the quorum"

_log = logging.getLogger(__name__)


class Upstream(Protocol):
    """The connection to the keeper."""

    def send(self, message: Message) -> None:
        """Queue a message; called between `GroupServer.up` and `GroupServer.down` only."""


class GroupServer:
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
        self._connections: set[Worker] = set()
        """All, those that have not said who they are among them."""
        self._workers: dict[int, Worker] = {}
        self._number = 0
        """The last ask's, for the life of this server."""
        self._forget()

    def _forget(self) -> None:
        self._stopped: set[Worker] = set()
        self._byes: set[int] = set()
        self._lost: str | None = None
        self._asks: dict[int, Ask] = {}
        self._asked: Ask | None = None
        """What has been sent to a keeper, and not been answered."""
        self._place: Placement | None = None
        self._broken = False
        self._call = 0
        self._proposed = 0
        self._ats: dict[int, At] = {}
        self._ballot = Ballot()

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
        self._tell(Notice(left_s))

    # ---- the keeper ---------------------------------------------------------------------

    def up(self) -> None:
        """A connection to a keeper stands: say who is here, and what it has to answer."""
        self._up = True
        place = self._place
        if place is None:
            self._tell(Here(NO_QUORUM, 0, 0, 0, broken=False))
        else:
            self._tell(Here(place.quorum_id, place.replica_rank, place.replica_world_size,
                            self._call, self._broken))  # fmt: skip
        if self._lost is not None:
            self._tell(Lost(self._lost))
        if self._notice_at is not None:
            left_s = self._notice_at - asyncio.get_running_loop().time()
            self._tell(Notice(max(0.0, left_s)))
        if self._is_done:
            self._tell(Bye())
        self._ask_again()

    def down(self, why: str = _DOWN) -> None:
        """The connection is gone; the keeper may be. May be repeated, to give another reason."""
        self._up = False
        self._down = why
        self._send(self._asks, Waiting(self._down))

    def heard(self, message: Message) -> None:
        """Take a message of the keeper.

        Raises:
            ValueError: it is not for a group.
        """
        match message:
            case Placements():
                self._placed(message)
            case Broken():
                self._break(message)
            case Propose():
                self._proposed, self._ats = message.number, {}
                self._send_all(message)
            case Confirm():
                self._send_all(message)
            case Farewell():
                self._left = True
                self._answer(message)
            case SaveFirst():
                self._answer(message)
            case Waiting():
                self._send(self._asks, message)
            case _:
                raise ValueError(f"not for a group: {message}")

    def _tell(self, message: Message) -> None:
        if self._up:
            self._upstream.send(message)

    def _placed(self, placements: Placements) -> None:
        ranks = placements.ranks
        if self._asked is None or len(ranks) != self._size:
            quorum_id = ranks[0].quorum_id if ranks else NO_QUORUM
            self._tell(Broken(quorum_id, f"{self._replica_id} had given up waiting for it"))
            return
        if placements.number != self._asked.number:
            return  # an older ask's: the keeper breaks that quorum when it hears the newer one
        asks, self._asks, self._asked = self._asks, {}, None
        self._place, self._broken, self._call = ranks[0], False, 0
        for rank, placement in enumerate(ranks):
            self._workers[rank].send(Placements((placement,), asks[rank].number))

    def _answer(self, message: Farewell | SaveFirst) -> None:
        self._asks, self._asked = {}, None
        self._send_all(message)

    def _break(self, broken: Broken) -> bool:
        """Tell all workers, in the same order with respect to verdicts; whether it is news."""
        if self._place is None or broken.quorum_id != self._place.quorum_id or self._broken:
            return False
        self._broken = True
        self._send_all(broken)
        return True

    # ---- workers ------------------------------------------------------------------------

    def said(self, worker: Worker, message: Message) -> None:
        """See `workers.Host`."""
        if isinstance(message, Hello):
            self._welcome(worker, message)
            return
        rank = self._rank_of(worker)
        match message:
            case Ask():
                self._asks[rank] = message
                self._ask_if_complete()
            case Withdraw():
                self._withdraw(rank)
            case Broken():
                if self._break(message):
                    self._tell(message)
            case At():
                self._answered(rank, message)
            case Vote():
                self._ballot.cast(rank, message)
                self._decide()
            case Bye():
                self._bye(rank)
            case _:
                raise ValueError(f"not from a worker: {message}")

    def left(self, worker: Worker, why: str) -> None:
        """See `workers.Host`."""
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
            self._connections.add(Worker(connection, self))
        except OSError as e:
            _log.warning("a worker was not let in: %s", e)
            connection.close()

    def _welcome(self, worker: Worker, hello: Hello) -> None:
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

    def _rank_of(self, worker: Worker) -> int:
        for rank, known in self._workers.items():
            if known is worker:
                return rank
        raise ValueError("it has not said who it is")

    def _drop(self, worker: Worker) -> None:
        worker.close()
        self._connections.discard(worker)
        self._workers = {rank: w for rank, w in self._workers.items() if w is not worker}

    def _lose(self, why: str) -> None:
        """Tell everybody that this group can not go on, before any of its workers waits in vain."""
        _log.warning("%s", why)
        self._lost = why
        if not self._is_complete(self._asks):
            self._asked = None
        self._tell(Lost(why))
        if self._place is not None:
            self._break(Broken(self._place.quorum_id, why))
        self._decide()

    def _bye(self, rank: int) -> None:
        self._byes.add(rank)
        self._asks.pop(rank, None)
        if self._is_done:
            self._tell(Bye())

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
            self._send(self._asks, Waiting(missing(self._asks, self._size or 0)))
        elif not self._up:
            self._send(self._asks, Waiting(self._down))
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
            self._tell(Withdraw())

    def _answered(self, rank: int, at: At) -> None:
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

    def _look_at(self, worker: Worker, stopped_s: float) -> None:
        if stopped_s >= _STOPPED_S and worker not in self._stopped and not self._left:
            self._stopped.add(worker)
            rank = self._rank_of(worker)
            self._lose(f"rank {rank} of {self._replica_id}: process {worker.pid} is stopped")
        elif stopped_s == 0 and worker in self._stopped:
            self._stopped.discard(worker)
            self._ask_again()
