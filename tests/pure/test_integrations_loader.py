"""What frameworks are given to train on, and which of their checkpoints count."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations.loader import ElasticLoader, sort_by_step, sync_all

LENGTH = 10


def loader(batch: BatchDivision | int) -> ElasticLoader:
    """Numbers from 0 on, in order."""
    data = TensorDataset(torch.arange(LENGTH))
    batch = batch if isinstance(batch, BatchDivision) else BatchDivision(batch)
    sampler = ElasticSampler(LENGTH, **vars(batch), shuffle=False, name=None)
    return ElasticLoader(DataLoader(data, batch_sampler=sampler))


def drawn(batches) -> list[list[int]]:
    """The numbers of each micro-batch."""
    return [data.tolist() for (data,) in batches]


def test_the_position_moves_with_the_step_and_not_with_the_draw():
    """What was given out and not trained comes again."""
    first = loader(4)
    batches = iter(first)
    next(batches)
    assert first.state_dict()["position"] == 0
    first.on_optimizer_step()
    assert first.state_dict()["position"] == 4
    next(batches)

    again = loader(4)
    again.load_state_dict(first.state_dict())
    assert drawn(again) == [[4, 5, 6, 7], [8, 9]]


def test_a_loop_that_goes_on_has_trained():
    """A draw of the next batch counts the last one as done, also without a call."""
    assert drawn(loader(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_empty_rest_of_an_epoch_is_passed_over():
    """A checkpoint of an epoch's last step goes on with the next epoch, whole."""
    first = loader(5)
    batches = iter(first)
    for _ in range(2):
        next(batches)
        first.on_optimizer_step()
    again = loader(5)
    again.load_state_dict(first.state_dict())
    assert again.sampler.epoch == 0
    assert drawn(again) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert again.sampler.step == 4


def test_shares_are_weighed_and_a_checkpoint_fits_another_world_size():
    """Two workers and then three: each sample once, the weights of a step add up to the workers."""
    before = [loader(BatchDivision(5, None, rank, 2)) for rank in range(2)]
    seen = []
    for each in before:
        (data,) = next(iter(each))
        each.on_optimizer_step()
        seen += data.tolist()
    assert [each.weight for each in before] == [2 * 2 / 5, 3 * 2 / 5]

    after = [loader(BatchDivision(5, None, rank, 3)) for rank in range(3)]
    for each in after:
        each.load_state_dict(before[0].state_dict())
        (data,) = next(iter(each))
        seen += data.tolist()
    assert sorted(seen) == list(range(LENGTH))
    assert sum(each.weight for each in after) == pytest.approx(3)


def test_a_step_in_the_middle_of_a_global_batch_is_refused():
    """A framework that accumulates too little would train on a part of the batch."""
    each = loader(BatchDivision(4, micro_batch_size=2))
    batches = iter(each)
    next(batches)
    with pytest.raises(RuntimeError, match="last micro-batch"):
        each.on_optimizer_step()


def test_a_loader_of_another_sampler_is_refused():
    """The message gives the remedy."""
    with pytest.raises(ConfigError, match="batch_sampler=ElasticSampler"):
        ElasticLoader(DataLoader(TensorDataset(torch.arange(4)), batch_size=2))


def test_checkpoints_are_ordered_by_number(tmp_path):
    """100 comes after 99, and what has no number is none."""
    names = ("step-99.ckpt", "step-100.ckpt", "checkpoint-7", "step-x.ckpt")
    paths = sort_by_step(tmp_path / name for name in names)
    assert [p.name for p in paths] == ["checkpoint-7", "step-99.ckpt", "step-100.ckpt"]


def test_flush_goes_through_folders(tmp_path, monkeypatch):
    """Every file, the folders, and nothing beside them."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "other").touch()
    opened: dict[int, str] = {}
    flushed: list[str] = []
    real_open = os.open

    def note_open(path, flags):
        fd = real_open(path, flags)
        opened[fd] = Path(path).name
        return fd

    monkeypatch.setattr("hpc_elastic.shared_files.os.open", note_open)
    monkeypatch.setattr("hpc_elastic.shared_files.os.fsync", lambda fd: flushed.append(opened[fd]))
    sync_all(tmp_path / "a")
    assert sorted(flushed) == ["a", "b", "file"]
