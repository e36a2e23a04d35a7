"""The Lightning example: a worker is killed, a node is told to go."""

import pytest
from framework_runs import FrameworkRun

pytest.importorskip("lightning", reason="pip install -e '.[frameworks]'")


def test_a_killed_worker_and_a_node_that_goes(tmp_path):
    """Every sample once an epoch, no step lost at the notice, the same parameters on all ranks."""
    overrides = ("nodes=2:3", "epochs=4", "pause_s=0.1", "save_every_s=3")
    with FrameworkRun("lightning/train.py", tmp_path, *overrides) as run:
        run.trains(1)
        run.has_saved()
        run.kill_worker(run.tasks()[1])
        run.trains(2)
        run.tell_to_go(run.tasks()[0])
        results = run.result()

    assert [e["world_size"] for e in run.events("round")] == [3, 3, 2]
    (shrank,) = [episode for episode in run.story() if episode.kind == "shrank"]
    assert shrank.cost.lost_steps == 0
    assert [r["steps"] for r in results] == [4 * 38] * 2
    assert results[0] == results[1]
    run.audit()
