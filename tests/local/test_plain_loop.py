"""Loops over the DataLoader itself: what counts as trained, and the gradients' weights."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpc_elastic import Checkpointer
from hpc_elastic.data import ElasticSampler
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import directory, fencing

LENGTH = 60
FORKS = multiprocessing.get_context("forkserver")


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


def make(rank=0, size=1, **options):
    """Return a rank's sampler, with a model scaled, and its loader."""
    sampler = ElasticSampler(LENGTH, 8, seed=3, rank=rank, world_size=size)
    sampler.scale_gradients(nn.Linear(1, 1))
    if options.get("num_workers"):
        options = {"multiprocessing_context": FORKS, "prefetch_factor": 3, **options}
    return sampler, DataLoader(Numbers(), batch_sampler=sampler, **options)


LOADERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("options", LOADERS)
def test_an_item_counts_as_trained_once_the_loop_has_it(options):
    """What loader workers have read ahead does not; one worker saves, and three continue."""
    sampler, loader = make(**options)
    seen = {0: [], 1: [], 2: []}
    for epoch in sampler.epochs(3):
        for step, numbers in enumerate(loader, start=sampler.step + 1):
            assert sampler.step == step
            seen[epoch].extend(numbers.tolist())
            if step == 11:
                break
        if sampler.step == 11:
            break
    state = sampler.state_dict()
    for rank in range(3):
        sampler, loader = make(rank, 3, **options)
        sampler.load_state_dict(state)
        for epoch in sampler.epochs(3):
            for numbers in loader:
                seen[epoch].extend(numbers.tolist())
        assert sampler.step == sampler.total_steps == 24
    assert {epoch: sorted(numbers) for epoch, numbers in seen.items()} == {
        epoch: list(range(LENGTH)) for epoch in range(3)
    }


@pytest.mark.parametrize("options", LOADERS[:2])
def test_the_loop_leaves_the_random_numbers_of_the_model_alone(options):
    """A restart starts the loader once more, and must not change what dropout draws."""
    _, loader = make(**options)
    before = torch.get_rng_state()
    for _ in loader:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_saved_at_the_end_of_an_epoch_runs_what_follows_the_loop():
    """The loop has no item left then."""
    sampler, loader = make()
    for _ in loader:
        state = sampler.state_dict()
    sampler, loader = make()
    sampler.load_state_dict(state)
    assert [(epoch, len(list(loader))) for epoch in sampler.epochs(2)] == [(0, 0), (1, 8)]


class FakeManager:
    """A fault-tolerant manager."""

    def register_state_dict_fn(self, *_):
        """Take no part in a heal."""


@pytest.mark.parametrize(
    ("options", "scaled", "complaint"),
    [
        ({}, False, "scale_gradients"),
        ({"micro_batch_size": 2}, True, "a step has 4 micro-batches"),
        ({"manager": FakeManager()}, True, "manager"),
    ],
)
def test_what_a_plain_loop_cannot_do_is_refused_before_the_first_item(options, scaled, complaint):
    """With the longer form as the remedy, or the missing line."""
    sampler = ElasticSampler(LENGTH, 8, rank=0, world_size=1, **options)
    if scaled:
        sampler.scale_gradients(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=complaint):
        next(iter(DataLoader(Numbers(), batch_sampler=sampler)))


def test_an_evaluation_needs_no_scaled_model():
    """It makes no gradients."""
    sampler = ElasticSampler(LENGTH, 8, rank=0, world_size=1, name=None)
    with torch.no_grad():
        assert len(list(DataLoader(Numbers(), batch_sampler=sampler))) == 8


def test_other_loaders_are_as_torch_has_them():
    """The hook is for DataLoaders of an ElasticSampler; torch has to have the place for it."""
    loader = DataLoader(Numbers(), batch_size=7)
    assert "torch" in type(iter(loader)).__module__
    assert callable(DataLoader.__iter__) and loader.batch_sampler is not None
    assert [len(x) for x in loader] == [7] * 8 + [4]


def test_a_model_without_a_tensor_to_scale_is_refused():
    """Its gradients would not be weighted."""

    class Opaque(nn.Module):
        def forward(self, x):
            """Return what hides its tensors."""
            return object()

    sampler, loader = make()
    model = sampler.scale_gradients(Opaque())
    with pytest.raises(RuntimeError, match=r"sampler.batches\(loader\)"):
        for x in loader:
            model(x)


# ---- the gradients, on real ranks


class Net(nn.Module):
    """Returns its output in a mapping, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        """Return the prediction."""
        return {"y": [self.layers(x)]}


def parameters_of_both(rank: int, wrap: str, global_batch: int):
    """Return the parameters after two epochs of the short form, and of the long one."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, 6, generator=chance)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    found = []
    for plain in (True, False):
        model = DistributedDataParallel(Net()) if wrap == "ddp" else fully_shard(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        sampler = ElasticSampler(data, global_batch, seed=5)
        loader = DataLoader(data, batch_sampler=sampler)
        if plain:
            sampler.scale_gradients(model)
            for _ in sampler.epochs(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    mse_loss(model(x)["y"][0], y).backward()
                    optimizer.step()
        else:
            for _ in sampler.epochs(2):
                for batch in sampler.batches(loader):
                    optimizer.zero_grad()
                    for (x, y), weight in batch.micro_batches(model):
                        (weight * mse_loss(model(x)["y"][0], y)).backward()
                    optimizer.step()
        whole = [p.full_tensor() if wrap == "fsdp" else p for p in model.parameters()]
        found.append(torch.cat([p.detach().flatten() for p in whole]).tolist())
    dist.barrier()
    return found


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("global_batch", [12, 11])
def test_gradients_are_those_of_weighted_losses(wrap, global_batch):
    """Bit for bit where all shares are equal; else the weight is applied at another place."""
    for short, long in run_ranks(parameters_of_both, 3, wrap, global_batch):
        if global_batch == 12:
            assert short == long
        else:
            assert short == pytest.approx(long, rel=1e-4, abs=1e-6)


# ---- the Checkpointer of the short form


def test_the_directory_of_checkpoints_is_found(tmp_path, monkeypatch):
    """That of the run, and else of the working directory."""
    monkeypatch.chdir(tmp_path)
    state = {"x": torch.zeros(3)}
    with Checkpointer(state) as checkpointer:
        assert checkpointer.directory == tmp_path / "checkpoints"
    monkeypatch.setenv(directory.RUN_DIR_VARIABLE, str(tmp_path / "run"))
    with Checkpointer(state) as checkpointer:
        assert checkpointer.directory == tmp_path / "run/checkpoints"


def test_save_if_due_saves_at_the_due_steps(tmp_path):
    """And says so."""
    with Checkpointer({"x": torch.zeros(3)}, tmp_path) as checkpointer:
        assert [checkpointer.save_if_due(step, every_steps=3) for step in range(1, 7)] == [
            False, False, True, False, False, True,
        ]  # fmt: skip
        checkpointer.wait()
        assert checkpointer.load_latest() == 6


def test_a_path_in_place_of_the_state_is_named(tmp_path: Path):
    """The directory comes second."""
    with pytest.raises(ConfigError, match="mapping"):
        Checkpointer(tmp_path, {"x": torch.zeros(3)})  # type: ignore[arg-type]
