"""Runs whose nodes share a folder as by NFS: each has caches of its own, which live for long.

Whoever waits for a file by its path waits for as long as the caches live, so that these tests of
other modules do not come to their end.
"""

import os

import pytest
from test_doctor import (  # noqa: F401
    place,
    test_the_probe_goes_through_what_a_run_goes_through,
)
from test_growing_runs import (  # noqa: F401
    test_a_late_node_joins_at_a_checkpoint_and_costs_no_step,
)
from test_runs import test_a_leader_that_dies_is_replaced  # noqa: F401

from hpc_elastic.testing.pytest_plugin import refuse
from hpc_elastic.testing.slurm_sandbox import SandboxConfig, SandboxError, SlurmSandbox
from hpc_elastic.testing.slurm_sandbox.requirements import check

NAME = "nfs_runs"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A sandbox of four nodes that know for ten minutes what they have seen."""
    try:
        check(nfs=True)
    except SandboxError as error:
        refuse(str(error), in_ci=os.environ.get("CI", "").lower() not in ("", "0", "false", "no"))
    SlurmSandbox(NAME).down()
    folder = tmp_path_factory.getbasetemp().resolve()
    try:
        yield SlurmSandbox.up(
            SandboxConfig(name=NAME, nodes=4, nfs=str(folder), nfs_options="actimeo=600")
        )
    finally:
        SlurmSandbox(NAME).down()
