"""The sampler under a manager, with real loaders, replicas that are killed, and the audit."""

import json
import multiprocessing

import pytest
import torch
from ft_data_runs import GLOBAL_BATCH, LENGTH, NUM_EPOCHS, train
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic import launch
from hpc_elastic.cli.main import main
from hpc_elastic.data import ElasticSampler
from hpc_elastic.run import fencing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


class OneOfTwo:
    """A manager whose peer comes and goes."""

    def __init__(self):
        self.step, self.size = 0, 1

    def current_step(self):
        """Return what was committed."""
        return self.step

    def participating_rank(self):
        """Return the first place."""
        return 0

    def is_participating(self):
        """Always."""
        return True

    def num_participants(self):
        """Count the peer, if it is there."""
        return self.size

    def register_state_dict_fn(self, key, load, save):
        """Nobody heals."""


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_that_reads_ahead_is_begun_anew(monkeypatch, persistent):
    """What its processes have read for another share, or for a step that failed, is left."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)
    manager = OneOfTwo()
    sampler = ElasticSampler(96, 8, seed=3, manager=manager, shuffle=False)
    loader = DataLoader(
        TensorDataset(torch.arange(96)),
        batch_sampler=sampler,
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=persistent,
        multiprocessing_context=FORKS,
    )
    sizes = {3: 2, 4: 2, 7: 1, 8: 2}  # from this try on
    failed = {5, 9}
    for i, batch in enumerate(sampler.batches(loader)):
        manager.size = sizes.get(i, manager.size)
        ((numbers,), weight) = next(parts := batch.micro_batches())
        assert list(parts) == []
        begin = 8 * manager.step
        assert numbers.tolist() == list(range(begin, begin + 8 // manager.size))
        assert weight == 1.0
        manager.step += i not in failed
    assert (i, sampler.step, sampler.epoch) == (13, 12, 1)


@pytest.mark.long
@pytest.mark.parametrize("catch_up_bytes", [None, 1], ids=["all wait", "beside the training"])
def test_a_replica_that_is_killed_loses_no_sample(tmp_path, capsys, catch_up_bytes):
    """Counted by the parameters themselves, and proven from the ledger."""
    result = launch(
        train, str(tmp_path), catch_up_bytes, nodes="1:2", nproc_per_node=1, launcher="local",
        ft=True, run_dir=tmp_path / "run", poll_interval_s=0.2, max_restarts=3,
    )  # fmt: skip
    for counts in dict(result).values():
        assert counts == pytest.approx([NUM_EPOCHS] * LENGTH)
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "run"), "--json"]) == 0
    (proof,) = json.loads(capsys.readouterr().out).values()
    assert [epoch["once"] for epoch in proof["epochs"]] == [LENGTH] * NUM_EPOCHS
    assert proof["last_step"] == NUM_EPOCHS * -(-LENGTH // GLOBAL_BATCH)
    assert proof["stretches"] >= 3
