"""Work beside a training: an evaluation of its checkpoints, and rollouts for its trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from local_runs import LocalRun

from hpc_elastic import Checkpointer, follow_checkpoints
from hpc_elastic.errors import ConfigError
from hpc_elastic.run.directory import RunDir

ROOT = Path(__file__).parents[2]


def kill(run: Path) -> None:
    """Kill the processes of a run's first node."""
    argv = [sys.executable, "-m", "hpc_elastic", "node", "kill", str(run), "local-0"]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)


def progress(run: Path) -> int:
    """The last step of a run."""
    status = run / "status.json"
    return (json.loads(status.read_text())["step"] or 0) if status.exists() else 0


@pytest.fixture
def trained(tmp_path) -> tuple[RunDir, Checkpointer, torch.nn.Linear]:
    """A run with the checkpoint of its first step, its checkpointer and its model."""
    run = RunDir(tmp_path / "run")
    net = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    checkpointer = Checkpointer({"net": net, "optimizer": sgd}, run.checkpoints)
    checkpointer.save(1, urgent=True)
    return run, checkpointer, net


def test_each_new_checkpoint_is_there_until_the_run_has_ended(trained):
    """Those that a newer one has overtaken are left out; what was used before is not repeated."""
    run, checkpointer, net = trained
    mine, steps = torch.nn.Linear(1, 1), []
    for step in follow_checkpoints({"net": mine}, run.path, poll_s=0.01):
        steps.append(step)
        assert torch.equal(mine.weight, net.weight)
        torch.nn.init.zeros_(net.weight)
        if step == 1:
            checkpointer.save(2, urgent=True)
            checkpointer.save(3, urgent=True)
        if step == 3:
            checkpointer.save(4, urgent=True)
            run.result.write_text("{}")
    assert steps == [1, 3, 4]
    assert not list(follow_checkpoints({"net": mine}, run.path, after=4))


def test_a_wrong_key_and_a_run_that_saves_nothing_more_are_named(trained):
    """Neither evaluates what was not loaded, nor waits for ever."""
    run, _, net = trained
    with pytest.raises(ConfigError, match=r"state=\['model'\]: .* net, optimizer"):
        next(follow_checkpoints({"model": net}, run.path))
    followed = follow_checkpoints({"net": net}, run.path, poll_s=0.01, timeout_s=0.1)
    assert next(followed) == 1
    with pytest.raises(TimeoutError, match=r"no checkpoint after step 1 for 0\.1 s"):
        next(followed)


def test_a_damaged_newest_checkpoint_does_not_put_off_the_time_out(trained):
    """What verifies was used before, so nothing new has come."""
    run, checkpointer, net = trained
    checkpointer.save(2, urgent=True)
    for shard in (run.checkpoints / "step-00000002").glob("shard-*"):
        shard.write_bytes(b"damaged")
    followed = follow_checkpoints({"net": net}, run.path, after=1, poll_s=0.01, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="no checkpoint after step 1"):
        next(followed)


@pytest.mark.long
def test_an_evaluation_on_the_side(tmp_path):
    """It follows a training to its end, though its own node is killed meanwhile."""
    settings = ("epochs=12", "pause_s=0.02", "save_every_s=1")
    beside = tmp_path / "beside"
    beside.mkdir()
    with LocalRun(ROOT / "train.py", tmp_path, "launcher=local", "nodes=1", *settings) as training:
        overrides = ("launcher=local", f"run={training.path}", "poll_s=0.2")
        with LocalRun(ROOT / "examples/beside/evaluate.py", beside, *overrides) as evaluation:
            evaluation.eventually(lambda: evaluation.events("first_step"), "it has evaluated")
            kill(evaluation.path)
            assert training.wait() == 0, training.output()
            assert evaluation.wait() == 0, evaluation.output()
    value = json.loads(next((evaluation.path / "results").glob("round-*/rank-0.json")).read_text())
    assert value["360"] > 0.9, "the last step of the training"


@pytest.mark.long
def test_rollouts_come_and_go_while_the_trainer_stays(tmp_path):
    """A rollout's node is killed, then the trainer's own: each goes on by itself."""
    overrides = ("-m", "launcher=local", "role=trainer,rollout-1,rollout-2", "steps=120")
    with LocalRun(ROOT / "examples/beside/policy.py", tmp_path, *overrides) as trainer:
        rollout = tmp_path / "sweep" / "1"
        trainer.eventually(lambda: progress(rollout) > 5, "a rollout plays")
        kill(rollout)
        reached = progress(trainer.path)
        trainer.eventually(lambda: progress(trainer.path) > reached + 5, "the trainer stays")
        kill(trainer.path)
        assert trainer.wait() == 0, trainer.output()
    assert len(trainer.events("task")) == 2 and trainer.result()["restarts"] == 0
    value = json.loads(next((trainer.path / "results").glob("round-*/rank-0.json")).read_text())
    assert value > 0.8, "the mean reward of the last step"
