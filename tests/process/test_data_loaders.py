"""The sampler with real data loaders: processes that read ahead, and torchdata's."""

import gc
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import fencing

LENGTH = 60
FORKS = multiprocessing.get_context("forkserver")
"""Forks where no other thread is: this process has those of the tests before."""
FORKS.set_forkserver_preload(["torch"])


class Numbers(Dataset):
    """Sample i is i."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, i):
        return i


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch):
    """No ledger."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)


def make(loader=DataLoader, rank=0, size=1, num_workers=2, **options):
    """Return a rank's sampler and its loader."""
    sampler = ElasticSampler(LENGTH, 8, seed=3, micro_batch_size=2, rank=rank, world_size=size)
    if num_workers:
        options = {"multiprocessing_context": FORKS, "prefetch_factor": 3, **options}
    return sampler, loader(Numbers(), batch_sampler=sampler, num_workers=num_workers, **options)


def train(sampler, loader, num_epochs, num_steps=None):
    """Return the samples of each epoch, up to a step."""
    seen = {}
    for _ in sampler.epochs(num_epochs):
        for batch in sampler.batches(loader):
            for numbers, weight in batch.micro_batches():
                assert weight == len(numbers) * sampler._plan.batch.group()[1] / batch.num_samples
                seen.setdefault(batch.epoch, []).extend(numbers.tolist())
            if batch.step == num_steps:
                return seen
    return seen


def together(*parts):
    """Return the samples of several calls, by epoch."""
    return {
        e: sorted(x for p in parts for x in p.get(e, [])) for e in {e for p in parts for e in p}
    }


ALL = {epoch: list(range(LENGTH)) for epoch in range(3)}


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}, {"persistent_workers": True}])
def test_what_a_loader_reads_ahead_is_not_lost(options):
    """One worker saves in the middle of an epoch, and three go on."""
    sampler, loader = make(**options)
    first = train(sampler, loader, 3, num_steps=11)
    state = sampler.state_dict()
    others = []
    for rank in range(3):
        sampler, loader = make(rank=rank, size=3, **options)
        sampler.load_state_dict(state)
        others.append(train(sampler, loader, 3))
    assert together(first, *others) == ALL


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_a_loop_left_early_ends_the_workers_of_its_loader(options):
    """At once, and not when garbage is collected: torch waits 5 s for each, in any thread, then."""
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        sampler, loader = make(**options)
        train(sampler, loader, 1, num_steps=3)
        del loader
        assert set(multiprocessing.active_children()) <= before
    finally:
        gc.enable()


def test_a_loop_left_early_does_not_lose_what_was_read_ahead():
    """The loader's processes are used again for the rest of the epoch."""
    sampler, loader = make(persistent_workers=True)
    parts = [train(sampler, loader, 1, num_steps=step) for step in (2, 5, None)]
    assert together(*parts) == {0: ALL[0]}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_beginning_a_loader_leaves_the_models_random_numbers_alone(num_workers):
    """So one more beginning, after an interruption, changes nothing of dropout."""
    sampler, loader = make(num_workers=num_workers)
    before = torch.get_rng_state()
    next(sampler.batches(loader))
    assert torch.equal(torch.get_rng_state(), before)


class Draws(Numbers):
    """Sample i is a random number of the worker that loads it."""

    def __getitem__(self, i):
        return int(torch.randint(10**9, ()))


def test_workers_draw_other_random_numbers_each_epoch():
    """On each rank; and the same ones in the same training."""

    def drawn(rank):
        sampler = ElasticSampler(4, 4, seed=3, rank=rank, world_size=2)
        loader = DataLoader(
            Draws(), batch_sampler=sampler, num_workers=1, multiprocessing_context=FORKS
        )
        return train(sampler, loader, 2)

    first, other = drawn(0), drawn(1)
    assert first == drawn(0)
    assert len({*map(tuple, first.values()), *map(tuple, other.values())}) == 4


def test_a_loader_with_another_sampler_is_refused():
    """It would go through the data in its own way."""
    sampler, _ = make()
    for options in ({"sampler": DistributedSampler(Numbers(), 1, 0)}, {"batch_size": 4}):
        with pytest.raises(ConfigError, match="make it with batch_sampler=sampler"):
            next(sampler.batches(DataLoader(Numbers(), **options)))
    _, loader = make(in_order=False)
    with pytest.raises(ConfigError):
        next(sampler.batches(loader))


# torchdata 0.11 calls what torch 2.13 has deprecated
old_torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def stateful():
    """torchdata's loader, where it is installed."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader


@old_torchdata
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, pytest.param({"num_workers": 1}, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("saved", ["sampler", "loader", "both"])
@pytest.mark.parametrize("num_steps", [8, 11, None])
def test_torchdatas_loader_resumes(stateful, options, saved, num_steps):
    """With its own state, the sampler's or both; in an epoch, at its last step, and behind it."""
    sampler, loader = make(stateful, **options)
    first = train(sampler, loader, 1 if num_steps is None else 3, num_steps)
    state, loaders_state = sampler.state_dict(), loader.state_dict()
    sampler, loader = make(stateful, **options)
    if saved != "loader":
        sampler.load_state_dict(state)
    if saved != "sampler":
        loader.load_state_dict(loaders_state)
    second = train(sampler, loader, 3)
    assert together(first, second) == ALL
    assert sampler.step == 24


@old_torchdata
def test_torchdatas_loader_resumes_in_a_larger_group(stateful):
    """What it keeps of the sampler is the same on every rank."""
    parts, states = [], []
    for rank in range(2):
        sampler, loader = make(stateful, rank=rank, size=2, num_workers=1)
        parts.append(train(sampler, loader, 1, num_steps=3))
        states.append(loader.state_dict())
    for rank in range(3):
        sampler, loader = make(stateful, rank=rank, size=3, num_workers=1)
        loader.load_state_dict(states[0])
        parts.append(train(sampler, loader, 1))
    assert together(*parts) == {0: ALL[0]}


@old_torchdata
def test_torchdatas_loader_may_not_skip(stateful):
    """States that are taken now and then would need it to."""
    sampler, loader = make(stateful, snapshot_every_n_steps=5)
    with pytest.raises(ConfigError, match=r"^snapshot_every_n_steps=5"):
        next(sampler.batches(loader))


def test_a_pinned_or_moved_item_is_handed_through():
    """Whatever the loader makes of the indices."""
    sampler = ElasticSampler(LENGTH, 8, seed=3, rank=0, world_size=1)
    loader = DataLoader(
        Numbers(), batch_sampler=sampler, collate_fn=lambda x: {"x": torch.tensor(x)}
    )
    for batch in sampler.batches(loader):
        ((item, weight),) = batch.micro_batches()
        assert item["x"].shape == (batch.num_samples,)
        assert weight == 1.0
