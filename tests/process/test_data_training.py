"""Training on real gloo ranks: the same curve, however often it is interrupted."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.deterministic import deterministic_allreduce

GLOBAL_BATCH, MICRO_BATCH, LENGTH, NUM_EPOCHS = 15, 4, 100, 3
NUM_STEPS = 7 * NUM_EPOCHS
INTERRUPTIONS = [3, 7, 8, 12, 18]  # in an epoch, at its end, and right behind it
TOLERANCE = 1e-5
"""Of the loss, relative, after all steps under other world sizes; measured: 4e-7."""


def dataset():
    """Return inputs and targets that a small net can learn."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, 6, generator=chance)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def network(dropout: float = 0.0):
    """Return a net whose gradients DDP packs anew after its first step."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def train(
    rank: int, folder: Path, until: int, dropout: float = 0.0
) -> tuple[list[float], list[float]]:
    """Train from the checkpoint to a step that is saved, and on, which is lost.

    Returns:
        The losses of the saved steps, and the parameters after the last of them.
    """
    checkpoint, random_numbers = folder / "checkpoint.pt", folder / f"rng-{rank}.pt"
    model = deterministic_allreduce(DistributedDataParallel(network(dropout)))
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=5, micro_batch_size=MICRO_BATCH)
    loader = DataLoader(dataset(), batch_sampler=sampler)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        if random_numbers.exists():  # a rank of a larger group has none yet
            torch.set_rng_state(torch.load(random_numbers, weights_only=True))
    dist.barrier()
    losses: list[float] = []
    for _ in sampler.epochs(NUM_EPOCHS):
        for global_batch in sampler.batches(loader):
            loss_sum = step(global_batch, model, optimizer)
            if global_batch.step > until:
                return losses, []
            losses.append(loss_sum)
            if global_batch.step == until:
                torch.save(torch.get_rng_state(), random_numbers)
            if global_batch.step == until and rank == 0:
                saved = {
                    "net": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "sampler": sampler.state_dict(),
                }  # fmt: skip
                torch.save(saved, checkpoint)
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def step(batch, model, optimizer) -> float:
    """Make one step; return the mean loss of the global batch."""
    optimizer.zero_grad()
    loss_sum = torch.zeros(())
    for (x, y), weight in batch.micro_batches(model):
        loss = weight * mse_loss(model(x), y)
        loss.backward()
        loss_sum += loss.detach()
    optimizer.step()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / dist.get_world_size()


def curve(rank: int, folder: Path, until: list[int], dropout: float = 0.0):
    """Train up to each of these steps, each time anew from the last checkpoint.

    Returns:
        The losses of all steps, and the last parameters.
    """
    losses, parameters = [], []
    for each in until:
        more, parameters = train(rank, folder, each, dropout)
        losses += more
    return losses, parameters


def undisturbed_and_interrupted(rank: int, folder: Path):
    """Return the curves of both."""
    for name in ("a", "b"):
        (folder / name).mkdir(exist_ok=True)
    return (
        curve(rank, folder / "a", [NUM_STEPS], 0.1),
        curve(rank, folder / "b", [*INTERRUPTIONS, NUM_STEPS], 0.1),
    )


def test_interrupted_five_times_it_is_bit_for_bit_the_same(tmp_path):
    """With the same world size, on CPUs, with dropout: every loss, and the last parameters."""
    for undisturbed, interrupted in run_ranks(undisturbed_and_interrupted, 3, tmp_path):
        assert len(undisturbed[0]) == NUM_STEPS
        assert undisturbed[0][-1] < undisturbed[0][0] / 1.5
        assert interrupted == undisturbed


def test_under_other_world_sizes_it_is_the_same_but_for_rounding(tmp_path):
    """One worker alone, or two and then four."""
    (tmp_path / "alone").mkdir()
    ((alone, _),) = run_ranks(curve, 1, tmp_path / "alone", [NUM_STEPS])
    losses = []
    for world_size, until in ((2, 8), (4, NUM_STEPS)):
        more, _ = run_ranks(curve, world_size, tmp_path, [until])[0]
        losses += more
    assert losses == pytest.approx(alone, rel=TOLERANCE)
    assert losses != alone


def gradients(wrap: str, global_batch: int, micro_batch: int | None) -> list[float]:
    """Return the gradient of one global batch."""
    net = network().double()
    model = DistributedDataParallel(net) if wrap == "ddp" else fully_shard(net)
    sampler = ElasticSampler(LENGTH, global_batch, seed=5, micro_batch_size=micro_batch)
    loader = DataLoader(dataset(), batch_sampler=sampler)
    for (x, y), weight in next(sampler.batches(loader)).micro_batches(model):
        (weight * mse_loss(model(x.double()), y.double())).backward()
    grads = [p.grad.full_tensor() if wrap == "fsdp" else p.grad for p in net.parameters()]
    return torch.cat([grad.flatten() for grad in grads]).tolist()


def expected_gradients(global_batch: int) -> list[float]:
    """Return them as found by one process at once."""
    sampler = ElasticSampler(LENGTH, global_batch, seed=5, rank=0, world_size=1)
    with torch.no_grad():
        x, y = dataset()[next(iter(sampler))]
    net = network().double()
    mse_loss(net(x.double()), y.double()).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]).tolist()


CASES = [("ddp", 10, 2), ("ddp", 2, None), ("ddp", 9, None), ("fsdp", 10, 2), ("fsdp", 2, 1)]


def gradients_of_all_cases(rank: int) -> list[list[float]]:
    """Return the gradients of each."""
    return [gradients(*case) for case in CASES]


def test_gradients_are_those_of_the_whole_batch():
    """Uneven shares, several parts, ranks without a sample, whole and sharded models."""
    for of_rank in run_ranks(gradients_of_all_cases, 3):
        for case, found in zip(CASES, of_rank, strict=True):
            expected = expected_gradients(case[1])
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), case
