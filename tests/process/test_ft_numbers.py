"""What per-step fault tolerance makes of gradients, beside one process and beside torch's DDP."""

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed import ReduceOp

from hpc_elastic.ft import (
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    PureDistributedDataParallel,
)
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.ft.manager import WorldSizeMode

NUM_STEPS = 6
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def lighthouse():
    """The address of a lighthouse that waits for two replicas."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
    yield server.address()
    server.shutdown()


class Branches(nn.Module):
    """A random model: some layers in a chain, others in branches, a shared, a frozen, an unused."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(4)
        chance = random.Random(seed)
        self.chain = nn.ModuleList(nn.Linear(4, 4) for _ in range(chance.randint(1, 3)))
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(chance.randint(1, 4)))
        self.branches.append(self.chain[0])
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x, used):
        """Return the outputs of some branches, added up."""
        x = self.norm(x)
        for layer in self.chain:
            x = self.frozen(torch.tanh(layer(x)))
        return sum((self.branches[i](x) for i in used), x)


def draws(seed, rank):
    """Yield a replica's batch and its branches, for each micro-batch of each step."""
    chance, numbers = random.Random(f"{seed} {rank}"), torch.Generator().manual_seed(seed + rank)
    for _ in range(2 * NUM_STEPS):
        used = [i for i in range(2) if chance.random() < 0.4]
        yield torch.randn(3, 4, generator=numbers), used


def make_manager(lighthouse, rank, net=None, **options):
    """Return the manager of a replica of one process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(TIMEOUT),
        load_state_dict=net.load_state_dict if net else lambda state: None,
        state_dict=net.state_dict if net else lambda: {},
        min_replica_size=2, timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"r{rank}", init_sync=False, **options,
    )  # fmt: skip
    manager.store = store
    return manager


def train(rank, seed, lighthouse, wrap, accumulates):
    """Return the parameters after some steps of a replica with a manager, or of torch's DDP."""
    torch.set_num_threads(1)
    net = Branches(seed)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if wrap is None:
        manager, optimizer = None, inner
        model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    else:
        manager = make_manager(lighthouse, rank, net)
        model, optimizer = wrap(manager, net), Optimizer(manager, inner)
    batches = draws(seed, rank)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(1 + accumulates):
            x, used = next(batches)
            model(x, used).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        if manager is not None:
            assert manager.current_step() == step + 1
    dist.barrier()
    if manager is not None:
        manager.shutdown()
    return [t.detach().numpy() for t in (*net.parameters(), *net.buffers())]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("wrap", "accumulates"),
    [
        (DistributedDataParallel, False),
        (PureDistributedDataParallel, True),
        pytest.param(DistributedDataParallel, True, marks=pytest.mark.long),
        pytest.param(PureDistributedDataParallel, False, marks=pytest.mark.long),
    ],
)
def test_replicas_train_as_torchs_ddp(lighthouse, seed, wrap, accumulates):
    """With clipped gradients, buffers, and what one of them uses alone; also with accumulation."""
    args = seed, lighthouse
    replicas = run_ranks(train, 2, *args, wrap, accumulates)
    by_torch = run_ranks(train, 2, *args, None, accumulates)
    for a, b, c in zip(*replicas, by_torch[0], strict=True):
        assert (a == b).all()
        assert abs(a - c).max() < 1e-6


def reduce(rank, lighthouse):
    """Return what a replica gets of each operation, when one of three is a spare."""
    spares = WorldSizeMode.FIXED_WITH_SPARES
    manager = make_manager(lighthouse, rank, world_size_mode=spares)
    while True:
        manager.start_quorum()
        found = {
            (str(op), dtype): manager_result(manager, op, dtype)
            for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.SUM)
            for dtype in (torch.float32, torch.int64, torch.uint8)
        } | {("BAND", torch.int32): manager_result(manager, ReduceOp.BAND, torch.int32)}
        size = manager._pg.size()
        if manager.should_commit() and size == 3:
            break
    dist.barrier()
    manager.shutdown()
    return {f"{op} {dtype}": value for (op, dtype), value in found.items()}


def manager_result(manager, op, dtype):
    """Return what an operation makes of the same number of every replica."""
    number = -5 if op == ReduceOp.MAX and dtype != torch.uint8 else 5
    tensor = torch.tensor([number], dtype=dtype)
    manager.allreduce(tensor, reduce_op=op).wait()
    return tensor.item()


def test_a_spare_changes_no_result(lighthouse):
    """Whatever the operation: two of three participate."""
    for found in run_ranks(reduce, 3, lighthouse):
        for name, value in found.items():
            op = name.split()[0].split(".")[-1]
            expected = {"PRODUCT": 25, "SUM": 10}.get(op, 5)
            is_negative = op == "MAX" and "uint8" not in name
            assert value == (-5 if is_negative else expected), name


def train_beside_a_spare(rank, lighthouse, accumulates):
    """Return the gradients of each step of three replicas; one of them is a spare."""
    net = Branches(4)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    spares = WorldSizeMode.FIXED_WITH_SPARES
    manager = make_manager(lighthouse, rank, net, world_size_mode=spares)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    numbers, found = torch.Generator().manual_seed(rank), []
    while len(found) < NUM_STEPS:
        optimizer.zero_grad()
        is_spare = manager.participating_rank() is None
        for at in range(1 + accumulates):
            is_wanted = is_spare or (rank == 0 and at == 0 and len(found) % 3 == 2)
            used = [i for i in range(len(net.branches)) if is_wanted and (i + len(found)) % 2]
            model(torch.randn(3, 4, generator=numbers), used).square().mean().backward()
        size, before = manager._pg.size(), manager.current_step()
        optimizer.step()
        if size == 3 and manager.current_step() > before:
            found.append([None if p.grad is None else p.grad.tolist() for p in net.parameters()])
    dist.barrier()
    manager.shutdown()
    return found


@pytest.mark.parametrize("accumulates", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_a_spare_alone_uses_changes_nothing(lighthouse, accumulates):
    """Neither its own gradient nor a zero, which decays; nor what others have accumulated."""
    one, *others = run_ranks(train_beside_a_spare, 3, lighthouse, accumulates)
    assert all(other == one for other in others)
    assert any(None in gradients for gradients in one)
