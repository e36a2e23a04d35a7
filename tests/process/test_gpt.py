"""The GPT in plain torch: sharded over all nodes, in bfloat16."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import LocalRun

SCRIPT = Path(__file__).parents[2] / "examples/gpt/plain.py"
COMMAND = [sys.executable, "-m", "hpc_elastic"]


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sharded_gpt_is_killed_and_grows(compiled, tmp_path):
    """It goes on with one node, resharded, then with two again; each sample is trained once."""
    stretched = ("pause_s=0.25", "save_every_s=2", "launcher.scale_up=immediate")
    overrides = ("launcher=local", "nodes=1:2", *stretched, f"compile={compiled}")
    with LocalRun(SCRIPT, tmp_path, *overrides) as run:
        run.eventually(lambda: len(run.events("first_step")) >= 2, "both nodes train")
        subprocess.run(
            [*COMMAND, "node", "kill", str(run.path), "local-1"], check=True, timeout=120
        )
        assert run.wait() == 0, run.output()
    sizes = [event["nodes"] for event in run.events("round")]
    assert 1 in sizes and sizes.count(2) >= 2
    audit = subprocess.run([*COMMAND, "audit", str(run.path)], timeout=120)
    assert audit.returncode == 0
    (value,) = (run.path / "results").glob("round-*/rank-0.json")
    assert json.loads(value.read_text()) < 4.0
    points = (run.path / "progress.jsonl").read_text()
    assert '"lr": 0.0' in points, "the learning rate is reported"
