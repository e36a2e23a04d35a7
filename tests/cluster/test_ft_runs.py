"""examples/train_ft.py on a real Slurm: replicas survive while nodes die, leave and come back."""

import pytest
from replicas import Replicas
from sweeps import eventually, leader_host

TAKEN_S = 6


@pytest.mark.long
def test_replicas_live_on(slurm, sweep, tmp_path):
    """The leader's node dies, the next leader's is preempted; later all are preempted at once.

    They come back. The survivors' workers are never started again, all end with the same
    parameters, what is announced costs no step, and every sample is trained exactly once.
    """
    run = Replicas(
        tmp_path, sweep, "train_ft.py", "nodes=2:4", "epochs=10", "pause_s=0.5", "save_every_s=5"
    )
    run.train(4)
    dead = leader_host(run.sweep)
    slurm.kill_node(dead)
    run.train(3)
    slurm.preempt([leader_host(run.sweep)], for_s=TAKEN_S)
    run.train(2)
    slurm.start_node(dead)
    run.train(4)
    assert run.sweep.events("round_stopped") == []
    per_task = sorted(len(files) for files in run.outputs().values())
    assert per_task == [1, 1, 2, 2], "only those that went were started again"
    slurm.preempt(slurm.nodes, for_s=TAKEN_S)
    eventually(lambda: len(run.sweep.events("task_exited")) == 5, "all have left")
    reached = max(step for step, _ in run.steps().values())
    run.train(4)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.sweep.result()["restarts"] == 0
    assert len(run.fingerprints()) == 4 and len(set(run.fingerprints())) == 1
    assert reached in run.restored(), "what was announced cost no step"
    told = [(e.kind, e.nodes_before, e.nodes_after) for e in run.sweep.timeline()]
    assert told[:4] == [
        ("started", None, None), ("formed", None, 4), ("shrank", 4, 3), ("shrank", 3, 2)
    ]  # fmt: skip
    assert ("stopped", 4, 0) in told and told[-1][0] == "ended"
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_nodes_that_are_taken_one_after_the_other_lose_no_step(slurm, sweep, tmp_path):
    """The second is no quorum by itself when it is told to go; both come back to the step."""
    run = Replicas(
        tmp_path, sweep, "train_ft.py", "nodes=2", "epochs=10", "pause_s=1", "save_every_s=1000"
    )
    run.train(2)
    first = leader_host(run.sweep)
    (second,) = {e["host"] for e in run.sweep.events("task")} - {first}
    slurm.preempt([first], for_s=TAKEN_S)
    slurm.preempt([second], for_s=TAKEN_S)
    eventually(lambda: len(run.sweep.events("task_exited")) == 2, "both have left")
    reached = max(step for step, _ in run.steps().values())
    run.train(2)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.restored() == {reached}


@pytest.mark.long
def test_nodes_that_are_returned_lose_no_step(slurm, sweep, tmp_path):
    """Below the minimum for too long, what is left saves before it returns its node."""
    run = Replicas(
        tmp_path, sweep, "train_ft.py", "nodes=2", "epochs=10", "pause_s=1", "save_every_s=1000",
        "launcher.below_min_timeout_s=8",
    )  # fmt: skip
    run.train(2)
    first, last = (e["host"] for e in run.sweep.events("task"))
    slurm.preempt([node for node in slurm.nodes if node != last], for_s=40)
    eventually(lambda: run.sweep.events("nodes_requeued"), f"{first} and {last} are returned")
    reached = max(step for step, _ in run.steps().values())
    run.train(2)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert run.restored() == {reached} and not run.sweep.events("state_unsaved")


@pytest.mark.long
def test_a_node_that_is_away_for_long_stops_nothing(slurm, sweep, tmp_path):
    """With every default: what is left waits for longer than any time-out of its own, and goes on.

    Elsewhere `below_min_timeout_s` is shorter than these, and hides whether a worker gives up.
    """
    run = Replicas(
        tmp_path, sweep, "train_ft.py", "nodes=2", "epochs=10", "pause_s=1", "save_every_s=1000"
    )
    run.train(2)
    _, last = (e["host"] for e in run.sweep.events("task"))
    slurm.preempt([node for node in slurm.nodes if node != last], for_s=75)
    eventually(lambda: run.sweep.events("task_exited"), "one has left")
    run.train(2)
    output = run.sweep.output()
    assert run.sweep.result()["status"] == "succeeded", output
    assert not run.sweep.events("nodes_requeued") and not run.sweep.events("restart")
