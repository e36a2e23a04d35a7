"""What the fake does is what Slurm does: the tests of tests/conformance, on the real one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from backends import Backend, Teller, environment
from test_array_life import *  # noqa: F403
from test_lost_nodes import *  # noqa: F403
from test_signals_and_ends import *  # noqa: F403
from test_steps import *  # noqa: F403

from slurm_sandbox.config import parse_version

pytestmark = pytest.mark.long


@pytest.fixture
def backend(slurm) -> Backend:
    """The sandbox; it is healed after each test by its own fixture."""
    release = parse_version(slurm.run(["squeue", "-V"]).stdout)
    env = environment(slurm.env)
    return Backend(slurm, env, slurm.start_node, hold_s=120, release=release, early_s=60)


@pytest.fixture
def teller(tmp_path) -> Teller:
    """Makes lines for jobs that log the signals that they get."""
    return Teller(tmp_path)
