"""Whole runs on the fake, by the unmodified product: grow, lose nodes, end alone, are resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_elastic.testing.fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

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
    text = (ROOT / "train.py").read_text().replace(", total_steps=sampler.total_steps", "")
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
    """Another agent leads the next term."""
    eventually(lambda: sweep.group_sizes()[-1:] == [3], "three nodes train")
    cluster.kill_node(leader_host(sweep))
    eventually(lambda: len(sweep.events("leader")) > 1, "another one leads")
    ends_well(sweep)
    assert [e["term"] for e in sweep.events("leader")][:2] == [1, 2]


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


@pytest.mark.long
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


COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))


class Runs:
    """A folder with train.py, and the command beside a fake Slurm."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.folder = folder
        self.run = folder / "sweep" / "0"
        self.env = {**os.environ, **slurm.env, "XDG_STATE_HOME": str(folder / "state")}
        for name in ("train.py", "train.yaml"):
            shutil.copy(ROOT / name, folder)

    def call(self, *argv: str, code: int = 0) -> str:
        """Return what a command prints; it has to return this exit code."""
        done = subprocess.run(
            argv, cwd=self.folder, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        steps = (int(f.name[5:]) for f in (self.run / "checkpoints").glob("step-*"))
        return max(steps, default=0)


@pytest.fixture
def runs(tmp_path, cluster) -> Runs:
    """Three nodes, on which nothing is left afterwards."""
    return Runs(tmp_path, cluster)


@pytest.mark.long
def test_a_coallocated_job_that_was_cancelled_by_hand_is_seen_to_be_lost_and_resumed(runs):
    """By scancel: no process is left to write a result. It is resumed as a smaller one."""
    runs.call(
        COMMAND, "submit", "train.py", "launcher=slurm", "nodes=2:3",
        "launcher.coallocate_min=true",
        "pause_s=0.1", "epochs=40", "save_every_s=2", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    eventually(runs.newest, "the job has saved")
    assert "still has tasks" in runs.call(COMMAND, "resume", "last", code=1)
    jobs = {*runs.call("squeue", "-h", "-o", "%A").split()}
    runs.call("scancel", *jobs)
    output = runs.call(COMMAND, "logs", "last", "--follow", code=1)
    assert "it is lost: none of its tasks is left" in output and "hpc-elastic resume" in output
    for nodes, *more in (["1:2"], ["1", "launcher.coallocate_min=false"]):
        before = runs.newest()
        runs.call(COMMAND, "resume", "last", f"nodes={nodes}", *more)
        eventually(lambda before=before: runs.newest() > before, "it goes on from its checkpoint")
        runs.call(COMMAND, "cancel", "last", "--yes")
    status = json.loads(runs.call(COMMAND, "status", "last", "--json"))
    assert status["phase"] == status["ended"]["status"] == "cancelled"


SLOW_SBATCH = """#!/bin/sh
trap '' INT TERM  # Slurm's own may have sent the job when the signal comes
{real} "$@"
touch {submitted}
sleep 2
"""


def test_an_interrupted_submission_leaves_no_run_and_prints_no_traceback(cluster, tmp_path):
    """The job that sbatch had submitted is cancelled, or ends when it starts."""
    submitted = tmp_path / "submitted"
    folder = tmp_path / "bin"
    folder.mkdir()
    real = next(
        p for p in map(Path, cluster.env["PATH"].split(os.pathsep)) if (p / "sbatch").exists()
    )
    (folder / "sbatch").write_text(SLOW_SBATCH.format(real=real / "sbatch", submitted=submitted))
    (folder / "sbatch").chmod(0o755)
    env = {**cluster.env, "PATH": f"{folder}{os.pathsep}{cluster.env['PATH']}"}
    argv = [
        sys.executable,
        str(ROOT / "train.py"),
        "-m",
        "launcher=slurm",
        "hydra.sweep.dir=sweep",
    ]
    launcher = subprocess.Popen(
        argv, cwd=tmp_path, env=env, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    eventually(submitted.exists, "sbatch has submitted the job")
    os.killpg(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, output
    assert "Traceback" not in output and "interrupted during the submission" in output
    assert (tmp_path / "sweep" / "0" / "cancelled.json").exists()
    eventually(lambda: not cluster.tasks(), "the job has ended")
    assert not (tmp_path / "sweep" / "0" / "result.json").exists(), "it was not trained"


def test_a_run_gives_a_node_back_for_a_job_that_waits(cluster, tmp_path):
    """It keeps its minimum, its tasks stand behind the job, and the node comes back."""
    script = tmp_path / "train.py"
    text = (ROOT / "train.py").read_text().replace(", total_steps=sampler.total_steps", "")
    script.write_text(unhurried(text, tmp_path))
    shutil.copy(ROOT / "train.yaml", tmp_path)
    given = ["nodes=1:3", "epochs=5", "pause_s=0.25", "launcher.give_way=on"]
    run = Sweep(tmp_path, cluster.env, script, *given)
    eventually(lambda: run.group_sizes()[-1:] == [3], "three nodes train")
    other = busy(cluster, 2)
    (event,) = run.events("nodes_given_back")
    assert (event["job"], event["needs"], len(event["hosts"])) == (other, 2, 2)
    eventually(lambda: run.group_sizes()[-1] == 1, "one trains on")
    cluster.run(["scancel", other])
    eventually(lambda: run.group_sizes()[-1] == 3, "three train again")
    run.hurry()
    ends_well(run)
