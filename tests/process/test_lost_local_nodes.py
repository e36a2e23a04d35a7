"""Nodes of a local run that are told to go, preempted, killed and come back: without Slurm."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from local_runs import PATIENCE_S, LocalRun

from ended import is_gone
from helps import not_in_help
from hpc_elastic.slurm.environment import as_array_task, outside

COMMAND = str(Path(sys.executable).with_name("hpc-elastic"))
SCRIPT = textwrap.dedent(
    """
    import subprocess, time
    from pathlib import Path

    import hydra
    import torch
    import torch.distributed as dist
    from hpc_elastic import mark_checkpoint, should_checkpoint

    FOLDER = Path({folder!r})
    SAVED = FOLDER / "saved"

    @hydra.main(version_base=None)
    def main(cfg):
        dist.init_process_group("gloo")
        step = int(SAVED.read_text()) if SAVED.exists() else 0
        if cfg.get("with_child"):
            child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            (FOLDER / f"children-{{dist.get_world_size()}}").open("a").write(f"{{child.pid}}\\n")
        over = torch.tensor(0)
        while not over:
            time.sleep(0.02)
            over = torch.tensor(int((FOLDER / "over").exists()))
            dist.all_reduce(over)
            step += 1
            print("step", step, flush=True)
            if should_checkpoint(step, every_steps=50):
                if dist.get_rank() == 0:
                    SAVED.write_text(str(step))
                dist.barrier()
                mark_checkpoint(step=step)
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
    """
)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., LocalRun]]:
    """Starts the script's run, and ends what is left of it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    with contextlib.ExitStack() as started:
        yield lambda *overrides: started.enter_context(
            LocalRun(script, tmp_path, "+launcher=local", "nproc_per_node=1", *overrides)
        )


def call(*args: str | Path, code: int = 0) -> str:
    """Call hpc-elastic; return what it prints."""
    done = subprocess.run(
        [COMMAND, *map(str, args)], capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def sizes(run: LocalRun) -> list[int]:
    """How many nodes each round had."""
    return [e["nodes"] for e in run.events("round")]


def steps(run: LocalRun, round_: int, rank: int = 0) -> list[int]:
    """The steps that a worker of a round has made."""
    found = [*(run.path / "tasks").glob(f"*/attempt-*/round-{round_}.rank-{rank}.out")]
    return [int(n) for file in found for n in re.findall(r"step (\d+)\n", file.read_text())]


def trains(run: LocalRun, *expected: int) -> None:
    """Wait until the rounds have had these sizes, and the last one has made steps."""
    run.eventually(lambda: sizes(run) == list(expected), f"groups {expected}, not {sizes(run)}")
    run.eventually(lambda: len(steps(run, len(expected))) > 5, "the group trains")


def agents(run: LocalRun) -> dict[str, int]:
    """The pid of each node's agent, by the node's name."""
    return {e["host"]: e["pid"] for e in run.events("task")}


def leader(run: LocalRun) -> str:
    """The node whose agent leads."""
    task = run.events("leader")[-1]["task"]
    return next(e["host"] for e in run.events("task") if e["task"] == task)


@pytest.mark.long
def test_a_run_has_the_sizes_that_it_was_given_only(start, tmp_path):
    """Three of four nodes train as two; the fourth comes back, and they are four again."""
    run = start("nodes=1:4", "launcher.world_sizes=[1,2,4]", "launcher.agent.warm_workers=false")
    trains(run, 4)
    call("node", "preempt", run.path, "local-1")
    trains(run, 4, 2, 4)
    (tmp_path / "over").touch()
    assert run.wait() == 0, run.output()


def test_a_node_that_is_lost_comes_back(start, tmp_path):
    """Preempted, killed, and the one that leads: no step is missing, no word is of Slurm."""
    run = start("nodes=1:2")
    trains(run, 2)
    assert sorted(agents(run)) == ["local-0", "local-1"]
    told = json.loads(call("node", "preempt", run.path, "local-1", "--json"))
    assert not not_in_help("node preempt", told)
    assert (told["left"], told["comes_back"], told["attempt"]) == (True, True, 0), told
    trains(run, 2, 1, 2)
    assert told["step"] == steps(run, 1)[-1] == steps(run, 2)[0] - 1
    assert steps(run, 3)[0] == steps(run, 2)[-1] + 1

    led, (other,) = leader(run), {"local-0", "local-1"} - {leader(run)}
    os.kill(agents(run)[other], signal.SIGKILL)
    trains(run, 2, 1, 2, 1, 2)
    said = call("node", "kill", run.path, led)
    assert f"killing {led}" in said and "its task starts again" in said
    call("wait", run.path, "--until", "nodes=2", "--timeout", "120")
    trains(run, 2, 1, 2, 1, 2, 1, 2)
    assert leader(run) == other
    attempts = [(e["host"], e["attempt"]) for e in run.events("task")]
    assert sorted(attempts) == sorted(set(attempts)) and len(attempts) == 5

    (tmp_path / "over").touch()
    assert run.wait() == 0, run.output()
    assert run.result()["restarts"] == 0
    made = [step for number in range(1, 8) for step in steps(run, number)]
    assert sorted(set(made)) == list(range(1, max(made) + 1)), "no step is missing"
    texts = [call(what, run.path) for what in ("events", "status")]
    assert texts[0].count("came back") == 3, texts[0]
    assert "preempted local-1 (30 s grace)" in texts[0]
    assert f"killed the processes of {led}" in texts[0]
    for text in (*texts, run.output()):
        assert "slurm" not in text.lower(), text
    assert "has ended (succeeded)" in call("node", "preempt", run.path, "local-1", code=1)
    late = call("wait", run.path, "--until", "training", code=1)
    assert "has not reached training: it has ended: succeeded" in late


@pytest.mark.long
def test_a_node_that_is_told_to_go_leaves_nothing_and_costs_nothing(start, tmp_path):
    """Its workers are there until all have saved; the other node goes on from that step."""
    run = start("nodes=1:2", "launcher.agent.warm_workers=false", "+with_child=true")
    run.eventually(lambda: all(len(steps(run, 1, rank)) > 20 for rank in (0, 1)), "two nodes train")
    by_task = {e["task"]: psutil.Process(e["pid"]) for e in run.events("task")}
    task, agent = min(by_task.items())
    agent.send_signal(signal.SIGTERM)
    run.eventually(lambda: is_gone(agent.pid), "the agent ends")
    (left,) = run.events("task_exited")
    assert (left["task"], left["reason"], left["how"]) == (task, "signal", "requeue")
    run.eventually(lambda: steps(run, 2), "the other node goes on")
    children = map(int, (tmp_path / "children-2").read_text().split())
    assert all(map(is_gone, children)), "whatever session they are in"

    (tmp_path / "over").touch()
    assert run.wait() == 0, run.output()
    first, other = steps(run, 1, 0), steps(run, 1, 1)
    after = steps(run, 2)
    assert first == other == list(range(1, len(first) + 1))
    assert after == list(range(len(first) + 1, len(first) + len(after) + 1))
    assert run.events("end")[0]["restarts"] == 0


def test_a_task_that_is_told_to_go_before_it_has_joined_goes_at_once(start, tmp_path):
    """It still imports torch: the signal is neither its end nor forgotten."""
    run = start("nodes=1", "launcher.dry_run=true")
    assert run.wait() == 0
    array = tmp_path / "sweep" / ".hpc_elastic" / "array-0.json"
    task = subprocess.Popen(
        [sys.executable, "-u", "-m", "hpc_elastic.agent", str(array)],
        env={**outside(os.environ), **as_array_task(9, 0, node_name="early", cpus=1)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "logs of this task" in task.stdout.readline()
    task.terminate()
    task.communicate(timeout=PATIENCE_S)
    assert task.returncode == 143
    assert [e["how"] for e in run.events("task_exited")] == ["exit"]
    assert not run.events("joined")
