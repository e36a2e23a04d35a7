"""The rendezvous over real sockets: sessions in threads of this process, no torch."""

import asyncio
import contextlib
import gc
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable

import pytest
from group import PATIENCE_S, SECRET, Group, eventually, kill, open_files

from hpc_elastic import shared_files
from hpc_elastic.rendezvous import leader as leaders
from hpc_elastic.rendezvous import session as sessions
from hpc_elastic.rendezvous.leader_state import LeaderState
from hpc_elastic.rendezvous.log_entry import Endpoint, Failure, claim
from hpc_elastic.rendezvous.messages import End, Failed, Finished, Heartbeat
from hpc_elastic.transport.connection import connect


def test_agents_get_distinct_ranks_in_one_round(group):
    """Four agents that start together agree on one round."""
    g = group()
    g.running = frozenset(f"7_{slot}" for slot in range(4))
    rounds = g.join(*(g.agent(slot) for slot in range(4)))
    assert sorted(r.group_rank for r in rounds) == [0, 1, 2, 3]
    assert {(r.number, r.world_size) for r in rounds} == {(1, 4)}


def test_nodes_of_different_size_get_consecutive_ranks(group):
    """The workers of a node follow those of the nodes before it."""
    g = group(max_nodes=3)
    rounds = g.join(g.agent(0, nproc=2), g.agent(1, nproc=3), g.agent(2, nproc=1))
    placed = [(r.group_rank, r.first_rank, r.world_size) for r in rounds]
    assert placed == [(0, 0, 6), (1, 2, 6), (2, 5, 6)]


def test_a_late_agent_makes_the_group_larger(group):
    """The members stop, and the next round has all agents."""
    g = group()
    g.running = frozenset({"7_0"})
    a = g.agent(0)
    assert g.join(a)[0].world_size == 1
    g.running = frozenset({"7_0", "7_1"})
    b = g.agent(1)
    waiting = g.threads.submit(b.join, PATIENCE_S)
    eventually(lambda: a.stop_requested)
    assert [r.group_rank for r in g.join(a)] == [0]
    assert (waiting.result().group_rank, waiting.result().world_size) == (1, 2)


def test_the_run_ends_for_all_agents_when_all_have_finished(group):
    """They get the outcome, result.json is written, and the pending tasks are cancelled."""
    g = group(max_nodes=2)
    a, b = g.agent(0), g.agent(1)
    g.join(a, b)
    a.report(Finished())
    b.report(Finished())
    eventually(lambda: a.verdict and b.verdict)
    assert a.verdict == End("succeeded", None)
    assert json.loads(g.run.result.read_text())["status"] == "succeeded"
    assert g.cancelled.wait(PATIENCE_S)
    late = g.agent(2)
    assert g.join(late) == [End("succeeded", None)]


def test_no_failure_of_the_scheduler_ends_a_term(group, caplog):
    """An unexpected answer is none: the leader goes on with what it knows."""
    g = group(max_nodes=2)

    def fail(*_):
        raise KeyError("an answer that no version of Slurm gives")

    g.poll_tasks = g.cancel_pending = g.readmit = fail
    a, b = g.agent(0), g.agent(1)
    g.join(a, b)
    a.report(Finished())
    b.report(Finished())
    eventually(lambda: a.verdict and b.verdict)
    eventually(lambda: "pending tasks of the run were not cancelled" in caplog.text)
    assert caplog.text.count("the tasks of the run cannot be listed") == 1
    assert "the leader failed" not in caplog.text


def test_a_follower_that_dies_is_dropped(group):
    """The other agents stop and form a round without it."""
    g = group(max_nodes=3)
    agents = [g.agent(slot) for slot in range(3)]
    rounds = g.join(*agents)
    follower = g.followers[0]
    others = [s for s in agents if s is not follower]
    kill(follower)
    for s in others:
        eventually(lambda s=s: s.stop_requested)
    g.running = frozenset({"7_0", "7_1", "7_2"})
    again = g.join(*others)
    assert {r.world_size for r in again} == {2} and rounds[0].number + 1 == again[0].number


def test_agents_that_start_together_have_one_leader(group):
    """No agent takes a leader that has just started for a dead one."""
    g = group(max_nodes=8)
    g.running = frozenset(f"7_{slot}" for slot in range(8))
    g.join(*(g.agent(slot) for slot in range(8)))
    eventually(lambda: [e["term"] for e in g.events("leader")] == [1])


def test_agents_go_on_from_the_last_entry_while_old_ones_are_removed(group, monkeypatch):
    """Those that join late, and the one that takes over when the leader dies."""
    monkeypatch.setattr(LeaderState, "num_kept", 1)
    g = group(max_nodes=2)
    leader, other = g.agent(0), g.agent(1)
    g.join(leader, other)
    leader, other = g.leader, g.followers[0]
    for slot in range(2, 5):
        kill(other)
        other = g.agent(slot)
        eventually(lambda: leader.stop_requested)
        (before,) = {r.number for r in g.join(leader, other)}
    eventually(lambda: 0 < len(g.register.indices()) <= 3)
    kill(leader)
    eventually(lambda: other.stop_requested)
    (again,) = g.join(other)
    assert again.number == before + 1 and g.register.last_index() == again.index
    eventually(lambda: min(g.register.indices()) > 3)


def test_a_stale_leader_whose_port_has_another_owner_is_replaced(group):
    """After a requeue another program may own the port of the previous leader."""
    g = group(max_nodes=1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        stale = Endpoint("127.0.0.1", other.getsockname()[1], "7_9", 0)
        assert g.register.create(claim(1, None, stale, 0.0))
        threading.Thread(target=_close_connections, args=(other,), daemon=True).start()
        assert g.join(g.agent(0))[0].world_size == 1
    eventually(lambda: [e["term"] for e in g.events("leader")] == [2])


def _close_connections(server: socket.socket) -> None:
    """Accept and close every connection until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"entry": "{}", "mac": "00"}',
        *(pytest.param(text, marks=pytest.mark.long) for text in ("{}", "\xff\xfe")),
    ],
)
def test_an_entry_that_does_not_verify_is_skipped_after_the_timeout(group, text):
    """A damaged entry takes its index, and costs the time of a silent leader."""
    g = group(max_nodes=1)
    (g.run.rdzv / "entry.1.json").write_text(text, encoding="latin-1")
    assert g.join(g.agent(0))[0].world_size == 1
    eventually(lambda: [e["term"] for e in g.events("leader")] == [2])


def test_a_leader_that_dies_is_replaced(group):
    """The next leader continues the count of rounds in the next term."""
    g = group(max_nodes=3)
    agents = [g.agent(slot) for slot in range(3)]
    g.join(*agents)
    leader, others = g.leader, g.followers
    g.running = frozenset({"7_0", "7_1", "7_2"})
    kill(leader)
    for s in others:
        eventually(lambda s=s: s.stop_requested)
    again = g.join(*others)
    assert {(r.number, r.world_size) for r in again} == {(2, 2)}
    eventually(lambda: [e["term"] for e in g.events("leader")] == [1, 2])


def test_the_reason_of_a_leave_is_in_the_event_log(group):
    """The other agents stop."""
    g = group(max_nodes=2)
    g.join(g.agent(0), g.agent(1))
    leader, (follower,) = g.leader, g.followers
    follower.leave("taken by SIGTERM")
    eventually(lambda: leader.stop_requested)
    eventually(lambda: g.events("node_lost"))
    assert g.events("node_lost")[0]["why"] == "taken by SIGTERM"


def test_a_failure_report_reaches_the_result(group):
    """After the last restart the run fails with the reported failure."""
    g = group(max_nodes=1)
    a = g.agent(0)
    for restarts in (0, 1):
        (round_,) = g.join(a)
        assert round_.restarts == restarts
        failure = Failure("7_0", "n", 0, 0, time.time(), "boom")
        a.report(Failed([failure]))
        eventually(lambda: a.stop_requested)
    (verdict,) = g.join(a)
    assert verdict.status == "failed" and "boom" in verdict.failure
    assert json.loads(g.run.result.read_text())["failure"]["message"] == "boom"


def test_unauthenticated_connections_change_nothing(group):
    """Garbage, a wrong signature, or silence on the leader's port disturbs no agent."""
    g = group(max_nodes=2)
    g.running = frozenset({"7_0", "7_1"})
    a = g.agent(0)
    waiting = g.threads.submit(a.join, PATIENCE_S)
    eventually(g.register.last_index)
    _, entry = g.register.last()
    where = (entry.leader.address, entry.leader.port)
    unsigned = b"ab" * 16 + b"\n{}\n"
    with socket.create_connection(where):  # a silent connection
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"x" * (2 << 20), b"\n" * 100, unsigned):
            with contextlib.suppress(OSError), socket.create_connection(where) as s:
                s.sendall(garbage)
        assert not waiting.done()
        b = g.agent(1)
        assert g.join(b)[0].world_size == 2 and waiting.result().world_size == 2


def test_an_agent_that_gets_no_port_retries_its_claim(group, monkeypatch):
    """Too many files may be open, or the interface may be down for a moment."""
    listener, refusals = sessions.Listener, [OSError(24, "Too many open files")] * 2

    def listen(address: str) -> object:
        if refusals:
            raise refusals.pop()
        return listener(address)

    monkeypatch.setattr(sessions, "Listener", listen)
    g = group(max_nodes=1)
    assert g.join(g.agent(0))[0].world_size == 1 and not refusals


def test_a_timeout_names_the_missing_nodes(group):
    """The error counts the nodes that have joined and lists the others."""
    g = group(min_nodes=3)
    g.running, g.pending = frozenset({"7_0", "7_5"}), frozenset({"7_6"})
    a = g.agent(0)
    with pytest.raises(TimeoutError):
        a.join(0.1)
    eventually(lambda: "7_6 (" in a.news)
    with pytest.raises(TimeoutError) as e:
        a.join(0.1)
    assert "1 of at least 3 nodes have joined" in str(e.value)
    assert "7_5 (RUNNING on node9), log /logs/7_5/0" in str(e.value)
    assert "7_6 (PENDING, Resources)" in str(e.value)


@pytest.mark.parametrize("way", ["cancelled", "no greeting", "closed"])
def test_a_connection_that_fails_is_closed(way):
    """`connect` closes it itself, while its loop continues."""

    async def attempt(listener: socket.socket) -> bytes:
        connecting = asyncio.create_task(connect(*listener.getsockname(), SECRET, 1, {}))
        accepted, _ = await asyncio.to_thread(listener.accept)
        with accepted:
            accepted.settimeout(PATIENCE_S)
            if way == "cancelled":
                connecting.cancel()
            elif way == "no greeting":
                accepted.sendall(b"SSH-2.0\n")
            else:
                accepted.shutdown(socket.SHUT_WR)
            with pytest.raises((asyncio.CancelledError, ConnectionError)):
                await connecting
            return await asyncio.to_thread(accepted.recv, 1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(attempt(listener)) == b""


def test_agents_may_leave_at_any_moment(group):
    """Also while they connect or claim: they leave nothing open."""
    g = group(max_nodes=4)
    gc.collect()  # the garbage of earlier tests
    before = open_files()
    for attempt in range(20):
        sessions = [g.agent(slot, attempt) for slot in range(4)]
        time.sleep(attempt / 1000)
        leaving = [g.threads.submit(s.leave, "it may", PATIENCE_S) for s in sessions]
        for left in leaving:
            left.result()
    gc.collect()
    eventually(lambda: open_files() <= before)


def test_a_leader_stays_until_the_others_have_the_outcome(group):
    """However early its agent leaves; then it ends at once."""
    g = group(max_nodes=4)
    g.running = frozenset(f"7_{slot}" for slot in range(4))
    agents = [g.agent(slot) for slot in range(4)]
    g.join(*agents)
    leader = g.leader
    for s in agents:
        s.report(Finished())
    eventually(lambda: leader.verdict)
    since = time.monotonic()
    leader.leave("its agent ended")
    assert time.monotonic() - since < 5.0 and not leader._thread.is_alive()
    assert [s.verdict for s in agents] == [End("succeeded", None)] * 4
    assert len(g.events("leader")) == 1


@pytest.fixture
def removed(tmp_path, monkeypatch):
    """Makes a group of two agents whose run directory was removed; a second proves it."""

    def make(**sizes):
        monkeypatch.setattr(shared_files, "REMOVED_AFTER_S", 1.0)
        group = Group(tmp_path / "run", **sizes)
        agents = [group.agent(slot) for slot in range(2)]
        group.join(*agents)
        eventually(lambda: group.register.lease(1))  # a leader creates no other file there
        gone = (tmp_path / "run").rename(tmp_path / "gone")  # its leader writes there meanwhile
        shutil.rmtree(gone)
        return group, agents

    return make


def test_a_run_whose_directory_was_removed_ends_on_all_nodes(removed):
    """The leader sends the end; the pending tasks are cancelled."""
    group, agents = removed(max_nodes=2)
    eventually(lambda: all(agent.verdict for agent in agents))
    assert [agent.verdict and agent.verdict.status for agent in agents] == ["removed"] * 2
    assert group.cancelled.wait(PATIENCE_S)


def test_an_agent_without_a_leader_ends_once_the_directory_was_removed(removed):
    """No agent can lead any more, since the log is gone."""
    group, agents = removed(min_nodes=2)
    group.leader.leave("its agent was killed")
    (left,) = [agent for agent in agents if agent._thread.is_alive()]
    eventually(lambda: left.verdict)
    assert left.verdict is not None and left.verdict.status == "removed"


def test_a_leader_that_fails_writes_its_last_events_down(group, caplog):
    """A wrong decision can be followed afterwards; heartbeats would displace all else."""
    g = group(max_nodes=1)
    (agent, _) = (g.agent(0), g.agent(1))
    g.join(agent)
    leader = g.leader._leader
    handle, beats = leader._term.handle, list[Heartbeat]()

    def count_heartbeats(event: Callable, *args: object) -> None:
        beats.extend(each for each in args if isinstance(each, Heartbeat))
        handle(event, *args)

    leader._term.handle = count_heartbeats
    eventually(lambda: len(beats) > 2)

    def fail(now: float) -> None:
        raise RuntimeError("a rule that is wrong")

    leader._state.tick = fail
    eventually(lambda: "the leader failed" in caplog.text)
    story = caplog.text.partition("its last events:")[2].partition("Traceback")[0]
    assert "connected(Agent(task='7_0'" in story and "Join(request=" in story
    assert "appended()" in story and "fail(" in story and "Heartbeat" not in story
    others = (None, leader)
    eventually(lambda: any(s._leader not in others for s in g.sessions))  # the run goes on
    (failed,) = g.events("leader_failed")
    assert failed["why"] == "RuntimeError: a rule that is wrong" and "fail" in failed["traceback"]
    assert [f.host for f in g.register.last()[1].counters.failed_terms] == [failed["host"]]


def test_a_node_whose_stores_fail_leaves_the_lead_to_another(group, monkeypatch):
    """Such as one without free ports: it tries for a while, and is a member all the same."""
    monkeypatch.setattr(leaders, "_STORE_TRIES", 2)
    g = group(min_nodes=2, max_nodes=2)
    first = g.agent(0)
    waiting = g.threads.submit(first.join, PATIENCE_S)
    eventually(lambda: first._leader is not None)

    def make_store() -> tuple[str, int]:
        if first._leader is not None:
            raise OSError(98, "Address already in use")
        return "127.0.0.1", 1

    g.make_store = make_store
    assert g.join(g.agent(1))[0].world_size == 2 and waiting.result().world_size == 2
    (failed,) = g.events("leader_failed")
    assert failed["host"] == "node0" and "Address already in use" in failed["why"]


def test_an_error_that_a_leader_cannot_record_ends_its_agent(group, monkeypatch):
    """It is not silent, and leads no more."""
    g = group(min_nodes=2)
    a = g.agent(0)
    waiting = g.threads.submit(a.join, PATIENCE_S)
    eventually(lambda: a._leader is not None)

    def fail(self, *_: object) -> None:
        raise RuntimeError("a rule that is wrong")

    monkeypatch.setattr(leaders.LeaderState, "failed", fail)
    a._leader._state.tick = fail
    with pytest.raises(RuntimeError, match="a rule that is wrong"):
        waiting.result()
