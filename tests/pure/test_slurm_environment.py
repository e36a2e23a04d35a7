"""hpc_elastic.slurm.environment: the SLURM_* variables in both directions."""

from __future__ import annotations

import pytest

from hpc_elastic.errors import SlurmEnvironmentError
from hpc_elastic.slurm.environment import (
    SlurmEnvironment,
    as_array_task,
    as_worker,
    for_commands,
    for_sbatch,
    for_submission,
    granted_gpus,
    listed_gpus,
    of_slot,
    outside,
)

STEP = {
    "SLURM_JOB_ID": "50",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n3",
    "SLURM_CPUS_ON_NODE": "8",
}


def of(**variables):
    """Return the environment of a job step with these variables changed."""
    return SlurmEnvironment.from_env({**STEP, **variables})


def test_a_task_reads_back_what_a_local_launch_sets():
    """Both directions agree."""
    env = as_array_task(40, 3, node_name="node3", cpus=2, restart_count=1)
    task = SlurmEnvironment.from_env({"PATH": "/bin", **env})
    assert task.task_name == "40_3"
    assert (task.array_job_id, task.array_task_id, task.restart_count) == (40, 3, 1)
    assert (task.node_name, task.hosts) == ("node3", ["node3"])
    assert (task.node_id, task.num_nodes, task.cpus_on_node, task.step_id) == (0, 1, 2, 0)
    assert task.end_time_s is None


def test_each_local_task_is_a_job_of_its_own():
    """As in a real array, only the array's job id is shared."""
    ids = {as_array_task(40, i, node_name="x", cpus=1)["SLURM_JOB_ID"] for i in range(5)}
    assert len(ids) == 5


def test_a_node_of_a_job_step_is_named_by_job_and_node():
    """Outside of arrays the nodes of a step are the tasks."""
    assert of().task_name == "50.1"
    assert (of().array_job_id, of().array_task_id) == (None, None)


def test_the_nodes_of_a_step_come_before_those_of_its_job():
    """A step may use a part of the allocation."""
    assert (of().hosts, of().num_nodes) == (["n2", "n3"], 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_JOB_ID": "51"},
        {"SLURM_STEP_ID": "7"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_CLUSTER_NAME": "another"},
        {"SLURM_STEP_LAUNCHER_PORT": "40002"},
    ],
)
def test_no_two_steps_are_taken_for_one(changed):
    """Job ids recur, on another cluster for one, and records of old steps are kept for a while."""
    assert of(**changed).step_identity != of().step_identity
    assert of(SLURM_NODEID="0").step_identity == of().step_identity


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "-5"}])
def test_a_batch_script_sees_the_nodes_of_its_job(step):
    """It is no step, whatever 26.05 calls it."""
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    task = SlurmEnvironment.from_env(batch | step)
    assert (task.hosts, task.num_nodes, task.step_id) == (["n1", "n2", "n3", "n4"], 4, None)


def test_an_array_task_ignores_the_step_it_was_submitted_from():
    """The call of sbatch hands on the variables of the shell it is called in."""
    task = of(SLURM_ARRAY_JOB_ID="60", SLURM_ARRAY_TASK_ID="0", SLURM_JOB_NODELIST="n4")
    assert task.hosts == ["n4"]


def test_restarts_are_zero_before_the_first_requeue():
    """Slurm sets the variable from the first requeue on."""
    assert of().restart_count == 0
    assert of(SLURM_RESTART_COUNT="2").restart_count == 2


def test_the_end_time_is_an_epoch_time():
    """Newer Slurm sets it."""
    assert of(SLURM_JOB_END_TIME="1700000000").end_time_s == 1700000000


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("SLURM_NODEID", "x", "node_id"),
        ("SLURM_NODEID", "-1", "node_id"),
        ("SLURM_CPUS_ON_NODE", "", "cpus_on_node"),
        ("SLURM_STEP_NUM_NODES", "2(x2)", "num_nodes"),
        ("SLURM_STEP_NODELIST", "n[1-", "hosts"),
        ("SLURM_STEP_NODELIST", "", "hosts"),
        ("SLURM_RESTART_COUNT", "many", "restart_count"),
        ("SLURM_JOB_END_TIME", "soon", "end_time_s"),
        ("SLURMD_NODENAME", "", "node_name"),
    ],
)
def test_a_malformed_variable_is_named_with_its_value(variable, value, read):
    """The error says what was expected."""
    with pytest.raises(SlurmEnvironmentError) as caught:
        getattr(of(**{variable: value}), read)
    assert f"{variable} is {value!r}, expected a" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "read"),
    [
        ("SLURM_NODEID", "node_id"),
        ("SLURM_NODEID", "task_name"),
        ("SLURM_CPUS_ON_NODE", "cpus_on_node"),
        ("SLURMD_NODENAME", "node_name"),
    ],
)
def test_a_missing_variable_is_named(variable, read):
    """Only when somebody asks for it."""
    task = SlurmEnvironment.from_env({k: v for k, v in STEP.items() if k != variable})
    with pytest.raises(SlurmEnvironmentError, match=f"{variable} is not set"):
        getattr(task, read)


def test_half_an_array_task_is_an_error():
    """The index is not made up."""
    with pytest.raises(SlurmEnvironmentError, match="SLURM_ARRAY_TASK_ID is not set"):
        _ = of(SLURM_ARRAY_JOB_ID="60").task_name


def test_outside_of_slurm_the_first_look_says_so():
    """A process that Slurm did not start has no job id."""
    with pytest.raises(SlurmEnvironmentError, match="SLURM_JOB_ID is not set"):
        SlurmEnvironment.from_env({"PATH": "/bin"})


def test_the_environment_of_a_submission_has_no_trace_of_a_job_around_it():
    """But it still finds the cluster."""
    env = {
        **STEP,
        "SLURM_RESTART_COUNT": "3",
        "SLURM_CONF": "/c",
        "PATH": "/bin",
        "SBATCH_QOS": "q",
    }
    assert outside(env) == {"SLURM_CONF": "/c", "PATH": "/bin", "SBATCH_QOS": "q"}


@pytest.mark.parametrize("of", [for_sbatch, for_submission])
def test_no_option_of_the_shell_reaches_sbatch(of):
    """sbatch takes SBATCH_TIMELIMIT before the script's own line; the job's srun, SRUN_OUTPUT."""
    shell = {
        **{"SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "0-99"},
        **{"SALLOC_PARTITION": "x", "SRUN_OUTPUT": "/o", "SLURM_TIMELIMIT": "1"},
    }
    assert of({**shell, "PATH": "/bin", "SLURM_CONF": "/c"}) == {"PATH": "/bin", "SLURM_CONF": "/c"}


def test_the_environment_of_commands_does_not_change_what_they_print():
    """A user's SQUEUE_FORMAT is for his eyes."""
    env = {
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "R",
        "SCANCEL_INTERACTIVE": "1",
        "SLURM_BITSTR_LEN": "64",
        "LC_ALL": "de_DE.UTF-8",
        "SLURM_CONF": "/c",
    }
    assert for_commands(env) == {
        "SLURM_CONF": "/c",
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "standard",
        "SLURM_BITSTR_LEN": "0",
    }


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1", ["0", "1"]),
        (" 2 , 0", ["2", "0"]),
        ("GPU-8932f937,MIG-1a2b", ["GPU-8932f937", "MIG-1a2b"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["1"]),
        ("NoDevFiles", []),
    ],
)
def test_devices_are_listed_as_cuda_reads_them(text, devices):
    """What follows the first entry that is no device does not count."""
    assert listed_gpus(text) == devices


@pytest.mark.parametrize(
    ("env", "granted"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, ["0", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}, ["1"]),
        ({"SLURM_GPUS_ON_NODE": "2"}, ["?", "?"]),
    ],
)
def test_the_gpus_that_were_granted(env, granted):
    """CUDA's variable says which, or else Slurm's how many; not every site sets the former."""
    assert granted_gpus(env) == granted


def worker_variables(rank: int, local_rank: int, node: int, here: int) -> dict[str, str]:
    """torch's variables of one of five workers on three nodes, in a task of Slurm's."""
    numbers = {
        "RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": here,
        "WORLD_SIZE": 5, "GROUP_WORLD_SIZE": 3,
    }  # fmt: skip
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "41", "HOME": "/h"}
    return {**task, **{name: str(number) for name, number in numbers.items()}}


def test_a_worker_finds_its_group_in_slurms_variables():
    """As one srun with a task for each worker would set them; the task's own are kept."""
    env = as_worker(worker_variables(3, 1, 1, 2), "n3,n[1-2]", "2(x2),1")
    expected = {
        "PROCID": "3", "LOCALID": "1", "NODEID": "1", "NTASKS": "5", "NPROCS": "5", "NNODES": "3",
        "JOB_NUM_NODES": "3", "JOB_NODELIST": "n3,n[1-2]", "TASKS_PER_NODE": "2(x2),1",
        "LAUNCH_NODE_IPADDR": "n3", "GTIDS": "2,3", "JOB_ID": "41",
    }  # fmt: skip
    assert {name: env[f"SLURM_{name}"] for name in expected} == expected
    assert "SLURM_NTASKS_PER_NODE" not in env, "it differs"
    assert env["HPC_ELASTIC_TASK_SLURM_PROCID"] == "0" and env["HOME"] == "/h"
    assert env["HPC_ELASTIC_TASK_SLURM_NTASKS"] == "1"


@pytest.mark.parametrize(
    ("granted", "of_workers"),
    [
        ("MIG-1,MIG-2,MIG-3", ["MIG-1", "MIG-2", "MIG-3", "MIG-1"]),
        ("MIG-1", ["MIG-1"] * 4),
        ("0,1", ["0,1"] * 4),
        ("0,MIG-1", ["0,MIG-1"] * 4),
    ],
)
def test_each_worker_has_a_slice_of_mig_of_its_own(granted, of_workers):
    """CUDA shows a process the first one only. Whole GPUs are numbered by LOCAL_RANK."""
    env = {"CUDA_VISIBLE_DEVICES": granted, "HOME": "/h"}
    assert [of_slot(env, slot, 4)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == of_workers
    assert of_slot(env, 0, 1) == env, "a command may start processes of its own"
    assert of_slot({"HOME": "/h"}, 1, 2) == {"HOME": "/h"}


def test_equal_nodes_have_a_number_of_tasks_each():
    """Where it is the same on all of them."""
    env = as_worker(worker_variables(0, 0, 0, 2), "n[1-3]", "2(x3)")
    assert env["SLURM_NTASKS_PER_NODE"] == "2"
    assert SlurmEnvironment.from_env(env).hosts == ["n1", "n2", "n3"]
