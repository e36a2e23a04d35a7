"""A replica group's server and its workers' links, over real sockets and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from ft_group import PATIENCE_S, ask_of
from ft_place import Place, Q, until
from scarcity import no_descriptors

from hpc_elastic.ft.manager_client import GroupServerGoneError, ManagerClient
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    LeaveNotice,
    QuorumAborted,
    QuorumRequest,
    QuorumWaiting,
    ReplicaStatus,
    Shutdown,
    WorkersLost,
)


@pytest.fixture
def place(tmp_path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


def test_a_step_in_a_standing_quorum_says_nothing(place):
    """After a place was given, steps cost no message."""
    server = place.serve()
    link = place.link()
    assert link.replica_id == "group-a"
    place.in_quorum(link)
    for call in range(1, 100):
        assert not link.needs_quorum(failed=False)
        assert link.call == call
    assert not server.keeper.messages


def test_all_ranks_ask_as_one(place):
    """A group asks once all its ranks do; until then, who waits knows which rank is missing."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    assert links[0].needs_quorum(failed=False)
    with pytest.raises(TimeoutError, match="rank 1 of this replica group"):
        links[0].ask(ask_of(links[0]), 2.0)
    first = place.threads.submit(links[0].ask, ask_of(links[0]), PATIENCE_S)
    second = place.asks(links[1], 1)
    assert server.keeper.next(QuorumRequest).metadata == ("m0", "m1")
    server.place(Q, 2)
    assert first.result(PATIENCE_S) == second.result(PATIENCE_S)


def test_failed_step_asks_anew(place):
    """After a step that was not committed, the next one needs a quorum."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    assert link.needs_quorum(failed=True)
    place.threads.submit(link.ask, ask_of(link, failures=1), PATIENCE_S)
    ask = server.keeper.next(QuorumRequest)
    assert (ask.call, ask.quorum_id, ask.commit_failures) == (1, Q, 1)
    server.place(Q + 1)


def test_broken_reaches_every_rank_once(place):
    """A break that is pushed calls every worker back, once; one of an older quorum does not."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    server.hears(QuorumAborted(Q - 1, "old"))
    server.hears(QuorumAborted(Q, "b died"))
    server.hears(QuorumAborted(Q, "b died again"))
    until(lambda: len(place.broken) == 2)
    assert place.broken == [(Q, "b died")] * 2
    assert links[0].broken == "b died"


def test_what_one_rank_finds_broken_all_hear(place):
    """A rank's report goes up once, and to the other ranks."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    links[1].report_broken(Q, "mine")
    links[1].report_broken(Q, "mine")
    links[1].report_broken(Q - 1, "of another")
    assert server.keeper.next(QuorumAborted) == QuorumAborted(Q, "mine")
    until(lambda: place.broken == [(Q, "mine")])  # the other rank's
    assert not server.keeper.messages


def test_vote_is_an_and(place):
    """A group commits if all its ranks can; a rank that can not decides for all."""
    place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    yes = [place.threads.submit(link.vote, True, PATIENCE_S) for link in links]
    assert [answer.result(PATIENCE_S) for answer in yes] == [True, True]
    for link in links:
        assert not link.needs_quorum(failed=False)
    assert not links[0].vote(False, PATIENCE_S)
    assert not links[1].vote(True, PATIENCE_S)


def test_vote_in_vain_is_a_no_for_all(place):
    """A rank that waits for a vote in vain does not commit, and neither does who votes late."""
    place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    assert not links[0].vote(True, 0.05)
    assert not links[1].vote(True, PATIENCE_S)


def test_new_keeper_is_told_everything(place):
    """While there is no keeper, asks wait; the next one hears who is here, then what is asked."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    server.do(server.server.down)
    server.do(server.server.notice, 60.0)
    assert link.needs_quorum(failed=True)
    with pytest.raises(TimeoutError, match="no connection to the coordinator"):
        link.ask(ask_of(link), 2.0)
    answer = place.threads.submit(link.ask, ask_of(link), PATIENCE_S)
    until(lambda: server.server._asks)
    server.do(server.server.up)
    assert server.keeper.next(ReplicaStatus) == ReplicaStatus(Q, 0, 2, 0, broken=False)
    server.keeper.next(LeaveNotice)
    assert server.keeper.next(QuorumRequest).quorum_id == Q
    server.do(server.server.down)
    server.do(server.server.up)
    server.keeper.next(QuorumRequest)
    server.place(Q + 1)
    assert answer.result(PATIENCE_S).quorum_id == Q + 1


def test_who_gives_up_waiting_withdraws(place):
    """A quorum that is formed with somebody who has just given up waiting is broken."""
    server = place.serve()
    link = place.link()
    assert link.needs_quorum(failed=False)
    with pytest.raises(TimeoutError, match="b has not asked"):
        asked = place.threads.submit(link.ask, ask_of(link), 2.0)
        server.keeper.next(QuorumRequest)
        server.hears(QuorumWaiting("b has not asked"))
        asked.result(PATIENCE_S)
    server.keeper.next(CancelRequest)
    server.place(Q)
    assert server.keeper.next(QuorumAborted).quorum_id == Q
    assert link.quorum_id == NO_QUORUM


def test_answer_to_an_older_ask(place):
    """A place that crosses a newer ask is not taken for the answer to that one."""
    server = place.serve()
    link = place.link()
    assert link.needs_quorum(failed=False)
    with pytest.raises(TimeoutError):
        link.ask(ask_of(link), 0.05)
    answer = place.threads.submit(link.ask, ask_of(link), PATIENCE_S)
    older, newer = server.keeper.next(QuorumRequest), server.keeper.next(QuorumRequest)
    assert newer.number > older.number
    server.place(Q, number=older.number)
    server.place(Q + 1)
    assert answer.result(PATIENCE_S).quorum_id == Q + 1


def test_end_in_peace(place):
    """A group whose ranks are all done says so, and nothing is lost."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links)
    links[0].close()
    links[1].close()
    until(lambda: not server.server._workers)
    assert server.keeper.messages == [Shutdown()]


def test_dead_worker_is_lost_at_once(place):
    """The keeper hears of a killed worker, though a child of it keeps its socket open."""
    server = place.serve()
    worker = place.worker()
    worker.tell("step")
    server.keeper.next(QuorumRequest)
    server.place(Q)
    worker.says("placed")
    worker.tell("fork 30")
    child = int(worker.says("forked")[1])
    os.kill(worker.pid, signal.SIGKILL)
    assert "ended" in server.keeper.next(WorkersLost).why
    os.kill(child, signal.SIGKILL)


def test_dead_rank_breaks_its_group(place):
    """The other ranks of a dead one hear it, do not commit, and it can come back."""
    server = place.serve(size=2)
    other, rank = place.link(1, 2), place.link(0, 2)
    place.in_quorum(rank, other)
    voting = place.threads.submit(other.vote, True, PATIENCE_S)
    rank._socket.shutdown(socket.SHUT_RDWR)
    assert not voting.result(PATIENCE_S)
    server.keeper.next(WorkersLost)
    assert [why.split(":")[0] for _, why in place.broken] == ["rank 0 of group-a"]
    assert other.needs_quorum(failed=True)
    answer = place.threads.submit(other.ask, ask_of(other, 1), PATIENCE_S)
    again = place.link(0, 2)
    place.asks(again)
    server.keeper.next(QuorumRequest)
    server.place(Q + 1, 2)
    assert answer.result(PATIENCE_S).quorum_id == Q + 1


def test_stopped_worker_is_lost_until_it_goes_on(place):
    """A worker that is stopped by a signal is lost; when it goes on, its ask is sent again."""
    server = place.serve()
    worker = place.worker()
    worker.tell("step")
    server.keeper.next(QuorumRequest)
    os.kill(worker.pid, signal.SIGSTOP)
    assert "stopped" in server.keeper.next(WorkersLost).why
    os.kill(worker.pid, signal.SIGCONT)
    server.keeper.next(QuorumRequest)
    server.place(Q)
    worker.says("placed")


def test_new_workers_are_expected(place):
    """When the agent starts the workers again, nothing is left of those before."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    server.do(server.server.expect, 2)
    server.keeper.next(WorkersLost)
    links = [place.link(rank, 2) for rank in range(2)]
    place.in_quorum(*links, quorum_id=Q + 1)
    assert link.needs_quorum(failed=True)
    with pytest.raises(GroupServerGoneError):
        link.ask(ask_of(link), 1.0)


def test_server_is_gone(place):
    """A worker whose server has died trains on, and learns it when it needs a quorum."""
    server = place.serve()
    link = place.link()
    place.in_quorum(link)
    server._run(server.server.stop())
    until(lambda: link._gone)
    assert not link.needs_quorum(failed=False)
    link.report_broken(Q, "no matter")
    assert link.needs_quorum(failed=True)
    with pytest.raises(GroupServerGoneError, match="Start the worker again"):
        link.ask(ask_of(link), PATIENCE_S)
    with pytest.raises(GroupServerGoneError, match="can not be reached"):
        ManagerClient(server.path, 0, 1, on_broken=print, timeout_s=1.0)


def test_impostors_are_refused(place):
    """A rank that is taken, a wrong size, and nonsense end that connection only."""
    server = place.serve(size=2)
    links = [place.link(rank, 2) for rank in range(2)]
    for rank, size in ((0, 2), (2, 2), (0, 3)):
        with pytest.raises(GroupServerGoneError):
            ManagerClient(server.path, rank, size, on_broken=print, timeout_s=PATIENCE_S)
    for nonsense in (
        b"[]\n",
        b"\xff\n",
        b'{"type":"bye"}\n',
        b'{"type":"ask"}\n',
        b"x" * 3_000_000,
    ):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as stranger:
            stranger.connect(str(server.path))
            stranger.settimeout(PATIENCE_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(nonsense)
                assert stranger.recv(100) == b""
    place.in_quorum(*links)


def test_a_want_of_open_files_passes(place, caplog):
    """Workers are taken again as soon as there are some."""
    server = place.serve()
    with socket.socket(socket.AF_UNIX) as waiting, no_descriptors():
        waiting.connect(str(server.path))
        until(lambda: "no worker can be taken for now" in caplog.text)
    place.in_quorum(place.link())


def test_other_users_are_kept_out(place, monkeypatch):
    """The kernel says whose process has connected; nobody else's is let in."""
    server = place.serve()
    assert server.path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    with pytest.raises(GroupServerGoneError):
        place.link()


def test_breaks_are_told_while_the_worker_waits(place):
    """The thread that reads calls back while the worker's own thread is elsewhere."""
    server = place.serve()
    told = threading.Event()
    link = ManagerClient(
        server.path, 0, 1, on_broken=lambda q, why: told.set(), timeout_s=PATIENCE_S
    )
    place.in_quorum(link)
    server.hears(QuorumAborted(Q, "b died"))
    assert told.wait(PATIENCE_S)
    link.close()
