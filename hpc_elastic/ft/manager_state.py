"""State of a manager server: its decisions about one replica group (pure).

`manager_server` drives it with sockets and processes. No call blocks, and each event calls its
ports in order: `send` for the lighthouse, a `Worker` for each worker, and a `RelayLink` where the
server of the group is on another node. The state of a node is one of two things:

*Server*. It combines the requests and votes of all workers of the group, on whatever node, into
those of the group, and passes on what the lighthouse answers. One no, or one lost worker, decides a
vote against the commit; a yes needs the votes of all ranks of all nodes. A worker that is dead or
stopped is reported to the lighthouse at once (`WorkersLost`), and the quorum is aborted for the
others of its group. Workers on other nodes are `RemoteWorker` objects behind the connection of
their node's relay (`RemoteNodes`); when that ends, all of them are lost.

*Relay*. It passes on the messages of its node's workers, with their ranks, and the answers. It
decides nothing, but reports workers that are dead, stopped, or run again. When its connection ends,
its workers lose the server, and end.

Log entries number the placements of groups. A relay names the entry of its group: until the server
expects that one, its frames wait; a relay of an earlier one is disconnected.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hpc_elastic.ft import messages

_NO_CONNECTION = "there is no connection to the lighthouse"


class Worker(Protocol):
    """A worker, as its group's server uses it: of this node, or behind the relay of another."""

    rank: int | None

    @property
    def pid(self) -> int | str:
        """Its process, as messages name it."""

    def send(self, message: messages.Message) -> None:
        """Queue a message."""

    def close(self) -> None:
        """Drop the connection, without a report. May be repeated."""

    def is_stopped(self, now: float) -> bool | None:
        """Return whether the process is stopped for long; None if only for a moment so far."""


class RelayLink(Protocol):
    """The connection of a relay to the server of its group (`manager_server.Relay`)."""

    def send(self, frame: dict[str, Any]) -> None:
        """Queue a frame."""

    def send_message(self, rank: int, message: messages.Message) -> None:
        """Queue the message of a worker."""

    def close(self) -> None:
        """End the connection, without a report. May be repeated."""


class ManagerState:
    """What the server of one replica group, or a relay, knows and decides."""

    def __init__(
        self,
        replica_id: str,
        send: Callable[[messages.Message], None],
        *,
        on_empty: Callable[[], None] = lambda: None,
        relays: RemoteNodes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without workers and lighthouse; the arguments are those of `ManagerServer`."""
        self._relays = relays
        self._relay: RelayLink | None = None
        """The connection to the server of the group, if that is on another node."""
        self._replica_id = replica_id
        self._send = send
        self._on_empty = on_empty
        self._clock = clock
        self._is_connected = False
        self._disconnect_reason = _NO_CONNECTION
        self._size: int | None = None
        self.has_left = False
        """The group has left the quorum as announced: its workers wait to be stopped."""
        self.on_report: Callable[[messages.RunReport], None] = lambda _: None
        """Receives what is for the run's events; may be replaced."""
        self._leave_deadlines: dict[RemoteNode | None, float] = {}
        """When nodes of the group are lost that are under notice; None: this one."""
        self._connections: dict[Worker, None] = {}
        """All of this node, also those without a `Hello` (ordered set)."""
        self._workers: dict[int, Worker] = {}
        self._number = 0
        """Of the last request, over the life of this server."""
        self._reset()

    def _reset(self) -> None:
        self._stopped: set[Worker] = set()
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
        self._switch_requests: set[int] = set()
        """Ranks that request a switch of the present quorum."""
        self._commit_votes = CommitVotes()

    # ---- the workers to expect -----------------------------------------------------------

    def expect_workers(
        self, group_world_size: int, entry: int = 0, relay: Callable[[], RelayLink] | None = None
    ) -> None:
        """Forget the present workers, and wait for new ones, which the agent starts.

        ``group_world_size`` includes workers on other nodes; ``entry`` is the index of the log
        entry that placed the group. ``relay`` connects to the server of the group, which is on
        another node; None: this is it.
        """
        if (
            self._workers
            and not self._is_complete(self._done_ranks)
            and not self.has_left
            and self._relay is None
        ):
            self._lose_workers("its workers are started again")
        self._close_connections()
        self._reset()
        self._leave_deadlines.clear()  # agents announce what holds for the new group
        self._size = group_world_size
        self.has_left = False
        if relay is not None:
            self._relay = relay()
        elif self._relays is not None:
            self._relays.expect(entry)

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
        self._send_down(self._workers, messages.QuorumWaiting(reason))
        self._close_connections()

    @property
    def was_in_quorum(self) -> bool:
        """Whether the present workers have been in a quorum."""
        return self._result is not None

    def announce_leave(self, left_s: float, node: RemoteNode | None = None) -> None:
        """Announce that a node is lost within this number of seconds; None: this one."""
        if self._relay is not None:
            self._relay.send({"type": "leave", "left_s": left_s})
            return
        self._leave_deadlines[node] = self._clock() + left_s
        self._send_up(messages.LeaveNotice(left_s))

    def forget_leave(self, node: RemoteNode) -> None:
        """Forget the notice of a node that is gone, so that no later lighthouse obeys it."""
        self._leave_deadlines.pop(node, None)

    # ---- the lighthouse -----------------------------------------------------------------

    def on_connect(self) -> None:
        """Report the group's state to a newly connected lighthouse, and repeat its request."""
        self._is_connected = True
        if self._relay is not None:
            return
        result = self._result
        status = messages.ReplicaStatus(messages.NO_QUORUM, 0, 0, 0, is_aborted=False)
        if result is not None and not self.has_left:
            place = result.quorum_id, result.replica_rank, result.replica_world_size
            status = messages.ReplicaStatus(*place, self._quorum_step, self._is_aborted)
        self._send_up(status)
        if self._lost_reason is not None:
            self._send_up(messages.WorkersLost(self._lost_reason))
        else:
            self._repeat_leave_notice()
        if self._is_complete(self._done_ranks):
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
                if self._sent is None or message.number != self._sent.number:
                    return  # of an older request, perhaps of workers that have been restarted since
                if isinstance(message, messages.LeaveGranted):
                    self.has_left = True
                    self._leave_deadlines.clear()
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
        self._switch_requests.clear()
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

    def add_connection(self, worker: Worker) -> None:
        """Add a worker of this node that has connected; its `Hello` follows."""
        self._connections[worker] = None

    def on_worker_message(self, worker: Worker, message: messages.Message) -> None:
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
            case messages.SwitchRequest():
                self._on_switch_request(rank, message)
            case messages.CommitVote():
                self._commit_votes.add_vote(rank, message)
                self._decide_commit()
            case messages.StateMismatch() | messages.HealFailed():
                self.on_report(message)
            case messages.Shutdown():
                self._done_ranks[rank] = message
                self._requests.pop(rank, None)
                if self._is_complete(self._done_ranks):
                    self._send_shutdown()
            case _:
                raise ValueError(f"not from a worker: {message}")

    def on_worker_disconnect(self, worker: Worker, reason: str) -> None:
        """Handle the end of a worker's connection or process."""
        self._connections.pop(worker, None)
        self._stopped.discard(worker)
        rank = worker.rank
        if rank is None:
            return
        del self._workers[rank]
        self._requests.pop(rank, None)
        if self._relay is not None:
            self._relay.send({"type": "lost", "rank": rank, "why": reason})
        elif rank not in self._done_ranks and not self.has_left:
            self._lose_workers(f"rank {rank} of {self._replica_id}: {reason}")
        if not self._workers:
            self._on_empty()

    def check_workers(self) -> None:
        """Report workers that are stopped, or run again; to be called some 40 times a second."""
        now = self._clock()
        for rank, worker in list(self._workers.items()):
            if self._workers.get(rank) is not worker:
                continue  # lost meanwhile
            is_stopped = worker.is_stopped(now)
            if is_stopped is None or is_stopped == (worker in self._stopped):
                continue
            if self._relay is not None:
                self._stopped ^= {worker}
                self._relay.send({"type": "stopped", "rank": rank, "now": is_stopped})
            elif not is_stopped:
                self._stopped.discard(worker)
                self._repeat_request()
            elif not self.has_left:
                self._stopped.add(worker)
                process = f"process {worker.pid} is stopped"
                self._lose_workers(f"rank {rank} of {self._replica_id}: {process}")

    def _add_worker(self, worker: Worker, hello: messages.Hello) -> None:
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
        for worker in dict.fromkeys((*self._connections, *self._workers.values())):
            worker.close()
        self._connections.clear()
        self._workers.clear()
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _lose_workers(self, reason: str) -> None:
        """Report that the group cannot go on, so that no worker waits for its next quorum."""
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
            if self._lost_reason is not None:
                self._lost_reason = None
                self._repeat_leave_notice()
            self._send_up(self._sent)

    def _repeat_leave_notice(self) -> None:
        """Send the notice to a lighthouse that may not have it.

        Not while workers are lost: if they are started again, the agents announce what holds then.
        """
        if self._leave_deadlines:
            left_s = min(self._leave_deadlines.values()) - self._clock()
            self._send_up(messages.LeaveNotice(max(0.0, left_s)))

    def _on_switch_vote(self, rank: int, vote: messages.SwitchVote) -> None:
        self._quorum_step = max(self._quorum_step, vote.quorum_step)
        if vote.number != self._proposal_number:
            return
        self._switch_votes[rank] = vote
        if self._is_complete(self._switch_votes):
            votes = self._switch_votes.values()
            most = _most(votes, "quorum_step", "rate", "confirmed_step")
            self._send_up(replace(vote, ok=all(v.ok for v in votes), **most))

    def _on_switch_request(self, rank: int, request: messages.SwitchRequest) -> None:
        """Request a switch if all ranks do, which repeat it at the end of each step."""
        if self._result is not None and request.quorum_id == self._result.quorum_id:
            self._switch_requests.add(rank)
            if self._is_complete(self._switch_requests):
                self._send_up(request)

    def _decide_commit(self) -> None:
        decision = self._commit_votes.decide(
            self._size or 1, all_live=self._is_complete(self._workers)
        )
        if decision is not None:
            self._send_down(self._workers, decision)


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
        step=step,
        state_version=version,
        shrink_only=any(q.shrink_only for q in ranks),
        metadata=tuple(text for q in ranks for text in q.metadata),
        is_saved=all(q.is_saved for q in ranks),
        catch_up=all(q.catch_up for q in ranks),
        **_most(
            ranks, "quorum_step", "quorum_id", "commit_failures", "min_replicas", "heal_failures"
        ),
    )


def _most(of: Collection[object], *names: str) -> dict[str, Any]:
    return {name: max(getattr(each, name) for each in of) for name in names}


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


# ---- the other nodes of a group, at its server


class NodeConnection(Protocol):
    """The server's end of a relay's connection (`transport.connection.ServerConnection`)."""

    def send(self, message: dict[str, Any]) -> None:
        """Queue a frame."""

    def close(self) -> None:
        """Close the connection."""

    def abort(self, reason: str) -> None:
        """Drop the connection at once."""


class RemoteWorker:
    """A worker on another node; see `Worker`. ``pid`` is a description of its process."""

    def __init__(self, node: RemoteNode, rank: int) -> None:
        self.rank: int | None = None
        self.pid = f"of rank {rank} on {node.host}"
        self._node = node
        self._number = rank
        self.has_stopped = False
        """Its node has reported that it is stopped for long."""

    def send(self, message: messages.Message) -> None:
        """See `Worker`."""
        self._node.connection.send({**messages.to_frame(message), "rank": self._number})

    def close(self) -> None:
        """Drop the connection to its node."""
        self._node.close()

    def is_stopped(self, now: float) -> bool:
        """See `Worker`."""
        return self.has_stopped


@dataclass(eq=False)
class RemoteNode:
    """A relay's connection, and the workers behind it."""

    connection: NodeConnection
    host: str
    entry: int
    workers: dict[int, RemoteWorker] = field(default_factory=dict)
    early: list[dict[str, Any]] = field(default_factory=list)
    """Frames that came before the server expected the group."""
    is_open: bool = True

    def close(self) -> None:
        """Drop the connection."""
        self.is_open = False
        self.connection.close()


class RemoteNodes:
    """The other nodes of a group, as its server sees them: the connections of their relays."""

    def __init__(self) -> None:
        self._nodes: dict[NodeConnection, RemoteNode] = {}
        self._entry = -1
        self._owner: ManagerState | None = None

    def start(self, owner: ManagerState) -> None:
        """Pass what the relays send to this server from now on."""
        self._owner = owner

    def expect(self, entry: int) -> None:
        """Serve the relays of the group that an entry has placed, and of no earlier one."""
        self._entry = entry
        for node in list(self._nodes.values()):
            if node.entry < entry:
                node.close()
            elif node.entry == entry:
                early, node.early = node.early, []
                for frame in early:
                    self._handle(node, frame)

    # ---- what the connections call ------------------------------------------------------

    def on_connect(self, connection: NodeConnection, hello: dict[str, Any]) -> None:
        """Handle a relay that has connected; raise ValueError if it is of an earlier group."""
        entry = int(hello["entry"])
        if entry < self._entry:
            raise ValueError(f"a relay of entry {entry}, and the group is of entry {self._entry}")
        self._nodes[connection] = RemoteNode(connection, str(hello["host"]), entry)

    def on_message(self, connection: NodeConnection, message: dict[str, Any]) -> None:
        """Handle a frame of a relay; raise ValueError if it is none, or out of order."""
        node = self._nodes[connection]
        if node.entry > self._entry:
            node.early.append(message)
        elif node.is_open:
            self._handle(node, message)

    def on_disconnect(self, connection: NodeConnection, reason: str) -> None:
        """Handle the end of a relay's connection: the group has lost the workers behind it."""
        node = self._nodes.pop(connection, None)
        if node is None or self._owner is None:
            return
        self._owner.forget_leave(node)
        if not node.is_open:
            return
        node.is_open = False
        for worker in node.workers.values():
            self._owner.on_worker_disconnect(worker, f"{node.host}: {reason}")

    def _handle(self, node: RemoteNode, frame: dict[str, Any]) -> None:
        owner = self._owner
        assert owner is not None
        if frame["type"] == "leave":
            owner.announce_leave(float(frame["left_s"]), node)
            return
        rank = int(frame["rank"])
        match frame["type"]:
            case "ft":
                worker = node.workers.setdefault(rank, RemoteWorker(node, rank))
                owner.on_worker_message(worker, messages.unpack(frame["message"]))
            case "lost" if rank in node.workers:
                owner.on_worker_disconnect(node.workers.pop(rank), str(frame["why"]))
            case "stopped" if rank in node.workers:
                node.workers[rank].has_stopped = bool(frame["now"])
