"""Parts of the soak that need no Slurm."""

import json
import random
import shutil
import subprocess
import sys

from savers import Counter, checkpointer, save_at

from hpc_elastic.checkpoint.store import Store, verify
from soak.hands import spoil
from soak.training import __name__ as training


def test_the_undisturbed_training_sees_each_sample_once_an_epoch(tmp_path):
    """And ends after as many epochs as it is told."""
    argv = [sys.executable, "-m", training, str(tmp_path), "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    outcome = json.loads(done.stdout)
    assert (outcome["epochs"], outcome["times_seen"], outcome["world_size"]) == (2, [2], 1)
    assert 0 < outcome["loss"] < 1


def test_a_checkpoint_that_is_spoilt_does_not_verify(tmp_path):
    """Whichever way chance has chosen."""
    counter = Counter()
    with checkpointer(tmp_path / "good", counter) as c:
        assert save_at(c, counter, 7)
    found = set()
    for seed in range(30):
        folder = shutil.copytree(Store(tmp_path / "good").folder(7), tmp_path / str(seed) / "x")
        assert verify(folder) == []
        spoil(folder, random.Random(seed))
        (problem,) = verify(folder)
        found |= {
            word for word in ("was changed", "bytes instead", "No such file") if word in problem
        }
    assert len(found) == 3
