"""hpc_elastic.slurm.client without a Slurm: what it asks, and how failures come out."""

from __future__ import annotations

import os

import pytest

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient


@pytest.fixture
def command(tmp_path):
    """Return a function that puts a shell script in the place of one of Slurm's commands.

    It logs its arguments, one call a line, to the file that `command.log` names.
    """
    log = tmp_path / "log"
    log.touch()

    def write(name, script):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{script}\n')
        path.chmod(0o755)

    write.client = SlurmClient(5, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    write.calls = lambda: log.read_text().splitlines()
    return write


def test_a_command_that_is_not_installed_is_said_so(tmp_path):
    """The login node may not be one."""
    with pytest.raises(SlurmCommandError, match="is Slurm installed here") as caught:
        SlurmClient(env={"PATH": str(tmp_path)}).partitions()
    assert caught.value.exit_code is None
    assert caught.value.argv[0] == "sinfo"


def test_a_command_that_fails_keeps_what_it_said(command):
    """Exit code and standard error are attributes."""
    command("sinfo", "echo 'no controller' >&2; exit 3")
    with pytest.raises(SlurmCommandError, match="no controller") as caught:
        command.client.partitions()
    assert caught.value.exit_code == 3


def test_a_command_that_does_not_answer_is_given_up(command, tmp_path):
    """A dead controller may not hang the run."""
    command("sinfo", "sleep 60")
    client = SlurmClient(0.1, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    with pytest.raises(SlurmCommandError, match="no answer within") as caught:
        client.partitions()
    assert caught.value.exit_code is None


def test_nothing_is_asked_about_nothing(command):
    """No job ids, no tasks, no call."""
    assert command.client.tasks([]) == {}
    command.client.cancel([])
    assert command.calls() == []


def test_all_jobs_are_asked_for_in_one_call(command):
    """One call a poll, however many arrays a sweep has."""
    command("squeue", "echo '7|0|7|RUNNING|0|n1|None|'; echo '8|1|9|RUNNING|0|n2|None|'")
    assert set(command.client.tasks(["7", "8", "7"])) == {"7_0", "8_1"}
    (call,) = command.calls()
    assert call.endswith("-j 7,8")


def test_unreadable_output_is_an_error_of_the_command(command):
    """A plugin's chatter is not taken for tasks."""
    command("squeue", "echo hello")
    with pytest.raises(SlurmCommandError, match="not a line of squeue"):
        command.client.tasks(["7"])


def test_one_forgotten_job_does_not_hide_the_others(command):
    """Should a squeue refuse them all, each is asked for alone."""
    command(
        "squeue",
        'case "$*" in *"-j 7") echo "7|0|7|RUNNING|0|n1|None|";; '
        "*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;; esac",
    )
    assert set(command.client.tasks(["7", "8"])) == {"7_0"}
    assert command.client.tasks(["8"]) == {}


def test_elements_of_an_array_are_cancelled_as_one_set(command):
    """Whole jobs go by their ids."""
    command("scancel", "")
    command.client.cancel(["7_3", "7_1", "8", "7_2", "9_5"])
    assert command.calls() == ["8 7_[1-3] 9_[5]"]


def test_many_jobs_are_cancelled_in_several_calls(command):
    """A command line has an end."""
    command("scancel", "")
    command.client.cancel([str(i) for i in range(250)])
    assert [len(call.split()) for call in command.calls()] == [100, 100, 50]


def test_only_the_pending_are_cancelled_if_so_asked(command):
    """By name: scancel's own filter would take all pending elements of the array."""
    command("squeue", "echo '7|2-5|7|PENDING|0||Resources|'; echo '7|1|8|RUNNING|0|n1|None|'")
    command("scancel", "")
    command.client.cancel(["7_1", "7_2", "7_4"], pending_only=True)
    assert command.calls()[1:] == ["7_[2,4]"]


@pytest.mark.parametrize(
    "says", ["Invalid job id specified", "Job/step already completing or completed"]
)
def test_a_task_that_has_ended_need_not_be_cancelled(command, says):
    """What was wanted is so already."""
    command("scancel", f"echo 'scancel: error: Kill job error on job id 7: {says}' >&2; exit 1")
    command.client.cancel(["7"])


def test_other_failures_to_cancel_are_errors(command):
    """Another user's job, say."""
    command("scancel", "echo 'error: Access/permission denied' >&2; exit 210")
    with pytest.raises(SlurmCommandError, match="permission denied"):
        command.client.cancel(["7"])


def test_max_array_size_is_read_from_the_configuration(command):
    """It stands among a hundred others."""
    command("scontrol", "echo 'MaxArraySize            = 1001'")
    assert command.client.max_array_size() == 1001
    command("scontrol", "echo nothing")
    with pytest.raises(SlurmCommandError, match="MaxArraySize"):
        command.client.max_array_size()
