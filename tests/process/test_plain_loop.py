"""Loops over the DataLoader itself: what counts as trained, and the gradients' weights."""

import contextlib
import functools
import gc
import inspect
import itertools
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
from hpc_elastic.checkpoint.checkpointer import CheckpointOptions
from hpc_elastic.data import ElasticSampler, plain_loop
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
    """No ledger, and no loop that a test before has left behind in a traceback."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)
    plain_loop._loops.clear()


def make(rank=0, size=1, **options):
    """Return a rank's sampler, with a model scaled, and its loader."""
    sampler = ElasticSampler(LENGTH, 8, seed=3, rank=rank, world_size=size)
    sampler.scale_gradients(nn.Linear(1, 1))
    if options.get("num_workers"):
        options = {"multiprocessing_context": FORKS, "prefetch_factor": 3, **options}
    return sampler, DataLoader(Numbers(), batch_sampler=sampler, **options)


LOADERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("options", LOADERS)
def test_an_item_counts_as_trained_once_the_next_is_drawn(options):
    """What loader workers have read ahead does not, nor a last item; one saves, three continue."""
    sampler, loader = make(**options)
    seen = {0: [], 1: [], 2: []}
    for epoch in sampler.epochs(3):
        for step, numbers in enumerate(loader, start=sampler.step):
            assert sampler.step == step
            if step == 11:
                break
            seen[epoch].extend(numbers.tolist())
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


class Training:
    """One worker's training, in which each sample is seen by one optimizer step."""

    def __init__(self, state=None, loader=DataLoader, **options):
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-3)
        self.sampler = ElasticSampler(LENGTH, 8, seed=3, rank=0, world_size=1, **options)
        self.sampler.scale_gradients(self.net)
        self.loader = loader(Numbers(), batch_sampler=self.sampler)
        if state is not None:
            self.sampler.load_state_dict(state)

    def backward(self, numbers):
        """Add the gradients of a batch."""
        self.net(numbers.float().unsqueeze(1)).square().mean().backward()

    def train(self, numbers):
        """Make a step of a batch."""
        self.optimizer.zero_grad()
        self.backward(numbers)
        self.optimizer.step()


def test_an_item_counts_when_an_optimizer_has_stepped():
    """A state that is taken before the step is before the item, as the parameters are."""
    t = Training()
    for step, numbers in enumerate(t.loader):
        assert t.sampler.state_dict()["step"] == step
        t.optimizer.zero_grad()
        t.backward(numbers)
        assert t.sampler.state_dict()["step"] == step
        t.optimizer.step()
        assert t.sampler.state_dict()["step"] == step + 1
        t.optimizer.step()  # as with a second optimizer
        assert t.sampler.step == step + 1
    assert (t.sampler.epoch, t.sampler.step) == (1, 8)


def test_a_loop_that_breaks_at_its_top_loses_nothing():
    """Also one over two loaders, where the first has drawn when the second ends."""
    t, other = Training(), Training()
    for numbers in t.loader:
        if t.sampler.step == 3:
            break
        t.train(numbers)
    assert t.sampler.state_dict()["position"] == t.sampler.position == 24
    for numbers, _ in zip(t.loader, range(2), strict=False):
        t.train(numbers)
    assert t.sampler.state_dict()["position"] == 40
    next(iter(other.loader))
    assert other.sampler.step == 0


def test_epochs_end_with_a_loop_that_breaks_before_it_trains():
    """As one does that has reached its last step; but not one over another loader."""
    t, steps = Training(), []
    for _ in t.sampler.epochs(5):
        for numbers in t.loader:
            if t.sampler.step == 11:
                break
            t.train(numbers)
            steps.append(t.sampler.step)
    assert steps == list(range(1, 12))
    with pytest.raises(RuntimeError, match="nothing of epoch"):
        list(Training().sampler.epochs(1))


def test_accumulated_items_count_with_the_step_that_has_their_gradients():
    """A state in between is before all of them; a step at the loop's top leaves its own item."""
    t = Training()
    for i, numbers in enumerate(t.loader):
        t.backward(numbers)
        assert t.sampler.state_dict()["step"] == i // 3 * 3
        if i % 3 == 2:
            t.optimizer.step()
            t.optimizer.zero_grad()
            assert t.sampler.state_dict()["step"] == i + 1
    with pytest.raises(ConfigError, match=r"optimizer.zero_grad\(\) before the save"):
        t.sampler.state_dict()
    t.optimizer.zero_grad()
    assert t.sampler.state_dict()["epoch"] == 1

    t = Training()
    for i, numbers in enumerate(t.loader):
        if i:
            t.optimizer.step()
            t.optimizer.zero_grad()
        assert t.sampler.state_dict()["step"] == i
        t.backward(numbers)
    t.optimizer.step()
    assert t.sampler.state_dict()["epoch"] == 1


def test_a_step_that_a_gradient_scaler_skips_is_no_obstacle_to_a_save():
    """Its item has changed nothing, and counts with the next step, or at the epoch's end."""
    t = Training()
    for i, numbers in enumerate(t.loader):
        t.optimizer.zero_grad()
        t.backward(numbers * (float("inf") if i in (0, 7) else 1))
        if i not in (0, 7):
            t.optimizer.step()
        assert t.sampler.state_dict()["step"] == (i + 1 if i not in (0, 7) else i)
    assert (t.sampler.state_dict()["epoch"], t.sampler.step) == (1, 8)


@pytest.mark.parametrize("by_data", [False, True])
def test_updates_without_an_optimizer_are_refused_at_the_save(by_data):
    """Whether the parameters hold the present item is unknown."""
    t = Training()
    t.optimizer = None
    for numbers in t.loader:
        t.backward(numbers)
        with torch.no_grad():
            for p in t.net.parameters():
                (p.data if by_data else p).sub_(1e-3 * p.grad)
        with pytest.raises(ConfigError, match=r"sampler.batches\(loader\)"):
            t.sampler.state_dict()


def test_a_step_with_gradients_of_no_backward_is_refused():
    """Their weight would be missing."""
    t = Training()
    with pytest.raises(ConfigError, match="multiply the loss by the weight"):
        for numbers in t.loader:
            loss = t.net(numbers.float().unsqueeze(1)).square().mean()
            for p, g in zip(
                t.net.parameters(), torch.autograd.grad(loss, t.net.parameters()), strict=True
            ):
                p.grad = g
            t.optimizer.step()
    assert t.sampler.step == 0


def test_other_optimizers_in_the_loop_are_left_alone():
    """One of inputs, with their derivatives, and one whose parameters have no gradients."""
    t = Training()
    for numbers in t.loader:
        x = numbers.float().unsqueeze(1).requires_grad_()
        t.net(x).sum().backward(inputs=[x])
        torch.optim.SGD([x], 0.1).step()
        torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).step()
        assert t.sampler.state_dict()["step"] == t.sampler.step
        t.train(numbers)


def test_a_second_derivative_by_backward_is_refused():
    """The weight would be a part of it; `torch.autograd.grad` has none."""
    t = Training()
    with pytest.raises(ConfigError, match="create_graph"):
        for numbers in t.loader:
            t.net(numbers.float().unsqueeze(1)).square().mean().backward(create_graph=True)


class Subclass(DataLoader):
    """With torch's `__iter__`, as those of PyTorch Geometric and MONAI."""


class Overridden(DataLoader):
    """With its own, as accelerate's and torchdata's."""

    def __iter__(self):
        yield from super().__iter__()


def test_a_subclass_of_the_loader_moves_the_sampler():
    """If it has torch's `__iter__`; another is refused while gradients are recorded."""
    t = Training(loader=Subclass)
    for numbers in t.loader:
        t.train(numbers)
    assert t.sampler.step == 8
    t = Training(loader=Overridden)
    with pytest.raises(ConfigError, match="its own __iter__ may draw ahead"):
        next(iter(t.loader))
    with torch.no_grad():
        assert len(list(t.loader)) == 8
    with pytest.raises(ConfigError, match="batches"):
        next(iter(t.sampler))


def test_a_tracer_around_the_loaders_iter_changes_nothing(monkeypatch):
    """Whether it comes before the sampler, or after."""
    for wraps in (functools.wraps(DataLoader.__iter__), lambda function: function):
        ours = DataLoader.__iter__

        def traced(self, ours=ours):
            return ours(self)

        monkeypatch.setattr(DataLoader, "__iter__", wraps(traced))
        t = Training(loader=Subclass)
        for numbers in t.loader:
            t.train(numbers)
        assert t.sampler.step == 8


def ahead(loader):
    """Draw an item ahead, as a prefetcher does."""
    items = iter(loader)
    item = next(items)
    for following in items:
        yield item
        item = following
    yield item


def test_what_draws_ahead_is_refused_at_the_first_backward():
    """It is unknown which item is trained; enumerate and islice do not draw ahead."""
    t = Training()
    with pytest.raises(ConfigError, match=r"2 items drawn.*draws ahead"):
        for numbers in ahead(t.loader):
            t.train(numbers)
    t = Training()
    for _, numbers in enumerate(itertools.islice(t.loader, 4)):
        t.train(numbers)
    assert t.sampler.step == 4


def test_items_may_be_left_out_after_the_first_one():
    """They count when the next is drawn."""
    t = Training()
    for i, numbers in enumerate(t.loader):
        if i in (2, 5):
            continue
        t.train(numbers)
    assert t.sampler.step == 8


def test_a_loop_that_was_left_counts_nothing_later():
    """Its iterator may live on; it ends once another loop over the sampler begins."""
    t, other = Training(), Training()
    items = iter(t.loader)
    t.train(next(items))
    next(items)
    for numbers in t.loader:
        t.train(numbers)
        assert t.sampler.step == 2
        break
    with pytest.raises(RuntimeError, match="another loop has begun"):
        next(items)
    for numbers in other.loader:
        other.train(numbers)
    assert (t.sampler.step, other.sampler.step) == (2, 8)


def test_two_loops_at_a_time_need_equal_batches():
    """For one number of ranks or another, one backward() has one weight."""
    for lengths, sizes, end, is_right in (
        ((32, 32), (8, 8), "keep", True), ((32, 64), (8, 8), "keep", True),
        ((32, 30), (8, 8), "keep", False), ((32, 30), (8, 8), "drop", True),
        ((32, 32), (8, 4), "keep", False), ((30, 30), (8, 8), "keep", True),
    ):  # fmt: skip
        samplers = [
            ElasticSampler(n, size, rank=0, world_size=1, end=end)
            for n, size in zip(lengths, sizes, strict=True)
        ]
        net = nn.Linear(1, 1)
        loaders = [
            DataLoader(range(n), batch_sampler=s.scale_gradients(net) and s)
            for n, s in zip(lengths, samplers, strict=True)
        ]
        complaint = contextlib.nullcontext()
        if not is_right:
            complaint = pytest.raises(ConfigError, match="both")
        with complaint:
            for a, b in zip(*loaders, strict=False):
                net((a.sum() + b.sum()).float().view(1, 1)).sum().backward()


def test_the_long_form_before_the_optimizers_step_is_before_the_batch():
    """From the first batch on."""
    t = Training()
    for i, batch in enumerate(t.sampler.batches(t.loader)):
        for numbers, weight in batch.micro_batches():
            t.optimizer.zero_grad()
            (weight * t.net(numbers.float().unsqueeze(1)).square().mean()).backward()
        assert t.sampler.state_dict()["step"] == i
        if i < 3:
            t.optimizer.step()
            assert t.sampler.state_dict()["step"] == i + 1
        if i == 3:
            break
    assert t.sampler.state_dict()["step"] == 3
    t.optimizer.step()
    assert t.sampler.state_dict()["step"] == 4


def counted_without_an_optimizer(rank):
    """The steps of the long form, counted as each batch is handed out."""
    t = Training()
    t.optimizer = None
    gc.collect()
    steps = []
    for batch in t.sampler.batches(t.loader):
        for numbers, _ in batch.micro_batches():
            t.backward(numbers)
        steps.append((batch.step, t.sampler.state_dict()["step"]))
    return steps


def test_a_batch_of_the_long_form_counts_at_once_without_an_optimizer():
    """An update of the script's own is not seen; a process of its own has no other optimizer."""
    (steps,) = run_ranks(counted_without_an_optimizer, 1)
    assert steps and all(batch == counted for batch, counted in steps)


def test_a_sampler_that_was_not_restored_with_the_checkpoint_is_refused(tmp_path):
    """In both forms, before the first item; an evaluation and initial weights are not."""
    t = Training()
    state = {"net": t.net, "sampler": t.sampler}
    for numbers in t.loader:
        t.train(numbers)
        with Checkpointer(state, tmp_path) as checkpointer:
            checkpointer.save(1)
        break
    for form in (iter, lambda loader: loader.batch_sampler.batches(loader)):
        t = Training()
        with Checkpointer({"net": t.net}, tmp_path, options=CheckpointOptions(strict=False)) as c:
            assert c.load_latest() == 1
        with pytest.raises(ConfigError, match="step 1 was restored without the state of this"):
            next(form(t.loader))
        with torch.no_grad():
            next(form(t.loader))
        t = Training()
        with Checkpointer({"net": t.net, "sampler": t.sampler}, tmp_path) as c:
            c.load_latest()
        next(form(t.loader))
    t = Training()
    with Checkpointer({"net": t.net}, tmp_path / "new") as c:
        assert c.load_latest() is None  # this training begins
    with Checkpointer(
        {"net": t.net}, tmp_path, options=CheckpointOptions(strict=False, boundary=False)
    ) as c:
        c.load_latest()
    next(iter(t.loader))


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
        torch.ones(1, requires_grad=True).sum().backward()
        torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1).step()
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


def test_an_evaluation_whose_ranks_lack_samples_is_refused():
    """Each would count a sample of another: 67 of 66. Also for the largest group of the run."""
    for size, end, is_right in ((60, "keep", True), (66, "keep", False), (66, "drop", True)):
        sampler = ElasticSampler(size, 64, rank=0, world_size=3, name=None, end=end)
        complaint = contextlib.nullcontext()
        if not is_right:
            complaint = pytest.raises(ConfigError, match="leave out what has the weight 0")
        with torch.no_grad(), complaint:
            next(iter(DataLoader(range(size), batch_sampler=sampler)))


def test_private_parts_of_torch():
    """torch has the names that a plain loop builds on; if not, `data.plain_loop` changes."""
    assert plain_loop.is_in_backward() is False
    seen = []
    x = torch.ones(1, requires_grad=True)
    (x * 2).register_hook(lambda _: seen.append(plain_loop.is_in_backward()))
    y = x * 2
    y.register_hook(lambda _: seen.append(plain_loop.is_in_backward()))
    y.backward()
    assert seen == [True]
    ours, theirs = (inspect.signature(f) for f in (plain_loop.backward, plain_loop._of_torch))
    assert list(ours.parameters) == list(theirs.parameters)
    version = x._version
    x.data, _ = torch.zeros(1), x.detach().add_(1)
    assert x._version > version


def test_every_backward_passes_the_public_function(monkeypatch):
    """Where the weight of a plain loop is applied."""
    calls = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *_, **__: calls.append(1))
    torch.ones(1, requires_grad=True).sum().backward()
    assert calls == [1]


def facts_of_ranks(rank: int) -> list[str]:
    """Return the complaints of a rank about what differs between the ranks."""
    found = []

    def make(*args, **options):
        try:
            ElasticSampler(*args, **options)
        except ConfigError as e:
            found.append(str(e))

    make(60, 8, seed=3)
    dist.barrier()
    for order in (0, 1):  # rank 0 is the first
        if order == rank:
            make(60, 8, seed=rank)
            make(60 + rank, 8, name="other")
            make(60, 8 + rank, name="third")
            make(60, 8, seed=rank, name=None)
            make(60, 8, seed=rank, rank=0, world_size=1)
        dist.barrier()
    if rank == 0:
        make(60, 4, name=None)  # an evaluation of one rank alone
    make(60, 8, name=None, seed=9)
    return found


def test_ranks_that_differ_are_refused_when_the_sampler_is_made():
    """By the value of the first rank, and without a collective."""
    first, second = run_ranks(facts_of_ranks, 2)
    assert first == []
    assert [text.split(":")[0] for text in second] == [
        "seed=1", "dataset=61", "global_batch_size=9", "seed=1",
    ]  # fmt: skip
    assert all("rank 0 has" in text for text in second)


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
@pytest.mark.parametrize("global_batch", [pytest.param(12, marks=pytest.mark.long), 11])
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
