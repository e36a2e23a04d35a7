"""The sampler: its place moves with the training, and can be carried to another world size."""

import json
import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from data_worlds import Loader, World
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import fencing


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch):
    """No ledger."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)


def sampler_of(dataset_len=10, seed=3, batch=4, **options):
    """Return the sampler of a single worker."""
    return ElasticSampler(dataset_len, batch, seed=seed, rank=0, world_size=1, **options)


def samples_by_epoch(worlds):
    """Return how often each sample was trained, by epoch."""
    counts: dict[int, Counter] = {}
    for _, epoch, indices in worlds:
        counts.setdefault(epoch, Counter()).update(indices)
    return counts


@pytest.mark.parametrize("history", range(20))
def test_every_sample_once_an_epoch_for_any_history(history):
    """Groups of any size follow each other, save, train on, and are killed, anywhere."""
    chance = random.Random(history)
    length, batch = chance.randint(1, 150), chance.randint(1, 40)
    micro_batch = chance.choice([None, 1, 3, 10])
    survived, state, num_epochs = [], None, 3
    while state is None or state["epoch"] < num_epochs:
        world = World(chance.randint(1, 7), length, (batch, micro_batch), state)
        steps = world.steps(num_epochs, num_ahead=chance.randint(0, 9))
        saved = 0
        for _ in steps:
            if chance.random() < 0.3:
                saved, state = len(world.trained), world.state()
            if chance.random() < 0.1:
                break  # what was trained behind the last state is lost
        else:
            saved, state = len(world.trained), world.state()
        survived += world.trained[:saved]
    once = Counter(range(length))
    assert samples_by_epoch(survived) == {epoch: once for epoch in range(num_epochs)}


def test_the_order_does_not_depend_on_the_history():
    """Each step has the same samples, whoever makes it, and with or without an interruption."""
    alone = World(1, 50, (8, None))
    alone.run(2)
    first = World(3, 50, (8, 2))
    first.run(2, num_steps=5)
    second = World(5, 50, (8, None), first.state())
    second.run(2)
    by_step = {step: sorted(indices) for step, _, indices in alone.trained}
    together: dict[int, list[int]] = {}
    for step, _, indices in first.trained + second.trained:
        together.setdefault(step, []).extend(indices)
    assert {step: sorted(indices) for step, indices in together.items()} == by_step


def test_the_state_is_a_few_numbers():
    """However large the dataset is."""
    sampler = sampler_of(10**12)
    assert len(json.dumps(sampler.state_dict())) < 250
    parts = next(sampler.batches(Loader(sampler))).micro_batches()
    assert next(parts)[0] != [0, 1, 2, 3]


def test_a_step_counts_once_its_parts_have_ended():
    """Not when it was drawn, and not before it was trained."""
    sampler = sampler_of()
    batches = sampler.batches(Loader(sampler))
    batch = next(batches)
    assert (sampler.position, sampler.step) == (0, 0)
    for _ in batch.micro_batches():
        assert sampler.state_dict()["position"] == 0
    assert (sampler.position, sampler.step) == (4, 1)
    next(batches)
    assert (sampler.position, sampler.step) == (4, 1)


def test_a_state_inside_of_the_loop_resumes_inside_of_the_epoch():
    """Even behind the last batch, so that what the script does after the loop is not skipped."""
    sampler = sampler_of(8)
    for batch in sampler.batches(Loader(sampler)):
        list(batch.micro_batches())
        inside = sampler.state_dict()
    resumed = sampler_of(8)
    resumed.load_state_dict(inside)
    assert next(resumed.epochs(2)) == 0
    assert list(resumed.batches(Loader(resumed))) == []
    after = sampler_of(8)
    after.load_state_dict(sampler.state_dict())
    assert list(resumed.epochs(1)) == list(after.epochs(1)) == []
    assert next(after.epochs(2)) == 1


@pytest.mark.parametrize(
    ("end", "sizes"), [("keep", [4, 4, 2]), ("drop", [4, 4]), ("pad", [4, 4, 4])]
)
def test_the_end_of_an_epoch_is_as_one_says(end, sizes):
    """A smaller batch, no batch, or one filled up with the epoch's first samples."""
    sampler = sampler_of(10, end=end)
    parts = [
        indices
        for b in sampler.batches(Loader(sampler))
        for indices, weight in b.micro_batches()
        if weight
    ]
    assert [len(indices) for indices in parts] == sizes
    assert len(sampler) == sampler.num_batches == len(sizes)
    trained = [i for indices in parts for i in indices]
    assert len(set(trained[:10])) == min(10, sum(sizes))
    assert trained[10:] == trained[: max(0, sum(sizes) - 10)]


def test_a_small_dataset_is_padded_over_and_over():
    """A batch larger than the dataset is whole, too."""
    sampler = sampler_of(3, batch=8, end="pad")
    batch = next(sampler.batches(Loader(sampler)))
    assert batch.num_samples == 8


def test_the_loader_is_as_long_as_the_ranks_micro_batches():
    """For any rank, so that progress bars agree."""
    for rank in range(3):
        sampler = ElasticSampler(50, 16, micro_batch_size=2, rank=rank, world_size=3)
        with torch.no_grad():  # else it would be a loop that trains past the sampler
            assert len(sampler) == len(list(sampler)) == 3 * 3 + 1


@pytest.mark.parametrize("end", ["keep", "drop", "pad"])
@pytest.mark.parametrize("before", range(5))
def test_the_items_of_a_resumed_epoch_are_counted_on(before, end):
    """As in an epoch that was not interrupted, however its last batch is treated."""

    def numbers(sampler, most=99):
        sampler.scale_gradients(torch.nn.Linear(1, 1))
        loader = DataLoader(range(10), batch_sampler=sampler)
        for epoch in sampler.epochs(2):
            for i, _ in enumerate(loader, sampler.step_in_epoch):
                yield epoch, i, len(loader)
                assert sampler.step_in_epoch == i
                if epoch * len(loader) + i + 1 == most:
                    return

    first, second = sampler_of(end=end), sampler_of(end=end)
    whole = list(numbers(sampler_of(end=end)))
    if before:
        begun = list(numbers(first, before + 1))  # the last item has not counted
        second.load_state_dict(first.state_dict())
        assert begun[:before] + list(numbers(second)) == whole
    assert [i for _, i, _ in whole] == 2 * list(range(len(whole) // 2))


def test_an_epoch_that_was_left_early_goes_on():
    """Nothing of it is lost."""
    world = World(1, 20, (4, None))
    seen = []
    for epoch in world.samplers[0].epochs(1):
        seen.append(epoch)
        for batch in world.samplers[0].batches(Loader(world.samplers[0])):
            world._train(batch)
            if batch.step % 2 == 0:
                break
    assert seen == [0, 0, 0]
    assert samples_by_epoch(world.trained) == {0: Counter(range(20))}


def test_another_global_batch_may_go_on():
    """Positions are samples, so the size of a step may change; it is logged."""
    first = World(2, 50, (8, None))
    first.run(1, num_steps=2)
    second = World(3, 50, (5, None), first.state())
    second.run(1)
    assert samples_by_epoch(first.trained + second.trained) == {0: Counter(range(50))}


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"dataset_len": 11}, "dataset_len"), ({"seed": 4}, "seed"), ({"shuffle": False}, "shuffle")],
)
def test_a_state_of_another_order_is_refused(changed, key):
    """It would silently train some samples twice; the message names what differs."""
    state = sampler_of().state_dict()
    with pytest.raises(ConfigError, match=f"^{key}=.*the state was taken with {key}="):
        sampler_of(**changed).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"dataset_len": 0}, "dataset"),
        ({"dataset_len": 2.0}, "dataset"),
        ({"seed": None}, "seed"),
        ({"batch": "4"}, "global_batch_size"),
        ({"end": "stop"}, "end"),
        ({"batch": 11, "end": "drop"}, "global_batch_size"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_arguments_that_can_not_work_are_refused(options, key):
    """With the argument's name and a remedy."""
    with pytest.raises(ConfigError, match=f"^{key}="):
        sampler_of(**options)


def test_a_batch_can_not_be_left_in_the_middle():
    """Other ranks wait for the last part, with which gradients are exchanged."""
    sampler = ElasticSampler(8, 4, seed=3, micro_batch_size=2, rank=0, world_size=1)
    with pytest.raises(
        RuntimeError, match=r"step 1 ended before the last of its micro_batches\(\)"
    ):
        for batch in sampler.batches(Loader(sampler)):
            next(batch.micro_batches())


def test_a_batch_can_not_be_gone_through_twice():
    """Its data are gone."""
    sampler = sampler_of()
    batch = next(sampler.batches(Loader(sampler)))
    list(batch.micro_batches())
    with pytest.raises(RuntimeError, match="once"):
        next(batch.micro_batches())


def test_a_loop_past_the_sampler_is_told():
    """At its first draw; one that trains nothing would repeat the same epoch for ever."""
    sampler = sampler_of()
    with pytest.raises(ConfigError, match=r"iterate over sampler\.batches\(loader\)"):
        next(iter(Loader(sampler)))
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"or over sampler\.batches\(loader\)"),
    ):
        for _ in sampler.epochs(2):
            list(Loader(sampler))


def test_looking_at_a_batch_moves_nothing():
    """Such as to see what shape the data have."""
    sampler = sampler_of()
    with torch.no_grad():
        next(iter(Loader(sampler)))
    world = [
        i for b in sampler.batches(Loader(sampler)) for part, _ in b.micro_batches() for i in part
    ]
    assert sorted(world) == list(range(10))


def test_a_state_is_not_loaded_into_a_running_loop():
    """The loader has drawn from elsewhere."""
    sampler = sampler_of()
    state = sampler.state_dict()
    with pytest.raises(RuntimeError, match="begin the loop again"):
        for batch in sampler.batches(Loader(sampler)):
            list(batch.micro_batches())
            sampler.load_state_dict(state)


def test_an_iterator_from_before_the_state_is_found_out():
    """As one that was made to look at the first batch."""
    source = sampler_of()
    list(next(source.batches(Loader(source))).micro_batches())
    sampler = sampler_of()
    early = iter(Loader(sampler, num_ahead=0))
    with torch.no_grad():
        next(early)
    sampler.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="load the state before"):
        list(next(sampler.batches(early)).micro_batches())


def test_a_loader_that_does_not_fit_is_refused():
    """Another sampler, another order, or another number of items."""
    sampler, other = sampler_of(), sampler_of()
    with pytest.raises(ConfigError, match=r"^batch_sampler="):
        next(sampler.batches(Loader(other)))
    loader = Loader(sampler)
    loader.in_order = False
    with pytest.raises(ConfigError, match=r"^in_order=False"):
        next(sampler.batches(loader))
    with torch.no_grad():
        all_items = list(sampler)
    with pytest.raises(RuntimeError, match="the loader ended"):
        for batch in sampler.batches(iter(all_items[:2])):
            list(batch.micro_batches())
    sampler = sampler_of()
    with torch.no_grad():
        list(sampler)
    with pytest.raises(RuntimeError, match="has items after the end"):
        for batch in sampler.batches(iter([*all_items, [0]])):
            list(batch.micro_batches())


def test_models_exchange_gradients_with_the_last_part_only():
    """By no_sync, or by FSDP2's switch; others are left alone."""
    log = []

    class Replicated:
        def no_sync(self):
            class Context:
                def __enter__(self):
                    log.append("apart")

                def __exit__(self, *_):
                    log.append("together")

            return Context()

    class Sharded:
        def set_requires_gradient_sync(self, now):
            log.append(now)

    sampler = ElasticSampler(6, 6, seed=3, micro_batch_size=2, rank=0, world_size=1)
    batch = next(sampler.batches(Loader(sampler)))
    for _ in batch.micro_batches(Replicated(), Sharded(), object()):
        log.append("part")
    once = ["apart", False, "part", "together"]
    assert log == once * 2 + [True, "part"]


@pytest.mark.parametrize("length", [96, 98])
def test_each_size_of_a_batch_is_divided_once_an_epoch(length, monkeypatch):
    """The drawing and the loop divide each size once an epoch."""
    divided, of_before = [], BatchDivision.micro_batches

    def micro_batches(batch, size):
        divided.append(size)
        return of_before(batch, size)

    monkeypatch.setattr(BatchDivision, "micro_batches", micro_batches)
    sampler = sampler_of(length, batch=4)
    for _ in sampler.epochs(2):
        for batch in sampler.batches(Loader(sampler)):
            list(batch.micro_batches())
    sizes = {4, length % 4} - {0}
    assert set(divided) == sizes
    assert len(divided) <= 2 * 2 * len(sizes)
