"""What the doctor asks of the cluster as a whole, with scripts for Slurm's commands."""

import contextlib
import os

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SiteClient, time_limit_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("02:30", 150), ("4:00:00", 14400), ("1-0", 86400), ("1-12:30", 131400),
        ("2-00:00:05", 172805), ("UNLIMITED", None), ("nonsense", None),
    ],
)  # fmt: skip
def test_wall_times_are_read_as_sbatch_reads_them(text, seconds):
    """A plain number is minutes, and so are two parts' first."""
    assert time_limit_s(text) == seconds


@pytest.fixture
def command(tmp_path):
    """Put a shell script in the place of one of Slurm's commands; `command.client` calls it."""

    def write(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/log\n{script}\n")
        path.chmod(0o755)

    write.client = SiteClient(5, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    write.calls = lambda: (tmp_path / "log").read_text().splitlines()
    return write


def test_what_sbatch_would_do_is_told_in_its_words(command):
    """It writes that to standard error, and exits with 0."""
    words = "to start at 2026-11-22T06:06:10 using 8 processors on nodes node1 in partition low"
    command("sbatch", f"echo 'sbatch: Job 7 {words}' >&2")
    assert command.client.test_only("run.sbatch") == words
    assert command.calls() == ["--test-only run.sbatch"]


def test_what_sbatch_would_refuse_raises(command):
    """All its lines are kept."""
    lines = (
        "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition"
    )
    command("sbatch", f"echo '{lines}' >&2; exit 1")
    with pytest.raises(SlurmCommandError) as caught:
        command.client.test_only("run.sbatch")
    assert caught.value.stderr == lines


@pytest.mark.parametrize(
    ("printed", "version"),
    [("slurm-wlm 22.05.8", "22.05.8"), ("slurm 24.11.5", "24.11.5"), ("slurm 26.05.5", "26.05.5")],
)
def test_versions_of_distributions_and_of_slurm_itself(command, printed, version):
    """Debian names its package before it."""
    command("sbatch", f"echo '{printed}'")
    assert command.client.version("sbatch") == version


def test_a_cluster_without_accounting_says_so(command):
    """sacct fails then."""
    command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="disabled"):
        command.client.accounting_answers()


def test_signals_go_to_the_steps_and_kill_to_all(command):
    """A notice leaves the batch script alone; what is killed is killed as a whole."""
    command("scancel", "true")
    command.client.signal("7_0", "USR2")
    command.client.kill(["7"])
    assert command.calls() == ["--signal=USR2 7_0", "--full --signal=KILL 7"]


@pytest.mark.parametrize(
    ("says", "fails"),
    [
        ("scancel: error: Kill job error on job id 7_0: Invalid job id specified", False),
        ("scancel: error: Kill job error on job id 7_0: Access/permission denied", True),
    ],
)
def test_a_task_that_has_just_ended_need_not_be_killed(command, says, fails):
    """It ended in between; whoever may not kill one is told."""
    command("scancel", f"echo '{says}' >&2; exit 1")
    with pytest.raises(SlurmCommandError) if fails else contextlib.nullcontext():
        command.client.kill(["7_0"])
