"""The sandbox itself, on a real one: what it promises to every other test that uses it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_sandbox import (
    CommandError,
    NotUpError,
    SandboxConfig,
    SandboxError,
    SlurmSandbox,
    daemons,
)
from slurm_sandbox.cli import main
from slurm_sandbox.network import namespaces
from slurm_sandbox.processes import is_alive
from slurm_sandbox.releases import missing_packages
from slurm_sandbox.state import load_state

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_sandbox.py"


def wait(what, condition, timeout_s=60.0):
    """Wait for a condition and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)
    return value


def submit(slurm, script, *options):
    """Submit a batch script and return the job's id."""
    argv = ["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"]
    return slurm.run(argv).stdout.strip()


def job_field(slurm, job_id, field):
    """Return one field of `scontrol show job`."""
    shown = slurm.run(["scontrol", "show", "job", job_id]).stdout.split()
    return next(part.partition("=")[2] for part in shown if part.startswith(f"{field}="))


def lines(path):
    """Return a file's lines, none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def release(slurm, job_id):
    """Clear the two-minute hold of a requeued job once it is back in the queue.

    Not at once: a start in the very second in which Slurm lets go of the attempt before may fail
    for good.
    """
    wait("the requeue", lambda: job_field(slurm, job_id, "JobState") == "PENDING")
    slurm.run(["scontrol", "update", f"jobid={job_id}", "starttime=now+2"])


@pytest.fixture
def spare(slurm):
    """A second sandbox, small, of the same release, beside the one that the session uses."""
    release = slurm.config.slurm
    config = SandboxConfig(name="spare", nodes=2, gpus_per_node=0, slurm=release)
    SlurmSandbox("spare").down()
    yield SlurmSandbox.up(config)
    SlurmSandbox("spare").down()


def test_nodes_are_machines_of_their_own(slurm):
    """A step on four nodes sees four host names, four addresses and four process trees."""
    shown = slurm.run(["srun", "-N4", "sh", "-c", 'echo "$(hostname) $(hostname -I)"']).stdout
    expected = {f"{node} {slurm.address(node)}" for node in slurm.nodes[:4]}
    assert {line.strip() for line in shown.splitlines()} == expected
    trees = slurm.run(["srun", "-N4", "readlink", "/proc/self/ns/pid"]).stdout.split()
    assert len(set(trees)) == 4


def test_nodes_have_loopback_eth0_and_names(slurm):
    """Inside a node lo and eth0 are up, and all names resolve without a name server."""
    up = slurm.exec_on(1, ["ip", "-br", "link", "show", "up"]).stdout
    assert {line.split("@")[0].split()[0] for line in up.splitlines()} == {"lo", "eth0"}
    names = slurm.exec_on("node1", ["getent", "hosts", "node4", "ctl"]).stdout.split()
    assert names[0] == slurm.address(4)
    assert "ctl" in names


@pytest.mark.long
def test_array_runs_a_task_on_each_node(slurm, tmp_path):
    """Each task of an exclusive array has a node of its own, at the same time as the others."""
    wait_for_go = f"while ! [ -e {tmp_path}/go ]; do sleep 0.1; done"
    script = f"hostname > {tmp_path}/$SLURM_ARRAY_TASK_ID; {wait_for_go}"
    submit(slurm, script, "--array=0-3", "--exclusive")
    wait("four tasks", lambda: len(list(tmp_path.iterdir())) == 4)
    (tmp_path / "go").touch()
    slurm.wait_idle()
    hosts = {(tmp_path / str(task)).read_text().strip() for task in range(4)}
    assert hosts == set(slurm.nodes[:4])


@pytest.mark.long
def test_slurm_answers_inside_a_job(slurm, tmp_path):
    """A batch job can srun, squeue, scontrol and scancel."""
    other = submit(slurm, "sleep 600", "--nodelist=node2")
    commands = f"srun hostname && squeue -h -j {other} && scontrol ping && scancel {other}"
    submit(slurm, f"({commands}) > {tmp_path}/out 2>&1; echo $? > {tmp_path}/code", "-w", "node1")
    assert wait("the job", lambda: lines(tmp_path / "code")) == ["0"], lines(tmp_path / "out")
    assert lines(tmp_path / "out")[0] == "node1"
    wait("the cancel", lambda: job_field(slurm, other, "JobState") == "CANCELLED")


@pytest.mark.long
def test_gpus(slurm):
    """Slurm gives each task the GPUs that it asked for, and no two the same."""
    shown = ["printenv", "CUDA_VISIBLE_DEVICES"]
    each = slurm.run(["srun", "-N1", "-n2", "--gpus-per-task=1", *shown]).stdout
    assert sorted(each.split()) == ["0", "1"]
    both = slurm.run(["srun", "-N1", "--gres=gpu:2", *shown]).stdout
    assert both.strip() == "0,1"


@pytest.mark.long
def test_killed_node_loses_its_job_and_returns(slurm, tmp_path):
    """The processes of a killed node are gone, its job is requeued, and it comes back idle."""
    job = submit(slurm, f"echo $$ >> {tmp_path}/log; sleep 600", "--nodelist=node2", "--exclusive")
    wait("the first start", lambda: lines(tmp_path / "log"))
    slurm.kill_node("node2")
    assert slurm.status()["nodes"][1]["processes"] == "dead"
    with pytest.raises(SandboxError, match="node2 is dead"):
        slurm.exec_on(2, ["true"])
    wait("node2 down", lambda: slurm.node_states()["node2"].startswith("down"))
    assert job_field(slurm, job, "Restarts") == "1"
    slurm.start_node(2)
    release(slurm, job)
    wait("the second start", lambda: len(lines(tmp_path / "log")) == 2)


@pytest.mark.long
def test_jobs_hear_signals_that_the_starter_of_their_node_ignores(slurm):
    """A test that leaves SIGTERM ignored would make the jobs of all that follow immortal."""
    slurm.kill_node(2)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        slurm.start_node(2)
    finally:
        signal.signal(signal.SIGTERM, before)
    told = ["timeout", "20", "srun", "-w", "node2", "sh", "-c", "kill -TERM $$; exit 3"]
    codes = []
    wait(
        "a step on node2",
        lambda: codes.append(slurm.run(told, check=False).returncode) or {3, 143} & {*codes},
    )
    assert codes[-1] == 128 + signal.SIGTERM


@pytest.mark.long
def test_paused_node_stands_still_and_goes_on(slurm, tmp_path):
    """No process of a paused node runs; all go on when it is resumed."""
    log = tmp_path / "log"
    submit(slurm, f"while sleep 0.05; do echo tick >> {log}; done", "--nodelist=node3")
    wait("ticks", lambda: len(lines(log)) > 2)
    slurm.pause_node(3)
    assert slurm.status()["nodes"][2]["processes"] == "paused"
    ticks = len(lines(log))
    time.sleep(0.5)
    assert len(lines(log)) == ticks
    slurm.resume_node(3)
    wait("more ticks", lambda: len(lines(log)) > ticks)


@pytest.mark.long
def test_partitioned_node_runs_but_is_not_reached(slurm):
    """A cut-off node cannot be reached while its processes go on; healing restores it."""
    reach = "import socket; socket.create_connection(('node4', 6818), timeout=1).close()"
    slurm.exec_on(1, [sys.executable, "-c", reach])
    slurm.partition("node4")
    assert slurm.status()["nodes"][3]["link"] == "down"
    with pytest.raises(CommandError):
        slurm.exec_on(1, [sys.executable, "-c", reach])
    assert slurm.exec_on(4, ["hostname"]).stdout == "node4\n"
    slurm.heal("node4")
    wait(
        "node4", lambda: not slurm.exec_on(1, [sys.executable, "-c", reach], check=False).returncode
    )


@pytest.mark.long
def test_a_read_only_node_starts_no_task(slurm, tmp_path):
    """Its files are read-only there and nowhere else: tasks fail, or Slurm holds them.

    `test_bad_nodes` has both faults in a run.
    """
    options = [f"--output={tmp_path}/out", "--nodelist=node3"]
    main(["read-only-node", "3", "--name", slurm.name])
    slurm.make_read_only(3)
    assert slurm.exec_on(3, ["touch", f"{tmp_path}/new"], check=False).returncode
    slurm.exec_on(2, ["touch", f"{tmp_path}/new"])
    assert [node["files"] for node in slurm.status()["nodes"]].index("read-only") == 2
    job = submit(slurm, "true", *options)
    wait("the end", lambda: job_field(slurm, job, "JobState") == "FAILED")
    assert job_field(slurm, job, "Reason") == "JobLaunchFailure"
    main(["writable-node", "3", "--name", slurm.name])
    slurm.make_read_only(3, spool=True)
    job = submit(slurm, "true", *options)
    held = "launch_failed_requeued_held"
    wait("the hold", lambda: job_field(slurm, job, "Reason") == held)
    assert not Path("core").exists(), "a step daemon that cannot start a task crashes (22.05)"
    slurm.make_writable(3)
    assert {node["files"] for node in slurm.status()["nodes"]} == {"writable"}
    slurm.run(["scontrol", "update", f"jobid={job}", "starttime=now"])
    slurm.run(["scontrol", "release", job])
    wait("the end", lambda: job_field(slurm, job, "JobState") == "COMPLETED")


@pytest.mark.long
def test_preemption_terminates_the_step_and_requeues(slurm, tmp_path):
    """A job of `high` takes the node: SIGTERM reaches the step, and the task starts once more."""
    log = tmp_path / "log"
    step = f'trap "echo TERM >> {log}" TERM; echo ready >> {log}; while :; do sleep 0.1; done'
    script = f"echo restart=${{SLURM_RESTART_COUNT:-0}} >> {log}; srun sh -c '{step}'"
    job = submit(slurm, script, "--nodelist=node2", "--exclusive")
    wait("the step", lambda: "ready" in lines(log))
    thief = slurm.preempt(["node2"], for_s=1)
    wait("SIGTERM", lambda: "TERM" in lines(log))
    wait("the thief's turn", lambda: job_field(slurm, thief, "JobState") == "COMPLETED")
    release(slurm, job)
    wait("the restart", lambda: "restart=1" in lines(log))
    assert lines(log)[0] == "restart=0"


@pytest.mark.long
def test_heal_all_undoes_every_fault(slurm):
    """After any mixture of faults and jobs, all nodes are idle and no job is left."""
    submit(slurm, "trap '' TERM; sleep 600", "--array=0-7", "--exclusive")
    wait("allocation", lambda: slurm.node_states()["node4"] == "allocated")
    slurm.kill_node(1)
    slurm.pause_node(2)
    slurm.partition(3)
    slurm.make_read_only(4)
    slurm.heal_all()
    assert set(slurm.node_states().values()) == {"idle"}
    assert slurm.run(["squeue", "-h"]).stdout == ""
    assert {node["processes"] for node in slurm.status()["nodes"]} == {"running"}
    assert {node["files"] for node in slurm.status()["nodes"]} == {"writable"}


def test_slurm_env_points_commands_at_the_sandbox(slurm_env):
    """With the fixture `slurm_env`, a plain command line reaches the sandbox."""
    shown = subprocess.run(["sinfo", "-h", "-o", "%D"], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[0] == str(len(slurm_env.nodes))


def test_any_user_may_submit(slurm):
    """A user other than root runs jobs, and they run as that user."""
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    assert slurm.run([*as_nobody, "srun", "--chdir=/", "id", "-u"]).stdout == "65534\n"


@pytest.mark.long
def test_accounting_answers_sacct(slurm):
    """With accounting, sacct knows a job (needs slurmdbd and mariadb-server, else skipped)."""
    missing = missing_packages(accounting=True)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    release = slurm.config.slurm
    config = SandboxConfig(name="spare", nodes=1, accounting=True, slurm=release)
    try:
        counted = SlurmSandbox.up(config)
        counted.run(["srun", "true"])
        asked = ["sacct", "-n", "-X", "-a", "-o", "state"]
        wait("sacct", lambda: "COMPLETED" in counted.run(asked).stdout)
    finally:
        SlurmSandbox("spare").down()


def test_up_is_idempotent_and_keeps_jobs(slurm, capsys):
    """A second `up` starts nothing, ends no job, and prints the same last line."""
    job = submit(slurm, "sleep 600")
    before = load_state(slurm.name, slurm.root)
    assert main(["up", "--name", slurm.name]) == 0
    exports = " ".join(f"{name}={value}" for name, value in slurm.env.items())
    assert capsys.readouterr().out.splitlines()[-1] == f"export {exports}"
    assert load_state(slurm.name, slurm.root) == before
    assert job_field(slurm, job, "JobState") in ("PENDING", "RUNNING")


def test_up_with_other_settings_is_refused(slurm, capsys):
    """A sandbox that is up is not changed while it is in use."""
    assert main(["up", "--name", slurm.name, "--nodes", "7"]) == 1
    assert "nodes is 4, not 7" in capsys.readouterr().err


def test_status_for_people_and_programs(slurm, capsys):
    """`status` tells the same in words and in JSON, and exits 0 for a sandbox that is up."""
    assert main(["status", "--name", slurm.name, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [node["name"] for node in status["nodes"]] == list(slurm.nodes)
    assert main(["status", "--name", slurm.name]) == 0
    assert f"SLURM_CONF={status['slurm_conf']}" in capsys.readouterr().out
    assert main(["status", "--name", "nobody"]) == 1


@pytest.mark.long
def test_two_sandboxes_side_by_side(slurm, spare):
    """Each has its own network and its own nodes, and neither hears of the other's jobs."""
    assert not set(map(slurm.address, slurm.nodes)) & set(map(spare.address, spare.nodes))
    assert sorted(spare.run(["srun", "-N2", "hostname"]).stdout.split()) == ["node1", "node2"]
    job = submit(slurm, "sleep 600", "--exclusive", "--job-name=mine")
    assert job in slurm.run(["squeue", "-h", "--name=mine"]).stdout
    assert spare.run(["squeue", "-h", "--name=mine"]).stdout == ""
    assert slurm.run(["srun", "-N1", "-w", "node4", "hostname"]).stdout == "node4\n"


@pytest.mark.long
def test_down_leaves_nothing(spare):
    """After `down` no process, namespace, link or file of the sandbox is left."""
    state = load_state("spare", spare.root)
    spare.run(["sbatch", "-o", "/dev/null", "--wrap", "sleep 600"])
    spare.down()
    assert not any(map(is_alive, state.processes.values()))
    assert namespaces(state.layout) == []
    assert not Path(f"/sys/class/net/{state.layout.host_leg}").exists()
    assert not state.layout.directory.exists()
    with pytest.raises(NotUpError):
        SlurmSandbox.attach("spare")
    spare.down()


@pytest.mark.long
def test_half_finished_up_is_cleaned_by_the_next(slurm, monkeypatch):
    """An `up` that was interrupted leaves nothing that the next `up` or `down` does not know."""
    config = SandboxConfig(name="spare", nodes=1, slurm=slurm.config.slurm)
    with monkeypatch.context() as patch:
        patch.setattr(daemons, "wait_for_nodes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            SlurmSandbox.up(config)
    left = load_state("spare", SlurmSandbox("spare").root)
    with pytest.raises(NotUpError):
        SlurmSandbox.attach("spare")
    try:
        assert SlurmSandbox.up(config).run(["srun", "hostname"]).stdout == "node1\n"
        assert not any(map(is_alive, left.processes.values()))
    finally:
        SlurmSandbox("spare").down()


def interrupted(*_):
    """Stand for Ctrl-C."""
    raise KeyboardInterrupt


@pytest.mark.long
def test_killed_up_is_cleaned_by_down(slurm):
    """An `up` killed with none, two or three daemons started leaves nothing behind after `down`."""
    argv = [sys.executable, str(SCRIPT), "up", "--name", "spare", "--nodes", "2"]
    argv += ["--slurm", slurm.config.slurm] if slurm.config.slurm else []
    for num_started in (0, 2, 3):
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as up:
            wait("a part of up", lambda number=num_started: started("spare") >= number)
            up.kill()
        SlurmSandbox("spare").down()
        assert not SlurmSandbox("spare").status()["up"]
        leftover = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
        assert "hxs-spare-" not in leftover.stdout
        assert not [pid for pid in processes() if "sandbox/spare" in command_line(pid)]


def started(name):
    """Return how many daemons of a sandbox are on record, -1 before the sandbox is."""
    state = load_state(name, SlurmSandbox(name).root)
    return -1 if state is None else len(state.processes)


def processes():
    """Return all pids."""
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def command_line(pid):
    """Return a process's command line, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.long
def test_script_runs_from_a_fresh_clone():
    """The script needs nothing installed: not even site-packages."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.defpath},
    )
    assert done.returncode == 0, done.stderr
    assert "kill-node" in done.stdout
