"""scripts/gpu_check: its lines run with gloo and CPU tensors; a failure and a missing GPU show."""

import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpu_check

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in an empty folder."""
    return subprocess.run(
        [SCRIPT, *arguments], cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.long
def test_rehearsal_runs_all_checks(tmp_path):
    """All is well on the CPU; the report has the figures, and no name of this host."""
    done = check(tmp_path, "--cpu", "--gb", "0.02", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsal on the CPU, which checks neither NCCL nor a GPU" in done.stdout
    text = (tmp_path / "gpu_check.json").read_text()
    report = json.loads(text)
    assert report["is_rehearsal"] and not report["has_nccl_group"]
    assert {c["name"]: c["verdict"] for c in report["checks"]} == dict.fromkeys(
        gpu_check.CHECKS, "ok"
    )
    facts = {c["name"]: c["facts"] for c in report["checks"]}
    assert facts["killed"]["error_after_s"] < 15
    assert facts["training"]["failed_steps"] <= 1
    assert facts["checkpoint"]["held_up_s"] > 0 and facts["transports"]["http_gb_per_s"] > 0
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_checked(tmp_path):
    """An exit code of its own says so, and the text what to do."""
    done = check(tmp_path)
    assert done.returncode == gpu_check.NO_GPU
    assert "No GPU" in done.stdout and "--cpu" in done.stdout
    assert not list(tmp_path.iterdir())


def hang(place: gpu_check.Place) -> gpu_check.Facts:
    """Wait for nothing."""
    threading.Event().wait()
    return {}


@pytest.mark.parametrize(
    ("planted", "error", "log"),
    [
        pytest.param({"kills": False}, "rank 1 ended with exit code -9", "", id="a rank dies"),
        pytest.param(
            {"run": hang, "limit_s": 20.0}, "no end of ranks [0, 1] within 20 s", "in hang",
            marks=pytest.mark.long, id="a check hangs",
        ),
    ],
)  # fmt: skip
def test_a_failure_is_reported_with_its_log(tmp_path, monkeypatch, planted, error, log):
    """The outcome names the ranks, and has the last lines that they wrote: stacks, if they hang."""
    changed = replace(gpu_check.CHECKS["killed"], **planted)
    monkeypatch.setitem(gpu_check.CHECKS, "killed", changed)
    place = gpu_check.Place(size=2, is_cpu=True, folder=str(tmp_path))
    outcome = gpu_check.perform("killed", place)
    assert (outcome.verdict, outcome.error) == ("FAIL", error)
    assert log in outcome.log
