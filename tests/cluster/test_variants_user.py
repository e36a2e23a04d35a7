"""Runs of an ordinary user on a cluster that makes it hard for them.

No accounting, JobRequeue=0, MaxArraySize 4, PreemptMode SUSPEND, and a partition with a short time
limit: what none of them excludes is tried on one sandbox.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from sweeps import SLOWLY, eventually, hosts, leader_host
from variants import Cluster, cluster

from slurm_sandbox import SandboxConfig

CONFIG = SandboxConfig(
    name="variants",
    nodes=6,
    gpus_per_node=0,
    max_array_size=4,
    job_requeue=False,
    preempt_mode="SUSPEND",
)
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def _up(slurm):
    yield from cluster(CONFIG, slurm)


@pytest.fixture
def user(_up):
    """Return the cluster, on which nothing is left of it afterwards."""
    yield _up
    _up.clean()


def succeeded(sweep) -> str:
    """Wait for the end of a run that succeeds without a restart, and return what was printed."""
    output = sweep.output()
    assert sweep.process.returncode == 0, output
    assert sweep.result()["restarts"] == 0 and sweep.value() > 0.95, output
    return output


def cancelled(user: Cluster, sweep) -> str:
    """Cancel a run that has shown what it was to show, and return what was printed."""
    user.run(["scancel", user.task(sweep, 0).partition("_")[0]])
    return sweep.output()


def test_six_nodes_where_an_array_may_have_four(user: Cluster):
    """Two arrays make one run; the folder and the job have blanks and quotes in their names."""
    folder = """it's a "long" name"""
    s = user.sweep(folder, "nodes=1:6", "launcher.job_name='a \"b\" c'", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [6], "six nodes train")
    jobs = [p.read_text().strip() for p in (s.folder / ".hpc_elastic").glob("array-*.jobid")]
    shown = user.slurm.run(["squeue", "-h", "-o", "%j|%U", "-j", ",".join(jobs)]).stdout
    assert set(shown.splitlines()) == {'a "b" c|61234'}
    assert len(jobs) == 2
    output = s.output()
    assert s.result()["status"] == "succeeded", output
    assert all(path.stat().st_uid == s.folder.stat().st_uid for path in s.run().rglob("*"))


def test_a_newline_in_a_name_is_refused(user: Cluster):
    """A line of the batch script would end there."""
    s = user.sweep("newline", "nodes=1", "launcher.job_name='a\nb'")
    output = s.output()
    assert s.process.returncode != 0
    assert "a text of one line" in output and "Traceback" not in output
    assert not (s.folder / ".hpc_elastic" / "array-0.jobid").exists()


def test_preempted_tasks_come_back_where_nobody_requeues_by_default(user: Cluster):
    """JobRequeue=0; where an administrator has forbidden the requeue, another task is submitted."""
    s = user.sweep("requeue", "nodes=1:2", "launcher.partition=short", *SLOWLY)
    for forbidden in (False, True):
        eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
        taken = next(h for h in hosts(s) if h != leader_host(s))
        task = next(e["task"] for e in reversed(s.events("task")) if e["host"] == taken)
        assert user.field(task, "Requeue") == "1", "the script asks for it"
        if forbidden:
            user.slurm.run(["scontrol", "update", f"jobid={task}", "requeue=0"])
        user.slurm.preempt([taken], for_s=1)
        eventually(lambda: s.group_sizes()[-1:] == [1], "one node goes on")
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train again")
    succeeded(s)
    assert len({e["task"] for e in s.events("task")}) == 3
    assert max(e["attempt"] for e in s.events("task")) == 1


def test_a_task_that_is_suspended_joins_again(user: Cluster):
    """The others go on without it; it costs no restart, and no attempt."""
    s = user.sweep("suspend", "nodes=1:2", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    taken = next(h for h in hosts(s) if h != leader_host(s))
    task = next(e["task"] for e in s.events("task") if e["host"] == taken)
    job = user.slurm.preempt([taken], for_s=60)
    eventually(lambda: user.field(task, "JobState") == "SUSPENDED", "it is suspended")
    eventually(lambda: s.group_sizes()[-1:] == [1], "one node goes on")
    user.slurm.run(["scancel", job])
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train again")
    assert {e["attempt"] for e in s.events("task")} == {0}
    cancelled(user, s)


def test_a_held_task_stays_held_and_joins_when_it_is_released(user: Cluster):
    """The run begins without it, reports it, and does not release what its user holds."""
    away = user.slurm.run(
        ["sbatch", "--parsable", "-N5", "--exclusive", "-o/dev/null", "--wrap=sleep 300"]
    )
    s = user.sweep("held", "nodes=1:2", *SLOWLY)
    task = user.task(s, 1)
    user.run(["scontrol", "hold", task])
    user.slurm.run(["scancel", away.stdout.strip()])
    eventually(lambda: s.group_sizes()[-1:] == [1], "one node trains")
    eventually(lambda: user.field(task, "Reason") == "JobHeldUser", "the other is held")
    time.sleep(3)
    assert user.field(task, "JobState") == "PENDING"
    user.run(["scontrol", "release", task])
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train")
    assert "JobHeldUser" in cancelled(user, s)


def test_a_run_outlives_its_controller(user: Cluster):
    """While slurmctld is away nothing stops; a node that is taken right after it comes back."""
    s = user.sweep("controller", "nodes=1:2", "launcher.partition=short", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    user.slurm.stop_controller()
    time.sleep(4)
    user.slurm.start_controller()
    taken = next(h for h in hosts(s) if h != leader_host(s))
    user.slurm.preempt([taken], for_s=1)
    eventually(lambda: s.group_sizes()[-1:] == [1], "one node goes on")
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train again")
    assert s.process.poll() is None, "the launcher waits on"
    cancelled(user, s)


def test_a_run_of_another_user_is_left_alone(user: Cluster):
    """Whoever may cancel his jobs, too: root. A job that his files name as the run's goes on."""
    s = user.sweep("theirs", "nodes=1:1", *SLOWLY)
    eventually(lambda: s.group_sizes(), "it trains")
    sleeps = ["sbatch", "--parsable", "-a0", "-o/dev/null", "--wrap=sleep 300"]
    mine = user.slurm.run(sleeps).stdout.strip()
    (file,) = s.folder.glob(".hpc_elastic/array-*.jobid")
    own = file.read_text()
    file.write_text(mine)

    def called(*argv: str) -> subprocess.CompletedProcess[str]:
        """A command of root's."""
        whole = [sys.executable, "-m", "hpc_elastic", *argv, str(s.run())]
        env = {**os.environ, **user.slurm.env}
        return subprocess.run(whole, env=env, text=True, capture_output=True, timeout=60)

    for command in (("cancel", "-y"), ("checkpoints", "prune", "--keep-last", "1"), ("resume",)):
        refused = called(*command)
        assert refused.returncode == 1 and "belongs to another user (owner" in refused.stderr
        assert "--trust" in refused.stderr
    named = called("cancel", "-y", "--trust")
    assert named.returncode == 1 and mine in named.stderr
    assert user.field(mine, "JobState") == "RUNNING"
    file.write_text(own)
    assert "training" in called("status").stdout
    user.slurm.run(["scancel", mine])
    succeeded(s)


def test_more_time_than_the_partition_gives_is_said(user: Cluster):
    """Slurm takes such a task and never starts it."""
    s = user.sweep("time", "nodes=1", "launcher.partition=short", "launcher.time=60")
    task = user.task(s, 0)
    eventually(lambda: user.field(task, "Reason") == "PartitionTimeLimit", "it is stuck")
    time.sleep(2)
    user.run(["scancel", task])
    output = s.output()
    assert "PartitionTimeLimit" in output and "launcher.time" in output


def test_the_user_is_not_root(user: Cluster):
    """Neither at the submission nor in a task."""
    assert user.run(["id", "-un"]).stdout == "hxsuser\n"
    assert user.run(["srun", "id", "-un"]).stdout == "hxsuser\n"
    assert user.slurm.home.stat().st_uid not in (0, os.getuid())
