"""A run on a cluster that offers a preemptible QOS with NoReserve (``launcher.harvest=auto``)."""

from __future__ import annotations

import json
import sys

import pytest
from sweeps import SLOWLY, eventually, hosts
from variants import Cluster, accounted_cluster

from slurm_sandbox import SandboxConfig

CONFIG = SandboxConfig(
    name="standby",
    nodes=3,
    gpus_per_node=0,
    accounting=True,
    extra_lines=(
        "AccountingStorageEnforce=associations,limits,qos",
        "PreemptType=preempt/qos",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=10000",
    ),
)
SETUP = (
    "add account science description=science organization=here",
    "add user hxsuser account=science",
    "add qos standby set Flags=NoReserve PreemptMode=requeue GraceTime=20 Priority=0 MaxWall=240",
    "modify qos normal set Preempt=standby Priority=100",
    "modify user hxsuser set qos=normal,standby",
)
pytestmark = pytest.mark.long


@pytest.fixture
def user(slurm):
    """Return the cluster."""
    for up in accounted_cluster(CONFIG, slurm, SETUP):
        yield up
        up.clean()


def test_a_run_has_the_gap_before_a_planned_job(user: Cluster):
    """With the longest limit of the QOS, until a job preempts it; it is back and loses nothing."""
    sleeps = ["sbatch", "--parsable", "--exclusive", "-o/dev/null", "--wrap", "sleep 600"]
    before = user.run([*sleeps, "-N2", "-t", "60"]).stdout.strip()
    after = user.run([*sleeps, "-N3", "-t", "120"]).stdout.strip()
    start = ["squeue", "-h", "-j", after, "-o", "%S"]
    eventually(lambda: "20" in user.run(start).stdout, "a job is planned on all nodes")

    terms = ("nodes=1:2", "launcher.time=480", "launcher.harvest=auto")
    s = user.sweep("harvest", *terms, *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [1], "it trains in the gap of an hour")
    task = s.events("round")[-1]["members"][0]["task"]
    assert user.field(task, "QOS") == "standby" and user.field(task, "TimeLimit") == "04:00:00"
    script = str(s.folder.parent / "train.py")
    argv = [
        sys.executable,
        "-m",
        "hpc_elastic",
        "submit",
        "--test-only",
        "--json",
        script,
        "launcher=slurm",
        *terms,
    ]
    found = json.loads(user.run(["env", f"--chdir={s.folder.parent}", *argv]).stdout)
    assert found["shapes"][0]["time_limit_s"] == 4 * 3600 and len(found["shapes"]) == 1
    assert any("QOS standby has NoReserve" in note for note in found["notes"])

    urgent = user.run([*sleeps, "-N1", "-t", "5"]).stdout.strip()
    eventually(lambda: s.events("task_exited"), "a job takes the node")
    assert s.events("task_exited")[-1]["means"] == "preempted"
    user.run(["scancel", urgent])
    eventually(lambda: len(s.events("round")) == 2 and hosts(s), "it is back")
    user.run(["scancel", before, after])
    output = s.output()
    assert "launcher.harvest=auto: tasks start in gaps of any length with QOS standby" in output
    assert s.process.returncode == 0 and s.result()["restarts"] == 0, output
    assert s.audit().returncode == 0
