"""What the soak compares its run with."""

import json
import subprocess
import sys

from hpc_elastic.testing.soak.training import __name__ as training


def test_the_undisturbed_training_sees_each_sample_once_an_epoch(tmp_path):
    """And ends after as many epochs as it is told."""
    argv = [sys.executable, "-m", training, str(tmp_path), "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    outcome = json.loads(done.stdout)
    assert (outcome["epochs"], outcome["times_seen"], outcome["world_size"]) == (2, [2], 1)
    assert 0 < outcome["loss"] < 1
