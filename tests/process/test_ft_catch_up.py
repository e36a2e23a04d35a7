"""A replica takes over a state in parts, while its source and it make steps."""

import concurrent.futures
import time
from datetime import timedelta

import pytest
import torch

from hpc_elastic.ft.catch_up import CatchUp, SkipCopiesOntoItself
from hpc_elastic.ft.checkpointing import HealError, HTTPTransport, UnusableStateError, _wire
from hpc_elastic.ft.checkpointing._layout import SMALL_BYTES
from hpc_elastic.ft.quorum import CommittedProgress

TIMEOUT = timedelta(seconds=20)
NUM_LAYERS = 6
NUMBERS = SMALL_BYTES // 2  # four bytes each


class Replica:
    """A model with Adam, an average of its parameters, a running mean and a schedule."""

    def __init__(self, seed):
        draws = torch.Generator().manual_seed(seed)
        self.layers = [
            torch.nn.Parameter(torch.randn(NUMBERS, generator=draws)) for _ in range(NUM_LAYERS)
        ]
        self.mean = torch.randn(10, generator=draws)
        self.average = [p.detach().clone() for p in self.layers]
        self.frozen = torch.randn(NUMBERS, generator=draws)
        self.optimizer = torch.optim.Adam(self.layers, lr=0.1 * seed)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.transport = HTTPTransport(TIMEOUT, key=b"the run's")
        self.progress = CommittedProgress(0, 0, "fresh")

    def step(self, seed, *, couples=False):
        """Step with gradients that all replicas have; perhaps in a way that couples parameters."""
        draws = torch.Generator().manual_seed(seed)
        for p in self.layers:
            p.grad = torch.randn(NUMBERS, generator=draws)
        self.optimizer.step()
        self.schedule.step()
        if couples:
            total = sum(p.detach().sum() for p in self.layers)
            for p in self.layers:
                p.data.add_(total, alpha=1e-6)
        for average, p in zip(self.average, self.layers, strict=True):
            average.lerp_(p.detach(), 0.5)
        self.progress = self.progress.after_step(1, 1)

    def state(self):
        """Return the live state in the form in which it is sent."""
        user = {
            "layers": [p.detach() for p in self.layers],
            "mean": self.mean,
            "average": self.average,
            "frozen": self.frozen,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        return {"user": user, "torchft": vars(self.progress)}

    def load(self, state):
        """Take a state over; what is on live memory costs nothing."""
        with SkipCopiesOntoItself():
            user = state["user"]
            for own, given in zip(self.layers, user["layers"], strict=True):
                own.data.copy_(given)
            self.mean.copy_(user["mean"])
            self.frozen.copy_(user["frozen"])
            for own, given in zip(self.average, user["average"], strict=True):
                own.copy_(given)
            self.optimizer.load_state_dict(user["optimizer"])
            self.schedule.load_state_dict(user["schedule"])
        self.progress = CommittedProgress(**state["torchft"])


@pytest.fixture
def pair():
    source, newcomer = Replica(1), Replica(2)
    for seed in range(3):
        source.step(seed)
    newcomer.step(0)  # with any gradients: the optimizer has its tensors then
    newcomer.progress = source.progress
    yield source, newcomer
    for replica in (source, newcomer):
        replica.transport.shutdown()


@pytest.fixture
def slow_network(monkeypatch):
    """Large tensors take long: a few come in a step."""
    receive = _wire.receive_into

    def receive_into(sock, views):
        if sum(map(len, views)) > SMALL_BYTES:
            time.sleep(0.05)
        receive(sock, views)

    monkeypatch.setattr(_wire, "receive_into", receive_into)


def catch_up_of(newcomer):
    return CatchUp(newcomer.transport, [newcomer.optimizer], TIMEOUT)


def make_step(source, newcomer, catch_up, seed, *, ends_early=True, **how):
    """Make one step of both."""
    source.transport.offer_parts(source.progress.step, source.state(), TIMEOUT)
    own = newcomer.state()
    catch_up.start_step([source.transport.metadata()], newcomer.progress, lambda: own)
    time.sleep(0.1)
    if not ends_early:
        assert catch_up._fetching is not None
        concurrent.futures.wait([catch_up._fetching])
    state = catch_up.end_step()
    if state is not None:
        newcomer.load(state)
    source.transport.disallow_checkpoint()
    for replica in (source, newcomer):
        replica.step(seed, **how)
    return state


def assert_equal(a, b):
    assert a.progress == b.progress
    assert a.schedule.state_dict() == b.schedule.state_dict()
    of_a, of_b = a.state()["user"], b.state()["user"]
    for key in ("layers", "mean", "average", "frozen", "optimizer"):
        torch.testing.assert_close(of_a[key], of_b[key], rtol=0, atol=0)


@pytest.mark.parametrize("couples", [False, True])
def test_what_has_come_stays_up_to_date(pair, slow_network, couples, caplog):
    """Also where the optimizer couples parameters: what differs at the end is fetched again."""
    source, newcomer = pair
    catch_up = catch_up_of(newcomer)
    caplog.set_level("INFO")
    for seed in range(100, 200):
        make_step(source, newcomer, catch_up, seed, couples=couples)
        if catch_up.is_complete:
            break
        source.mean.add_(1.0)  # as running means, which differ
    assert seed > 102
    assert_equal(source, newcomer)
    again = caplog.messages[-1].partition("; ")[2]
    assert again.startswith("0 of") is not couples
    for seed in range(200, 203):
        for replica in pair:
            replica.step(seed, couples=couples)
    assert_equal(source, newcomer)


def test_all_comes_in_one_step_if_there_is_time(pair):
    """Then the last step is the first."""
    source, newcomer = pair
    catch_up = catch_up_of(newcomer)
    assert make_step(source, newcomer, catch_up, 100, ends_early=False)
    assert catch_up.is_complete
    assert_equal(source, newcomer)


def test_a_step_that_ends_at_once_waits_for_one_unit(pair):
    """So a replica with short steps catches up, too."""
    source, newcomer = pair
    catch_up = catch_up_of(newcomer)
    for seed in range(100, 200):
        before = set(catch_up._done)
        make_step(source, newcomer, catch_up, seed)
        if catch_up.is_complete:
            break
        assert catch_up._done > before
    assert catch_up.is_complete
    assert_equal(source, newcomer)


def test_a_request_may_come_before_the_offer_of_its_step(pair):
    """The source may be a moment behind: it has not ended the step before."""
    source, newcomer = pair
    source.transport.offer_parts(source.progress.step, source.state(), TIMEOUT)
    for replica in pair:
        replica.step(50)
    catch_up, own = catch_up_of(newcomer), newcomer.state()
    catch_up.start_step([source.transport.metadata()], newcomer.progress, lambda: own)
    source.transport.disallow_checkpoint()
    source.transport.offer_parts(source.progress.step, source.state(), TIMEOUT)
    assert catch_up.end_step() is not None


def test_a_source_with_another_history_is_refused(pair):
    """An equal step proves nothing."""
    source, newcomer = pair
    source.progress = CommittedProgress(source.progress.step, 0, "another")
    catch_up = catch_up_of(newcomer)
    for _ in range(2):
        make_step(source, newcomer, catch_up, 100, ends_early=False)
        newcomer.progress = CommittedProgress(source.progress.step, 0, "other")
    with pytest.raises(HealError, match=r"no part of the state came in 3 steps.*another history"):
        make_step(source, newcomer, catch_up, 100, ends_early=False)
    source.transport.disallow_checkpoint()


def test_a_state_that_cannot_be_sent_is_named(pair):
    """At once: no other step would help."""
    source, newcomer = pair
    catch_up, own = catch_up_of(newcomer), newcomer.state()
    source.transport.refuse_checkpoint([], source.progress.step, "no reason", TIMEOUT)
    catch_up.start_step([source.transport.metadata()], newcomer.progress, lambda: own)
    with pytest.raises(UnusableStateError, match="no reason"):
        catch_up.end_step()
    source.transport.disallow_checkpoint()


def test_a_copy_onto_other_memory_is_made():
    """Only one onto itself is left out."""
    a = torch.zeros(4)
    with SkipCopiesOntoItself():
        a.copy_(torch.ones(4))
        a[1:].copy_(a[:-1].clone() + 1)
        a.copy_(a.detach())
    assert a.tolist() == [1, 2, 2, 2]
