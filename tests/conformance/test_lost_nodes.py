"""Nodes that die with all that runs on them, and what becomes of their jobs."""

import time

import pytest
from backends import eventually

from hpc_elastic.slurm import nodelist


def stray(path) -> str:
    """A line that leaves a process behind, in a session and with an environment of its own."""
    beat = f"while :; do date +%s%N > {path}; sleep 0.1; done"
    return f"env -i PATH=$PATH setsid sh -c '{beat}' > /dev/null 2>&1 &"


def beats(path) -> bool:
    """Tell whether a stray still writes."""
    before = path.read_text() if path.exists() else ""
    time.sleep(1)
    return (path.read_text() if path.exists() else "") != before


def test_what_a_task_leaves_behind_ends_with_its_job(backend, tmp_path):
    """Also in a session of its own, its parent gone, its environment emptied."""
    path = tmp_path / "beat"
    line = f"srun -n1 sh -c {_quoted(stray(path) + ' sleep 600')}"
    job = backend.submit(line)
    eventually(lambda: path.exists() and path.read_text())
    backend.client.cancel([job])
    backend.wait_state(job, "CANCELLED")
    eventually(lambda: not beats(path))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def test_the_task_of_a_node_that_dies_is_requeued_elsewhere(backend, tmp_path):
    """Once Slurm has noticed; nothing of it lives on; the node comes back when it is restored."""
    path = tmp_path / "beat"
    job = backend.submit(
        f"{stray(path)} sleep 600", "--array=0-1", "--exclusive", "--nodelist=node3"
    )
    backend.wait_state(f"{job}_0", "RUNNING")
    eventually(lambda: path.exists() and path.read_text())
    assert backend.client.node("node3").is_up
    backend.cluster.kill_node("node3")
    eventually(lambda: not beats(path))
    eventually(backend.cluster.node_states, lambda states: states["node3"].startswith("down"))
    assert not backend.client.node("node3").is_up
    back = eventually(lambda: backend.state(f"{job}_0"), lambda s: s.state == "PENDING")
    assert (back.restarts, back.preempted) == (1, False)
    reasons = ["ReqNodeNotAvail, UnavailableNodes:node3"]
    if backend.release > (22, 5):  # whichever of its two schedulers has looked last
        reasons.append("ReqNodeNotAvail, May be reserved for other job")
    backend.wait_reason(f"{job}_1", *reasons)
    backend.restore_node("node3")
    eventually(backend.cluster.node_states, lambda states: not states["node3"].startswith("down"))
    backend.wait_state(f"{job}_1", "RUNNING")


def test_a_task_that_may_not_be_requeued_fails_with_its_node(backend):
    """NODE_FAIL."""
    job = backend.submit("sleep 600", "--no-requeue", "--nodelist=node4")
    backend.wait_state(job, "RUNNING")
    backend.cluster.kill_node("node4")
    ended = backend.wait_state(job, "NODE_FAIL", "PENDING")
    assert (ended.state, ended.restarts) == ("NODE_FAIL", 0)


COALLOCATED = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--exclusive"]
LIVES = "--no-kill --kill-on-bad-exit=0 --wait=0"


@pytest.mark.parametrize("which", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_coallocated_job_that_asks_for_it_outlives_its_nodes(backend, tmp_path, which):
    """The others run on, also where the batch script died; the lost node leaves the job's list."""
    beat = f"while :; do date +%s%N > {tmp_path}/$SLURM_NODEID; sleep 0.1; done"
    job = backend.submit(f"srun -N3 -n3 {LIVES} sh -c '{beat}'", *COALLOCATED, "--no-kill")
    eventually(lambda: len(list(tmp_path.iterdir())) == 3)
    hosts = nodelist.expand(backend.state(job).node)
    assert len(hosts) == 3
    backend.cluster.kill_node(hosts[which])
    left = [host for i, host in enumerate(hosts) if i != which]
    state = eventually(lambda: backend.state(job), lambda s: nodelist.expand(s.node) == left)
    assert (state.state, state.restarts) == ("RUNNING", 0)
    for i in {0, 1, 2} - {which}:
        eventually(lambda i=i: beats(tmp_path / str(i)))
    assert not beats(tmp_path / str(which))


def test_a_coallocated_job_that_does_not_is_requeued_as_a_whole(backend, tmp_path):
    """The tasks on the other nodes are ended."""
    beat = f"while :; do date +%s%N > {tmp_path}/$SLURM_NODEID; sleep 0.1; done"
    job = backend.submit(f"srun sh -c '{beat}'", *COALLOCATED)
    eventually(lambda: len(list(tmp_path.iterdir())) == 3)
    backend.cluster.kill_node(nodelist.expand(backend.state(job).node)[1])
    back = eventually(lambda: backend.state(job), lambda s: s.state == "PENDING")
    assert back.restarts == 1
    assert not any(beats(tmp_path / str(i)) for i in range(3))
