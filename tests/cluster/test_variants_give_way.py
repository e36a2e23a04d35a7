"""``launcher.give_way`` on a cluster with accounting, limits, and nodes of unequal memory."""

from __future__ import annotations

import time

import pytest
from sweeps import eventually
from variants import Cluster, accounted_cluster

from hpc_elastic.site.neighbours import CHECK_S
from hpc_elastic.slurm.job_state import WAITS_FOR_NODES
from slurm_sandbox import SandboxConfig

CONFIG = SandboxConfig(
    name="neighbours",
    nodes=3,
    gpus_per_node=0,
    memory_mb=(65536, 65536, 131072),
    accounting=True,
    extra_lines=(
        "AccountingStorageEnforce=associations,limits,qos",
        "PartitionName=hidden Nodes=node[1-3] MaxTime=INFINITE PriorityTier=1 Hidden=YES",
        "PartitionName=later Nodes=node[1-3] MaxTime=INFINITE PriorityTier=0",
    ),
)
SETUP = (
    "add account science description=science organization=here",
    "add user hxsuser account=science",
    "add account arts description=arts organization=here",
    "add user root account=arts",
    "modify user root where account=arts set MaxJobs=1",
    "add qos single set MaxJobsPerUser=1",
    "modify user root set qos=normal,single",
)
KEPT = {
    "a limit of the QOS": (["--qos=single"], ["QOSMaxJobsPerUserLimit"]),
    "a limit of the account": (["--account=arts"], ["AssocMaxJobsLimit"]),
    "memory of another node": (["--mem=100G"], WAITS_FOR_NODES),
    "a partition that Slurm tries after the task that waits": (["-p", "later"], WAITS_FOR_NODES),
}
"""Jobs that get nothing, each with its flags and with the reasons of Slurm, one of them."""
GIVEN = {"memory": ["--mem=60G"], "a hidden partition": ["-p", "hidden", "--exclusive"]}
pytestmark = pytest.mark.long


@pytest.fixture
def user(slurm):
    """Return the cluster."""
    for up in accounted_cluster(CONFIG, slurm, SETUP):
        yield up
        up.clean()


def test_a_job_gets_a_node_unless_a_limit_or_its_memory_keeps_it_from_starting_there(
    user: Cluster,
):
    """A job of the same account and QOS has the node with more memory."""
    slurm = user.slurm

    def other(*flags: str) -> str:
        argv = ["sbatch", "--parsable", "-o", "/dev/null", "-N1", "-t", "60", *flags]
        return slurm.run([*argv, "--wrap", "sleep 3600"]).stdout.strip()

    def field(job: str, name: str) -> str:
        return slurm.run(["squeue", "-h", "-j", job, "-O", f"{name}:0"]).stdout.strip()

    first = other("-w", "node3", "--exclusive", "--account=arts", "--qos=single")
    eventually(lambda: field(first, "State") == "RUNNING", "a job has the third node")
    terms = "launcher.give_way=on", "launcher.account=science", "epochs=9999", "pause_s=0.25"
    run = user.sweep("give", "nodes=1:3", *terms)
    eventually(lambda: run.group_sizes()[-1:] == [2], "two train")

    kept = {kind: other(*flags) for kind, (flags, _) in KEPT.items()}
    time.sleep(3 * CHECK_S)  # three checks: that nothing happens can only be waited for
    for kind, job in kept.items():
        assert field(job, "Reason") in KEPT[kind][1], kind
    assert run.events("nodes_given_back") == []
    slurm.run(["scancel", *kept.values()])

    for number, (kind, flags) in enumerate(GIVEN.items(), 1):
        job = other(*flags)
        eventually(lambda job=job: field(job, "State") == "RUNNING", f"{kind}: it starts")
        given = run.events("nodes_given_back")
        assert (len(given), given[-1]["job"]) == (number, job), kind
        slurm.run(["scancel", job])
        eventually(lambda: run.group_sizes()[-1] == 2, f"{kind}: the node is back")
