"""The fixture that starts sweeps."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sweeps import Sweep, train_without_end


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """Hear SIGTERM again after a test in which this process was a task, and left its node."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def sweep(slurm, tmp_path) -> Iterator[Callable[..., Sweep]]:
    """Starts sweeps of train.py, or of another script."""
    started: list[Sweep] = []

    def start(*overrides: str, script: Path | None = None) -> Sweep:
        script = script or train_without_end(tmp_path)
        prefix = slurm.on_login(())
        started.append(Sweep(tmp_path, slurm.env, script, *overrides, prefix=prefix))
        return started[-1]

    yield start
    for s in started:
        if s.process.poll() is None:
            s.process.kill()
            s.process.communicate()
        assert s.event_problems() == [], "every event is as hpc_elastic/run/events.py says"
