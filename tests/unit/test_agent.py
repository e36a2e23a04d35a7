"""The private names of torch's elastic agent that RunAgent builds on.

Each test fails with the name that torch has changed, so that an upgrade shows what to look at.
"""

import inspect
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from hpc_elastic.agent import agent as module
from hpc_elastic.agent.agent import RunAgent
from hpc_elastic.control import ControlPage


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_start_workers", ["self", "worker_group"]),
        ("_stop_workers", ["self", "worker_group"]),
        ("_monitor_workers", ["self", "worker_group"]),
        ("_rendezvous", ["self", "worker_group"]),
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


def test_torch_still_makes_every_workers_process_where_we_replace_it():
    """Otherwise workers would be new processes, silently, and restarts slow."""
    assert "start_processes(" in inspect.getsource(LocalElasticAgent._start_workers)
    assert "get_subprocess_handler(" in inspect.getsource(SubprocessContext._start)
    assert SubprocessContext._start.__globals__ is vars(processes)
    assert "get_subprocess_handler" in vars(processes)
    made = inspect.getsource(SubprocessHandler.__init__)
    for name in ("self._popen(", "self._stdout = open(", "self._stderr = open("):
        assert name in made, name
    assert made.index("self.local_rank_id = ") < made.index("self._popen(")
    assert list(inspect.signature(SubprocessHandler._popen).parameters) == ["self", "args", "env"]
    assert "start_new_session" in inspect.getsource(SubprocessHandler._popen)


class FakeSpares:
    """Takes note of what is asked of it."""

    def __init__(self) -> None:
        self.filled: list[bool] = []

    def fill(self, *, paced: bool) -> None:
        """Spares are to be made."""
        self.filled.append(paced)

    def tend(self) -> None:
        """The agent looks after them."""

    def close(self) -> None:
        """The agent ends."""
        self.closed = True


@pytest.fixture
def training(tmp_path: Path, monkeypatch) -> RunAgent:
    """An agent whose only worker has been started, at second 100."""
    agent = RunAgent.__new__(RunAgent)
    agent._spares, agent._filled, agent._started_at = FakeSpares(), False, 100.0
    agent.pages = {3: ControlPage.create(tmp_path, 0)}
    monkeypatch.setattr(module.time, "monotonic", lambda: 101.0)
    return agent


def test_spares_are_made_once_the_workers_have_made_a_step(training):
    """Before it, the workers need the CPU themselves; and dead spares are not made again."""
    training._keep_spares()
    training.pages[3].report(0, None, None)
    training._keep_spares()
    assert training._spares.filled == []
    training.pages[3].report(1, None, None)
    training._keep_spares()
    training._keep_spares()
    assert training._spares.filled == [True]


def test_spares_are_made_after_a_while_where_no_step_is_reported(training, monkeypatch):
    """A script need not report anything."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 111.0)
    training._keep_spares()
    assert training._spares.filled == [True]


def test_no_spare_outlives_the_agent(training, monkeypatch):
    """However its run ends: with a signal, say."""

    def taken(*_):
        raise SignalException("taken", signal.SIGTERM)

    monkeypatch.setattr(LocalElasticAgent, "run", taken)
    with pytest.raises(SignalException):
        training.run()
    assert training._spares.closed
