"""hpc_elastic.slurm.client without a Slurm: what it asks, and how failures come out."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
    assert caught.value.argv == ["sinfo", "-h", "-a", "-o", "%R"]


def test_what_does_not_answer_is_killed_with_all_it_started(command, tmp_path):
    """A site's squeue is a script around the real one; no process and no zombie stays."""
    command("squeue", f"sleep 600 & echo $! $$ > {tmp_path}/pids; wait")
    client = SlurmClient(2, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    with pytest.raises(SlurmCommandError, match=r"`squeue .*-j 7` could not be run: no answer"):
        client.tasks(["7"])
    pids = (tmp_path / "pids").read_text().split()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):  # the grandchild is reaped by init
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not Path(f"/proc/{pids[1]}").exists()


def alive(pid):
    """Tell whether a process runs; one that only waits to be reaped by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_controller_that_is_down_is_said_so(command):
    """squeue's own words are in the error."""
    says = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    command("squeue", f"echo '{says}' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="Unable to contact slurm controller") as caught:
        command.client.tasks(["7", "8"])
    assert caught.value.exit_code == 1
    assert len(command.calls()) == 1


def test_nothing_is_asked_about_nothing(command):
    """No job ids, no tasks, no call."""
    assert command.client.tasks([]) == {}
    command.client.cancel([])
    assert command.calls() == []


def test_all_jobs_are_asked_for_in_one_call(command):
    """One call a poll, however many arrays a sweep has."""
    command("squeue", "echo '7|0|7|RUNNING|0|n1|9:00|None|'; echo '8|1|9|RUNNING|0|n2|9:00|None|'")
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
        'case "$*" in *"-j 7") echo "7|0|7|RUNNING|0|n1|9:00|None|";; '
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
    command(
        "squeue", "echo '7|2-5|7|PENDING|0||9:00|Resources|'; echo '7|1|8|RUNNING|0|n1|9:00|None|'"
    )
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


def test_pending_tasks_are_postponed_by_job(command):
    """One call a job, whole seconds; a node of a larger job stands for the job."""
    command("scontrol", "")
    command.client.postpone(["7_3", "7_1", "7_2", "8.1", "8.0"], 90.2)
    assert command.calls() == [
        "update jobid=8 starttime=now+91",
        "update jobid=7_[1-3] starttime=now+91",
    ]


@pytest.mark.parametrize(
    "says",
    [
        "7_0: Job is no longer pending execution\n7_8: No error",
        "Job has already finished for job 7",
        "7_9: Invalid job id specified",
    ],
)
def test_a_task_that_is_not_pending_need_not_be_postponed(command, says):
    """Others of the same call were postponed all the same."""
    command("scontrol", f"echo '{says}' >&2; exit 1")
    command.client.postpone(["7_0"], 60)


@pytest.mark.parametrize("says", ["Access/permission denied for job 7", ""])
def test_other_failures_to_postpone_are_errors(command, says):
    """Another user's job, say."""
    command("scontrol", f"echo '{says}' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="starttime=now"):
        command.client.postpone(["7_0"], 60)


def test_a_task_that_another_agent_has_requeued_is_no_error(command):
    """The agents of one job all try."""
    command("scontrol", "echo 'Job is pending execution for job 8' >&2; exit 1")
    command.client.requeue("8.1")
    assert command.calls() == ["requeue 8"]


def test_a_requeue_that_slurm_refuses_is_an_error(command):
    """A job that was submitted with --no-requeue."""
    command("scontrol", "echo 'Requested operation is presently disabled for job 8' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="presently disabled"):
        command.client.requeue("8")


def test_the_address_of_a_node_is_slurms(command):
    """Not its host name, which stands beside it."""
    command("scontrol", "echo '   NodeAddr=fd00::5 NodeHostName=n5 Version=22.05'")
    assert command.client.node_address("n5") == "fd00::5"
    assert command.calls() == ["show node n5"]


def test_a_node_without_an_address_has_none(command):
    """Slurm prints what it has not as (null), and says on standard output what it does not know."""
    command("scontrol", "echo 'NodeName=n5 NodeAddr=(null)'")
    assert command.client.node_address("n5") is None
    command("scontrol", "echo 'Node n5 not found'; exit 1")
    assert command.client.node_address("n5") is None
    command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        command.client.node_address("n5")
