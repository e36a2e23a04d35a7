"""A cluster with accounting that enforces accounts, QOS and the limits of partitions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sweeps import SLOWLY, eventually, hosts, leader_host
from variants import Cluster, accounted_cluster

from slurm_sandbox import SandboxConfig

CONFIG = SandboxConfig(
    name="accounted",
    nodes=3,
    gpus_per_node=0,
    accounting=True,
    preempt_mode="CANCEL",
    extra_lines=("AccountingStorageEnforce=associations,limits,qos", "EnforcePartLimits=ALL"),
)
SETUP = (
    "add account science description=science organization=here",
    "add user hxsuser account=science",
    "add qos brief set MaxWall=00:01:00 Flags=DenyOnLimit",
    "add qos single set MaxJobsPerUser=1",
    "modify user hxsuser set qos=normal,brief,single",
)
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def _up(slurm):
    yield from accounted_cluster(CONFIG, slurm, SETUP)


@pytest.fixture
def user(_up):
    """Return the cluster, on which nothing is left of it afterwards."""
    yield _up
    _up.clean()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("launcher.account=arts", ("launcher.account", "'arts'", "not an account of yours")),
        ("launcher.qos=wrong", ("launcher.qos", "'wrong'", "sacctmgr show qos")),
        ("launcher.time=60 launcher.partition=short", ("launcher.time", "sinfo")),
        ("launcher.time=10 launcher.qos=brief", ("limits",)),
    ],
)
def test_what_is_not_allowed_is_refused_at_submission_with_the_remedy(
    user: Cluster, override, words
):
    """An account, a QOS, a time limit: the message names the key, the value and what to do."""
    name = "".join(c for c in override if c.isalnum())
    s = user.sweep(name, "nodes=1", *override.split())
    output = s.output()
    assert s.process.returncode != 0
    assert all(word in output for word in words), output
    assert "Traceback" not in output and not user.slurm.run(["squeue", "-h"]).stdout


def test_a_run_with_accounting_comes_back_after_a_cancelling_preemption(user: Cluster):
    """PreemptMode=CANCEL; sacct knows its tasks, though the run does not ask it."""
    s = user.sweep("accounted", "nodes=1:2", "launcher.account=science", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    taken = next(h for h in hosts(s) if h != leader_host(s))
    user.slurm.preempt([taken], for_s=3)
    eventually(lambda: s.group_sizes()[-1:] == [1], "one node goes on")
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train again")
    output = s.output()
    assert s.process.returncode == 0 and s.result()["restarts"] == 0, output
    job = user.task(s, 0).partition("_")[0]
    sacct = ["sacct", "-n", "-X", "-D", "-P", "-o", "JobID,Account", "-j", job]
    eventually(lambda: f"{job}_0|science" in user.run(sacct).stdout, "sacct knows the task")


def test_a_run_that_waits_for_a_limit_names_the_limit_and_its_qos(user: Cluster):
    """The other run of the user has all that the QOS allows."""
    first = user.sweep("first", "nodes=1", "launcher.qos=single", "epochs=99", "pause_s=0.25")
    eventually(lambda: first.events("first_step"), "it trains")
    second = user.sweep("second", "nodes=1", "launcher.qos=single")
    task = [*user.slurm.as_user(()), sys.executable, "-m", "hpc_elastic", "status", "--json"]

    def why() -> str:
        done = subprocess.run(
            [*task, str(second.run())], env=user.env, capture_output=True, text=True, timeout=60
        )
        return str(json.loads(done.stdout)["why_waits"]) if done.returncode == 0 else ""

    words = "the limit of QOS single for running jobs of each user is reached"
    eventually(lambda: words in why(), words)
    assert "choose another launcher.qos" in why()
