"""Whole runs of train.py on the fake, by the unmodified product: grow, lose nodes, end alone."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.testing.fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "slurm"))

from sweeps import Sweep, busy, eventually, hosts, leader_host, unhurried  # noqa: E402


@pytest.fixture
def cluster() -> Iterator[FakeSlurm]:
    """Three nodes of its own for each run."""
    with FakeSlurm(nodes=3, grace_s=10) as slurm:
        yield slurm


@pytest.fixture
def sweep(cluster, tmp_path) -> Iterator[Sweep]:
    """A run of train.py on one to three nodes; it does not tell when it will be done."""
    script = tmp_path / "train.py"
    text = (ROOT / "train.py").read_text().replace(", total_steps=total_steps", "")
    script.write_text(unhurried(text, tmp_path))
    shutil.copy(ROOT / "train.yaml", tmp_path)
    started = Sweep(tmp_path, cluster.env, script, "nodes=1:3", "epochs=5", "pause_s=0.25")
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.communicate()


def ends_well(s: Sweep) -> None:
    """The run has succeeded, and spent no restart on what was done to it."""
    output = s.output()
    assert (s.result()["status"], s.result()["restarts"]) == ("succeeded", 0), output
    assert s.value() > 0.9


@pytest.fixture
def busy_nodes(cluster) -> str:
    """A job that has two of the three nodes; its id."""
    return busy(cluster, 2)


@pytest.mark.long
def test_a_run_starts_alone_and_grows(cluster, busy_nodes, sweep):
    """With one node free it trains on that; it has three once they are free."""
    eventually(lambda: sweep.group_sizes() == [1], "one node trains")
    cluster.run(["scancel", busy_nodes])
    eventually(lambda: sweep.group_sizes()[-1] == 3, "three nodes train")
    ends_well(sweep)


@pytest.mark.long
def test_a_preempted_node_leaves_and_comes_back(cluster, sweep):
    """All save at one step; the task requeues itself, and joins again in its next attempt."""
    eventually(lambda: sweep.group_sizes()[-1:] == [3], "three nodes train")
    taken = next(h for h in hosts(sweep) if h != leader_host(sweep))
    cluster.preempt(taken, for_s=1)
    eventually(lambda: sweep.group_sizes()[-1:] == [2], "two nodes go on")
    task = next(e["task"] for e in sweep.events("node_lost"))
    eventually(lambda: sweep.group_sizes()[-1] == 3, "three nodes train again")
    ends_well(sweep)
    assert {e["attempt"] for e in sweep.events("task") if e["task"] == task} == {0, 1}
    assert not cluster.tasks(), "nothing of the run stays in the queue"


@pytest.mark.long
def test_a_leader_whose_node_dies_is_replaced(cluster, sweep):
    """Another agent leads the next epoch."""
    eventually(lambda: sweep.group_sizes()[-1:] == [3], "three nodes train")
    cluster.kill_node(leader_host(sweep))
    eventually(lambda: len(sweep.events("leader")) > 1, "another one leads")
    ends_well(sweep)
    assert [e["epoch"] for e in sweep.events("leader")][:2] == [1, 2]


@pytest.mark.long
def test_the_last_node_ends_the_run_alone(cluster, sweep):
    """Two of three die, one after the other."""
    eventually(lambda: sweep.group_sizes()[-1:] == [3], "three nodes train")
    first, second = [h for h in hosts(sweep) if h != leader_host(sweep)]
    cluster.hold_queue()
    cluster.kill_node(first)
    eventually(lambda: sweep.group_sizes()[-1:] == [2], "two nodes go on")
    cluster.kill_node(second)
    eventually(lambda: sweep.group_sizes()[-1:] == [1], "one goes on")
    ends_well(sweep)


def test_the_example_of_the_guide_passes(tmp_path):
    """The test in docs/howto/test-preemptions.md is run as it stands."""
    text = (ROOT / "docs/howto/test-preemptions.md").read_text()
    block = text.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "test_example.py").write_text(block)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir"]
    done = subprocess.run(
        [*argv, str(tmp_path), str(tmp_path / "test_example.py")],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
