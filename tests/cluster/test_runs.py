"""Whole runs on a real Slurm: start with what is free, grow, lose nodes, fail, end."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import PATIENCE_S, ROOT, SLOWLY, busy, eventually, hosts, leader_host, pending


def epochs_by_round(run: Path) -> dict[int, list[int]]:
    """Which epochs' losses each round's rank 0 logged."""
    logged: dict[int, list[int]] = {}
    for path in run.glob("tasks/*/attempt-*/round-*.rank-0.out"):
        number = int(re.search(r"round-(\d+)\.", path.name)[1])
        epochs = [int(n) for n in re.findall(r"epoch (\d+): loss", path.read_text())]
        logged.setdefault(number, []).extend(epochs)
    return logged


@pytest.mark.long
def test_starts_on_the_free_nodes_and_grows(slurm, sweep):
    """With two of four nodes busy a run starts with two, and has four once they are free."""
    job = busy(slurm, 2)
    s = sweep("nodes=1:4", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    eventually(lambda: len(s.events("first_step")) > 1, "both have made a step")
    slurm.run(["scancel", job])
    eventually(lambda: s.group_sizes()[-1] == 4, "four nodes train")
    output = s.output()
    assert s.group_sizes()[-1] == 4, output
    assert next(n for n in s.group_sizes() if n > 1) == 2
    assert s.result()["restarts"] == 0 and s.value() > 0.95
    logged = epochs_by_round(s.run())
    assert all(len(set(epochs)) == len(epochs) for epochs in logged.values())
    assert max(max(epochs) for epochs in logged.values() if epochs) == 7


@pytest.mark.long
def test_a_node_that_comes_as_the_run_ends_leaves_at_once(slurm, sweep, tmp_path, monkeypatch):
    """Though it has not imported yet: it holds no node on when the launcher has returned."""
    started = tmp_path / "started"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(
        "import pathlib, sys, time\n"
        "def find(self, name, *_):\n"
        "    if name == 'torch' and 'hpc_elastic.agent' in sys.orig_argv:\n"
        f"        started = pathlib.Path({str(started)!r})\n"
        "        is_first, _ = not started.exists(), started.touch()\n"
        "        time.sleep(0 if is_first else 300)\n"
        "sys.meta_path.insert(0, type('Slow', (), {'find_spec': find})())\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'slow'}:{ROOT}")
    job = busy(slurm, 3)
    s = sweep("nodes=1:2", "launcher.agent.warm_workers=false", *SLOWLY)
    eventually(lambda: s.group_sizes() == [1], "one node trains")
    slurm.run(["scancel", job])
    run = ["squeue", "-h", "-t", "RUNNING", "-o", "%i"]
    eventually(lambda: len(slurm.run(run).stdout.split()) == 2, "the other one starts")
    eventually(lambda: len(list(s.run().glob("tasks/*/attempt-0/agent.log"))) == 2, "it begins")
    output = s.output()
    assert s.result()["status"] == "succeeded" and s.group_sizes() == [1], output
    eventually(lambda: not slurm.run(["squeue", "-h"]).stdout.strip(), "it has left")


@pytest.mark.long
def test_a_follower_that_dies_is_dropped(slurm, sweep):
    """The others go on at the smaller size, spend no restart, and the model is as good."""
    s = sweep("nodes=1:3", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [3], "three nodes train")
    slurm.kill_node(next(h for h in hosts(s) if h != leader_host(s)))
    s.output()
    assert 2 in s.group_sizes()
    assert s.result()["restarts"] == 0 and s.value() > 0.95


@pytest.mark.long
def test_a_run_goes_on_without_its_launcher(slurm, sweep):
    """Ctrl-C says how to come back; that command shows the end, though the first try was killed."""
    s = sweep("nodes=1:2", "epochs=3", "pause_s=0.25")
    eventually(lambda: s.group_sizes(), "it trains")
    s.process.send_signal(signal.SIGINT)
    said = s.process.communicate(timeout=PATIENCE_S)[0]
    assert s.process.returncode == 130 and "Traceback" not in said, said
    command, *args = shlex.split(re.search("wait: (.*)", said)[1])
    argv = slurm.on_login([str(Path(sys.executable).with_name(command)), *args])
    env = {**os.environ, **slurm.env}
    killed = subprocess.Popen(argv, env=env, text=True, stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline()
    killed.kill()
    killed.communicate()
    s.hurry()
    done = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert s.result()["restarts"] == 0


@pytest.mark.nfs
def test_a_leader_that_dies_is_replaced(slurm, sweep):
    """Another agent leads the next term, and the run ends as if nothing had been.

    So does the other run of the sweep.
    """
    s = sweep("nodes=1:2", "lr=0.1,0.05", *SLOWLY)
    eventually(lambda: [s.group_sizes(n)[-1:] for n in range(2)] == [[2], [2]], "both train")
    slurm.kill_node(leader_host(s))
    output = s.output()
    assert [e["term"] for e in s.events("leader")][:2] == [1, 2]
    assert [e["term"] for e in s.events("leader", 1)] == [1]
    assert [s.result(n)["restarts"] for n in range(2)] == [0, 0], output
    assert all(s.value(n) > 0.95 for n in range(2))


@pytest.mark.long
def test_a_leader_that_is_preempted_is_replaced(slurm, sweep):
    """Its successor goes on with those that are left, one node having died before."""
    s = sweep("nodes=1:4", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [4], "four nodes train")
    slurm.kill_node(next(h for h in hosts(s) if h != leader_host(s)))
    eventually(lambda: s.group_sizes()[-1:] == [3], "three nodes go on")
    slurm.preempt([leader_host(s)], for_s=3)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes go on")
    assert [e["term"] for e in s.events("leader")] == [1, 2]


@pytest.mark.long
def test_a_preempted_node_leaves_and_comes_back(slurm, sweep):
    """Preemption costs no restart; the requeued task joins again in its next attempt."""
    s = sweep("nodes=1:2", *SLOWLY)
    eventually(lambda: s.group_sizes()[-1:] == [2], "two nodes train")
    taken = next(h for h in hosts(s) if h != leader_host(s))
    slurm.preempt([taken], for_s=3)
    eventually(lambda: s.group_sizes()[-1:] == [1], "one node goes on")
    task = next(e["task"] for e in s.events("node_lost"))
    eventually(lambda: task in pending(slurm), "the task is requeued")
    eventually(lambda: s.group_sizes()[-1] == 2, "two nodes train again")
    s.output()
    assert s.result()["restarts"] == 0 and s.value() > 0.95
    assert s.group_sizes()[-1] == 2
    assert {e["attempt"] for e in s.events("task") if e["task"] == task} == {0, 1}


@pytest.mark.long
def test_a_sweep_gives_every_run_a_node_first(slurm, sweep):
    """Three runs of up to four nodes on four nodes: all three train at the same time."""
    s = sweep("nodes=1:4", "lr=0.1,0.05,0.02", *SLOWLY)
    eventually(lambda: all(s.group_sizes(n) for n in range(3)), "all three runs train")
    assert not any((s.run(n) / "result.json").exists() for n in range(3))
    output = s.output()
    assert all(s.value(n) > 0.95 for n in range(3)), output
    jobs = list((s.folder / ".hpc_elastic").glob("array-*.jobid"))
    assert len(jobs) == 1, "one array"
    left = ["squeue", "-h", "-j", jobs[0].read_text().strip()]
    eventually(lambda: not slurm.run(left).stdout.strip(), "nothing of the runs stays in the queue")


FAILING = """
import os
import hydra, torch, torch.distributed as dist

def inner():
    raise ValueError("boom on purpose")

@hydra.main(version_base=None)
def main(cfg):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 3:
        inner()
    dist.all_reduce(torch.ones(1))
    dist.barrier()

if __name__ == "__main__":
    main()
"""


def test_the_first_failure_is_what_the_user_sees(sweep, tmp_path):
    """Rank 3 raises: its host and traceback are shown, not those of the workers that followed."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.replace("launcher=slurm", ""))
    s = _plus(sweep, script, "nodes=4", "launcher.max_restarts=1")
    output = s.output()
    assert s.process.returncode != 0
    failure = s.result()["failure"]
    assert (failure["rank"], failure["exception"]) == (3, "ValueError")
    assert failure["host"] in output and "boom on purpose" in output and "in inner" in output
    assert s.result()["restarts"] == 1
    assert all("boom" not in v["message"] for v in s.result()["secondary_failures"])


@pytest.mark.long
def test_a_missing_module_ends_the_run_at_once(sweep, tmp_path):
    """A script that can not be imported on the nodes is not tried again."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import os\nif 'SLURM_JOB_ID' in os.environ:\n    import nosuchmodule\n" + FAILING
    )
    s = _plus(sweep, script, "nodes=1")
    output = s.output()
    assert "nosuchmodule" in output and s.process.returncode != 0
    assert s.result()["rounds"] == 1 and s.result()["failure"]["phase"] == "import"


def _plus(sweep, script, *overrides):
    """Start a script whose defaults list has no launcher."""
    return sweep("+launcher=slurm", *overrides, script=script)


@pytest.mark.long
def test_a_rendered_script_runs_by_hand(slurm, tmp_path):
    """`hpc-elastic submit --dry-run` prints a script; sbatch takes it, and it trains to the end."""
    overrides = ["launcher=slurm", "nodes=1:2", "epochs=3"]
    folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    render = [
        sys.executable, "-m", "hpc_elastic", "submit", "--dry-run", str(ROOT / "train.py")
    ]  # fmt: skip
    argv = slurm.on_login([*render, *overrides, folder])
    env = {**os.environ, **slurm.env}
    rendered = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert rendered.returncode == 0, rendered.stderr
    assert not slurm.run(["squeue", "-h"]).stdout.strip(), "nothing is submitted"
    script = tmp_path / "by-hand.sbatch"
    script.write_text(rendered.stdout)
    slurm.run(["sbatch", str(script)])
    run = tmp_path / "sweep" / "0"
    try:
        eventually((run / "result.json").exists, "the run ends")
    finally:  # what is shown if it did not
        print(slurm.run(["squeue"]).stdout, *(f.read_text() for f in run.rglob("agent.log")))
    assert json.loads((run / "result.json").read_text())["status"] == "succeeded"
    eventually(lambda: not slurm.run(["squeue", "-h"]).stdout.strip(), "the queue is empty")


def test_an_unknown_partition_is_refused_with_those_there_are(slurm, sweep):
    """The answer comes at submission, in the submitting terminal, with a near miss."""
    s = sweep("nodes=1", "launcher.partition=lwo")
    output = s.output()
    assert s.process.returncode != 0
    assert "launcher.partition" in output and "'low'" in output
    assert "Traceback" not in output
