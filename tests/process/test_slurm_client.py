"""hpc_elastic.slurm.client without a Slurm: what it asks, and how failures come out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from group import eventually

from hpc_elastic import _util
from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.site.nodes import list_drained
from hpc_elastic.slurm import client as slurm_command
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import Preemption, is_refused

REST = "|9:00|N/A|N/A|"
"""The fields of squeue's lines between the node and the reason."""
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


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


def test_a_node_is_not_unknown_where_nobody_can_be_asked(tmp_path):
    """That no scontrol was found does not mean that the node was not."""
    with pytest.raises(SlurmCommandError, match="not found; is Slurm installed here"):
        SlurmClient(env={"PATH": str(tmp_path)}).node("n5")


def test_a_command_that_fails_keeps_what_it_said(command):
    """Exit code and standard error are attributes."""
    command("sinfo", "echo 'no controller' >&2; exit 3")
    with pytest.raises(SlurmCommandError, match="no controller") as caught:
        command.client.partitions()
    assert caught.value.exit_code == 3


@pytest.fixture
def reaped(monkeypatch) -> None:
    """What was killed is reaped, however busy the machine is."""
    monkeypatch.setattr(_util, "_REAP_S", 60.0)


def test_a_command_that_does_not_answer_is_given_up(command, tmp_path, reaped):
    """A dead controller may not hang the run."""
    command("sinfo", "sleep 60")
    client = SlurmClient(0.1, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    with pytest.raises(SlurmCommandError, match="no answer within") as caught:
        client.partitions()
    assert caught.value.exit_code is None
    assert caught.value.argv == ["sinfo", "-h", "-a", "-o", "%R"]


@pytest.mark.parametrize(
    ("line", "timeout_s"),
    [
        ("MessageTimeout=60", 65.0),
        ("messagetimeout = 100 # slow", 105.0),
        ("#MessageTimeout=60", 10.0),
        ("MessageTimeout=5", 10.0),
    ],
)
def test_a_slow_site_is_waited_for_as_its_own_commands_wait(tmp_path, line, timeout_s):
    """Its MessageTimeout, by this machine's slurm.conf; without a line, 10 s."""
    config = tmp_path / "slurm.conf"
    config.write_text(f"ClusterName=a\n{line}\nSlurmctldHost=b\n")
    assert SlurmClient(env={"SLURM_CONF": str(config)}).timeout_s == timeout_s
    assert SlurmClient(7, env={"SLURM_CONF": str(config)}).timeout_s == 7


def test_a_command_that_is_slow_is_said_so_once(command, monkeypatch, caplog):
    """And waited for: the default of 10 s would make this test last."""
    monkeypatch.setattr(slurm_command, "_SLOW_S", 0.1)
    command("sinfo", "sleep 0.5; echo low")
    assert command.client.partitions() == ["low"]
    assert caplog.text.count("has not answered for 0.1 s, and is waited for up to 5 s") == 1


def test_a_command_that_was_hit_before_it_began_is_run_again(command, tmp_path, monkeypatch):
    """Slurm signals every process of a step, the shell that is to ignore that among them."""
    command("sinfo", "echo low")
    hit = f"[ -e {tmp_path}/hit ] || {{ touch {tmp_path}/hit; kill -USR2 $$; }}"
    monkeypatch.setattr(slurm_command, "_IGNORING", ["/bin/sh", "-c", f'{hit}; exec "$@"', "sh"])
    assert list(command.client.partitions()) == ["low"]
    assert (tmp_path / "hit").exists() and len(command.calls()) == 1


def test_what_squeue_may_have_lost_is_asked_for_again(command):
    """Of elements 0, 4, ..., 16 that wait -r shows all but the last; what it shows is better."""
    each = "; ".join(f"echo '7|{i}|7|PENDING|0|{REST}Resources|'" for i in (0, 4, 8, 12))
    held = "echo '7|1|8|PENDING|1||9:00|N/A|N/A|BeginTime|'"
    merged = "echo '7|0-1,4,8,12,16|7|PENDING|0||9:00|N/A|N/A|Resources,BeginTime|'"
    command("squeue", f'case "$*" in *" -r "*) {each}; {held};; *) {merged};; esac')
    tasks = command.client.tasks(["7"])
    assert set(tasks) == {f"7_{i}" for i in (0, 1, 4, 8, 12, 16)} and len(command.calls()) == 2
    assert (tasks["7_1"].restarts, tasks["7_1"].reason) == (1, "BeginTime")


def test_what_does_not_answer_is_killed_with_all_it_started(command, tmp_path, reaped):
    """A site's squeue is a script around the real one; no process and no zombie stays."""
    command("squeue", f"sleep 600 & echo $! $$ > {tmp_path}/pids; wait")
    client = SlurmClient(3, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    with pytest.raises(SlurmCommandError, match=r"`squeue .*-j 7` could not be run: no answer"):
        client.tasks(["7"])
    pids = (tmp_path / "pids").read_text().split()
    eventually(lambda: not any(alive(pid) for pid in pids))  # the grandchild is reaped by init
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
    command(
        "squeue",
        f"echo '7|0|7|RUNNING|0|n1{REST}None|'; echo '8|1|9|RUNNING|0|n2{REST}None|'",
    )
    assert set(command.client.tasks(["7", "8", "7"])) == {"7_0", "8_1"}
    (call,) = command.calls()
    assert call.endswith("-j 7,8")


def test_unreadable_output_is_an_error_of_the_command(command):
    """A plugin's chatter is not taken for tasks."""
    command("squeue", "echo hello")
    with pytest.raises(SlurmCommandError, match="not a line of squeue"):
        command.client.tasks(["7"])


BANNER = "*** Welcome: 24.12 is down, see a|b ***"


@pytest.mark.parametrize(
    ("name", "rows", "query", "answer"),
    [
        ("sinfo", ["gpu", "cpu"], lambda c: c.partitions(), ["gpu", "cpu"]),
        ("sinfo", ["n1|idle"], lambda c: c.each_node(None), {"n1": "idle"}),
        ("squeue", [f"7|0|7|RUNNING|0|n1{REST}None|"], lambda c: list(c.tasks(["7"])), ["7_0"]),
        ("squeue", ["7|/s|/w|a name|"], lambda c: list(c.identities(["7"])), ["7"]),
        ("scontrol", ["MaxArraySize = 9"], lambda c: c.max_array_size(), 9),
        ("sacctmgr", ["a,b"], lambda c: c.offered_qos("me"), {"a", "b"}),
        ("sbatch", ["slurm 24.11.5"], lambda c: c.version("sbatch"), "24.11.5"),
    ],
)
def test_the_banner_of_a_wrapper_is_not_read_as_an_answer(command, name, rows, query, answer):
    """Sites wrap Slurm's commands: lines before and after the answer are not of it."""
    command(name, f"cat <<'END'\n{BANNER}\n" + "\n".join(rows) + f"\n\n{BANNER}\nEND")
    assert query(command.client) == answer


def test_where_jobs_wait_is_squeues_answer(command):
    """A task that was moved, one that may start in two partitions, and a site's banner."""
    command("squeue", "echo 'Slurm 24.11'; echo '7|new'; echo '7|new'; echo '8|a,b'")
    assert command.client.pending_partitions(["7", "8", "7"]) == "a,b,new"
    assert "-t PENDING" in command.calls()[0] and "-j 7,8" in command.calls()[0]
    command("squeue", FORGOTTEN)
    assert command.client.pending_partitions(["7"]) is None


def test_the_qos_of_other_clusters_and_accounts_are_not_offered(command):
    """The accounting of a site may be of several clusters: sacctmgr is asked for ours only."""
    ours, mine = 'grep -qw "cluster=a"', 'grep -qw "account=p"'
    rows = f'echo "$*" | {ours} || echo far; echo "$*" | {mine} || echo other; echo normal'
    command("sacctmgr", rows)
    assert command.client.offered_qos("me", "a", "p") == {"normal"}
    assert command.client.offered_qos("me", "a") == {"normal", "other"}


def test_the_banner_of_a_wrapper_is_no_step_to_kill(command):
    """A version or a date in it looks like a step of another job."""
    command("squeue", "echo 'Slurm 24.11 on 24.12'; echo 7_0.batch; echo 7_0.0")
    command("scancel", "true")
    command.client.kill_steps("7_0")
    assert command.calls()[-1] == "--signal=KILL 7_0.0"


def test_banners_alone_leave_each_job_to_be_asked_for(command):
    """Several jobs that Slurm has purged leave no row; each alone has an error of its own."""
    command("squeue", f'echo Welcome; case "$*" in *7,8*) ;; *) {FORGOTTEN};; esac')
    command("scontrol", FORGOTTEN)
    assert command.client.tasks(["7", "8"]) == {}


@pytest.mark.parametrize(
    "says",
    [
        "Welcome\nscancel: error: Kill job error on job id 7: Invalid job id specified",
        "Job/step already completing or completed\nBye",
    ],
)
def test_the_banner_of_a_wrapper_is_no_error_of_slurm(command, says):
    """A task that has ended need not be cancelled, whatever else is printed."""
    command("scancel", f"echo '{says}' >&2; exit 1")
    command.client.cancel(["7"])


def test_one_forgotten_job_does_not_hide_the_others(command):
    """Should a squeue refuse them all, each is asked for alone."""
    command(
        "squeue",
        'case "$*" in *"-j 7") echo "7|0|7|RUNNING|0|n1|9:00|N/A|N/A|None|";; '
        f"*) {FORGOTTEN};; esac",
    )
    command("scontrol", FORGOTTEN)
    assert set(command.client.tasks(["7", "8"])) == {"7_0"}
    assert command.client.tasks(["8"]) == {}


def test_what_a_cached_squeue_does_not_list_yet_the_controller_does(command):
    """Its answer is older than job 8; job 6 was purged, and is asked for no more."""
    command("squeue", "echo '7|0|7|RUNNING|0|n1|9:00|N/A|N/A|None|'")
    shown = "JobId=9 ArrayJobId=8 ArrayTaskId=1 JobState=RUNNING Reason=None Restarts=2"
    shown += " PreemptTime=2030-01-31T12:00:00 NodeList=n[1-2]"
    command("scontrol", f'case "$*" in *6) {FORGOTTEN};; esac; echo "{shown}"')
    for _ in range(2):
        tasks = command.client.tasks(["6", "7", "8"])
        state = TaskState("8_1", "RUNNING", node="n[1-2]", restarts=2, preempted=True)
        assert set(tasks) == {"7_0", "8_1"} and tasks["8_1"] == state
    assert [call.split()[-1] for call in command.calls() if "show job" in call] == ["6", "8", "8"]
    assert set(command.client.tasks(["7", "8"], once=True)) == {"7_0"}


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
        "squeue",
        f"echo '7|2-5|7|PENDING|0|{REST}Resources|'; echo '7|1|8|RUNNING|0|n1{REST}None|'",
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


def test_the_limit_of_a_task_that_has_started_is_not_lowered(command):
    """NumTasks is refused for it before the limit is set; one that returns gets both at once."""
    command("scontrol", "echo '7_0: Job is no longer pending execution' >&2; exit 1")
    command.client.set_time_limit(["7_0", "7_1"], 290.0)
    command.client.postpone(["7_0"], 10, time_limit_s=3600.0)
    assert command.calls() == [
        "update jobid=7_[0-1] NumTasks=1 TimeLimit=5",
        "update jobid=7_[0] starttime=now+10 TimeLimit=60",
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


def test_a_job_that_may_not_be_requeued_is_permitted_it_first(command, tmp_path):
    """Its owner can allow what --no-requeue has forbidden."""
    allowed = tmp_path / "allowed"
    command(
        "scontrol",
        f'case "$1" in update) touch {allowed};; requeue) [ -e {allowed} ] || '
        "{ echo 'Requested operation is presently disabled' >&2; exit 1; };; esac",
    )
    command.client.requeue("8.1")
    assert command.calls() == ["requeue 8", "update jobid=8 requeue=1", "requeue 8"]


@pytest.mark.parametrize(
    ("words", "refused"), [("Access/permission denied", True), ("down", False)]
)
def test_a_permission_that_is_denied_is_a_refused_requeue(command, words, refused):
    """Some sites let nobody change it: another task takes the place."""
    disabled = "echo 'Requested operation is presently disabled' >&2"
    command("scontrol", f"[ $1 = update ] && echo '{words}' >&2 || {disabled}; exit 1")
    with pytest.raises(SlurmCommandError) as failed:
        command.client.requeue("8")
    assert is_refused(failed.value) is refused


def test_what_a_site_has_to_say_about_a_submission_is_printed(command, tmp_path, capsys):
    """By its job_submit plugin, on standard error, though it takes the job."""
    command("sbatch", "echo 'sbatch: 12 of 40 node hours are left' >&2; echo 7")
    assert command.client.sbatch(tmp_path / "x.sbatch", env=dict(os.environ, PATH=str(tmp_path)))
    assert capsys.readouterr().err == "sbatch: 12 of 40 node hours are left\n"


def test_a_requeue_that_slurm_refuses_is_told_from_other_errors(command):
    """A site can forbid it for good."""
    command("scontrol", "echo 'Requested operation is presently disabled for job 8' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="presently disabled") as refused:
        command.client.requeue("8")
    command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="Unable to contact") as down:
        command.client.requeue("8")
    assert is_refused(refused.value) and not is_refused(down.value)


RECORDS = """
JobId=7 ArrayJobId=7 ArrayTaskId=2-4%3 JobName=a b JobState=PENDING Restarts=0 ExcNodeList=(null)
JobId=9 ArrayJobId=7 ArrayTaskId=1 JobState=PENDING Restarts=2 ExcNodeList=n[1-2]
JobId=8 ArrayJobId=7 ArrayTaskId=0 JobState=RUNNING Restarts=0 ExcNodeList=n1
"""


def test_waiting_tasks_are_kept_away_from_further_nodes(command, tmp_path):
    """Beside those that each avoids already; what runs, and other runs' tasks, are left alone."""
    (tmp_path / "records").write_text(RECORDS)
    command("scontrol", f'[ "$1" = update ] || cat {tmp_path}/records')
    command.client.exclude(["7_0", "7_1", "7_2", "7_4"], ["n9", "n1"])
    assert command.calls() == [
        "-o show job 7",
        "update jobid=7_[2,4] ExcNodeList=n[1,9]",
        "update jobid=7_[1] ExcNodeList=n[1-2,9]",
    ]


def test_nodes_that_are_avoided_already_need_no_call(command, tmp_path):
    """Nor does an empty list, nor a job that Slurm has forgotten."""
    (tmp_path / "records").write_text(RECORDS)
    command("scontrol", f'[ "$1" = update ] || cat {tmp_path}/records')
    command.client.exclude(["7_1"], ["n2"])
    command.client.exclude(["7_1"], [])
    command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    command.client.exclude(["7_1"], ["n9"])
    assert command.calls() == ["-o show job 7"] * 2


ALONE = "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobState={state} ExcNodeList=n[1-3]"


@pytest.mark.parametrize(
    ("host", "rest"), [("n2", "n[1,3]"), ("n9", None)], ids=["avoided", "not avoided"]
)
def test_a_node_that_a_waiting_task_avoids_is_given_back_to_it(command, host, rest):
    """The others that it avoids stay."""
    record = ALONE.format(state="PENDING")
    command("scontrol", f'[ "$1" = update ] || echo "{record}"')
    assert command.client.readmit("7_1", host)
    updates = [] if rest is None else [f"update jobid=7_1 ExcNodeList={rest}"]
    assert command.calls() == ["-o show job 7_1", *updates]


def test_waiting_tasks_get_a_node_back(command, tmp_path):
    """Those that avoid it, in one call for all that avoid the same nodes."""
    (tmp_path / "records").write_text(RECORDS)
    command("scontrol", f'[ "$1" = update ] || cat {tmp_path}/records')
    command.client.exclude(["7_0", "7_1", "7_2", "7_4"], (), but=["n2"])
    assert command.calls() == ["-o show job 7", "update jobid=7_[1] ExcNodeList=n1"]


def test_a_task_that_runs_can_not_be_given_a_node(command):
    """Slurm changes that of waiting tasks only."""
    record = ALONE.format(state="RUNNING")
    command("scontrol", f'[ "$1" = update ] || echo "{record}"')
    assert not command.client.readmit("7_1", "n2")
    assert command.calls() == ["-o show job 7_1"]


@pytest.mark.parametrize(
    ("state", "is_up"),
    [
        *[(s, True) for s in ("IDLE", "MIXED+DRAIN", "ALLOCATED+COMPLETING", "SOMETHING_NEW")],
        *[(s, False) for s in ("DOWN*", "IDLE*", "DOWN+NOT_RESPONDING", "IDLE+POWERED_DOWN")],
    ],
)
def test_a_node_is_up_by_its_state(command, state, is_up):
    """Not while Slurm does not hear it."""
    command("scontrol", f"echo 'NodeName=n1 State={state} ThreadsPerCore=1'")
    assert command.client.node("n1").is_up is is_up
    assert command.client.node("n1").is_off is (state == "IDLE+POWERED_DOWN")


def test_a_node_that_slurm_does_not_know_is_not_up(command):
    """It was taken out of the cluster."""
    command("scontrol", "echo 'Node n1 not found'; echo 'Node n1 not found' >&2; exit 1")
    assert not command.client.node("n1").is_up


def test_records_that_can_not_be_read_are_slurms_failure(command):
    """Who asks is prepared for that."""
    command("scontrol", "echo 'JobId=7 JobState=PENDING ExcNodeList=n[1-'")
    with pytest.raises(SlurmCommandError, match="scontrol"):
        command.client.exclude(["7"], ["n9"])


def test_a_script_is_submitted_again_for_one_element(command, tmp_path):
    """Without the variables of the job around it, and not to start before it is released."""
    command("sbatch", f'env > {tmp_path}/env; echo "Z;cluster" | tr Z 9')
    command("squeue", "exit 0")
    inside = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MINE": "1", "SLURM_CONF": "/c"}
    node = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3", "SLURM_MEM_PER_NODE": "1"}
    client = SlurmClient(5, env={**inside, **node})
    assert client.resubmit("/s/array-0.sbatch", 4, exclude=["n2", "n1"]) == "9"
    assert client.resubmit("/s/array-1.sbatch", None) == "9"
    assert [call for call in command.calls() if call.startswith("--parsable")] == [
        "--parsable --begin=now+600 --mail-type=NONE --array=4 --exclude=n[1-2] /s/array-0.sbatch",
        "--parsable --begin=now+600 --mail-type=NONE /s/array-1.sbatch",
    ]
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert inside.items() <= seen.items()
    assert not (node.keys() | {"LC_ALL", "SLURM_TIME_FORMAT"}) & seen.keys()


def test_what_a_preemption_is_like_is_asked_at_submission(command, caplog):
    """Where Slurm does not answer, its defaults are assumed, and the log says so."""
    command(
        "scontrol",
        'case "$*" in *config) echo "KillWait = 7 sec"; '
        'echo "PreemptType = preempt/partition_prio";; '
        "*) echo PartitionName=low Default=YES GraceTime=45 PreemptMode=CANCEL;; esac",
    )
    found = command.client.preemption(None)
    assert (found.grace_s, found.kill_wait_s) == (45, 7)
    assert [partition.name for partition in found.partitions] == ["low"]
    assert not caplog.records
    command("scontrol", 'echo "PreemptType = preempt/qos"; echo PartitionName=low GraceTime=45')
    command("sacctmgr", "echo 'standby||requeue|00:02:00||'")
    for qos, grace_s in {None: 0, "standby": 120, "other": 0}.items():
        assert command.client.preemption("low", qos).grace_s == grace_s
    assert not caplog.records
    command("sacctmgr", "exit 1")
    assert command.client.preemption("low", "standby").grace_s == 0
    assert "the grace of QOS standby is unknown" in caplog.text
    caplog.clear()
    command("scontrol", "exit 1")
    assert command.client.preemption("low") == Preemption()
    assert len(caplog.records) == 1


def test_the_address_of_a_node_is_slurms(command):
    """Not its host name, which stands beside it."""
    command("scontrol", "echo '   NodeAddr=fd00::5 NodeHostName=n5 Version=22.05'")
    assert command.client.node("n5").address == "fd00::5"
    assert command.calls() == ["show node n5"]


def test_a_node_without_an_address_has_none(command):
    """Slurm prints what it has not as (null), and says on standard output what it does not know."""
    command("scontrol", "echo 'NodeName=n5 NodeAddr=(null)'")
    assert command.client.node("n5").address is None
    command("scontrol", "echo 'Node n5 not found'; exit 1")
    assert command.client.node("n5").address is None
    command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        command.client.node("n5")


def test_each_batch_script_of_the_user_is_listed_once(command):
    """Jobs without a script, such as those of salloc, have no path."""
    rows = ["7|0|/a/array-0.sbatch", "8|N/A|(null)", "7|1-3|/a/array-0.sbatch", "9|N/A|/b c/x.sh"]
    command("squeue", "\n".join(["cat <<'E'", "Welcome", *rows, "E"]))
    assert command.client.batch_scripts() == [Path("/a/array-0.sbatch"), Path("/b c/x.sh")]
    assert command.calls() == ["-h --me -o %F|%K|%o"]


ALIVE = """for job; do :; done
for i in 0 1 2 3; do echo "JobId=$job ArrayJobId=$job ArrayTaskId=$i JobState=PENDING"; done"""
"""What scontrol shows of a job that is the last word."""


def test_a_job_is_found_by_its_batch_script(command):
    """That of an array element beside those that are known; the newest."""
    rows = ["7|0-3|/a b/x.sh", "8|2|/a b/x.sh", "12|2|/a b/x.sh", "13|N/A|/a b/x.sh.old", "9|1|/c"]
    command("squeue", "\n".join(["cat <<'E'", *rows, "E"]))
    command("scontrol", ALIVE)
    find = command.client.find_job
    assert (find(Path("/a b/x.sh")), find(Path("/a b/x.sh"), 2, besides=["7", "12"])) == ("12", "8")
    assert find(Path("/a b/x.sh"), 3) is None and find(Path("/d")) is None


@pytest.mark.parametrize(
    "shown",
    ["echo 'JobId=7 JobState=CANCELLED'", "echo 'Invalid job id specified' >&2; exit 1",
     "echo 'JobId=9 ArrayJobId=7 ArrayTaskId=2 JobState=FAILED'"],
)  # fmt: skip
def test_a_job_that_only_a_cached_squeue_lists_is_not_adopted(command, shown):
    """It was of an earlier submission in the same directory, and has been cancelled."""
    command("squeue", "echo '7|2|/a/x.sh'")
    command("scontrol", shown.replace("Invalid", "slurm_load_jobs error: Invalid"))
    assert command.client.find_job(Path("/a/x.sh"), 2) is None
    command("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmCommandError):
        command.client.find_job(Path("/a/x.sh"), 2)


def test_a_replacement_whose_answer_was_lost_is_not_submitted_again(command):
    """A slow sbatch would be ended and repeated, and each of its jobs take a node."""
    command("squeue", "echo '7|0-3|/a/x.sh'; echo '8|2|/a/x.sh'")
    command("scontrol", ALIVE)
    command("sbatch", "echo 9")
    assert command.client.resubmit(Path("/a/x.sh"), 2, known=["7"]) == "8"
    assert command.client.resubmit(Path("/a/x.sh"), 2, known=["7", "8"]) == "9"


def test_each_node_is_listed_once_with_its_state(command):
    """sinfo has a line for each partition of a node; marks behind a state are kept."""
    command("sinfo", "printf 'n1|idle\\nn2|allocated*\\nn1|idle\\n'")
    assert command.client.each_node("low,high") == {"n1": "idle", "n2": "allocated*"}
    assert command.client.each_node(None)
    assert command.calls() == ["-h -N -p low,high -o %N|%T", "-h -N -o %N|%T"]


@pytest.mark.parametrize("state", ["draining", "drained", "drained*", "drng", "failing"])
def test_drained_nodes_are_found_among_those_of_a_run(command, state):
    """sinfo is called for these nodes alone."""
    command("sinfo", f"printf 'n1|{state}\\nn2|allocated\\nn3|mixed~\\n'")
    assert list_drained(command.client, ["n1", "n2", "n3"]) == {"n1": state}
    assert command.calls() == ["-h -N -a -n n1,n2,n3 -o %N|%T"]


# ---- the cluster as a whole


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


def test_how_long_jobs_ran_is_asked_of_sacct_and_else_of_squeue(command, monkeypatch):
    """A forecast does without: a failure is no error, nor is a database that does not answer."""
    monkeypatch.setattr(slurm_command, "_HISTORY_S", 2.0)
    rows = "echo '7|COMPLETED|eve|gpu|1:00|10:00|1900000000'"
    for sacct, squeue, source in (
        (f"[ $SLURM_TIME_FORMAT = %s ] && {rows}", "exit 1", "sacct"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", rows, "squeue"),
        ("exec sleep 60", rows, "squeue"),
        ("exit 1", "exit 1", "squeue"),
    ):
        command("sacct", sacct)
        command("squeue", squeue)
        found, name = command.client.job_runs()
        assert name == source
        assert [run.used_s for run in found] == ([60.0] if rows in sacct + squeue else [])
