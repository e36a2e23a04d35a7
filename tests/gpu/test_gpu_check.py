"""scripts/gpu_check on simulated GPUs, with a state that is taken over beside the training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_check
from gpu_ranks import require_own_devices

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.py"
OTHERS = [name for name in gpu_check.CHECKS if name not in ("changes", "joining")]


@pytest.mark.parametrize(
    "names", [["changes", "joining"], pytest.param(OTHERS, marks=pytest.mark.long)]
)
def test_all_is_well(gpus, tmp_path, names):
    """Each process has a context on its own GPU alone, and leaves nothing behind."""
    machine = gpus(count=2)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--gb", "0.3", "--only", *names],
        cwd=tmp_path, env=machine.environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts == {name: "skipped" if name == "compiled" else "ok" for name in names}
    require_own_devices(machine)
