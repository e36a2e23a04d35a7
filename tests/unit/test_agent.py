"""The private names of torch's elastic agent that RunAgent builds on.

Each test fails with the name that torch has changed, so that an upgrade shows what to look at.
"""

import inspect

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from hpc_elastic.agent.agent import RunAgent


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_start_workers", ["self", "worker_group"]),
        ("_stop_workers", ["self", "worker_group"]),
        ("_monitor_workers", ["self", "worker_group"]),
        ("_exit_barrier", ["self"]),
        ("_assign_worker_ranks", ["self", "store", "group_rank", "group_world_size", "spec"]),
    ],
)
def test_torch_still_has_what_we_override(name, parameters):
    """An override that torch no longer calls would silently do nothing."""
    theirs = inspect.signature(getattr(LocalElasticAgent, name))
    assert list(theirs.parameters)[: len(parameters)] == parameters, name
    assert name in vars(RunAgent)


def test_torch_still_stops_workers_as_we_call_it():
    """`_shutdown` takes the time between SIGTERM and SIGKILL by the name `timeout`."""
    assert "timeout" in inspect.signature(LocalElasticAgent._shutdown).parameters


def test_torch_still_goes_by_the_answers_that_we_give():
    """The loop asks the monitor, restarts on waiting nodes, and ends at the exit barrier."""
    loop = inspect.getsource(SimpleElasticAgent._invoke_run)
    for name in ("_monitor_workers", "num_nodes_waiting", "_restart_workers", "_exit_barrier"):
        assert name in loop, name
    assert "_remaining_restarts" in loop
    start = inspect.getsource(LocalElasticAgent._start_workers)
    assert "spec.max_restarts - self._remaining_restarts" in start
