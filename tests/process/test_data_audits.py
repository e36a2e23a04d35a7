"""A run whose workers are killed, and its audit."""

import json

import pytest
from data_runs import GLOBAL_BATCH, LENGTH, NUM_EPOCHS, train

from hpc_elastic import launch
from hpc_elastic.cli.main import main


@pytest.mark.long
def test_a_run_whose_workers_are_killed_trains_every_sample_once(tmp_path, capsys):
    """Two nodes, a worker killed in each of two rounds: the command proves it from the ledger."""
    result = launch(
        train, str(tmp_path), nodes=2, nproc_per_node=1, launcher="local",
        run_dir=tmp_path / "run", poll_interval_s=0.2, max_restarts=5,
    )  # fmt: skip
    steps_an_epoch = -(-LENGTH // GLOBAL_BATCH)
    assert dict(result) == {0: NUM_EPOCHS * steps_an_epoch, 1: NUM_EPOCHS * steps_an_epoch}
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "run"), "--json"]) == 0
    (proof,) = json.loads(capsys.readouterr().out).values()
    assert [epoch["once"] for epoch in proof["epochs"]] == [LENGTH] * NUM_EPOCHS
    assert proof["stretches"] >= 3
    assert proof["problems"] == []
