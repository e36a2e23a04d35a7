"""The gradients of loops over the DataLoader itself, on real ranks, against one whole batch."""

import random

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hpc_elastic.data import ElasticSampler

WIDTH, NUM_CASES = 5, 40
OPTIONS = (
    "outputs", "chain", "recurrence", "derivative", "frozen", "unused", "shared", "reentrant",
    "checkpoint", "twice", "gradient",
)  # fmt: skip


class Part(nn.Module):
    """A module with several outputs, whose parts are as a case demands."""

    def __init__(self, chosen: frozenset[str]) -> None:
        super().__init__()
        self.chosen = chosen
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)  # used by "derivative" alone
        if "shared" in chosen:
            self.last.weight = self.first.weight
        if "frozen" in chosen:
            self.first.bias.requires_grad_(False)

    def forward(self, x):
        """Return the hidden values, the output and the loss-like mean of it."""
        hidden = torch.tanh(self.first(x))
        if "checkpoint" in self.chosen or "reentrant" in self.chosen:
            y = checkpoint(self._rest, hidden, use_reentrant="reentrant" in self.chosen)
        else:
            y = self._rest(hidden)
        return {"hidden": hidden, "y": y, "mean": y.square().mean()}

    def _rest(self, hidden):
        return torch.sin(self.last(hidden)) + (0 if "unused" in self.chosen else self.other(hidden))


def make_case(number: int) -> tuple[frozenset[str], int, list[nn.Module]]:
    """Return the choices of a random case, its batch and its models."""
    chance = random.Random(number)
    chosen = frozenset(chance.sample(OPTIONS, chance.randint(1, 5)))
    if "derivative" in chosen:
        chosen -= {"reentrant"}  # torch has no second derivative of it
    torch.manual_seed(number)
    num = 2 if "chain" in chosen else 1
    return chosen, chance.randint(2, 11), [Part(chosen).double() for _ in range(num)]


def loss_of(chosen, models, x, y):
    """Return the mean loss of a batch."""
    out = models[0](x)
    loss = mse_loss(out["y"], y)
    if "outputs" in chosen:
        loss = loss + 0.3 * out["mean"] + 0.1 * out["hidden"].square().mean()
    if "recurrence" in chosen:
        for _ in range(3):
            out = models[0](out["y"])
        loss = loss + mse_loss(out["y"], y)
    if "chain" in chosen:
        loss = loss + mse_loss(models[1](out["y"])["y"], y)
    if "derivative" in chosen:
        x = x.clone().requires_grad_()
        energy = models[-1](x)["y"].sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = loss + mse_loss(force, y)
    return loss


def backward(chosen, models, x, y):
    """Make the gradients, in a way that a script may choose."""
    loss = loss_of(chosen, models, x, y)
    if "gradient" in chosen:
        out = models[0](x)["y"]
        torch.autograd.backward([loss, out], [None, torch.full_like(out, 0.1 / len(x))])
    elif "twice" in chosen:
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
    else:
        loss.backward()


def flat(models) -> torch.Tensor:
    """Return all gradients; zeros for none."""
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([g.full_tensor().flatten() if hasattr(g, "full_tensor") else g.flatten()
                      for g in grads])  # fmt: skip


def data(size: int) -> TensorDataset:
    """Return the samples of one global batch."""
    chance = torch.Generator().manual_seed(size)
    x = torch.randn(size, WIDTH, generator=chance, dtype=torch.float64)
    return TensorDataset(x, x.sin() * torch.arange(1, size + 1).unsqueeze(1))


def wrap(module):
    """Return a module that averages its gradients."""
    return DistributedDataParallel(module, find_unused_parameters=True, static_graph=False)


def averaged(models, by_hand: bool):
    """Return the gradients, averaged by hand where DDP is not used."""
    found = flat(models)
    if by_hand:
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found


def errors(rank: int) -> list[tuple[int, str, float]]:
    """Return the relative error of each case's gradient, and how it was made."""
    found = []
    for number in range(NUM_CASES):
        chosen, size, models = make_case(number)
        backward(chosen, models, *data(size).tensors)
        true = flat(models)
        _, _, models = make_case(number)
        # DDP takes no second use of a module in one step where parameters are unused
        by_hand = bool(chosen & {"recurrence", "reentrant", "derivative", "twice", "gradient"})
        used = models if by_hand else [wrap(model) for model in models]
        sampler = ElasticSampler(size, size, name=None)
        for model in used:
            sampler.scale_gradients(model)
        for x, y in DataLoader(data(size), batch_sampler=sampler):
            if not len(x):
                continue
            backward(chosen, used, x, y)
        error = (averaged(models, by_hand) - true).norm() / true.norm()
        found.append((number, f"{sorted(chosen)}, {size} samples", error.item()))
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradients_of_random_models_are_those_of_the_whole_batch(world_size):
    """The weight acts once, whatever the model is, and however uneven the shares are."""
    for found in run_ranks(errors, world_size):
        wrong = [case for case in found if not case[2] < 1e-6]
        assert not wrong


# ---- what stands between a script and the gradients


def ways(rank: int) -> dict[str, float]:
    """Return the relative error of the gradient for each way of training."""
    size = 8
    x, y = data(size).tensors
    chosen = frozenset[str]()

    def new():
        torch.manual_seed(3)
        return Part(frozenset({"unused"})).double().requires_grad_(True)

    whole = new()
    loss_of(chosen, [whole], x, y).backward()
    true, found = flat([whole]), {}

    def batch(*models, num=size):
        sampler = ElasticSampler(num, num, name=None)
        for model in models:
            sampler.scale_gradients(model)
        return sampler, DataLoader(data(num), batch_sampler=sampler)

    def note(name, model, times=1.0):
        found[name] = ((flat([model]) - times * true).norm() / true.norm()).item()

    model = wrap(new())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    _, loader = batch(model)
    for a, b in loader:
        scaler.scale(loss_of(chosen, [model], a, b)).backward()
    note("GradScaler", model, 4.0)

    model = wrap(new())
    sampler, loader = batch(model)
    for _ in range(2):  # two epochs of one batch
        for a, b in loader:
            loss_of(chosen, [model], a, b).backward()
    note("accumulation", model, 2.0)

    model = fully_shard(new())
    _, loader = batch(model)
    for a, b in loader:
        loss_of(chosen, [model], a, b).backward()
    note("FSDP2", model)

    net = new()
    model = torch.compile(wrap(net), backend="eager")
    _, loader = batch(model)
    for a, b in loader:
        loss_of(chosen, [model], a, b).backward()
    note("compiled model", net)

    net = new()
    model = wrap(net)

    @torch.compile(backend="eager")
    def step(a, b):
        loss = mse_loss(model(a)["y"], b)
        loss.backward()

    _, loader = batch(model)
    for a, b in loader:
        step(a, b)
    note("compiled step", net)

    model = wrap(new())
    sampler, loader = batch(model)
    for _ in range(3):
        sampler.scale_gradients(model)
    for a, b in loader:
        loss_of(chosen, [model], a, b).backward()
    note("called again", model)

    # two loaders with equal batches, and derivatives that are no gradients of the training
    model = wrap(new())
    _, one = batch(model)
    _, two = batch(model)
    for (a, b), (c, d) in zip(one, two, strict=True):
        (0.5 * loss_of(chosen, [model], a, b)).backward()
        (0.5 * loss_of(chosen, [model], c, d)).backward()
    note("two loaders", model)

    net = new()

    def forces() -> list[float]:
        at = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(net(at)["y"].sum(), at)
        net(at)["y"].sum().backward(inputs=[at])
        return torch.cat([force, at.grad]).flatten().tolist()

    outside = forces()
    _, loader = batch(net)
    for _ in loader:
        found["forces"] = max(abs(a - b) for a, b in zip(forces(), outside, strict=True))
    return found


def test_the_weight_acts_once_for_every_wrapper():
    """Also with a GradScaler, accumulation, FSDP2, compiled parts and several loaders."""
    for found in run_ranks(ways, 3):
        assert found and all(error < 1e-6 for error in found.values()), found
