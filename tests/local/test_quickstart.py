"""The sweep of the quickstart, as a newcomer sees it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_runs_of_the_quickstart_differ(tmp_path):
    """Its learning rates lead to results that nobody takes for one and the same."""
    found = re.search(r"'lr=([\d.]+),([\d.]+)'", (ROOT / "scripts/quickstart").read_text())
    assert found is not None
    what = ["nodes=1", "epochs=8", f"lr={found[1]},{found[2]}", f"hydra.sweep.dir={tmp_path}"]
    train = [sys.executable, str(ROOT / "train.py"), "-m", "launcher=local"]
    done = subprocess.run(
        [*train, *what], check=True, timeout=300, cwd=tmp_path, capture_output=True, text=True
    )
    first, second = map(float, re.findall(r"succeeded +(0\.\d+)", done.stdout))
    assert first > 0.95 and first - second > 0.01
