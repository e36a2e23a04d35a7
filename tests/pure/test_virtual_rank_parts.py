"""Virtual ranks: one tree of additions and one division of the batch for any number of workers."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader, TensorDataset

from data_worlds import Run
from hpc_elastic.data import ElasticSampler, audit
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.random_state import SeededIndices
from hpc_elastic.data.virtual_ranks import PartialSum, held_sums, push
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import fencing

WORLDS = [(v, w) for v in (1, 2, 7, 12, 16, 33) for w in range(1, v + 1)]
LENGTH = 45


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch):
    """No ledger."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)


def ranks_of_all(num_ranks: int, num_workers: int) -> list[range]:
    """Return the virtual ranks of each worker."""
    return [
        BatchDivision(64, None, worker, num_workers, num_ranks).ranks_of(worker)
        for worker in range(num_workers)
    ]


def test_the_sum_has_the_same_bits_for_any_number_of_workers():
    """Each adds up its own virtual ranks, and the sums of all become one."""
    chance = torch.Generator().manual_seed(1)
    for num_ranks, num_workers in WORLDS:
        numbers = torch.randn(num_ranks, 50, generator=chance)
        alone, shared = [], []
        for rank in range(num_ranks):
            push(alone, PartialSum(rank, rank + 1, [numbers[rank].clone()]), num_ranks)
        for ranks in ranks_of_all(num_ranks, num_workers):
            held = []
            for rank in ranks:
                push(held, PartialSum(rank, rank + 1, [numbers[rank].clone()]), num_ranks)
            for each in held:
                push(shared, each, num_ranks)
        ((_, _, (whole,)),), ((first, last, (found,)),) = alone, shared
        assert (first, last) == (0, num_ranks)
        assert torch.equal(found, whole)
        torch.testing.assert_close(whole, numbers.sum(0))


def test_a_worker_holds_few_sums():
    """One where a power of two of workers divides the virtual ranks."""
    for num_ranks, num_workers in WORLDS:
        most = max(len(held_sums(r, num_ranks)) for r in ranks_of_all(num_ranks, num_workers))
        assert most <= 2 * num_ranks.bit_length()
        if num_workers & (num_workers - 1) == 0 and num_ranks % num_workers == 0:
            assert most == 1


def test_the_micro_batches_are_those_of_one_worker():
    """In order, none of them without a virtual rank, each worker with one at least."""
    for num_ranks, num_workers in WORLDS:
        for size, micro_batch in ((64, None), (64, 3), (5, None), (1, 2)):
            of_all = [
                BatchDivision(64, micro_batch, worker, num_workers, num_ranks).micro_batches(size)
                for worker in range(num_workers)
            ]
            assert all(of_all)
            alone = BatchDivision(64, micro_batch, 0, 1, num_ranks).micro_batches(size)
            assert [part for parts in of_all for part in parts] == alone


def test_a_history_of_worlds_passes_the_audit(tmp_path, monkeypatch):
    """The shares that workers record make up the batches."""
    run, state = Run(tmp_path / "run", monkeypatch), None
    with torch.no_grad():
        for size, num_steps in ((3, 2), (5, 4), (1, 1), (16, None)):
            state = run.train_group(
                size, LENGTH, (20, 1, 16), state, num_epochs=3, num_steps=num_steps
            )
    run.succeed()
    (proof,) = audit.audit(run.path)
    assert proof.holds, proof.problems


def sampler_of(**options):
    """Return the sampler of a single worker."""
    return ElasticSampler(
        LENGTH, 20, **{"rank": 0, "world_size": 1, "virtual_ranks": 16, **options}
    )


def net() -> nn.Module:
    """Return a net with a layer that no batch uses."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    layers.unused = nn.Linear(1, 1)
    layers.forward = lambda x: layers[2](layers[1](layers[0](x)))
    return layers


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(16, None), (7, 2), (1, None)])
def test_gradients_are_those_of_the_whole_batch_and_are_added(num_ranks, micro_batch):
    """Of the mean, also for the last batch, which has fewer samples than virtual ranks."""
    x = torch.randn(LENGTH, 6).double()
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    sampler = sampler_of(virtual_ranks=num_ranks, micro_batch_size=micro_batch, shuffle=False)
    model = sampler.average_gradients(net())
    before = torch.get_rng_state()
    sizes = []
    for batch in sampler.batches(DataLoader(data, batch_sampler=sampler)):
        used = model[0].weight
        used.grad = torch.ones_like(used) if batch.step == 2 else None
        losses = []
        for (inputs, targets), weight in batch.micro_batches():
            losses.append(mse_loss(model(inputs), targets))
            (weight * losses[-1]).backward()
        begin = 20 * (batch.step - 1)
        inputs, targets = (each[begin : begin + batch.num_samples] for each in data.tensors)
        whole = net()
        expected = mse_loss(whole(inputs), targets)
        expected.backward()
        torch.testing.assert_close(used.grad, whole[0].weight.grad + (batch.step == 2))
        assert model.unused.weight.grad is None
        assert batch.mean(losses) == pytest.approx(expected.item(), rel=1e-12)
        sizes.append(batch.num_samples)
    assert sizes == [20, 20, 5]
    assert torch.equal(torch.get_rng_state(), before)


class Sharing(nn.Linear):
    """A wrapper that exchanges gradients itself, as DistributedDataParallel does."""

    def no_sync(self):
        """Leave them for once."""


class FakeManager:
    """A fault-tolerant manager."""


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda: sampler_of(world_size=17), "17 workers"),
        (lambda: sampler_of(virtual_ranks=0), "virtual_ranks"),
        (lambda: sampler_of(virtual_ranks=1.5), "virtual_ranks"),
        (lambda: sampler_of(manager=FakeManager()), "virtual_ranks"),
        (lambda: sampler_of().scale_gradients(net()), "average_gradients"),
        (lambda: sampler_of(virtual_ranks=None).average_gradients(net()), "virtual_ranks"),
        (lambda: sampler_of().average_gradients(Sharing(1, 1)), "bare module"),
        (lambda: sampler_of().average_gradients(nn.SyncBatchNorm(3)), "use BatchNorm"),
        (lambda: next(sampler_of().batches([])), "average_gradients"),
        (lambda: next(iter(DataLoader([0], batch_sampler=sampler_of()))), "batches"),
    ],
)
def test_what_cannot_be_the_same_bits_is_refused(misuse, complaint):
    """With the key and the remedy."""
    with pytest.raises(ConfigError, match=complaint):
        misuse()


def test_a_sampler_of_other_ranks_than_the_group_is_refused():
    """The exchange would have no peers."""
    sampler = sampler_of(world_size=2)
    sampler.average_gradients(net())
    batch = next(sampler.batches(DataLoader(range(LENGTH), batch_sampler=sampler)))
    with pytest.raises(ConfigError, match="process_group"):
        next(batch.micro_batches())


def test_a_mean_needs_a_value_of_each_micro_batch():
    """And virtual ranks."""
    sampler = sampler_of()
    sampler.average_gradients(nn.Linear(1, 1))
    batch = next(sampler.batches(DataLoader(range(LENGTH), batch_sampler=sampler)))
    values = [1.0 for _ in batch.micro_batches()]
    assert batch.mean(values) == 1.0
    with pytest.raises(RuntimeError, match="15 values for 16"):
        batch.mean(values[1:])


def test_another_number_of_virtual_ranks_is_warned_of(caplog):
    """The training continues, and not bit for bit."""
    sampler_of(virtual_ranks=8).load_state_dict(sampler_of().state_dict())
    assert "virtual_ranks was 16, and is 8" in caplog.text


def test_indices_seed_the_process_that_fetches():
    """And no other: to send them to it draws nothing."""
    indices = pickle.loads(pickle.dumps(SeededIndices([3, 1], 5)))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert pickle.dumps(indices)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    for _ in range(2):
        assert list(indices) == [3, 1]
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]


def test_torch_has_what_virtual_ranks_build_on():
    """A base of all modules with running statistics, and the count of a tensor's changes."""
    assert issubclass(nn.BatchNorm2d, _NormBase)
    tensor = torch.zeros(1)
    assert tensor.add_(1)._version == 1
    torch._foreach_add_([tensor], [tensor])
    assert tensor.item() == 2
