"""hpc-elastic doctor on a real Slurm: the login checks, and the probe from start to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import busy, eventually

from hpc_elastic.doctor.probe_network import NUM_ROUNDS

PATIENCE_S = 240


def doctor(slurm, folder, *words, **env):
    """Start the command as a user's own process on the login node, in an empty directory."""
    argv = slurm.on_login([sys.executable, "-m", "hpc_elastic", "doctor", "--json", *words])
    return subprocess.Popen(
        slurm.on_login(argv), env={**os.environ, **slurm.env, **env}, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def examine(slurm, folder, *words, **env):
    """Return the exit code, the findings by check, and the whole report."""
    process = doctor(slurm, folder, *words, **env)
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert output, errors
    report = json.loads(output)
    return process.returncode, {f["check"]: f for f in report["findings"]}, report


@pytest.fixture
def place(tmp_path):
    """An empty directory, such as runs would lie in."""
    folder = tmp_path / "runs here"
    folder.mkdir()
    return folder


def jobs(slurm):
    """The ids of all jobs that have not ended."""
    return slurm.run(["squeue", "-h", "-o", "%A"]).stdout.split()


def left(slurm, folder):
    """What the doctor has left behind: jobs and files."""
    return jobs(slurm), list(folder.iterdir())


def test_the_login_node_is_looked_at_without_submitting(slurm, place):
    """Nothing fails on the sandbox, and the report names versions, but no environment."""
    code, findings, report = examine(slurm, place, "partition=low", "nodes=1:4", SECRET="xyzzy")
    assert code == 0 and report["schema"] == 1
    assert findings["slurm.partition"]["found"].startswith("low; 4 idle")
    assert "sbatch --test-only accepts it: to start" in findings["slurm.submission"]["found"]
    assert findings["slurm.accounting"]["verdict"] == "ok"
    assert findings["directory.link"]["verdict"] == "ok"
    assert report["versions"]["slurm"] == report["facts"]["slurm"]["commands_version"]
    assert {"python", "torch", "submitit", "hydra-core", "kernel"} <= report["versions"].keys()
    assert "xyzzy" not in json.dumps(report)
    assert left(slurm, place) == ([], [])


@pytest.mark.long
def test_a_partition_that_does_not_exist_is_named(slurm, place):
    """Those that exist are said, and no probe is left in the queue."""
    code, findings, _ = examine(slurm, place, "partition=hihg", "--probe")
    assert code == 1
    assert findings["slurm.partition"]["verdict"] == "fail"
    remedy = findings["slurm.partition"]["remedy"]
    assert "did you mean 'high'" in remedy and "cancel, high, low" in remedy
    assert "could not be submitted" in findings["nodes.start"]["found"]
    assert left(slurm, place) == ([], [])


def test_what_sbatch_would_refuse_is_found_without_submitting(slurm, place):
    """As at a submission, before anything is submitted."""
    code, findings, _ = examine(slurm, place, "partition=low", "mem=9000G")
    assert code == 1
    assert "launcher.mem=" in findings["slurm.submission"]["found"]
    assert left(slurm, place) == ([], [])


@pytest.mark.long
@pytest.mark.nfs
def test_the_probe_goes_through_what_a_run_goes_through(slurm, place):
    """Two nodes meet, get signals; one comes back, one is cancelled, and nothing is left over."""
    code, findings, report = examine(slurm, place, "partition=low", "--probe")
    bad = [f for f in findings.values() if f["verdict"] in ("fail", "unknown")]
    assert (code, bad) == (0, [])
    nodes = [node["facts"]["name"] for node in report["facts"]["probe"]["nodes"]]
    assert len(set(nodes)) == 2
    assert all(node in findings["network.interface"]["found"] for node in nodes)
    assert "eth0" in findings["network.interface"]["found"]
    assert "came back" in findings["network.gloo"]["found"]
    raced = f"of {2 * NUM_ROUNDS} names that two nodes linked at once, each had one winner"
    assert raced in findings["directory.election"]["found"]
    assert "and the workers as well" in findings["signals.notice"]["found"]
    kill_wait_s = slurm.config.kill_wait_s
    for ending in report["facts"]["probe"]["endings"]:
        assert ending["lived_s"]["agent"] > kill_wait_s / 2
        assert ending["lived_s"]["worker"] > kill_wait_s / 2
    assert "it came back on" in findings["signals.requeue"]["found"]
    assert "host.python" not in findings, "the nodes have shown that it is there"
    assert left(slurm, place) == ([], [])


@pytest.mark.long
def test_a_requeue_and_a_time_limit_that_the_site_forbids(slurm, place):
    """JobRequeue=0 does not keep a task from coming back; a limit that is too long is refused."""
    conf = Path(slurm.env["SLURM_CONF"])
    text = conf.read_text()
    try:
        conf.write_text(text.replace("JobRequeue=1", "JobRequeue=0"))
        slurm.run(["scontrol", "reconfigure"])
        slurm.run(["scontrol", "update", "partitionname=cancel", "maxtime=3"])
        wanted = ("partition=cancel", "time=60")
        code, findings, _ = examine(slurm, place, *wanted, "--probe", "--probe-nodes", "1")
        asked_nothing = examine(slurm, place, "partition=cancel", "time=3")[1]
    finally:
        conf.write_text(text)
        slurm.run(["scontrol", "reconfigure"])
        slurm.run(["scontrol", "update", "partitionname=cancel", "maxtime=infinite"])
    assert code == 1
    assert findings["slurm.time"]["verdict"] == "fail"
    assert "launcher.time=3 or less" in findings["slurm.time"]["remedy"]
    assert findings["slurm.preemption"]["found"].startswith("PreemptMode CANCEL")
    assert findings["signals.requeue"]["verdict"] == "ok"
    assert "slurm.requeue" not in findings, "the probe has settled it"
    assert asked_nothing["slurm.requeue"]["found"].startswith("JobRequeue=0")
    assert asked_nothing["slurm.time"]["verdict"] == "warn"
    assert left(slurm, place) == ([], [])


@pytest.mark.long
def test_a_probe_that_does_not_start_says_why(slurm, place):
    """Slurm's reason and what to do; the probe is cancelled."""
    other = busy(slurm, len(slurm.nodes))
    code, findings, _ = examine(slurm, place, "partition=low", "--probe", "--wait-s", "4")
    assert code == 1
    assert findings["nodes.start"]["found"].startswith("2 tasks of 2 did not start: Resources")
    assert "--wait-s" in findings["nodes.start"]["remedy"]
    assert left(slurm, place) == ([other], [])


@pytest.mark.long
def test_gpus_are_counted_against_the_request(slurm, place, tmp_path):
    """Slurm gives what was asked for; the driver, a script here, shows one more."""
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\nfor i in 0 1; do echo "GPU $i: H200 (UUID: GPU-$i)"; done\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    asked = ["partition=low", "gpus_per_node=1", "--probe", "--probe-nodes", "1"]
    _, findings, report = examine(slurm, place, *asked, PATH=path)
    (node,) = (node["facts"] for node in report["facts"]["probe"]["nodes"])
    assert (node["gpus_given"], node["gpus_seen"]) == (1, 2)
    assert findings["nodes.gpus"]["verdict"] == "warn", findings["nodes.gpus"]
    assert "Slurm gives 1, the driver shows 2" in findings["nodes.gpus"]["found"]


@pytest.mark.long
def test_an_interrupted_probe_is_cancelled(slurm, place):
    """Ctrl-C at any moment leaves no job and no file."""
    process = doctor(slurm, place, "partition=low", "--probe")
    running = ["squeue", "-h", "-t", "RUNNING", "-o", "%A"]
    eventually(lambda: slurm.run(running).stdout.split(), "the probe runs")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, ""), errors
    assert left(slurm, place) == ([], [])


def waiting_python(folder, name):
    """Return an interpreter that waits for a file before it starts, and reports that it does."""
    script = folder / "python"
    script.write_text(
        f"#!/bin/sh\ntouch {folder}/waits-$SLURMD_NODENAME\n"
        f'until ls {folder} | grep -qx {name}; do sleep 0.1; done\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.long
def test_a_node_whose_network_is_cut_is_named(slurm, place, tmp_path):
    """The others cannot reach it, although Slurm and the file system are sound."""
    python = waiting_python(tmp_path, "start")
    process = doctor(slurm, place, "partition=low", f"python={python}", "--probe")
    eventually(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "both tasks have started")
    cut, other = sorted((p.name.partition("-")[2] for p in tmp_path.glob("waits-*")), reverse=True)
    slurm.partition(cut)
    (tmp_path / "start").touch()
    output, errors = process.communicate(timeout=PATIENCE_S)
    findings = {f["check"]: f for f in json.loads(output)["findings"]}
    assert process.returncode == 1, errors
    assert findings["network.reach"]["verdict"] == "fail"
    assert f"{other} cannot reach {cut}" in findings["network.reach"]["found"]
    assert cut in findings["network.interface"]["found"]
    assert cut in findings["signals.notice"]["found"], "Slurm cannot signal it"
    assert "not tried" in findings["network.gloo"]["found"]
    assert findings["nodes.torch"]["verdict"] in ("ok", "warn"), "each tries torch by itself"
    requeued = findings["signals.requeue"]
    assert requeued["verdict"] in ("ok", "unknown"), requeued  # Slurm is busy with the lost node
    assert list(place.iterdir()) == []


@pytest.mark.long
def test_slurm_that_is_not_in_the_container_is_told_apart(slurm, place, tmp_path):
    """Inside squeue is missing, outside it answers: mounts are to be set, not the admin asked."""
    tools = tmp_path / "tools"
    (tools / "inside").mkdir(parents=True)
    apptainer = tools / "apptainer"
    options = 'until [ "$1" = torch.sif ]; do shift; done; shift'
    apptainer.write_text(f'#!/bin/sh\n{options}\nPATH={tools}/inside exec "$@"\n')
    apptainer.chmod(0o755)
    box = ("container.runtime=apptainer", "container.image=torch.sif", f"python={sys.executable}")
    _, findings, _ = examine(
        slurm, place, "partition=low", *box, "--probe", "--probe-nodes", "1",
        PATH=f"{tools}:{os.environ['PATH']}",
    )  # fmt: skip
    assert findings["nodes.slurm"]["verdict"] == "warn"
    assert "launcher.container.mounts" in findings["nodes.slurm"]["remedy"]
    assert findings["nodes.slurm_outside"]["verdict"] == "ok"
    assert findings["network.reach"]["verdict"] == "unknown", "of one node nothing can be said"
    assert left(slurm, place) == ([], [])
