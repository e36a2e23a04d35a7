"""Runs whose nodes share a folder as by NFS: each has caches of its own, which live for long.

Whoever waits for a file by its path waits for as long as the caches live, so that these tests of
other modules, which are marked `nfs` there, do not come to their end.
"""

import re
from pathlib import Path

import pytest
from test_doctor import (  # noqa: F401
    place,
    test_the_probe_goes_through_what_a_run_goes_through,
)
from test_growing_runs import (  # noqa: F401
    test_a_late_node_joins_at_a_checkpoint_and_costs_no_step,
)
from test_runs import test_a_leader_that_dies_is_replaced  # noqa: F401
from test_shared_folder import _possible  # noqa: F401
from test_slurm_logs import (  # noqa: F401
    follow,
    test_a_run_is_followed_across_a_late_node_and_a_requeue,
)
from test_status_of_runs import test_a_run_beside_a_queue  # noqa: F401
from test_steered_runs import (  # noqa: F401
    start,
    steer,
    test_a_cancelled_run_is_resumed_on_other_nodes,
)

from slurm_sandbox import SandboxConfig, SlurmSandbox

NAME = "nfs_runs"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A sandbox of four nodes that know for ten minutes what they have seen.

    KillWait is Slurm's own default, since each step of a save is a request to a server here: the
    sandbox's 5 s leave 3.3 s for it.
    """
    SlurmSandbox(NAME).down()
    folder = tmp_path_factory.getbasetemp().resolve()
    try:
        yield SlurmSandbox.up(
            SandboxConfig(
                name=NAME, nodes=4, kill_wait_s=30, nfs=str(folder), nfs_options="actimeo=600"
            )
        )
    finally:
        SlurmSandbox(NAME).down()


def test_all_tests_that_are_marked_are_here():
    """`scripts/test` leaves them out where the nodes see one folder."""
    texts = [file.read_text() for file in Path(__file__).parent.glob("test_*.py")]
    marked = [re.findall(r"^@pytest\.mark\.nfs\ndef (\w+)", text, re.MULTILINE) for text in texts]
    named = [name for names in marked for name in names]
    assert named and [name for name in named if name not in globals()] == []
