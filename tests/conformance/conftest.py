"""The conformance tests here run on the fake; `test_conformance.py`, on a real Slurm."""

from collections.abc import Iterator

import pytest
from backends import Backend, Teller

from hpc_elastic.testing.fake_slurm import FakeSlurm

GRACE_S, HOLD_S = 10, 20
"""What a test sees while they last it has to see in time, on a busy machine too."""


@pytest.fixture(scope="session")
def fake_cluster() -> Iterator[FakeSlurm]:
    """One fake cluster for all tests, as the sandbox is."""
    times = {"grace_s": GRACE_S, "kill_wait_s": GRACE_S, "requeue_hold_s": HOLD_S}
    with FakeSlurm(nodes=4, cpus_per_node=8, **times) as slurm:
        yield slurm


@pytest.fixture
def backend(fake_cluster: FakeSlurm) -> Iterator[Backend]:
    """The fake; all its nodes are idle."""
    restore = fake_cluster.restore_node
    yield Backend(fake_cluster, fake_cluster.env, restore, hold_s=HOLD_S, grace_s=GRACE_S)
    fake_cluster.heal_all()
    assert not fake_cluster.log(), "the controller had something to complain of"


@pytest.fixture
def teller(tmp_path) -> Teller:
    """Makes lines for jobs that log the signals that they get."""
    return Teller(tmp_path)
