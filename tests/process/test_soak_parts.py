"""Parts of the soak that need no Slurm."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

from savers import Counter, checkpointer, save_at

from hpc_elastic.checkpoint.store import Store, verify_checkpoint
from soak.inject import damage_checkpoint
from soak.training import __name__ as training

TOOLS = Path(__file__).parents[2] / "tools"


def test_the_undisturbed_training_sees_each_sample_once_an_epoch(tmp_path):
    """And ends after the number of epochs that it was given."""
    argv = [sys.executable, "-m", training, str(tmp_path), "2"]
    env = {**os.environ, "PYTHONPATH": str(TOOLS)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    outcome = json.loads(done.stdout)
    assert (outcome["epochs"], outcome["times_seen"], outcome["world_size"]) == (2, [2], 1)
    assert 0 < outcome["loss"] < 1


def test_a_damaged_checkpoint_does_not_verify(tmp_path):
    """Whichever way chance has chosen."""
    counter = Counter()
    with checkpointer(tmp_path / "good", counter) as c:
        assert save_at(c, counter, 7)
    found = set()
    for seed in range(30):
        folder = shutil.copytree(Store(tmp_path / "good").folder(7), tmp_path / str(seed) / "x")
        assert verify_checkpoint(folder) == []
        damage_checkpoint(folder, random.Random(seed))
        (problem,) = verify_checkpoint(folder)
        found |= {
            word for word in ("was changed", "bytes instead", "No such file") if word in problem
        }
    assert len(found) == 3
