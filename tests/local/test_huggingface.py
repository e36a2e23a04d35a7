"""The examples with Hugging Face's Trainer and Accelerate: killed workers, nodes that go."""

import pytest
from framework_runs import FrameworkRun

for framework in ("transformers", "accelerate"):
    pytest.importorskip(framework, reason="pip install -e '.[frameworks]'")


def test_the_trainer_withstands_a_kill_and_a_node_that_goes(tmp_path):
    """Every sample once an epoch, no step lost at the notice, the same parameters on all ranks."""
    overrides = ("nodes=2:3", "epochs=4", "pause_s=0.2", "save_every_s=3")
    with FrameworkRun("huggingface/trainer.py", tmp_path, *overrides) as run:
        run.trains(1)
        run.has_saved()
        run.kill_worker(run.tasks()[1])
        run.trains(2)
        run.tell_to_go(run.tasks()[0])
        results = run.result()

    assert [e["world_size"] for e in run.events("round")] == [3, 3, 2]
    (shrank,) = [episode for episode in run.story() if episode.kind == "shrank"]
    assert shrank.cost.lost_steps == 0
    assert [r["steps"] for r in results] == [4 * 30] * 2
    assert results[0] == results[1]
    run.audit()


def test_accelerate_goes_on_without_a_node(tmp_path):
    """One of two nodes is told to go: the other goes on from the step that both have saved."""
    overrides = ("nodes=1:2", "epochs=2", "pause_s=0.1", "save_every_s=1000")
    with FrameworkRun("huggingface/accelerated.py", tmp_path, *overrides) as run:
        run.trains(1)
        run.tell_to_go(run.tasks()[0])
        (result,) = run.result()

    (shrank,) = [episode for episode in run.story() if episode.kind == "shrank"]
    assert shrank.cost.lost_steps == 0
    assert result["steps"] == 2 * 38
    assert "thrown away: 0 steps" in run.audit()
