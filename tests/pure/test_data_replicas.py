"""The sampler with a manager: replicas that come and go share each batch, and lose no sample."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from replica_worlds import Cohort, PlayedManager, Replica, TokenOfEach, train_with_faults

from data_worlds import Loader, Run
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.audit import audit
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import EpochPlan, SamplePosition
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import fencing


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose replicas write a ledger."""
    run = Run(tmp_path / "run", monkeypatch)
    run.form_group()
    return run


@pytest.fixture
def outside(monkeypatch):
    """No ledger."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def a_process_each(monkeypatch):
    """Let each replica write as if it were a process of its own."""
    monkeypatch.setattr("hpc_elastic.data.ledger.PROCESS_TOKEN", TokenOfEach())


def cohort_of(num_replicas, length=40, batch=(8, None), num_epochs=2, seed=0, **options):
    """Return replicas that have begun."""
    cohort = Cohort(lambda: Replica(length, batch, num_epochs, **options), random.Random(seed))
    for _ in range(num_replicas):
        cohort.start()
    return cohort


def assert_each_once(model, length, num_epochs):
    """Check what parameters have gone through."""
    assert Counter(i for part in model.values() for i in part) == Counter(
        {i: num_epochs for i in range(length)}
    )


@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
@pytest.mark.parametrize("seed", range(4))
def test_every_sample_once_an_epoch_and_proven(run, seed, end):
    """Replicas are killed, join, heal or are spares; all may be lost at once."""
    chance = random.Random(f"{seed} {end}")
    length, batch = chance.randint(20, 90), (chance.randint(1, 20), chance.choice([None, 2]))
    cohort = cohort_of(chance.randint(1, 4), length, batch, seed=seed, end=end)
    num_steps = 2 * cohort.replicas[0].sampler.num_batches
    model: dict[int, list[int]] = {}
    while len(model) < num_steps:
        train_with_faults(cohort, chance)
        model = dict(json.loads(cohort.saved)[2]) if cohort.saved else {}
        if len(model) < num_steps:  # everybody is lost: the run comes back from its checkpoint
            cohort.quorum += 1 << 20
            cohort.start()
    run.succeed()
    (proof,) = audit(run.path)
    assert proof.holds, proof.problems
    assert proof.last_step == num_steps
    if end == "keep":
        assert_each_once(model, length, 2)


def test_shares_and_weights_follow_the_membership(outside):
    """The mean over the contributors is the mean over the batch, whoever heals meanwhile."""
    cohort = cohort_of(2, batch=(9, 2))
    cohort.step()
    cohort.start()
    cohort.enter()
    for replica in cohort.replicas:
        replica.goes_on()
    first, second, third = (r.drawn for r in cohort.replicas)
    assert len(first) == len(second) == len(third) == 3
    assert [w for _, w in third] == [0.0] * 3
    assert sum(w for _, w in first + second) == pytest.approx(2)
    cohort._end(lambda _: True)
    cohort.step()
    assert all(sum(w for _, w in r.drawn) == pytest.approx(1) for r in cohort.replicas)


def test_a_failed_step_takes_the_same_batch_again(outside):
    """By whoever is there then, divided anew."""
    cohort = cohort_of(3)
    cohort.step()
    failed = cohort.replicas[0]
    cohort.step(commits=lambda _: False, killed=[cohort.replicas[2]])
    before = sorted(i for part, _ in failed.drawn for i in part)
    assert (failed.sampler.step, failed.sampler.position) == (1, 8)
    cohort.step()
    after = sorted(i for r in cohort.replicas for part, _ in r.drawn for i in part)
    assert set(before) < set(after)
    assert len(after) == 8
    assert failed.sampler.step == 2


def test_a_healed_replica_goes_on_in_the_loop_of_the_others_epoch(outside):
    """So what a script does behind the loop, as for a schedule, it does as often as they do."""
    cohort = cohort_of(1, length=16, num_epochs=3)
    for _ in range(3):
        cohort.step()
    cohort.start()
    late = cohort.replicas[1]
    for _ in range(3):
        cohort.step()
    assert not cohort.replicas
    assert late.epochs_ended == [0, 2]  # the one whose loop it was in ended as epoch 1
    assert_each_once(late.model, 16, 3)


def test_the_loader_is_begun_anew_only_if_the_share_or_the_place_has_changed(outside):
    """An undisturbed epoch is read ahead."""
    cohort = cohort_of(2, length=80)
    begun = []
    for replica in cohort.replicas:
        original = replica.sampler._items.open_loader
        replica.sampler._items.open_loader = lambda *a, f=original: (begun.append(1), f(*a))
    for _ in range(4):
        cohort.step()
    assert len(begun) == 2
    cohort.step(commits=lambda _: False)
    cohort.step()
    assert len(begun) == 4
    cohort.kill(cohort.replicas[1])
    cohort.step()
    assert len(begun) == 5


def test_ranks_of_a_group_divide_its_share(outside):
    """Two ranks in each of two replicas are four that divide the batch."""
    seen = []
    for replica in range(2):
        for rank in range(2):
            manager = PlayedManager(rank=replica, size=2)
            batch = BatchDivision(8, None, rank, 2)
            sampler = ElasticSampler(40, **vars(batch), seed=3, manager=manager)
            ((indices, weight),) = next(sampler.batches(Loader(sampler))).micro_batches()
            assert weight == 1.0
            seen += indices
    assert len(seen) == len(set(seen)) == 8


def test_a_step_without_a_quorum_is_told(outside):
    """zero_grad comes first."""
    sampler = ElasticSampler(40, 8, seed=3, manager=PlayedManager())
    with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\)"):
        next(next(sampler.batches(Loader(sampler))).micro_batches())


def test_a_managers_state_that_was_left_out_is_told(outside):
    """The sampler's without the manager's would train samples twice."""
    cohort = cohort_of(1)
    cohort.step()
    manager = PlayedManager(rank=0, size=1)
    sampler = ElasticSampler(40, 8, seed=3, manager=manager)
    sampler.load_state_dict(cohort.replicas[0].sampler.state_dict())
    with pytest.raises(ConfigError, match=r"^step=1: the manager is at step 0"):
        next(next(sampler.batches(Loader(sampler))).micro_batches())


def test_a_samplers_state_that_was_left_out_follows_from_the_step(outside):
    """The manager's step is the position of the training."""
    manager = PlayedManager(step=7, rank=0, size=1)
    sampler = ElasticSampler(40, 8, seed=3, manager=manager)
    next(next(sampler.batches(Loader(sampler))).micro_batches())
    assert (sampler.epoch, sampler.position, sampler.step) == (1, 16, 7)


def test_another_manager_can_write_no_ledger(run):
    """torchft's has no quorum to tell."""
    manager = PlayedManager(rank=0, size=1)
    names = ("current_step", "participating_rank", "is_participating", "num_participants")
    other = SimpleNamespace(**{name: getattr(manager, name) for name in names})
    other.register_state_dict_fn = manager.register_state_dict_fn
    sampler = ElasticSampler(40, 8, seed=3, manager=other)
    batches = sampler.batches(Loader(sampler))
    list(next(batches).micro_batches())
    manager.step += 1
    with pytest.raises(ConfigError, match=r"^manager='SimpleNamespace': .* name=None"):
        next(batches)


@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
@pytest.mark.parametrize("length", [8, 20, 24])
def test_a_place_so_many_steps_further_is_that_of_single_steps(end, length):
    """However far: the formula and the loop agree."""
    plan = EpochPlan(length, 3, True, end, BatchDivision(8))
    place = SamplePosition()
    for num_steps in range(1, 12):
        place = plan.after(plan.next_batch(place), 1)
        assert plan.after(SamplePosition(), num_steps) == place


def unnamed(manager, *lengths):
    """Return samplers without a name."""
    return [
        ElasticSampler(n, 4, seed=3, rank=0, world_size=1, name=None, manager=manager)
        for n in lengths
    ]


def heal(manager, peer):
    """Have a replica take over the state of another one."""
    manager.pending = peer.state()[0], json.loads(peer.state()[1])
    manager.heal()


def test_samplers_without_a_name_are_the_same_in_every_replica(outside):
    """By the order in which they are made, so that a newcomer heals from any peer."""
    peer, newcomer = PlayedManager(step=2), PlayedManager()
    for sampler in unnamed(peer, 40, 24):
        sampler.load_state_dict({**sampler.state_dict(), "step": 2, "position": 8})
    samplers = unnamed(newcomer, 40, 24)
    assert newcomer.parts.keys() == peer.parts.keys()
    heal(newcomer, peer)
    assert [s.position for s in samplers] == [8, 8]


def test_samplers_that_are_made_in_another_order_are_told(outside):
    """A state of one would be loaded into the other."""
    peer, newcomer = PlayedManager(step=2), PlayedManager()
    made = unnamed(peer, 40, 24), unnamed(newcomer, 24, 40)
    wrong = r"unnamed\.1 is of another one \(dataset_len.*same order"
    with pytest.raises(ConfigError, match=wrong):
        heal(newcomer, peer)
    assert made
