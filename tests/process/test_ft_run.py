"""Runs with ``ft=true`` on this machine: real agents, leaders and workers, which die."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from group import eventually
from replica_training import Replicas, train_and_report, train_managed

from hpc_elastic.run.events import read_events


@pytest.fixture
def replicas(tmp_path) -> Iterator[Callable[..., Replicas]]:
    """Makes runs, and ends them."""
    made: list[Replicas] = []

    def make(nodes: str, folder: Path = tmp_path, **settings: object) -> Replicas:
        made.append(Replicas(folder, nodes, **settings))
        return made[-1]

    yield make
    for run in made:
        run.end()


def test_neither_a_dead_worker_nor_a_dead_leader_stops_the_others(replicas):
    """A worker that dies is started again alone, and learns the state; the leader's death is less.

    The other workers go on in their processes, and what the first of them returns is the result.
    """
    run = replicas("2:3", max_restarts=1)
    run.train(3, 0, 1, 2)
    leader = run.leader()
    failing, other = (slot for slot in (0, 1, 2) if slot != leader)
    pids = run.pids(leader, other)
    (killed,) = run.pids(failing)[0]
    os.kill(killed, signal.SIGKILL)
    run.train(2, leader, other)
    run.train(3, 0, 1, 2)
    healed = [line for line in run.lines(failing) if line["pid"] != killed]
    assert healed[0]["step"] > 0
    os.kill(run.agents()[leader], signal.SIGKILL)
    run.train(2, failing, other)
    assert run.pids(leader, other) == pids and len(run.pids(failing)[0]) == 2
    assert run.leader() != leader
    stop = run.finish(other)
    result = run.results.result(60)
    assert (result.by_rank, result.restarts) == ({0: stop}, 1)
    rounds = [e for e in read_events(run.run.path / "events") if e["kind"] == "round"]
    assert [e["nodes"] for e in rounds] == [3, 3], "one for all, and one for who came back"


@pytest.mark.long
def test_a_replica_that_hangs_is_started_again_alone(replicas):
    """Its agent judges by itself: the others only wait, and their processes stay."""
    agent = {"hang_timeout_s": 4}
    run = replicas("2:2", train=train_and_report, max_restarts=1, agent=agent)
    run.train(2, 0, 1)
    eventually(lambda: run.last(1, "made")["step"] >= 100, 90.0)  # its agent has seen several
    pids = run.pids(0, 1)
    (stuck,) = pids[1]
    os.kill(stuck, signal.SIGSTOP)
    eventually(lambda: len(run.pids(1)[0]) == 2, 120.0)
    run.train(2, 0, 1)
    assert run.pids(0) == pids[:1]
    events = read_events(run.run.path / "events")
    (hang,) = [e for e in events if e["kind"] == "hang"]
    assert hang["ranks"][0]["state"] == "stopped" and hang["task"].endswith("_1")
    (restart,) = [e for e in events if e["kind"] == "restart"]
    assert "hung" in restart["failure"]
    run.finish()
    assert run.results.result(60).restarts == 1


@pytest.mark.long
def test_a_node_may_be_away_for_longer_than_the_quorum_time_out(replicas):
    """The wait is the leader's to end: the sound worker stays, and nothing counts as a failure."""
    run = replicas("2:2", train=train_managed)
    run.train(2, 0, 1)
    leader = run.leader()
    (pids,) = run.pids(leader)
    agent = psutil.Process(run.agents()[1 - leader])
    frozen = [agent, *agent.children(recursive=True)]
    for process in frozen:
        process.suspend()
    try:
        eventually(lambda: "node_lost" in {e["kind"] for e in read_events(run.run.path / "events")})
        time.sleep(4.0)  # four times the Manager's quorum_timeout
    finally:
        for process in frozen:
            process.resume()
    run.train(2, 0, 1)
    assert run.pids(leader) == [pids]
    run.finish()
    assert run.results.result(60).restarts == 0
