"""A pytest fixture with simulated GPUs.

Enable it in a conftest.py: ``pytest_plugins = ["simulated_gpu.pytest_plugin"]``. Where the
libraries cannot be built, tests that need them are skipped, or fail if CI is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import BuildError, Libraries, SimulatedGpus, build, machine_directory


@pytest.fixture(scope="session")
def simulated_gpu_libraries() -> Libraries:
    """Return the compiled libraries."""
    try:
        return build()
    except BuildError as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(e))


@pytest.fixture
def gpus(simulated_gpu_libraries: Libraries) -> Iterator[Callable[..., SimulatedGpus]]:
    """Yield a function that makes the test's machine, with fields of `SimulatedGpus`."""
    with machine_directory() as directory:

        def make(**values: Any) -> SimulatedGpus:
            return SimulatedGpus(simulated_gpu_libraries, directory, **values)

        yield make
