"""A replica group on two hosts outside of a run: its server, and a relay on the other host.

The hosts are processes with different host names on this machine.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from ft_server import Worker, until
from torch.distributed import TCPStore

from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.ft.manager_client import GroupPlace, find_server

HOSTS = ("here", "there", "there")


@pytest.fixture
def group() -> Iterator[list[Worker]]:
    """The workers of a group in a quorum: rank 0 on one host, two ranks on another."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers: list[Worker] = []
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    try:
        for rank, host in enumerate(HOSTS):
            url = lighthouse.address()
            workers.append(Worker(url, host, RANK=str(rank), waits=False, **place))
        for worker in workers:
            worker.wait_until_linked()
        for worker in workers:
            worker.order("step")
        placed = [worker.wait_for("placed") for worker in workers]
        assert placed[0] == placed[1] == placed[2]
        yield workers
    finally:
        for worker in workers:
            worker.end()
        lighthouse.shutdown()


def vote(group: list[Worker], *votes: str) -> list[str]:
    """Let the ranks vote; return the decision that each receives."""
    for worker, word in zip(group, votes, strict=True):
        worker.order(f"vote {word}")
    return [worker.wait_for("voted")[1] for worker in group]


def test_ranks_of_two_hosts_are_one_group(group):
    """One no decides for all; the other host has one relay, which ends with its workers."""
    assert group[0].server_pid and not (group[1].server_pid and group[2].server_pid)
    relay = group[1].server_pid or group[2].server_pid
    assert relay and group[1].path == group[2].path != group[0].path
    assert vote(group, "yes", "yes", "yes") == ["True"] * 3
    assert [worker.step() for worker in group] == [["on", "1"]] * 3
    assert vote(group, "yes", "yes", "no") == ["False"] * 3
    for worker in group:
        worker.order("close")
    for worker in group:
        worker.wait_for("closed")
    until(lambda: not group[1].path.exists() and not group[0].path.exists())


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_dead_or_stopped_worker_on_the_other_host_is_noticed(group, number):
    """The first host learns it by the relay, and no rank commits."""
    group[0].order("vote yes")
    group[1].order("vote yes")
    os.kill(group[2].pid, number)
    reasons = [" ".join(worker.wait_for("aborted")) for worker in group[:2]]
    assert all("rank 2 of" in reason for reason in reasons)
    assert number == signal.SIGKILL or "is stopped" in reasons[0]
    if number == signal.SIGKILL:
        assert [worker.wait_for("voted")[1] for worker in group[:2]] == ["False"] * 2


def test_lost_host_is_noticed_by_its_silence(group):
    """A relay that is stopped stands for a host without power: it closes no connection."""
    relay = group[1].server_pid or group[2].server_pid
    os.kill(relay, signal.SIGSTOP)
    try:
        group[0].order("vote yes")
        reason = " ".join(group[0].wait_for("aborted"))
        assert "there" in reason and "silent" in reason
        assert group[0].wait_for("voted")[1] == "False"
    finally:
        os.kill(relay, signal.SIGCONT)
    assert "gone" in " ".join(group[1].wait_for("aborted"))


@pytest.mark.long
def test_lost_first_host_is_noticed_by_its_silence(group):
    """The relay ends, and so its workers do not wait."""
    os.kill(group[0].server_pid, signal.SIGSTOP)
    try:
        group[1].order("vote yes")
        assert "server of this replica group" in " ".join(group[1].wait_for("lost"))
    finally:
        os.kill(group[0].server_pid, signal.SIGCONT)


def test_missing_ranks_are_named():
    """By a rank that waits for rank 0, and by one that waits for the first rank of its host."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = GroupPlace(2, 3, "127.0.0.1", store.port)
    given = {"lighthouse_addr": "h:1", "replica_id": None, "connect_timeout_s": 0.5}
    with pytest.raises(TimeoutError, match=r"rank 2 waits for rank 0"):
        find_server(place, **given)
    key = "hpc_elastic/ft/server/0"
    store.set(key, '{"path": "/p", "host": "elsewhere", "relay": ["127.0.0.1", 1]}')
    store.add(f"{key}/{socket.gethostname()}/ranks", 1)
    with pytest.raises(TimeoutError, match=f"the first rank on {socket.gethostname()}"):
        find_server(place, **given)
