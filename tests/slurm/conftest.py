"""The fixture that starts sweeps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sweeps import ROOT, Sweep


@pytest.fixture
def sweep(slurm, tmp_path) -> Iterator[Callable[..., Sweep]]:
    """Starts sweeps of train.py, or of another script."""
    started: list[Sweep] = []

    def start(*overrides: str, script: Path = ROOT / "train.py") -> Sweep:
        started.append(Sweep(tmp_path, slurm.env, script, *overrides))
        return started[-1]

    yield start
    for s in started:
        if s.process.poll() is None:
            s.process.kill()
            s.process.communicate()
