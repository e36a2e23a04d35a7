"""LocalSGD and DiLoCo: what is averaged when, and what a failed synchronisation leaves behind."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.local_sgd import DiLoCo, LocalSGD


class Done:
    """Work that has been done."""

    def wait(self):
        """Return at once."""
        return True


class Meeting:
    """Where the managers of some replicas, each in a thread, average tensors."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.given: list[torch.Tensor] = []
        self.num_sent = 0

    def average(self, tensor):
        """Replace a tensor by the mean of all."""
        self.barrier.wait()
        self.given.append(tensor.clone())
        self.num_sent += 1
        self.barrier.wait()
        tensor.copy_(torch.stack(self.given).mean(dim=0))
        if self.barrier.wait() == 0:
            self.given.clear()
        self.barrier.wait()


class PlayedManager:
    """A manager without a quorum; `commits` says for each synchronisation whether it succeeds."""

    _use_async_quorum = False

    def __init__(self, meeting, commits=()):
        self.meeting = meeting
        self.commits = list(commits)
        self.step = 0
        self.num_quorums = 0
        self.may_read = True
        self.parts = {}
        self.num_sources = None

    def heal_from_one_source(self):
        """As the manager does."""
        self.num_sources = 1

    def start_quorum(self):
        """As the manager does."""
        self.num_quorums += 1

    def allreduce(self, tensor, should_quantize=False):
        """As the manager does."""
        self.meeting.average(tensor)
        return Done()

    def should_commit(self):
        """As the manager does."""
        committed = self.commits.pop(0) if self.commits else True
        self.step += committed
        return committed

    def current_step(self):
        """As the manager does."""
        return self.step

    def disallow_state_dict_read(self):
        """As the manager does."""
        self.may_read = False

    def allow_state_dict_read(self):
        """As the manager does."""
        self.may_read = True

    def register_state_dict_fn(self, key, load, save):
        """As the manager does."""
        self.parts[key] = load, save


def together(script, size=2):
    """Run a script for each replica; return what they return."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return [f.result() for f in [threads.submit(script, rank, meeting) for rank in range(size)]]


def model_of(seed=0):
    """Return a small model of two parts."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def values(model):
    """Return a copy of all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def step(model, optimizer, rank, i):
    """Train on data of this replica's own."""
    generator = torch.Generator().manual_seed(1000 * rank + i)
    optimizer.zero_grad()
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    optimizer.step()


def alone(rank, num_steps, start):
    """Return where a replica gets by itself."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(num_steps):
        step(model, optimizer, rank, i)
    return values(model)


def test_local_sgd_averages_the_parameters_every_so_many_steps():
    """Both replicas then have the mean of what each has come to by itself."""
    start = model_of()

    def script(rank, meeting):
        model, manager = copy.deepcopy(start), PlayedManager(meeting)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        with LocalSGD(manager, model, optimizer, sync_every=3):
            for i in range(3):
                step(model, optimizer, rank, i)
                seen.append(values(model))
        step(model, optimizer, rank, 3)
        assert manager.num_quorums == 1
        return seen

    first, second = together(script)
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    mean = (alone(0, 3, start) + alone(1, 3, start)) / 2
    torch.testing.assert_close(first[2], mean)


def test_local_sgd_goes_on_from_its_own_parameters_where_the_average_failed():
    """Nothing is discarded, and the next average comes as many steps later."""
    start = model_of()
    model, manager = copy.deepcopy(start), PlayedManager(Meeting(1), commits=[False])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with LocalSGD(manager, model, optimizer, sync_every=2):
        for i in range(4):
            step(model, optimizer, 0, i)
    assert (manager.num_quorums, manager.step) == (2, 1)
    torch.testing.assert_close(values(model), alone(0, 4, start))


@pytest.mark.parametrize("options", [{}, {"use_bucketization": True, "bucket_cap_mb": 1}])
def test_diloco_gives_the_mean_movement_to_the_outer_optimizer(options):
    """As in the paper: with Nesterov momentum, over several rounds."""
    start = model_of()

    def script(rank, meeting):
        model, manager = copy.deepcopy(start), PlayedManager(meeting)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [model], inner, outer, sync_every=3, **options):
            for i in range(9):
                step(model, inner, rank, i)
        return values(model), meeting.num_sent

    (first, num_sent), (second, _) = together(script)
    assert num_sent == 2 * 3 * (1 if options else 4)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, paper(start, rounds=3, steps=3, lr=0.7))


def paper(start, rounds, steps, lr):
    """Return what Algorithm 1 of the DiLoCo paper gives for two replicas."""
    shared = copy.deepcopy(start)
    outer = torch.optim.SGD(shared.parameters(), lr, momentum=0.9, nesterov=True)
    for r in range(rounds):
        replicas = [copy.deepcopy(shared) for _ in range(2)]
        for rank, model in enumerate(replicas):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for i in range(steps):
                step(model, optimizer, rank, r * steps + i)
        for p, *locals_ in zip(
            shared.parameters(), *(m.parameters() for m in replicas), strict=True
        ):
            p.grad = torch.stack([p.detach() - q.detach() for q in locals_]).mean(dim=0)
        outer.step()
    return values(shared)


def test_diloco_goes_back_where_the_synchronisation_failed():
    """To the parameters that all have agreed on; the outer optimizer has not stepped."""
    start = model_of()
    model, manager = copy.deepcopy(start), PlayedManager(Meeting(1), commits=[False])
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9)
    with DiLoCo(manager, [model], inner, outer, sync_every=2):
        step(model, inner, 0, 0)
        assert not torch.equal(values(model), values(start))
        step(model, inner, 0, 1)
    assert torch.equal(values(model), values(start))
    assert not outer.state


@pytest.mark.parametrize("shares_outer", [True, False])
def test_fragments_take_turns_and_a_failed_one_comes_again(shares_outer):
    """One at a time; the gradients of the others' inner steps move nothing."""
    model, manager = model_of(), PlayedManager(Meeting(1), commits=[True, False, True])
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = [torch.optim.SGD(part.parameters(), 1.0, momentum=0.5) for part in model]
    shared = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    moved = []
    with DiLoCo(manager, list(model), inner, shared if shares_outer else outer, 4) as diloco:
        before = [copy.deepcopy(f.original_parameters) for f in diloco._fragments]
        for i in range(6):
            step(model, inner, 0, i)
            now = [copy.deepcopy(f.original_parameters) for f in diloco._fragments]
            pairs = zip(before, now, strict=True)
            moved.append([not torch.equal(a["weight"], b["weight"]) for a, b in pairs])
            before = now
    still = [False, False]
    assert moved == [still, [True, False], still, still, still, [False, True]]


def test_a_fragments_exchange_goes_on_behind_inner_steps():
    """What was trained meanwhile is mixed in by the share that one likes."""
    start = model_of()
    model, manager = copy.deepcopy(start), PlayedManager(Meeting(1))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = torch.optim.SGD(model.parameters(), 1.0)
    options = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.25}
    with DiLoCo(manager, [model], inner, outer, sync_every=4, **options):
        for i in range(4):
            step(model, inner, 0, i)
            assert manager.num_quorums == (i >= 1)
    sent, trained = alone(0, 2, start), alone(0, 4, start)
    torch.testing.assert_close(values(model), 0.75 * sent + 0.25 * trained)


def test_a_healed_replica_has_the_outer_state_of_its_source():
    """The global parameters and the momentum go with the manager's state."""
    source, manager = model_of(1), PlayedManager(Meeting(1))
    inner = torch.optim.SGD(source.parameters(), 0.1)
    outer = torch.optim.SGD(source.parameters(), 0.7, momentum=0.9)
    with DiLoCo(manager, list(source), inner, outer, sync_every=2) as theirs:
        for i in range(4):
            step(source, inner, 0, i)
    late, its_manager = model_of(2), PlayedManager(Meeting(1))
    its_outer = torch.optim.SGD(late.parameters(), 0.7, momentum=0.9)
    diloco = DiLoCo(
        its_manager, list(late), torch.optim.SGD(late.parameters(), 0.1), its_outer, sync_every=2
    )
    for key, (load, _) in its_manager.parts.items():
        load(copy.deepcopy(manager.parts[key][1]()))
    for mine, its in zip(diloco._fragments, theirs._fragments, strict=True):
        for name, parameter in its.original_parameters.items():
            assert torch.equal(mine.original_parameters[name], parameter)
    assert len(its_outer.state) == len(outer.state) == 4
    for mine, its in zip(its_outer.state.values(), outer.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], its["momentum_buffer"])


def test_nobody_reads_the_state_while_the_optimizer_is_at_work():
    """A healing replica would get half a step."""
    model, manager = model_of(), PlayedManager(Meeting(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with LocalSGD(manager, model, optimizer, sync_every=10):
        optimizer.register_step_pre_hook(lambda *_: seen.append(manager.may_read))
        step(model, optimizer, 0, 0)
    assert (seen, manager.may_read) == ([False], True)


def test_a_replica_heals_from_a_single_other():
    """Between two averages no two are alike, and a mixture of them is no model."""
    model, manager = model_of(), PlayedManager(Meeting(1))
    LocalSGD(manager, model, torch.optim.SGD(model.parameters(), 0.1), sync_every=10)
    assert manager.num_sources == 1


@pytest.fixture
def mesh():
    """One rank of a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_are_averaged_by_shards(mesh):
    """DTensors, as FSDP has them: what is sent and kept is this rank's shard."""
    start = model_of()
    model, manager = copy.deepcopy(start), PlayedManager(Meeting(1))
    fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    with (
        DiLoCo(manager, [model], inner, outer, sync_every=2) as diloco,
        LocalSGD(PlayedManager(Meeting(1)), model, inner, sync_every=3),
    ):
        for i in range(4):
            step(model, inner, 0, i)
    for name, parameter in model.named_parameters():
        kept = diloco._fragments[0].original_parameters[name]
        assert type(kept) is torch.Tensor
        assert torch.equal(kept, parameter.to_local())
    assert not torch.equal(model[0].weight.to_local(), start[0].weight)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sync_every": 3}, "sync_every"),
        ({"sync_every": 0}, "sync_every"),
        ({"fragment_sync_delay": 2}, "fragment_sync_delay"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha"),
        ({"outer": 3}, "outer_optimizer"),
        ({"is_async": True}, "use_async_quorum"),
    ],
)
def test_what_diloco_can_not_do_is_refused(options, key):
    """With the argument's name."""
    options = {"sync_every": 4, **options}
    model, manager = model_of(), PlayedManager(Meeting(1))
    manager._use_async_quorum = options.pop("is_async", False)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = [torch.optim.SGD(model.parameters(), 0.1)] * options.pop("outer", 2)
    with pytest.raises(ConfigError, match=f"^{key}="):
        DiLoCo(manager, list(model), inner, outer, **options)


def test_local_sgd_refuses_to_average_never():
    """With the argument's name."""
    model = model_of()
    with pytest.raises(ConfigError, match=r"^sync_every=0"):
        LocalSGD(PlayedManager(Meeting(1)), model, torch.optim.SGD(model.parameters(), 0.1), 0)
