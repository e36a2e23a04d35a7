"""Every test may ask for the real Slurm (`slurm`); none touches the user's own list of runs."""

import os
import tempfile

import pytest

pytest_plugins = ["hpc_elastic.testing.pytest_plugin"]

# for the processes that tests start as well; removed by the system
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hpc-elastic-state-")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what is marked `long`, unless it is asked for."""
    if item.get_closest_marker("long") and not os.environ.get("HPC_ELASTIC_LONG"):
        pytest.skip("takes long: HPC_ELASTIC_LONG=1 runs it")
