"""What a task prepares before it imports torch."""

import json
import os
from types import SimpleNamespace

import pytest

from hpc_elastic.agent import warm_workers
from hpc_elastic.agent.warm_workers import is_training, likely_workers, prepare_environment


@pytest.mark.parametrize(
    ("wanted", "env", "num_devices", "expected"),
    [
        (3, {}, 8, 3),
        ("cpu", {}, 8, 16),
        ("auto", {}, 0, 1),
        ("auto", {}, 4, 4),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "2,3"}, 4, 2),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 4, 1),
        ("auto", {"CUDA_VISIBLE_DEVICES": "0,1"}, 0, 1),
    ],
)
def test_the_workers_of_a_node_are_counted_without_torch(wanted, env, num_devices, expected):
    """One a GPU that Slurm gave the task; what torch finds later goes before it."""
    assert likely_workers(wanted, 16, env, num_devices) == expected


@pytest.mark.parametrize(
    ("setting", "given", "in_run", "expected"),
    [
        (None, None, {}, "1"),
        (5, None, {}, "5"),
        (5, "6", {}, "6"),
        (5, "6", {"OMP_NUM_THREADS": "7"}, "7"),
    ],
)
def test_threads_are_what_is_said_nearest_to_the_run(monkeypatch, setting, given, in_run, expected):
    """launcher.env, then the task's own environment, then launcher.agent, then a fair share."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(warm_workers, "_GIVEN_THREADS", given)
    spec = SimpleNamespace(env=in_run, agent=SimpleNamespace(omp_num_threads=setting))
    task = SimpleNamespace(spec=spec, slurm=SimpleNamespace(cpus_on_node=1))
    prepare_environment(task, 4)
    prepare_environment(task, 1)
    assert os.environ["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, False), ("{", False), (json.dumps({"phase": "training"}), True), ("{}", False)],
)
def test_whether_a_group_trains_is_read_from_the_status(tmp_path, text, expected):
    """A file that is not there, or damaged, tells nothing."""
    status = tmp_path / "status.json"
    if text is not None:
        status.write_text(text)
    assert is_training(status) is expected
