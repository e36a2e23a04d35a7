"""Whole runs that are steered from outside: submitted, cancelled and resumed, in every moment."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from counting import NUM_STEPS, SCRIPT, Counting, counting
from sweeps import PATIENCE_S, eventually, hosts

from hpc_elastic.run.directory import RunDir

COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))


@pytest.fixture
def steer(slurm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls the command, as a user would."""

    def call(*args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **slurm.env, **env}
        done = subprocess.run(
            slurm.on_login([COMMAND, *args]), env=environ, text=True, capture_output=True,
            timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def start(sweep, tmp_path) -> Callable[..., Counting]:
    """Starts a run of the counting script."""
    return lambda *overrides, **options: counting(sweep, tmp_path / "run", *overrides, **options)


def in_queue(slurm) -> list[str]:
    """All tasks that wait or run."""
    return slurm.run(["squeue", "-h", "-r", "-o", "%i %j %T"]).stdout.splitlines()


def trains(run: Counting, num_nodes: int, steps: int = 3, after: int = 0) -> None:
    """Wait until a group of that size has made so many steps, in a round later than one."""

    def condition() -> bool:
        rounds = run.rounds()
        of_size = run.sweep.group_sizes()[-1:] == [num_nodes]
        return (
            of_size
            and bool(rounds)
            and rounds[-1].number > after
            and (len(rounds[-1].steps) >= steps)
        )

    eventually(condition, f"{num_nodes} nodes train; sizes {run.sweep.group_sizes()}")


def ends_right(run: Counting) -> None:
    """It comes to its end, and the audit proves that no sample was lost or trained twice."""
    run.hurry()
    result = RunDir(run.sweep.run()).result
    eventually(lambda: result.exists(), "it ends")
    run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded"
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert run.is_complete()


def test_only_jobs_of_the_run_are_cancelled(slurm, start, steer):
    """Whatever id stands in its files: another job of the user goes on; then the right one ends."""
    held = ["sbatch", "--parsable", "-a0-1", "-o", "/dev/null", "--wrap", "sleep 600"]
    other = slurm.run(held).stdout.strip()
    run = start("nodes=1:2")
    eventually(lambda: run.sweep.group_sizes(), "it trains")
    (file,) = run.sweep.folder.glob(".hpc_elastic/array-*.jobid")
    own = file.read_text()
    file.write_text(f"{other}\n")
    refused = steer("cancel", "-y", str(run.sweep.run()), code=1).stderr
    assert other in refused and "squeue" not in refused
    tasks = [f"{other}_0", f"{other}_1"]
    assert {line.split()[0] for line in in_queue(slurm)} >= {*tasks}
    file.write_text(own)
    steer("cancel", "-y", str(run.sweep.run()))
    run.sweep.output()
    assert sorted(line.split()[0] for line in in_queue(slurm)) == tasks
    slurm.run(["scancel", other])


@pytest.mark.long
def test_one_run_of_a_sweep_is_cancelled_with_its_waiting_tasks(slurm, sweep, steer):
    """The other run, whose tasks are in the same array, goes on, and succeeds."""
    s = sweep(
        "nodes=1:4", "lr=0.1,0.05", "epochs=2", "pause_s=0.25", "launcher.scale_up=on_restart"
    )
    eventually(lambda: all(s.group_sizes(n) for n in range(2)), "both train")
    assert sum("PENDING" in line for line in in_queue(slurm)) == 4
    done = steer("cancel", str(s.run(0)))
    assert "2 running" in done.stdout and "2 waiting" in done.stdout
    assert len(in_queue(slurm)) == 4, "the tasks of the other run, and nothing else"
    s.hurry()
    eventually((s.run(1) / "result.json").exists, "the other run ends")
    output = s.output()
    assert "cancelled by root" in output, output
    assert s.result(1)["status"] == "succeeded"
    assert not in_queue(slurm)
    assert "has ended already: it succeeded" in steer("cancel", str(s.run(1))).stdout
    assert "was cancelled already by root" in steer("cancel", str(s.run(0))).stdout


@pytest.mark.long
@pytest.mark.parametrize("moment", ["preemption_notice", "task_exited"])
def test_a_run_cancelled_while_it_is_requeued_does_not_come_back(slurm, start, steer, moment):
    """Its nodes are being preempted, and its agents requeue themselves, when it is cancelled."""
    run = start("nodes=2")
    trains(run, 2)
    slurm.preempt(hosts(run.sweep), for_s=3)
    eventually(lambda: run.sweep.events(moment), f"the first agent writes {moment!r}")
    steer("cancel", str(run.sweep.run()))
    begun = len(run.sweep.events("task"))
    eventually(lambda: not in_queue(slurm), "the queue is empty, the other job has ended too")
    slurm.wait_idle()
    assert len(run.sweep.events("task")) == begun == 2, "no task has started again"
    assert "cancelled" in run.sweep.output()


@pytest.mark.long
@pytest.mark.nfs
def test_a_cancelled_run_is_resumed_on_other_nodes(slurm, start, steer):
    """It has saved before it went: no step is made twice, and none is missing, on three nodes."""
    run = start("nodes=1:2")
    trains(run, 2, steps=10)
    steer("cancel", str(run.sweep.run()))
    before = run.rounds()[-1]
    done = json.loads(steer("resume", str(run.sweep.run()), "nodes=1:3", "--json").stdout)
    assert (done["generation"], done["nodes"], done["launcher"]) == (1, "1:3", "slurm")
    trains(run, 3, after=before.number)
    assert not RunDir(run.sweep.run()).cancelled.exists()
    again = steer("resume", str(run.sweep.run()), code=1)
    assert "still has tasks" in again.stderr and "hpc-elastic cancel" in again.stderr
    ends_right(run)
    assert run.steps() == list(range(1, NUM_STEPS + 1)), "every step was made once"
    assert "has succeeded" in steer("resume", str(run.sweep.run()), code=1).stderr
    eventually(lambda: not in_queue(slurm), "nothing is left in the queue")


@pytest.mark.long
def test_a_failed_run_is_resumed_from_its_checkpoint(start, steer, tmp_path, monkeypatch):
    """Its result is put away, and no sample is lost."""
    line = next(line for line in SCRIPT.splitlines() if 'say(f"step' in line)
    indent = line[: len(line) - len(line.lstrip())]
    bad = f"if batch.step == 30 and is_there(Path({str(tmp_path / 'bad')!r})):"
    failing = SCRIPT.replace(line, f"{indent}{bad}\n{indent}    raise ValueError('bad')\n{line}")
    monkeypatch.setattr("counting.SCRIPT", failing)
    (tmp_path / "bad").touch()
    run = start("nodes=1", "launcher.max_restarts=0", every=20)
    assert "ValueError: bad" in run.sweep.process.communicate(timeout=PATIENCE_S)[0]
    (tmp_path / "bad").unlink()
    steer("resume", str(run.sweep.run()))
    put_away = run.sweep.run() / "before-resume.1" / "result.json"
    assert json.loads(put_away.read_text())["failure"]["exception"] == "ValueError"
    ends_right(run)
    assert run.rounds()[-1].resumed == 20, "it went on from its checkpoint"


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_resume_that_was_killed_can_be_made_again(slurm, start, steer, tmp_path, when):
    """It is killed while it calls sbatch, before Slurm has the job and after: one group trains."""
    run = start("nodes=1:2")
    trains(run, 2)
    steer("cancel", str(run.sweep.run()))
    number = run.rounds()[-1].number
    slow = hanging_sbatch(tmp_path / "bin", when)
    path = f"{slow}:{os.environ['PATH']}"
    env = {**os.environ, **slurm.env, "PATH": path}
    command = slurm.on_login([COMMAND, "resume", str(run.sweep.run())])
    first = subprocess.Popen(command, env=env, start_new_session=True, stdin=subprocess.DEVNULL)
    eventually((slow / "reached").exists, "it hangs in sbatch")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    if when == "after":
        assert in_queue(slurm), "the job that nobody knows of"
    outcome = resumed_somehow(run, steer)
    trains(run, 2, after=number)
    ends_right(run)
    assert run.steps() == list(range(1, NUM_STEPS + 1)), f"every step was made once ({outcome})"
    eventually(lambda: not in_queue(slurm), "nothing is left in the queue")


def resumed_somehow(run: Counting, steer) -> str:
    """Resume a run, unless the tasks of the resume that was killed have started meanwhile."""
    try:
        steer("resume", str(run.sweep.run()), "nodes=1:2")
    except AssertionError as e:
        assert "still has tasks" in str(e)
        return "by the first call"
    return "by the second call"


def hanging_sbatch(folder: Path, when: str) -> Path:
    """Return a folder with an sbatch that does not return."""
    real = subprocess.run(["which", "sbatch"], text=True, capture_output=True, check=True).stdout
    folder.mkdir()
    submit = f'{real.strip()} "$@"\n' if when == "after" else ""
    script = folder / "sbatch"
    script.write_text(f"#!/bin/sh\n{submit}touch {folder}/reached\nexec sleep 600\n")
    script.chmod(0o755)
    return folder


@pytest.mark.long
def test_a_node_that_was_frozen_has_no_part_in_the_resumed_run(slurm, start, steer):
    """Slurm has given it up, and the run went on elsewhere: it wakes up, and changes nothing."""
    run = start("nodes=2")
    trains(run, 2, steps=5)
    frozen = hosts(run.sweep)[0]
    slurm.pause_node(frozen)
    try:
        slurm.run(["scontrol", "update", f"nodename={frozen}", "state=down", "reason=test"])
        steer("cancel", str(run.sweep.run()))
        number = run.rounds()[-1].number
        steer("resume", str(run.sweep.run()), "nodes=1", f"launcher.exclude={frozen}")
        trains(run, 1, after=number)
        rounds = len(run.sweep.events("round"))
    finally:
        slurm.resume_node(frozen)
    before = len(run.rounds()[-1].steps)
    eventually(lambda: len(run.rounds()[-1].steps) > before + 30, "it trains on")
    assert len(run.sweep.events("round")) == rounds, "the group was not disturbed"
    ends_right(run)


@pytest.mark.long
def test_a_detached_submission_tells_what_to_do_next(slurm, steer, tmp_path):
    """The ids that it prints are known to the other commands; a script's error is passed on."""
    script = tmp_path / "script.py"
    script.write_text(
        "import hydra, time\n"
        "@hydra.main(version_base=None, config_path=None)\n"
        "def main(cfg):\n    time.sleep(cfg.s)\n    return cfg.s\n"
        "if __name__ == '__main__':\n    print('noise')\n    main()\n"
    )
    where = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    arguments = [str(script), "-m", "+launcher=slurm", where]
    (told,) = json.loads(steer("submit", "--json", *arguments, "+s=0,300", **state).stdout)
    quick, slow = told["runs"]
    assert told["launcher"] == "slurm" and len(told["job_ids"]) == 1
    assert "1 waiting" in (text := steer("cancel", slow["run_id"], **state).stdout) or (
        "1 running" in text
    )
    eventually((Path(quick["run"]) / "result.json").exists, "the other ends")
    arguments[-1] += "-2"
    refused = steer("submit", *arguments, "+s=1", "launcher.partition=lwo", code=1, **state)
    assert "launcher.partition" in refused.stderr and not refused.stdout
    alone = steer("submit", str(script), "+s=1", code=1, **state)
    assert "launcher" in alone.stderr
