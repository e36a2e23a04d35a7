"""The fixture that starts sweeps."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sweeps import ROOT, Sweep, unhurried


def train_without_end(folder: Path) -> Path:
    """Return a copy of train.py that is `unhurried`, and does not tell when it will be done.

    Whether a late node is worth the restart would depend on how fast this machine is.
    """
    script = folder / "train.py"
    told = ", total_steps=total_steps"
    text = (ROOT / "train.py").read_text()
    assert told in text
    script.write_text(unhurried(text.replace(told, ""), folder))
    shutil.copy(ROOT / "train.yaml", folder)
    return script


@pytest.fixture
def sweep(slurm, tmp_path) -> Iterator[Callable[..., Sweep]]:
    """Starts sweeps of train.py, or of another script."""
    started: list[Sweep] = []

    def start(*overrides: str, script: Path | None = None) -> Sweep:
        script = script or train_without_end(tmp_path)
        started.append(Sweep(tmp_path, slurm.env, script, *overrides))
        return started[-1]

    yield start
    for s in started:
        if s.process.poll() is None:
            s.process.kill()
            s.process.communicate()
