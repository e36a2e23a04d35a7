"""Replicas of two nodes on this machine: real agents, relays and sharded workers, which die."""

import json
import os
import signal
from collections.abc import Iterator

import pytest
from group import eventually
from replica_training import Replicas
from unit_training import train_sharded


@pytest.fixture
def pairs(tmp_path) -> Iterator[Replicas]:
    """A run of one or two replicas of two nodes."""
    run = Replicas(tmp_path, "2:4:2", train=train_sharded, max_restarts=1)
    yield run
    run.end()


def train(run: Replicas, size: int, *slots: int) -> None:
    """Wait until these slots have made further steps in a quorum of this size."""
    marks = {slot: len(run.lines(slot)) for slot in slots}

    def is_so(slot: int) -> bool:
        made = [line for line in run.lines(slot)[marks[slot] :] if "made" in line]
        return len(made) > 2 and made[-1]["size"] == size

    def done() -> bool:
        assert not run.results.done(), run.results.result()
        return all(map(is_so, slots))

    eventually(done, 90.0)


def other_pair(run: Replicas) -> tuple[int, int]:
    """The slots of the replica without the leader, in the order of their ranks."""
    started = {slot: run.last(slot, "started") for slot in range(4)}
    replica = started[run.leader()]["replica"]
    slots = [slot for slot in range(4) if started[slot]["replica"] != replica]
    first, second = sorted(slots, key=lambda slot: started[slot]["started"])
    return first, second


@pytest.mark.long
def test_the_partner_of_a_lost_node_completes_the_next_replica(pairs):
    """The other replica loses a step at most, and keeps its processes; all end equal."""
    train(pairs, 2, 0, 1, 2, 3)
    lost = other_pair(pairs)
    stay = [slot for slot in range(4) if slot not in lost]
    pids = pairs.pids(*stay)
    os.kill(pairs.agents()[lost[1]], signal.SIGKILL)
    train(pairs, 1, *stay)
    train(pairs, 2, 0, 1, 2, 3)
    assert pairs.pids(*stay) == pids
    assert all(sum("failed" in line for line in pairs.lines(slot)) <= 1 for slot in stay)
    pairs.finish(stay[0])
    result = pairs.results.result(60)
    assert result.restarts == 0 and set(result.by_rank) == {0, 1}
    for rank in (0, 1):
        ends = [line for slot in range(4) for line in pairs.lines(slot) if line.get("rank") == rank]
        assert {line["digest"] for line in ends} == {result.by_rank[rank]} and len(ends) == 2


@pytest.mark.long
def test_what_happens_to_a_second_node_holds_no_other_replica_up(pairs):
    """A notice costs no step, and a failed worker is one restart; a stopped one is seen.

    The server of the replica is on the first node, and learns of all that by the relay.
    """
    train(pairs, 2, 0, 1, 2, 3)
    first, second = other_pair(pairs)
    stay = [slot for slot in range(4) if slot not in (first, second)]
    pids, agent = pairs.pids(*stay), pairs.agents()[first]
    tasks = json.loads((pairs.run.path / ".hpc_elastic" / "local-tasks.json").read_text())
    (task,) = (name for name in tasks if name.endswith(f"_{second}"))
    notices = pairs.run.path / "preempt"
    notices.mkdir(exist_ok=True)
    (notices / task).touch()
    train(pairs, 1, *stay)
    train(pairs, 2, 0, 1, 2, 3)
    assert not any("failed" in line for slot in stay for line in pairs.lines(slot))
    assert pairs.agents()[first] == agent, "its partner has kept its node"

    stopped = pairs.last(second, "made")["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        train(pairs, 1, *stay)
    finally:
        os.kill(stopped, signal.SIGCONT)
    train(pairs, 2, 0, 1, 2, 3)

    os.kill(pairs.last(second, "made")["pid"], signal.SIGKILL)
    train(pairs, 1, *stay)
    train(pairs, 2, 0, 1, 2, 3)
    assert pairs.pids(*stay) == pids
    pairs.finish(stay[0])
    assert pairs.results.result(60).restarts == 1
