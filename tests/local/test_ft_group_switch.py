"""How a replica group's workers hear of a switch, and how the group goes; over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from ft_group import PATIENCE_S, ask_of
from ft_place import Place, Q, until

from hpc_elastic.ft.messages import (
    CheckpointBeforeLeave,
    ConfirmSwitch,
    LeaveGranted,
    LeaveNotice,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    SwitchVote,
)


@pytest.fixture
def place(tmp_path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


def test_proposal_is_answered_for_all_ranks(place):
    """The group agrees to a call that none has begun, waits, and asks when it is confirmed."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    assert not links[1].needs_quorum(failed=False)
    server.hears(ProposeSwitch(Q, 3, 1))
    assert not server.keeper.next(SwitchVote).ok
    server.hears(ProposeSwitch(Q, 4, 2))
    at = server.keeper.next(SwitchVote)
    assert (at.number, at.ok, at.call) == (4, True, 1)
    assert not links[0].needs_quorum(failed=False)
    waiting = [place.threads.submit(link.needs_quorum, failed=False) for link in links]
    server.hears(ConfirmSwitch(Q, 4, leaves=True))
    assert all(needs.result(PATIENCE_S) for needs in waiting)


def test_proposal_taken_back(place):
    """Who waits at a proposed call goes on when it is taken back, and asks when all breaks."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    server.hears(ProposeSwitch(Q, 1, 1))
    server.keeper.next(SwitchVote)
    needs = place.threads.submit(link.needs_quorum, failed=False)
    server.hears(ProposeSwitch(Q, 0, 0))
    assert not needs.result(PATIENCE_S)
    server.hears(ProposeSwitch(Q, 2, 2))
    server.keeper.next(SwitchVote)
    needs = place.threads.submit(link.needs_quorum, failed=False)
    server.hears(QuorumAborted(Q, "b died"))
    assert needs.result(PATIENCE_S)


def test_settle_waits_for_the_decision(place):
    """At the end of a step, a worker learns whether the members change at the next one."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    assert not link.settle()
    server.hears(ProposeSwitch(Q, 1, 1))
    assert not server.keeper.next(SwitchVote).ok
    assert not link.needs_quorum(failed=False)
    server.hears(ProposeSwitch(Q, 2, 2))
    assert server.keeper.next(SwitchVote).ok
    settled = place.threads.submit(link.settle)
    server.hears(ConfirmSwitch(Q, 2, leaves=True, last=True))
    assert settled.result(PATIENCE_S)


def test_farewell_ends_an_ask(place):
    """A group that has left as announced is told so, and its end is no loss any more."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    server.do(server.server.notice, 60.0)
    assert server.keeper.next(LeaveNotice).left_s == 60.0
    assert link.needs_quorum(failed=True)
    answer = place.threads.submit(link.ask, ask_of(link), PATIENCE_S)
    server.keeper.next(QuorumRequest)
    server.hears(LeaveGranted())
    assert answer.result(PATIENCE_S) == LeaveGranted()
    assert server.server.has_left
    link._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: not server.server._workers)
    assert not server.keeper.messages


def test_save_first_ends_an_ask_and_no_more(place):
    """The workers are to make one more step, so that the group has not left."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    server.hears(QuorumAborted(Q, "b died"))
    votes = [place.threads.submit(link.vote, False, PATIENCE_S) for link in links]
    assert not any(vote.result(PATIENCE_S) for vote in votes)
    answers = [place.asks(link, rank) for rank, link in enumerate(links)]
    assert not server.keeper.next(QuorumRequest).is_saved
    server.hears(CheckpointBeforeLeave())
    assert [answer.result(PATIENCE_S) for answer in answers] == [CheckpointBeforeLeave()] * 2
    assert not server.server.has_left
    votes = [place.threads.submit(link.vote, False, PATIENCE_S) for link in links]
    assert not any(vote.result(PATIENCE_S) for vote in votes)
    assert all(link.settle() for link in links)
    assert all(link.needs_quorum(failed=True) for link in links)
    assert all(link.is_saved for link in links)
