"""The state of a manager server and of its relays: notices of nodes that are gone, and frames."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpc_elastic.ft.manager_state import ManagerState, RemoteNodes
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CheckpointBeforeLeave,
    CommitVote,
    Hello,
    LeaveGranted,
    LeaveNotice,
    ProposeSwitch,
    QuorumRequest,
    ReplicaStatus,
    SwitchVote,
    WorkersLost,
    to_frame,
)


class Port:
    """A worker of the server's node, or the connection of a relay; keeps what is sent to it."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.pid = 7
        self.sent: list[object] = []
        self.is_closed = False

    def send(self, message: object) -> None:
        """Keep it."""
        self.sent.append(message)

    def close(self) -> None:
        """Keep that it was closed."""
        self.is_closed = True

    def is_stopped(self, now: float) -> bool:
        """It is not."""
        return False


class Group:
    """A server with one worker, and the relay of a second node with another."""

    def __init__(self) -> None:
        self.now = 0.0
        self.up: list[object] = []
        self.relays = RemoteNodes()
        self.state = ManagerState("r", self.up.append, relays=self.relays, clock=lambda: self.now)
        self.relays.start(self.state)
        self.state.on_connect()

    def start(self, entry: int) -> Port:
        """Start the workers of a placement; return the relay's connection."""
        self.state.expect_workers(2, entry)
        self.worker = Port()
        self.state.add_connection(self.worker)
        self.state.on_worker_message(self.worker, Hello(0, 2, 1))
        relay = Port()
        self.relays.on_connect(relay, {"entry": entry, "host": "b"})
        self.relays.on_message(relay, {**to_frame(Hello(1, 2, 1)), "rank": 1})
        return relay

    def request(self, relay: Port) -> int:
        """Let both workers request a quorum; return the number of the group's request."""
        self.state.on_worker_message(self.worker, request(0))
        self.relays.on_message(relay, {**to_frame(request(1)), "rank": 1})
        sent = self.up[-1]
        assert isinstance(sent, QuorumRequest)
        return sent.number

    def reconnect(self) -> list[object]:
        """Return what another lighthouse is sent."""
        self.state.on_disconnect()
        self.up.clear()
        self.state.on_connect()
        return [type(message) for message in self.up]


def request(rank: int) -> QuorumRequest:
    return QuorumRequest(0, 0, "v", NO_QUORUM, 0, 1, False, "h:1", (f"m{rank}",))


def test_notice_of_another_node_ends_with_it():
    """A later lighthouse would let the group leave that has taken another node instead."""
    group = Group()
    relay = group.start(1)
    group.relays.on_message(relay, {"type": "leave", "left_s": 30.0})
    group.now = 10.0
    assert group.up[-1] == LeaveNotice(30.0)
    assert group.reconnect() == [ReplicaStatus, LeaveNotice]
    assert group.up[-1] == LeaveNotice(20.0)
    group.relays.on_disconnect(relay, "its node is gone")
    assert group.reconnect() == [ReplicaStatus, WorkersLost]
    group.start(2)
    assert group.reconnect() == [ReplicaStatus]


def test_notice_is_repeated_once_the_workers_run_again():
    """Not while some are lost: if they are started again, the agents announce what holds then."""
    group = Group()
    relay = group.start(1)
    group.relays.on_message(relay, {"type": "leave", "left_s": 30.0})
    group.state.on_worker_message(group.worker, request(0))
    group.relays.on_message(relay, {**to_frame(request(1)), "rank": 1})
    group.relays.on_message(relay, {"type": "stopped", "rank": 1, "now": True})
    group.state.check_workers()
    assert isinstance(group.up[-1], WorkersLost)
    assert LeaveNotice not in group.reconnect()
    group.relays.on_message(relay, {"type": "stopped", "rank": 1, "now": False})
    group.state.check_workers()
    assert [type(message) for message in group.up[-2:]] == [LeaveNotice, QuorumRequest]


def test_notice_is_over_once_the_leave_is_granted():
    """Whatever the node does after that."""
    group = Group()
    relay = group.start(1)
    group.state.announce_leave(30.0)
    number = group.request(relay)
    group.state.on_message(LeaveGranted(number))
    assert group.state.has_left
    assert group.reconnect() == [ReplicaStatus]


@pytest.mark.parametrize("answer", [LeaveGranted, CheckpointBeforeLeave])
def test_answer_to_workers_that_have_been_restarted_is_ignored(answer):
    """The new ones would part: one has requested already, and another has not."""
    group = Group()
    number = group.request(group.start(1))
    relay = group.start(2)
    group.state.on_worker_message(group.worker, request(0))
    group.state.on_message(answer(number))
    assert not any(isinstance(message, answer) for message in group.worker.sent)
    assert group.request(relay) == number + 1
    group.state.on_message(answer(number))
    assert not group.state.has_left
    group.state.on_message(answer(number + 1))
    assert any(isinstance(message, answer) for message in group.worker.sent)


def test_relay_of_an_earlier_group_is_refused_and_one_of_a_later_group_waits():
    """Its first frames come before the server expects its group, and count then."""
    group = Group()
    early = Port()
    group.relays.on_connect(early, {"entry": 2, "host": "b"})
    group.relays.on_message(early, {**to_frame(Hello(1, 2, 1)), "rank": 1})
    assert not early.sent
    group.state.expect_workers(2, 2)
    assert early.sent[0]["message"]["type"] == "Welcome"
    with pytest.raises(ValueError, match="entry 1"):
        group.relays.on_connect(Port(), {"entry": 1, "host": "b"})


def test_lost_relay_decides_a_vote():
    """The workers behind it are lost, also those that had voted yes."""
    group = Group()
    relay = group.start(1)
    group.relays.on_message(relay, {**to_frame(CommitVote(7, 0, True)), "rank": 1})
    group.relays.on_disconnect(relay, "the connection is lost")
    group.state.on_worker_message(group.worker, CommitVote(7, 0, True))
    assert group.worker.sent[-1].commit is False
    assert group.up[-1] == WorkersLost("rank 1 of r: b: the connection is lost")


def test_a_group_answers_a_proposal_as_one():
    """With its furthest rank, and the step that is confirmed to it."""
    group = Group()
    relay = group.start(1)
    group.state.on_message(ProposeSwitch(7, 4, 0))
    vote = SwitchVote(7, 4, False, 2, 1.0, confirmed_step=5)
    group.state.on_worker_message(group.worker, vote)
    group.relays.on_message(relay, {**to_frame(SwitchVote(7, 4, False, 3, 0.5)), "rank": 1})
    assert group.up[-1] == SwitchVote(7, 4, False, 3, 1.0, confirmed_step=5)


def test_relay_reports_and_decides_nothing():
    """Its workers' messages and ends go to the server; they learn why they have lost it."""
    empty: list[bool] = []
    link = SimpleNamespace(frames=[], messages=[], close=lambda: None)
    link.send = link.frames.append
    link.send_message = lambda rank, message: link.messages.append((rank, message))
    state = ManagerState("b", lambda _: None, on_empty=lambda: empty.append(True))
    state.expect_workers(3, 1, lambda: link)
    ports = [Port(), Port()]
    for rank, port in enumerate(ports, start=1):
        state.add_connection(port)
        state.on_worker_message(port, Hello(rank, 3, 1))
    state.on_worker_message(ports[0], CommitVote(7, 0, True))
    assert [message[0] for message in link.messages] == [1, 2, 1] and not ports[0].sent
    state.on_worker_disconnect(ports[0], "it ended")
    assert link.frames == [{"type": "lost", "rank": 1, "why": "it ended"}] and not empty
    state.on_relay_end("the server is silent")
    assert ports[1].is_closed and ports[1].sent[-1].text == "the server is silent"
