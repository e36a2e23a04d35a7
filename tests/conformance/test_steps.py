"""srun: steps on one node and on several, in a job and on their own."""

from backends import eventually, parse_env

from hpc_elastic.slurm.environment import SlurmEnvironment

OF_A_STEP = {
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_LAUNCHER_PORT"),
    *("SLURM_LAUNCH_NODE_IPADDR", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME", "SLURM_TASK_PID"),
    *("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_TOPOLOGY_ADDR", "SLURM_DISTRIBUTION"),
}


def test_each_task_of_a_coallocated_job_is_told_its_place(backend, tmp_path):
    """Node id, rank and host list agree on all nodes; each task is on a node of its own."""
    line = (
        f"srun -N3 -n3 --ntasks-per-node=1 --cpus-per-task=8 sh -c 'env > {tmp_path}/$SLURM_PROCID'"
    )
    job = backend.submit(line, "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--exclusive")
    backend.wait_state(job, "COMPLETED")
    told = [parse_env(tmp_path / str(rank)) for rank in range(3)]
    hosts = SlurmEnvironment.from_env(told[0]).hosts
    assert len(set(hosts)) == 3
    for rank, env in enumerate(told):
        assert env.keys() >= OF_A_STEP, OF_A_STEP - env.keys()
        task = SlurmEnvironment.from_env(env)
        assert (task.hosts, task.node_name, task.node_id) == (hosts, hosts[rank], rank)
        assert (task.num_nodes, task.step_id, task.cpus_on_node) == (3, 0, 8)
        assert task.task_name == f"{job}.{rank}"
        assert env["SLURM_TASKS_PER_NODE"] == "1(x3)"
        assert env["SLURM_JOB_CPUS_PER_NODE"] == "8(x3)"


def test_srun_ends_as_the_worst_of_its_tasks(backend, tmp_path):
    """The exit code; 128 and the signal; 2 where there is no such program; with a message."""
    lines = {
        "srun -n1 sh -c 'exit 7'": 7,
        "srun -n1 sh -c 'kill -9 $$'": 137,
        "srun -n1 sh -c 'kill -15 $$'": 143,
        "srun -n1 /no/such/program": 2,
        "srun -N2 -n2 sh -c 'exit $SLURM_PROCID'": 1,
        "srun -n1 true": 0,
    }
    script = "; ".join(f"{line}; echo $? >> {tmp_path}/codes" for line in lines)
    job = backend.submit(script, "--nodes=2", f"--output={tmp_path}/log")
    backend.wait_state(job, "COMPLETED")
    assert (tmp_path / "codes").read_text().split() == [str(code) for code in lines.values()]
    log = (tmp_path / "log").read_text()
    assert "task 0: Exited with exit code 7" in log
    assert "task 0: Killed" in log and "task 0: Terminated" in log


def test_a_step_writes_where_it_is_told_to(backend, tmp_path):
    """Into the job's log, or into a file for each node."""
    lines = f"srun echo both; srun --output={tmp_path}/%j.%n.log sh -c 'echo of $SLURM_NODEID'"
    size = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    job = backend.submit(lines, *size, f"--output={tmp_path}/log")
    backend.wait_state(job, "COMPLETED")
    assert (tmp_path / "log").read_text().split() == ["both", "both"]
    texts = [(tmp_path / f"{job}.{node}.log").read_text() for node in (0, 1)]
    assert texts == ["of 0\n", "of 1\n"]


def test_what_is_sent_to_srun_reaches_its_tasks(backend, teller):
    """But for SIGTERM, which ends them."""
    line = "; ".join(
        [
            f"{_srun(teller)} & srun=$!",
            f"{teller.shell_waits('step starts')}; kill -USR2 $srun",
            f"{teller.shell_waits('step SIGUSR2')}; kill -TERM $srun",
            "wait $srun; exit $?",
        ]
    )
    job = backend.submit(line)
    teller.wait("step", "SIGUSR2")
    backend.wait_state(job, "FAILED")
    assert "SIGTERM" not in teller.told("step")
    assert backend.shown(job)["ExitCode"] == "137:0"


def _srun(teller) -> str:
    return f"srun -n1 {teller.line('step', 0, 100)}"


def test_srun_alone_gets_nodes_for_itself(backend):
    """And waits for them; what its tasks print comes out of it."""
    done = backend.run("srun", "-N2", "sh", "-c", "echo $SLURM_PROCID $SLURM_JOB_NUM_NODES")
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert backend.run("srun", "sh", "-c", "exit 3", check=False).returncode == 3
    eventually(lambda: not backend.run("squeue", "-h").stdout)


def test_a_job_can_ask_slurm_and_submit_others(backend, tmp_path):
    """The commands are on its PATH, whatever else is."""
    line = (
        f"squeue -h -j $SLURM_JOB_ID -o %T > {tmp_path}/state; "
        f"env -u SLURM_JOB_ID sbatch --parsable -o /dev/null --wrap 'touch {tmp_path}/other'"
    )
    job = backend.submit(line)
    backend.wait_state(job, "COMPLETED")
    assert (tmp_path / "state").read_text() == "RUNNING\n"
    eventually((tmp_path / "other").exists)
