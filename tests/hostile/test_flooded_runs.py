"""Silent connections at the ports that torch opens: a run whose processes may open few files."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flooded
import psutil
import pytest
from strangers import as_stranger

sys.path.insert(0, str(Path(__file__).parents[1] / "local"))

from training import Training

NUM_STRANGERS = 1500
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


def test_a_run_survives_a_flood_of_gloo_and_of_the_store(training):
    """Workers have as many descriptors as the system allows; else gloo would abort them."""
    agents = [psutil.Process(pid) for pid in training.agents().values()]
    workers = [child for agent in agents for child in agent.children(recursive=True)]
    ports = {
        (c.laddr.ip, c.laddr.port)
        for process in workers
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= 2, "each worker has a port of gloo's"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for port in (*ports, training.store()):
        argv = as_stranger(flooded.FLOOD, *port, NUM_STRANGERS)
        with subprocess.Popen(argv, cwd="/", **pipes) as strangers:
            assert strangers.stdout.readline() == "half\n"
            assert strangers.stdout.readline() == "all\n"
            training.goes_on()
            strangers.communicate("\n")
        training.goes_on()
    training.end()
    assert training.results.result().restarts == 0
