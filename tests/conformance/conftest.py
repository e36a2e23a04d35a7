"""The conformance tests here run on the fake; tests/slurm/test_conformance.py, on a real Slurm."""

from collections.abc import Iterator

import pytest
from backends import Backend, Teller

from hpc_elastic.testing.fake_slurm import FakeSlurm


@pytest.fixture(scope="session")
def fake_cluster() -> Iterator[FakeSlurm]:
    """One fake cluster for all tests, as the sandbox is."""
    with FakeSlurm(nodes=4, cpus_per_node=8, grace_s=5, kill_wait_s=5, requeue_hold_s=20) as slurm:
        yield slurm


@pytest.fixture
def backend(fake_cluster: FakeSlurm) -> Iterator[Backend]:
    """The fake; all its nodes are idle."""
    yield Backend(fake_cluster, fake_cluster.env, fake_cluster.restore_node, hold_s=20)
    fake_cluster.heal_all()
    assert not fake_cluster.log(), "the controller had something to complain of"


@pytest.fixture
def teller(tmp_path) -> Teller:
    """Makes lines for jobs that log the signals that they get."""
    return Teller(tmp_path)
