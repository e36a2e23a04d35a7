"""The pytest fixture ``fake_slurm``.

A conftest.py asks for it by ``pytest_plugins = ["hpc_elastic.testing.fake_slurm.fixture"]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpc_elastic.testing.fake_slurm.fake import FakeSlurm


@pytest.fixture
def fake_slurm() -> Iterator[FakeSlurm]:
    """Yield a fake cluster of four idle nodes, with nothing left of it after the test."""
    with FakeSlurm() as slurm:
        yield slurm
