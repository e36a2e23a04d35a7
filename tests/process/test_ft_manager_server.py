"""ManagerServer and ManagerClient, over real sockets and processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from ft_server import PATIENCE_S, Bench, Q, request_of, until
from scarcity import no_descriptors

from hpc_elastic.ft import manager_server
from hpc_elastic.ft.checkpointing.transport import HealError, UnusableStateError
from hpc_elastic.ft.manager_client import GroupPlace, ManagerClient, ManagerServerLostError
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    HealSource,
    LeaveGranted,
    LeaveNotice,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    QuorumWaiting,
    ReplicaStatus,
    Shutdown,
    SwitchRequest,
    SwitchVote,
    WorkersLost,
)
from hpc_elastic.ft.quorum import CommittedProgress
from hpc_elastic.ft.quorum_client import Entered, Limits, QuorumClient


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.end()


# ---- requests and votes -------------------------------------------------------------------------


def test_step_in_an_active_quorum_sends_nothing(bench):
    """Steps after the result cost no message."""
    server = bench.serve()
    client = bench.client()
    assert client.replica_id == "group-a"
    bench.enter(client)
    for step in range(1, 100):
        assert not client.start_step(last_failed=False)
        assert client.steps.quorum_step == step
    assert not server.received.messages


def test_a_socket_whose_path_was_removed_is_opened_again(bench):
    """The workers of the next round find it."""
    server, _ = bench.enter_group()
    server.path.unlink()
    for _ in range(2):
        server.do(server.server.restore_socket)
    server.do(server.server.expect_workers, 1)
    bench.enter(bench.client())


def test_all_ranks_request_as_one(bench):
    """Until all do, a rank that waits knows which one is missing."""
    server = bench.serve(size=2)
    clients = [bench.client(rank, 2) for rank in range(2)]
    assert clients[0].start_step(last_failed=False)
    with pytest.raises(TimeoutError, match="rank 1 of this replica group"):
        clients[0].request_quorum(request_of(clients[0]), 2.0)
    first = bench.threads.submit(clients[0].request_quorum, request_of(clients[0]), PATIENCE_S)
    second = bench.request(clients[1], 1)
    assert server.received.next(QuorumRequest).metadata == ("m0", "m1")
    server.place(Q, 2)
    assert first.result(PATIENCE_S) == second.result(PATIENCE_S)


def test_failed_step_requests_again(bench):
    """The step after one that was not committed needs a quorum."""
    server, client = bench.enter_group()
    bench.request(client, failures=1)
    request = server.received.next(QuorumRequest)
    assert (request.quorum_step, request.quorum_id, request.commit_failures) == (1, Q, 1)
    server.place(Q + 1)


def test_abort_reaches_every_rank_once(bench):
    """Each worker is called back once, and not for an older quorum."""
    server, *clients = bench.enter_group(2)
    server.send(QuorumAborted(Q - 1, "old"))
    server.send(QuorumAborted(Q, "b died"))
    server.send(QuorumAborted(Q, "b died again"))
    until(lambda: len(bench.aborts) == 2)
    assert bench.aborts == [(Q, "b died")] * 2
    assert clients[0].steps.abort_reason == "b died"


def test_abort_calls_back_while_the_worker_waits(bench):
    """The reading thread does, while the worker's own thread is elsewhere."""
    server = bench.serve()
    called = threading.Event()
    client = ManagerClient(
        server.path, 0, 1, on_abort=lambda q, reason: called.set(), timeout_s=PATIENCE_S
    )
    bench.enter(client)
    server.send(QuorumAborted(Q, "b died"))
    assert called.wait(PATIENCE_S)
    client.close()


def test_abort_by_one_rank_reaches_all(bench):
    """Its report goes up once, and to the other ranks."""
    server, *clients = bench.enter_group(2)
    clients[1].report_abort(Q, "mine")
    clients[1].report_abort(Q, "mine")
    clients[1].report_abort(Q - 1, "of another")
    assert server.received.next(QuorumAborted) == QuorumAborted(Q, "mine")
    until(lambda: bench.aborts == [(Q, "mine")])  # the other rank's
    assert not server.received.messages


class HealingRank:
    """A worker whose peer refuses its state; or it only sees that the quorum is aborted."""

    needs_group = multi_source = False
    peer: HealingRank
    """The other rank; it is refused once this one heals, too."""

    def __init__(self, bench: Bench, rank: int) -> None:
        self._aborted, self._heals = threading.Event(), threading.Event()
        self._is_refused = False
        self._client = ManagerClient(
            bench.server.path, rank, 2, timeout_s=PATIENCE_S,
            on_abort=lambda quorum_id, reason: self._quorum.on_abort(quorum_id, reason),
        )  # fmt: skip
        group = SimpleNamespace(configure=lambda *_: None, abort=lambda: None)
        limits, place = Limits(PATIENCE_S, PATIENCE_S, 0, 1), GroupPlace(rank, 2, "h", 1)
        self._quorum = QuorumClient(self._client, group, self, dict, limits, place)
        bench.add_end(self._client.close)

    def enter(self, *, is_refused: bool) -> Entered:
        """Enter a quorum, in a step after one that was not committed."""
        self._is_refused = is_refused
        self._client.start_step(last_failed=True)
        progress = CommittedProgress.initial(init_sync=True)
        flags = {"commit_failures": 0, "allow_heal": True, "shrink_only": False}
        return self._quorum.enter_quorum(progress, PATIENCE_S, **flags)

    def metadata(self) -> str:
        """As a transport."""
        return "here"

    def resume(self) -> None:
        """As a transport."""
        self._aborted.clear()

    def abort(self) -> None:
        """As a transport."""
        self._aborted.set()

    def recv_checkpoint(self, *_: object) -> dict:
        """As a transport."""
        self._heals.set()
        if self._is_refused:
            assert self.peer._heals.wait(PATIENCE_S)
            raise UnusableStateError("a lock has no state")
        assert self._aborted.wait(PATIENCE_S)
        raise HealError("aborted")


def test_an_error_that_stays_counts_for_all_ranks_together(bench):
    """One rank gets it at the first attempt, another at the second: that one ends the group."""
    server = bench.serve(size=2)
    ranks = [HealingRank(bench, rank) for rank in (0, 1)]
    ranks[0].peer, ranks[1].peer = ranks[1], ranks[0]
    heals = {"sources": (HealSource(0, "there"),), "cohort_rank": None, "cohort_size": 1}
    for refused in (0, 1):
        for rank in ranks:
            rank._heals.clear()
        entering = [bench.threads.submit(r.enter, is_refused=r is ranks[refused]) for r in ranks]
        server.received.next(QuorumRequest)
        result = QuorumResult(Q + refused, 1, 2, "h:1", 7, "version", **heals)
        server.send(QuorumResults((result, result), server.received.last_request))
        outcomes = [e.exception(PATIENCE_S) or e.result().error for e in entering]
        if refused == 0:
            assert [type(error) for error in outcomes] == [UnusableStateError, HealError]
        else:
            assert isinstance(entering[1].exception(), UnusableStateError)
            assert "a lock has no state" in str(outcomes[0])
            assert isinstance(entering[0].exception(), UnusableStateError)


def test_group_commits_if_all_ranks_can(bench):
    """One no decides for all."""
    _, *clients = bench.enter_group(2)
    votes = [bench.threads.submit(client.vote, True, PATIENCE_S) for client in clients]
    assert [vote.result(PATIENCE_S) for vote in votes] == [True, True]
    for client in clients:
        assert not client.start_step(last_failed=False)
    assert not clients[0].vote(False, PATIENCE_S)
    assert not clients[1].vote(True, PATIENCE_S)


def test_vote_without_a_decision_is_a_no_for_all(bench):
    """A rank that votes late does not commit either."""
    _, *clients = bench.enter_group(2)
    assert not clients[0].vote(True, 0.05)
    assert not clients[1].vote(True, PATIENCE_S)


def test_new_lighthouse_gets_everything(bench):
    """Without one, requests wait; the next gets the group's status, then its request."""
    server, client = bench.enter_group()
    server.do(server.server.on_disconnect)
    server.do(server.server.announce_leave, 60.0)
    assert client.start_step(last_failed=True)
    with pytest.raises(TimeoutError, match="no connection to the lighthouse"):
        client.request_quorum(request_of(client), 2.0)
    answer = bench.threads.submit(client.request_quorum, request_of(client), PATIENCE_S)
    until(lambda: server.server._requests)
    server.do(server.server.on_connect)
    status = ReplicaStatus(Q, 0, 2, 0, is_aborted=False)
    assert server.received.next(ReplicaStatus) == status
    server.received.next(LeaveNotice)
    assert server.received.next(QuorumRequest).quorum_id == Q
    server.do(server.server.on_disconnect)
    server.do(server.server.on_connect)
    server.received.next(QuorumRequest)
    server.place(Q + 1)
    assert answer.result(PATIENCE_S).quorum_id == Q + 1


def test_time_out_cancels_the_request(bench):
    """A quorum that is formed with the group all the same is aborted."""
    server = bench.serve()
    client = bench.client()
    assert client.start_step(last_failed=False)
    with pytest.raises(TimeoutError, match="b has not requested"):
        waiting = bench.threads.submit(client.request_quorum, request_of(client), 2.0)
        server.received.next(QuorumRequest)
        server.send(QuorumWaiting("b has not requested"))
        waiting.result(PATIENCE_S)
    server.received.next(CancelRequest)
    server.place(Q)
    assert server.received.next(QuorumAborted).quorum_id == Q
    assert client.steps.quorum_id == NO_QUORUM


def test_result_of_an_older_request_is_ignored(bench):
    """It crossed the newer one."""
    server = bench.serve()
    client = bench.client()
    assert client.start_step(last_failed=False)
    with pytest.raises(TimeoutError):
        client.request_quorum(request_of(client), 0.05)
    answer = bench.threads.submit(client.request_quorum, request_of(client), PATIENCE_S)
    older, newer = server.received.next(QuorumRequest), server.received.next(QuorumRequest)
    assert newer.number > older.number
    server.place(Q, number=older.number)
    server.place(Q + 1)
    assert answer.result(PATIENCE_S).quorum_id == Q + 1


# ---- switches, and leaving ----------------------------------------------------------------------


def test_proposal_is_answered_for_all_ranks(bench):
    """The group accepts a step that none has started, waits, and requests when it is confirmed."""
    server, *clients = bench.enter_group(2)
    assert not clients[1].start_step(last_failed=False)
    server.send(ProposeSwitch(Q, 3, 1))
    assert not server.received.next(SwitchVote).ok
    server.send(ProposeSwitch(Q, 4, 2))
    vote = server.received.next(SwitchVote)
    assert (vote.number, vote.ok, vote.quorum_step) == (4, True, 1)
    assert not clients[0].start_step(last_failed=False)
    waiting = [bench.threads.submit(client.start_step, last_failed=False) for client in clients]
    server.send(ConfirmSwitch(Q, 4, leaves=True))
    assert all(needs.result(PATIENCE_S) for needs in waiting)


def test_proposal_is_withdrawn(bench):
    """A waiting worker goes on then, and requests if the quorum is aborted."""
    server, client = bench.enter_group()
    server.send(ProposeSwitch(Q, 1, 1))
    server.received.next(SwitchVote)
    needs = bench.threads.submit(client.start_step, last_failed=False)
    server.send(ProposeSwitch(Q, 0, 0))
    assert not needs.result(PATIENCE_S)
    server.send(ProposeSwitch(Q, 2, 2))
    server.received.next(SwitchVote)
    needs = bench.threads.submit(client.start_step, last_failed=False)
    server.send(QuorumAborted(Q, "b died"))
    assert needs.result(PATIENCE_S)


def test_switch_is_requested_once_all_ranks_do(bench):
    """Not in the next quorum; the ranks repeat it, so a new lighthouse gets it as well."""
    server, *clients = bench.enter_group(2)
    clients[0].request_switch()
    server.send(ProposeSwitch(Q, 1, 0))
    server.received.next(SwitchVote)  # all that the first rank has sent has come
    for _ in range(2):
        clients[1].request_switch()
        assert server.received.next(SwitchRequest) == SwitchRequest(Q)
    waiting = [bench.request(client, rank, failures=1) for rank, client in enumerate(clients)]
    server.received.next(QuorumRequest)
    server.place(Q + 1, 2)
    assert all(w.result(PATIENCE_S).quorum_id == Q + 1 for w in waiting)
    clients[0].request_switch()
    server.send(ProposeSwitch(Q + 1, 1, 0))
    server.received.next(SwitchVote)
    assert not server.received.messages


def test_end_of_a_step_waits_for_the_confirmation(bench):
    """The worker learns there whether it has to save."""
    server, client = bench.enter_group()
    assert not client.settle_next_step()
    server.send(ProposeSwitch(Q, 1, 1))
    assert not server.received.next(SwitchVote).ok
    assert not client.start_step(last_failed=False)
    server.send(ProposeSwitch(Q, 2, 2))
    assert server.received.next(SwitchVote).ok
    must_save = bench.threads.submit(client.settle_next_step)
    server.send(ConfirmSwitch(Q, 2, leaves=True, last=True))
    assert must_save.result(PATIENCE_S)


def test_leave_is_granted(bench):
    """The request ends with it, and the end of the workers is no loss any more."""
    server, client = bench.enter_group()
    server.do(server.server.announce_leave, 60.0)
    assert server.received.next(LeaveNotice).left_s == 60.0
    answer = bench.request(client, failures=1)
    server.received.next(QuorumRequest)
    number = server.received.last_request
    server.send(LeaveGranted(number - 1))  # of an older request
    server.send(LeaveGranted(number))
    assert answer.result(PATIENCE_S) == LeaveGranted(number)
    assert server.server.has_left
    client._socket.shutdown(socket.SHUT_RDWR)
    assert server.is_empty.wait(PATIENCE_S)
    assert not server.received.messages


def test_checkpoint_before_leave(bench):
    """The request ends with it; the workers make one more step, so the group has not left."""
    server, *clients = bench.enter_group(2)
    server.send(QuorumAborted(Q, "b died"))
    votes = [bench.threads.submit(client.vote, False, PATIENCE_S) for client in clients]
    assert not any(vote.result(PATIENCE_S) for vote in votes)
    answers = [bench.request(client, rank) for rank, client in enumerate(clients)]
    assert not server.received.next(QuorumRequest).is_saved
    message = CheckpointBeforeLeave(server.received.last_request)
    server.send(message)
    assert [answer.result(PATIENCE_S) for answer in answers] == [message] * 2
    assert not server.server.has_left
    votes = [bench.threads.submit(client.vote, False, PATIENCE_S) for client in clients]
    assert not any(vote.result(PATIENCE_S) for vote in votes)
    assert all(client.settle_next_step() for client in clients)
    assert all(client.start_step(last_failed=True) for client in clients)
    assert all(client.steps.is_saved for client in clients)


# ---- the life of workers ------------------------------------------------------------------------


def test_shutdown_of_all_ranks(bench):
    """The group reports it, and nothing is lost."""
    server, *clients = bench.enter_group(2)
    for client in clients:
        client.start_step(last_failed=False)
    clients[0].close()
    clients[1].close(is_step_over=False)
    assert server.is_empty.wait(PATIENCE_S)
    quorum_id = clients[0].steps.quorum_id
    assert server.received.messages == [Shutdown(quorum_id, 0)]


def test_dead_worker_is_lost_at_once(bench):
    """Though a child of it keeps its socket open."""
    server = bench.serve()
    worker = bench.worker()
    worker.order("step")
    server.received.next(QuorumRequest)
    server.place(Q)
    worker.wait_for("placed")
    worker.order("fork 30")
    child = int(worker.wait_for("forked")[1])
    os.kill(worker.pid, signal.SIGKILL)
    assert "ended" in server.received.next(WorkersLost).reason
    os.kill(child, signal.SIGKILL)


def test_dead_rank_aborts_its_group(bench):
    """The other ranks do not commit, and the rank, which aborts its own part too, can come back."""
    server = bench.serve(size=2)
    other, rank = bench.client(1, 2), bench.client(0, 2)
    bench.enter(rank, other)
    voting = bench.threads.submit(other.vote, True, PATIENCE_S)
    rank._socket.shutdown(socket.SHUT_RDWR)
    assert not voting.result(PATIENCE_S)
    server.received.next(WorkersLost)
    until(lambda: len(bench.aborts) == 2)
    reasons = {reason.split(":")[0] for _, reason in bench.aborts}
    assert reasons == {"rank 0 of group-a", "the server of this replica group is gone"}
    answer = bench.request(other, 1, failures=1)
    again = bench.client(0, 2)
    bench.request(again)
    server.received.next(QuorumRequest)
    server.place(Q + 1, 2)
    assert answer.result(PATIENCE_S).quorum_id == Q + 1


def test_stopped_worker_is_lost_until_it_continues(bench):
    """Its request is sent again then."""
    server = bench.serve()
    worker = bench.worker()
    worker.order("step")
    server.received.next(QuorumRequest)
    os.kill(worker.pid, signal.SIGSTOP)
    assert "stopped" in server.received.next(WorkersLost).reason
    os.kill(worker.pid, signal.SIGCONT)
    server.received.next(QuorumRequest)
    server.place(Q)
    worker.wait_for("placed")


_TRACER = """
import ctypes, os, sys
pid, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
def ptrace(request):
    if libc.ptrace(request, pid, None, None) < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
ptrace(0x4206)  # PTRACE_SEIZE, of the main thread
ptrace(0x4207)  # PTRACE_INTERRUPT
os.waitpid(pid, 0x40000000)  # __WALL
print("stopped", flush=True)
sys.stdin.read()
ptrace(17)  # PTRACE_DETACH
"""


def test_worker_that_a_debugger_stops_is_lost_until_it_continues(bench):
    """One that a debugger holds for long; its request is sent again then."""
    server = bench.serve()
    worker = bench.worker()
    worker.order("step")
    server.received.next(QuorumRequest)
    tracer = subprocess.Popen(
        [sys.executable, "-c", _TRACER, str(worker.pid)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with tracer:
        if tracer.stdout.readline() != "stopped\n":
            pytest.skip(f"no process may be traced here: {tracer.stderr.read()}")
        assert "stopped" in server.received.next(WorkersLost).reason
        tracer.stdin.close()
    server.received.next(QuorumRequest)
    server.place(Q)
    worker.wait_for("placed")


def test_new_workers_are_expected(bench):
    """When the agent starts the workers again, nothing is left of those before."""
    server, client = bench.enter_group()
    server.do(server.server.expect_workers, 2)
    server.received.next(WorkersLost)
    clients = [bench.client(rank, 2) for rank in range(2)]
    bench.enter(*clients, quorum_id=Q + 1)
    assert client.start_step(last_failed=True)
    with pytest.raises(ManagerServerLostError):
        client.request_quorum(request_of(client), 1.0)


def test_server_that_has_ended(bench):
    """A worker trains on, and learns it when it needs a quorum."""
    server, client = bench.enter_group()
    server.end_server()
    assert not client.start_step(last_failed=False)
    client.report_abort(Q, "no matter")
    assert client.start_step(last_failed=True)
    with pytest.raises(ManagerServerLostError, match="Start the worker again"):
        client.request_quorum(request_of(client), PATIENCE_S)
    with pytest.raises(ManagerServerLostError, match="cannot be reached"):
        ManagerClient(server.path, 0, 1, on_abort=print, timeout_s=1.0)


def test_impostors_are_refused(bench):
    """A rank that is taken, a wrong size, and invalid messages end that connection only."""
    server = bench.serve(size=2)
    clients = [bench.client(rank, 2) for rank in range(2)]
    for rank, size in ((0, 2), (2, 2), (0, 3)):
        with pytest.raises(ManagerServerLostError):
            ManagerClient(server.path, rank, size, on_abort=print, timeout_s=PATIENCE_S)
    for invalid in (
        b"[]\n",
        b"\xff\n",
        b'{"type":"Shutdown"}\n',
        b'{"type":"QuorumRequest"}\n',
        b'{"type":"nothing"}\n',
        b"x" * 3_000_000,
    ):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.connect(str(server.path))
            connection.settimeout(PATIENCE_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(invalid)
                assert connection.recv(100) == b""
    bench.enter(*clients)


def test_lack_of_open_files_passes(bench, caplog):
    """Workers can connect again as soon as there are descriptors."""
    server = bench.serve()
    with socket.socket(socket.AF_UNIX) as waiting, no_descriptors():
        waiting.connect(str(server.path))
        until(lambda: "no worker can connect for now" in caplog.text)
    bench.enter(bench.client())


def test_other_users_are_refused(bench, monkeypatch):
    """The kernel tells whose process has connected."""
    server = bench.serve()
    assert server.path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    with pytest.raises(ManagerServerLostError):
        bench.client()


def test_an_error_at_the_start_of_a_connection_ends_that_one_only(monkeypatch):
    """What the group sends first may be refused; the reason is passed on, and the link tries on."""
    streams, reasons = [], []

    class Stream:
        closed = False

        async def send_heartbeats(self, *_):
            await asyncio.Event().wait()

        async def close(self):
            self.closed = True

    async def connect(*_):
        await asyncio.sleep(0)  # as a real one
        streams.append(Stream())
        return streams[-1]

    def on_connect():
        raise ValueError("a message of 2 MiB")

    async def run():
        server = SimpleNamespace(on_connect=on_connect, on_disconnect=reasons.append)
        running = asyncio.create_task(manager_server.LighthouseLink("a:1", "r").run(server))
        while len(streams) < 3:
            await asyncio.sleep(0.001)
        running.cancel()

    monkeypatch.setattr(manager_server, "connect", connect)
    monkeypatch.setattr(manager_server, "user_secret", lambda _: b"secret")
    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert "2 MiB" in reasons[0] and streams[0].closed
