"""Virtual ranks on real gloo workers: the same bits for any number of workers."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from test_conversions import CommandRun
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from hpc_elastic.data import ElasticSampler

LENGTH, GLOBAL_BATCH, NUM_EPOCHS = 84, 24, 3  # the last batch gives some virtual ranks no sample
NUM_STEPS = 4 * NUM_EPOCHS


class Noisy(Dataset):
    """Samples with an augmentation by each generator that datasets use."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(1)
        self.x = torch.randn(LENGTH, 3, 8, 8, generator=chance)
        self.y = 9 * self.x.mean((1, 2, 3)).unsqueeze(1)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int):
        noise = random.random() + np.random.random() + torch.rand(())
        return self.x[i] + 0.1 * noise, self.y[i]


class Net(nn.Module):
    """Dropout, batch normalisation, a buffer that is assigned, and a layer that few batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(288, 1),
        )  # fmt: skip
        self.rare = nn.Linear(1, 1)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("constant", torch.ones(5))

    def forward(self, x):
        """Return the prediction."""
        self.calls = self.calls + 1
        y = self.layers(x) * (self.scale.float().mean() + 0.01 * self.calls)
        if random.random() < 0.05:
            y = y + self.rare(y)
        return y * (1 + 0.01 * random.random())


def train(group: Any, folder: Path, until: int, num_workers: int = 0, **options: Any):
    """Train from the checkpoint up to a step that is saved, with the workers of a group.

    Returns:
        The losses, each with a number that the script draws, and all numbers of the checkpoint.
    """
    rank = dist.get_rank(group)
    torch.manual_seed(rank)  # the workers take over the parameters of worker 0
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    sampler = ElasticSampler(
        LENGTH, GLOBAL_BATCH, seed=5, rank=rank, world_size=dist.get_world_size(group),
        **{"virtual_ranks": 16, **options},
    )  # fmt: skip
    loader = DataLoader(
        Noisy(), batch_sampler=sampler, num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )  # fmt: skip
    torch.manual_seed(7)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["random"])
    dist.barrier(group)
    model = sampler.average_gradients(net, group)
    losses = []
    for _ in sampler.epochs(NUM_EPOCHS):
        for batch in sampler.batches(loader):
            optimizer.zero_grad()
            parts = []
            for (x, y), weight in batch.micro_batches():
                loss = mse_loss(model(x), y)
                (weight * loss).backward()
                parts.append(loss)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            losses.append((batch.mean(parts), torch.rand(()).item()))
            if batch.step == until:
                saved = {
                    "net": net.state_dict(), "optimizer": optimizer.state_dict(),
                    "sampler": sampler.state_dict(), "random": torch.get_rng_state(),
                }  # fmt: skip
                if rank == 0:
                    torch.save(saved, checkpoint)
                dist.barrier(group)
                return losses, bits(saved)
    raise AssertionError("the training ended early")


def bits(saved) -> list[float]:
    """Return all numbers of a checkpoint."""
    of_optimizer = [t for each in saved["optimizer"]["state"].values() for t in each.values()]
    tensors = [*saved["net"].values(), *of_optimizer, saved["random"]]
    return torch.cat([t.flatten().double() for t in tensors]).tolist()


def after(history, folder: Path, **options: Any):
    """Train with these numbers of workers, one after the other; return what worker 0 has."""
    if dist.get_rank() == 0:
        folder.mkdir()
    losses, end = [], []
    for world_size, until in history:
        group = dist.new_group(range(world_size))
        if dist.get_rank() < world_size:
            more, end = train(group, folder, until, **options)
            losses += more
        dist.barrier()
    return losses, end


UNDISTURBED = ((1, NUM_STEPS),)


def curves(rank: int, folder: Path, history):
    """Return (interrupted, undisturbed) curves of several options."""
    seven = {"virtual_ranks": 7, "micro_batch_size": 3}
    of_seven = [(min(num_workers, 7), until) for num_workers, until in history]
    undisturbed = after(UNDISTURBED, folder / "a")
    return [
        (after(history, folder / "b"), undisturbed),
        (after(((2, NUM_STEPS),), folder / "c", num_workers=1), undisturbed),
        (after(of_seven, folder / "d", **seven), after(UNDISTURBED, folder / "e", **seven)),
    ]


def require_same_curves(folder: Path, history) -> None:
    """Train with this history of workers, and compare with the undisturbed training."""
    found, *_ = run_ranks(curves, max(w for w, _ in history), folder, history)
    for interrupted, undisturbed in found:
        assert interrupted == undisturbed
        curve = [loss for loss, _ in undisturbed[0]]
        assert len(curve) == NUM_STEPS
        assert sum(curve[-4:]) < sum(curve[:4]) / 2


def test_after_five_changes_all_is_bit_for_bit_as_undisturbed(tmp_path):
    """Losses, parameters, buffers, moments, and the script's own random numbers."""
    require_same_curves(tmp_path, ((4, 2), (2, 3), (3, 5), (5, 8), (1, 10), (2, NUM_STEPS)))


@pytest.mark.long
def test_sixteen_workers_and_one(tmp_path):
    """As many workers as virtual ranks."""
    require_same_curves(tmp_path, ((16, 3), (1, 5), (11, NUM_STEPS)))


@pytest.mark.long
def test_a_run_that_is_killed_preempted_and_grown_has_the_curve_of_one_process(tmp_path):
    """Each step, also those that were trained again: the loss, and all parameters and buffers."""
    script, num_steps = str(Path(__file__).with_name("virtual_rank_runs.py")), 1500
    alone, disturbed = tmp_path / "alone", tmp_path / "run"
    for folder in (alone, disturbed):
        folder.mkdir()
    (alone / "fast").touch()
    argv = [sys.executable, script, str(alone), str(num_steps)]
    subprocess.run(argv, cwd=alone, check=True, timeout=300)
    command = ("python", script, str(disturbed), str(num_steps))
    with CommandRun(disturbed, *command, settings=("--nodes", "1:3")) as run:
        run.trains_with(3, 1)
        assert run.command("node", "kill", "RUN", "local-1").returncode == 0
        run.trains_with(3, 2)
        assert run.command("node", "preempt", "RUN", "local-2").returncode == 0
        run.trains_with(2, 1)
        run.trains_with(3, 3)
        (disturbed / "fast").touch()
        assert run.wait() == 0, run.output()
        assert run.command("audit").returncode == 0
    curves = [
        {tuple(line.split()[:3]) for line in (folder / "curve").read_text().splitlines()}
        for folder in (alone, disturbed)
    ]
    assert len(curves[0]) == num_steps
    assert curves[0] == curves[1]
