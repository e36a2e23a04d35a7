"""Silent connections at the ports that torch opens: a run whose processes may open few files."""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flooded
import psutil
import pytest
from strangers import as_stranger

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))

from group import eventually
from training import Training

NUM_STRANGERS = 1500
PATIENCE_S = 60.0
FEW_FILES = 1024
"""As most systems allow at first; the hard limit is higher."""


@pytest.fixture
def training(tmp_path, monkeypatch) -> Iterator[Training]:
    """A run of two nodes that has begun to train; no restart is left."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, FEW_FILES), hard))
    made = Training(tmp_path)
    try:
        made.has_begun()
        yield made
    finally:
        made.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def workers_of(training: Training) -> list[psutil.Process]:
    """The processes below the agents."""
    agents = [psutil.Process(pid) for pid in training.agents().values()]
    return [child for agent in agents for child in agent.children(recursive=True)]


def ports_of(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Where these processes listen."""
    return {
        (c.laddr.ip, c.laddr.port)
        for process in processes
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }


@contextlib.contextmanager
def flood(port: tuple[str, int]) -> Iterator[None]:
    """Hold silent connections to a port."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    argv = as_stranger(flooded.FLOOD, *port, NUM_STRANGERS)
    with subprocess.Popen(argv, cwd="/", **pipes) as strangers:
        assert strangers.stdout.readline() == "half\n"
        assert strangers.stdout.readline() == "all\n"
        yield
        strangers.communicate("\n")


def test_a_flood_of_gloo_and_of_the_store_disturbs_nothing(training):
    """Agents and workers have as many descriptors as the system allows."""
    ports = ports_of(workers_of(training))
    assert len(ports) >= 2, "each worker has a port of gloo's"
    for port in (*ports, training.store()):
        with flood(port):
            training.goes_on()
        training.goes_on()
    training.end()
    training.results.result()
    result = json.loads(training.run.result.read_text())
    assert (result["status"], result["rounds"], result["restarts"]) == ("succeeded", 1, 0)


@pytest.mark.long
def test_workers_that_gloo_aborts_for_strangers_cost_no_restart(training):
    """The group is formed again, although no restart is left."""
    workers = workers_of(training)
    for worker in workers:
        resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    with flood(min(ports_of(workers))):
        eventually(lambda: (training.folder / "round-2.json").exists(), PATIENCE_S)
    training.goes_on()
    training.end()
    training.results.result()
    result = json.loads(training.run.result.read_text())
    assert (result["status"], result["restarts"]) == ("succeeded", 0) and result["rounds"] > 1
