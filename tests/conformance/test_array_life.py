"""Arrays and jobs from submission to start: their environment, and why they wait."""

import os
import subprocess
import time
from dataclasses import replace

import pytest
from backends import eventually, parse_env

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment
from hpc_elastic.slurm.parsing import Preemption, is_refused, parse_partitions

SLEEP = "sleep 600"
OF_AN_ELEMENT = {
    *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST"),
    *("SLURM_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_CPUS_PER_NODE"),
    *("SLURM_TASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS_ON_NODE", "SLURM_NODEID"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_JOB_USER"),
    *("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP", "SLURM_JOB_UID"),
    *("SLURM_TOPOLOGY_ADDR", "SLURM_TASK_PID", "SLURM_CLUSTER_NAME", "SLURM_CONF", "ENVIRONMENT"),
    *("SLURMD_NODENAME", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_GID"),
}


def test_each_element_is_told_what_it_is(backend, tmp_path):
    """Every variable of Slurm's is there; the last element has the array's own id."""
    told = f"{tmp_path}/$SLURM_ARRAY_TASK_ID"
    line = f"env > {told}.part; mv {told}.part {told}"
    size = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--exclusive", "--mem=0"]
    job = backend.submit(line, "--array=2-4%2", "--job-name=told", *size)
    eventually(lambda: {p.name for p in tmp_path.iterdir()} == {"2", "3", "4"})
    told = {i: parse_env(tmp_path / str(i)) for i in (2, 3, 4)}
    wanted = OF_AN_ELEMENT | ({"SLURM_NODE_ALIASES"} if backend.release < (24, 11) else set())
    for index, env in told.items():
        assert env.keys() >= wanted, wanted - env.keys()
        assert "SLURM_RESTART_COUNT" not in env
        assert env.get("SLURM_STEP_ID") == ("-5" if backend.release >= (26, 5) else None)
        task = SlurmEnvironment.from_env(env)
        assert task.task_name == f"{job}_{index}"
        assert (task.restart_count, task.step_id) == (0, None)
        assert task.hosts == [task.node_name] and task.cpus_on_node == 8
        array = [env[f"SLURM_ARRAY_TASK_{what}"] for what in ("COUNT", "MIN", "MAX", "STEP")]
        assert array == ["3", "2", "4", "1"]
        assert (env["SLURM_JOB_NAME"], env["SLURM_JOB_CPUS_PER_NODE"]) == ("told", "8")
        assert env["HOSTNAME"] == env["SLURMD_NODENAME"]
    ids = [env["SLURM_JOB_ID"] for env in told.values()]
    assert ids[2] == job and len(set(ids)) == 3


def test_directives_are_read_from_the_script_and_the_command_line_goes_before(backend, tmp_path):
    """With the quoting of sbatch: a backslash escapes in single quotes, too."""
    script = tmp_path / "job.sh"
    lines = [
        "#!/bin/bash", r"#SBATCH --job-name='a b\'c' --output=/dev/null # a note",
        "#SBATCH --partition=cancel", "# no directive", "#SBATCH -t 7", "true", "#SBATCH --hold",
    ]  # fmt: skip
    script.write_text("\n".join(lines))
    job = backend.run("sbatch", "--parsable", "--partition=low", "--begin=now+1hour", str(script))
    shown = backend.run("squeue", "-h", "-j", job.stdout.strip(), "-o", "%j|%P|%l|%o").stdout
    assert shown.strip() == f"a b'c|low|7:00|{script}"
    assert backend.wait_reason(job.stdout.strip(), "BeginTime").time_left_s == 420


def test_a_script_may_come_through_a_pipe(backend, tmp_path):
    """sbatch without arguments reads it from its standard input."""
    text = f"#!/bin/sh\n#SBATCH --output=/dev/null\necho here > {tmp_path}/file\n"
    done = subprocess.run(
        ["sbatch"], input=text, env=backend.env, cwd="/tmp", text=True, capture_output=True
    )
    assert done.stdout.startswith("Submitted batch job "), done.stderr
    eventually((tmp_path / "file").exists)


def test_no_more_elements_run_than_the_array_allows(backend):
    """The next one starts when another has ended; those that wait have a reason."""
    job = backend.submit(SLEEP, "--array=0-4%2")
    client = backend.client

    def running():
        return sorted(n for n, t in client.tasks([job]).items() if t.state == "RUNNING")

    eventually(running, lambda names: names == [f"{job}_0", f"{job}_1"])
    assert client.tasks([job])[f"{job}_4"].reason == "JobArrayTaskLimit"
    client.cancel([f"{job}_0"])
    eventually(running, lambda names: names == [f"{job}_1", f"{job}_2"])


def test_squeue_shows_waiting_elements_as_one_line_or_apart(backend):
    """Without -r one line stands for all; with it each has its own."""
    job = backend.submit(SLEEP, "--array=0-3,7%2", "--hold")
    line = ["squeue", "-h", "-j", job, "-o", "%i %A %F %K %t %r"]
    joined = backend.run(*line).stdout.splitlines()
    assert joined == [f"{job}_[0-3,7%2] {job} {job} 0-3,7%2 PD JobHeldUser"]
    apart = backend.run("squeue", "-h", "-r", "-j", job, "-o", "%i").stdout.split()
    assert apart == [f"{job}_{i}" for i in (0, 1, 2, 3, 7)]


def test_a_job_that_does_not_fit_waits_for_resources_and_others_for_it(backend):
    """Exclusive jobs have their nodes alone; of those that wait, the first has its own reason."""
    first = backend.submit(SLEEP, "--array=0-3", "--exclusive")
    for i in range(4):
        backend.wait_state(f"{first}_{i}", "RUNNING")
    assert len({backend.state(f"{first}_{i}").node for i in range(4)}) == 4
    waits = backend.submit(SLEEP, "--exclusive")
    behind = backend.submit(SLEEP, "--exclusive")
    backend.wait_reason(waits, "Resources")
    backend.wait_reason(behind, "Priority")
    backend.client.cancel([f"{first}_2"])
    backend.wait_state(waits, "RUNNING")
    assert backend.state(behind).state == "PENDING"


def test_jobs_share_a_node_as_far_as_its_cpus_go(backend):
    """Two of four CPUs each fit on a node of eight, the third does not."""
    size = ["--nodelist=node1", "--cpus-per-task=4"]
    jobs = [backend.submit(SLEEP, *size) for _ in range(3)]
    for job in jobs[:2]:
        backend.wait_state(job, "RUNNING")
    backend.wait_reason(jobs[2], "Resources")


def test_a_held_job_waits_until_it_is_released(backend):
    """By its submission or by scontrol."""
    job = backend.submit("sleep 600", "--hold")
    backend.wait_reason(job, "JobHeldUser")
    backend.run("scontrol", "release", job)
    backend.wait_state(job, "RUNNING")
    later = backend.submit("sleep 600", "--begin=now+1hour")
    backend.run("scontrol", "hold", later)
    held = eventually(lambda: backend.state(later), lambda s: s.reason.startswith("JobHeld"))
    assert held.reason == "JobHeldUser" or os.getuid() == 0  # root is an administrator


def test_a_job_waits_for_its_time_and_for_other_jobs(backend):
    """BeginTime until it is released; Dependency until the other has begun."""
    job = backend.submit(SLEEP, "--begin=now+1hour")
    state = backend.wait_reason(job, "BeginTime")
    assert state.starts_in_s == pytest.approx(3600, abs=30)
    after = backend.submit(SLEEP, f"--dependency=after:{job}")
    backend.wait_reason(after, "Dependency")
    backend.client.release(job)
    backend.wait_state(job, "RUNNING")
    backend.wait_state(after, "RUNNING")


def test_a_closed_partition_starts_nothing(backend):
    """What runs there goes on."""
    runs = backend.submit(SLEEP)
    backend.wait_state(runs, "RUNNING")
    backend.run("scontrol", "update", "partitionname=low", "state=down")
    try:
        job = backend.submit(SLEEP)
        backend.wait_reason(job, "PartitionDown")
        assert backend.state(runs).state == "RUNNING"
    finally:
        backend.run("scontrol", "update", "partitionname=low", "state=up")
    backend.wait_state(job, "RUNNING")


def test_jobs_keep_to_their_nodes(backend):
    """Those that they must have, and those that they must not."""
    wanted = backend.submit(SLEEP, "--nodelist=node3")
    others = backend.submit(SLEEP, "--nodes=2", "--exclude=node[1-2]", "--exclusive")
    backend.wait_state(wanted, "RUNNING")
    backend.wait_reason(others, "Resources")
    assert backend.state(wanted).node == "node3"
    held = backend.submit(SLEEP, "--array=0-1", "--hold")
    backend.client.exclude([f"{held}_1"], ["node2", "node4"])
    assert backend.shown(f"{held}_1")["ExcNodeList"] == "node[2,4]"
    assert backend.shown(f"{held}_0")["ExcNodeList"] == "(null)"
    assert backend.client.readmit(f"{held}_1", "node2")
    assert backend.shown(f"{held}_1")["ExcNodeList"] == "node4"
    assert backend.client.readmit(f"{held}_1", "node4")
    assert backend.shown(f"{held}_1")["ExcNodeList"] == "(null)"
    assert not backend.client.readmit(wanted, "node4")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--partition=nope"], "Invalid partition name specified"),
        (["--nodelist=node77"], "Invalid node name specified"),
        (["--constraint=fast"], "Invalid feature specification"),
        (["--array=0-99999"], "Invalid job array specification"),
    ],
)
def test_impossible_requests_are_refused_with_slurms_message(backend, options, words):
    """The exit code is 1, and the words are those that the product explains."""
    done = backend.run("sbatch", *options, "--wrap=true", check=False)
    assert done.returncode == 1
    assert words in done.stderr and done.stderr.startswith("sbatch: error: ")


def test_options_that_are_not_known_end_a_command(backend):
    """With the exit code of Slurm's."""
    for command, code in {
        "sbatch": 255,
        "srun": 255,
        "squeue": 1,
        "scancel": 1,
        "sinfo": 1,
    }.items():
        done = backend.run(command, "--no-such-option", check=False)
        assert (done.returncode, bool(done.stderr)) == (code, True), command
        assert "--no-such-option" in done.stderr
    assert backend.run("scontrol", "nonsense", check=False).returncode == 1


def test_unknown_jobs_and_nodes_are_told_apart_from_errors(backend):
    """squeue and scontrol fail, scancel does not; the product's client knows what that means."""
    client = backend.client
    assert client.tasks(["999999"]) == {} == client.tasks(["999998", "999999"])
    for argv in (["squeue", "-j", "999999"], ["scontrol", "requeue", "999999"]):
        done = backend.run(*argv, check=False)
        assert done.returncode == 1 and "Invalid job id specified" in done.stderr
    assert backend.run("scancel", "999999", check=False).returncode == 0
    assert client.node("no-such-node").address is None
    assert client.node("node2").address is not None
    with pytest.raises(SlurmCommandError, match="Invalid job id"):
        client.release("999999_1")
    client.postpone(["999999", "999999_1"], 60)


def test_the_cluster_tells_its_limits(backend):
    """As far as the product asks."""
    client = backend.client
    assert client.max_array_size() == 1001
    assert set(client.partitions()) - {"short"} == {"low", "cancel", "high"}  # the sandbox has it
    for partition in (None, "low"):
        told = client.preemption(partition)
        assert replace(told, partitions=()) == Preemption(backend.grace_s, backend.grace_s)
        assert [(p.name, p.num_nodes) for p in told.partitions] == [("low", 4)]
    assert client.preemption("high").grace_s == 0
    partitions = parse_partitions(backend.run("scontrol", "-o", "show", "partition").stdout)
    modes = {partition.name: partition.preempt_mode for partition in partitions}
    modes.pop("short", None)
    assert modes == {"low": "REQUEUE", "cancel": "CANCEL", "high": "OFF"}
    assert set(backend.cluster.node_states().values()) == {"idle"}
    assert backend.run("sacct", check=False).returncode == 1


def test_a_job_without_requeue_is_requeued_once_that_is_permitted(backend):
    """Slurm refuses, until its owner allows it; the product's client does both."""
    job = backend.submit(SLEEP, "--no-requeue")
    backend.wait_state(job, "RUNNING")
    done = backend.run("scontrol", "requeue", job, check=False)
    assert done.returncode == 1 and "Requested operation is presently disabled" in done.stderr
    backend.client.requeue(job)
    assert backend.wait_state(job, "PENDING").restarts == 1


def test_only_a_task_that_waits_can_be_postponed(backend):
    """A job that runs, or has ended, is an error that names its state."""
    job = backend.submit(SLEEP)
    backend.wait_state(job, "RUNNING")
    argv = ["scontrol", "update", f"jobid={job}", "starttime=now"]
    done = backend.run(*argv, check=False)
    assert done.returncode == 1 and "no longer pending execution" in done.stderr
    backend.client.cancel([job])
    backend.wait_state(job, "CANCELLED")
    done = backend.run(*argv, check=False)
    assert done.returncode == 1 and "already finished" in done.stderr


def test_elements_are_requeued_by_one_command(backend):
    """Also where one of them waits already: it is not requeued once more."""
    job = backend.submit(SLEEP, "--array=0-2")
    names = [f"{job}_{index}" for index in range(3)]
    for name in names:
        backend.wait_state(name, "RUNNING")
    backend.client.requeue(names[1])
    backend.wait_reason(names[1], "BeginTime")
    backend.client.requeue_all(names)
    for name in names:
        assert backend.wait_reason(name, "BeginTime").restarts == 1


@pytest.mark.long
def test_a_requeue_is_held_unless_the_task_says_when_it_may_start(backend):
    """It waits for its time; meanwhile another requeue fails, since it is pending."""
    job = backend.submit(SLEEP, "--array=0-1")
    for name in (f"{job}_0", f"{job}_1"):
        backend.wait_state(name, "RUNNING")
    backend.run("scontrol", "requeue", f"{job}_0")
    again = backend.run("scontrol", "requeue", f"{job}_0", check=False)
    assert again.returncode == 1 and "Job is pending execution" in again.stderr
    held = backend.wait_reason(f"{job}_0", "BeginTime")
    assert (held.state, held.restarts) == ("PENDING", 1)
    assert held.starts_in_s == pytest.approx(backend.hold_s, abs=8)
    assert backend.state(f"{job}_1").state == "RUNNING"
    backend.client.requeue(f"{job}_1")
    backend.client.postpone([f"{job}_1"], 4)
    began = time.time()
    backend.wait_state(f"{job}_1", "RUNNING")
    assert time.time() - began < backend.hold_s - 3
    backend.client.release(f"{job}_0")
    assert backend.wait_state(f"{job}_0", "RUNNING").restarts == 1


def test_the_time_limit_of_a_task_that_waits_is_its_owners(backend):
    """Also upwards; that of a task which has started stays as it is."""
    size = ["--nodes=1", "--ntasks=1", "--exclusive"]
    job = backend.submit(SLEEP, "--array=0-5", "--time=30", *size)
    for index in range(4):
        backend.wait_state(f"{job}_{index}", "RUNNING")
    assert not {"idle", "planned"} & {*backend.client.each_node(None).values()}
    backend.client.set_time_limit([f"{job}_{index}" for index in range(6)], 7 * 60.0)
    limits = {index: backend.state(f"{job}_{index}").time_left_s for index in range(6)}
    assert limits[4] == limits[5] == 7 * 60.0
    assert min(limits[index] for index in range(4)) > 28 * 60.0
    backend.client.postpone([f"{job}_5"], 600, time_limit_s=3600.0)
    assert backend.state(f"{job}_5").time_left_s == 3600.0
    waiting = [each for each in backend.client.queue(only_waiting=True) if each.job == job]
    assert waiting and waiting[0].priority > 0


def test_a_task_that_has_ended_can_be_requeued(backend):
    """For as long as Slurm knows it."""
    job = backend.submit("false")
    backend.wait_state(job, "FAILED")
    try:
        backend.client.requeue(job)
    except SlurmCommandError as e:
        assert is_refused(e), e
        pytest.fail("it could be, when this was written")
    assert eventually(lambda: backend.state(job), lambda s: s.state == "PENDING").restarts == 1


@pytest.mark.long
def test_logs_are_kept_where_that_is_asked_for(backend, tmp_path):
    """Else the attempt that follows truncates what the one before has written."""
    line = "echo attempt ${SLURM_RESTART_COUNT:-0}; sleep 600"
    jobs = {
        mode: backend.submit(
            line, f"--open-mode={mode}", f"--output={tmp_path}/{mode}.%A_%a", "--array=1"
        )
        for mode in ("append", "truncate")
    }
    logs = {mode: tmp_path / f"{mode}.{job}_1" for mode, job in jobs.items()}
    for mode, job in jobs.items():
        eventually(lambda mode=mode: logs[mode].exists() and "0" in logs[mode].read_text())
        backend.client.requeue(f"{job}_1")
        backend.wait_state(f"{job}_1", "PENDING")
        backend.client.release(f"{job}_1")
        eventually(lambda mode=mode: "attempt 1" in logs[mode].read_text())
    assert "attempt 0" in logs["append"].read_text()
    assert "attempt 0" not in logs["truncate"].read_text()


def test_a_client_that_is_used_as_the_product_uses_it_sees_all_elements(backend):
    """None of those that wait is lost, whichever were cancelled."""
    job = backend.submit(SLEEP, "--array=0-99", "--begin=now+1hour")
    client = SlurmClient(30, env=backend.env)
    client.cancel([f"{job}_{i}" for i in range(0, 100, 2)], pending_only=True)
    seen = {name for name, task in client.tasks([job]).items() if task.state == "PENDING"}
    assert seen == {f"{job}_{i}" for i in range(1, 100, 2)}
