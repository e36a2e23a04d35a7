"""Every test may ask for the real Slurm (`slurm`); none touches the user's own list of runs."""

import gc
import os
import shutil
import signal
import tempfile

import pytest

from hpc_elastic.worker import reporting

pytest_plugins = ["hpc_elastic.testing.fake_slurm.fake", "slurm_sandbox.pytest_plugin"]

# for the processes that tests start as well
_STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hpc-elastic-state-")

# Two workers on two cores would otherwise wait for each other's threads most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script that starts pytest in the background has SIGINT ignored by it, and by all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that a test restores is not that of the next test's training."""
    monkeypatch.setattr(reporting._reporter, "restored", None)


def pytest_collection_finish() -> None:
    """Leave the modules of all tests out of garbage collections, and of searches for objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Remove what the tests' processes have written there."""
    shutil.rmtree(_STATE, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what is marked `long`, unless it is asked for."""
    if item.get_closest_marker("long") and not os.environ.get("HPC_ELASTIC_LONG"):
        pytest.skip("takes long: HPC_ELASTIC_LONG=1 runs it")
