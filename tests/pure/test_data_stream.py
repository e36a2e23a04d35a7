"""The stream: each sample of the shards once an epoch, for any history, and read forwards."""

import json
import logging
import os
import pickle
import random
from collections import Counter, deque
from dataclasses import replace

import pytest
import torch
from replica_worlds import Cohort, Replica, TokenOfEach, train_with_faults

from data_worlds import Run, World
from hpc_elastic.data import ElasticSampler, ElasticStream, count_samples
from hpc_elastic.data.audit import EpochProof, audit
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import fencing


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch):
    """No ledger, but where a test forms a group."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)


class Shards:
    """Shards whose samples are (shard, index); each process that reads counts for itself.

    Attributes:
        read: How often each sample was made.
        begun: How often a shard was opened.
    """

    def __init__(self, lengths, *, seeks=True):
        self.lengths, self.seeks = list(lengths), seeks
        self.made, self.begun = Counter(), Counter()

    def __call__(self, shard, start):
        """Read one, from a sample on."""
        self.begun[shard] += 1
        for i in range(start if self.seeks else 0, self.lengths[shard]):
            self.made[shard, i] += 1
            if i >= start:
                yield shard, i

    def all(self) -> Counter:
        """Every sample, once."""
        return Counter((i, j) for i, length in enumerate(self.lengths) for j in range(length))


def stream_of(lengths, batch=4, rank=0, size=1, read=None, **options) -> ElasticStream:
    """The stream of one rank."""
    batch = batch if isinstance(batch, BatchDivision) else BatchDivision(batch, None, rank, size)
    return ElasticStream(
        range(len(lengths)), read or Shards(lengths), lengths, **vars(batch), seed=3, **options
    )


class StreamLoader:
    """Loads in turn by several copies of the dataset, ahead of the training, as a DataLoader's."""

    def __init__(self, stream: ElasticStream, num_workers: int, num_ahead: int) -> None:
        self.batch_sampler, self.dataset = stream, stream.dataset
        self.num_workers, self.num_ahead = num_workers, num_ahead

    def __iter__(self):
        copies = [pickle.loads(pickle.dumps(self.dataset)) for _ in range(self.num_workers)]
        workers = copies or [self.dataset]
        self.reads = [copy._read for copy in workers]
        queue = deque()
        for i, numbers in enumerate(iter(self.batch_sampler)):
            queue.append(workers[i % len(workers)].__getitems__(numbers))
            if len(queue) > self.num_ahead:
                yield queue.popleft()
        yield from queue


class StreamWorld(World):
    """All ranks of one group that trains on a stream, each with its loader's workers."""

    def __init__(self, size, lengths, batch, state=None, num_workers=0, **options):
        self.num_workers, self.loaders = num_workers, []
        super().__init__(size, lengths, batch, state, **options)

    def sampler(self, lengths, batch, **options):
        """Make the stream of a rank."""
        shards = range(len(lengths))
        return ElasticStream(shards, Shards(lengths), lengths, **vars(batch), **options)

    def loader(self, stream, num_ahead):
        """Make the loader of a rank."""
        self.loaders.append(StreamLoader(stream, self.num_workers, num_ahead))
        return self.loaders[-1]


@pytest.mark.parametrize("history", range(200 if os.environ.get("HPC_ELASTIC_LONG") else 60))
def test_every_sample_once_an_epoch_for_any_history(history, tmp_path, monkeypatch):
    """World sizes and workers change, groups are killed anywhere: exact, as the audit confirms."""
    chance = random.Random(history)
    run = Run(tmp_path / "run", monkeypatch)
    lengths = [chance.choice([0, 1, chance.randint(2, 40)]) for _ in range(chance.randint(1, 20))]
    lengths[0] += 8
    global_batch, end = chance.randint(1, 30), chance.choice(["keep", "drop", "pad"])
    global_batch = min(global_batch, sum(lengths))
    options = {
        "shuffle": chance.random() < 0.8, "shuffle_buffer": chance.choice([1, 7, 60, 1000]),
        "num_lanes": chance.choice([None, 1, 4, 30]), "end": end,
    }  # fmt: skip
    micro_batch, num_epochs = chance.choice([None, 1, 3]), 2
    survived, state = [], None
    while state is None or state["epoch"] < num_epochs:
        run.form_group()
        world = StreamWorld(
            chance.randint(1, 8), lengths, (global_batch, micro_batch), state,
            num_workers=chance.randint(0, 3), **options,
        )  # fmt: skip
        saved = 0
        for _ in world.steps(num_epochs, num_ahead=chance.randint(0, 9)):
            if chance.random() < 0.3:
                saved, state = len(world.trained), world.state()
            if chance.random() < 0.15:
                break  # what was trained behind the last state is lost
        else:
            saved, state = len(world.trained), world.state()
        if chance.random() < 0.5:
            for stream in world.samplers:
                stream._ledger.flush()
        if state is None or state["epoch"] < num_epochs:
            world.die()
        survived += world.trained[:saved]
    run.succeed()

    num_samples = sum(lengths)
    rest = num_samples % global_batch
    dropped = rest if end == "drop" else 0
    padded = global_batch - rest if end == "pad" and rest else 0
    all_samples = Shards(lengths).all()
    for epoch in range(num_epochs):
        trained = Counter(x for _, e, samples in survived if e == epoch for x in samples)
        assert trained.total() == num_samples - dropped + padded
        assert (all_samples - trained).total() == dropped
        assert (trained - all_samples).total() == padded
    (proof,) = audit(run.path)
    assert proof.holds, proof.problems
    expected = [EpochProof(e, num_samples - dropped, 0, 0, 0, dropped, padded) for e in range(2)]
    assert proof.epochs == expected


class StreamReplica(Replica):
    """A replica under a manager that trains on a stream, with a loader that is ahead."""

    def make_sampler(self, lengths, batch, **options):
        """Make a stream of numbers."""
        begins = [sum(lengths[:i]) for i in range(len(lengths))]

        def read(shard, start):
            return range(begins[shard] + start, begins[shard] + lengths[shard])

        return ElasticStream(range(len(lengths)), read, lengths, **vars(batch), seed=3, **options)

    def make_loader(self):
        """Load ahead."""
        return StreamLoader(self.sampler, 0, 5)


@pytest.mark.parametrize("seed", range(10))
def test_every_sample_once_under_a_manager(seed, tmp_path, monkeypatch):
    """Replicas are killed, join, heal or are spares, between any two steps."""
    monkeypatch.setattr("hpc_elastic.data.ledger.PROCESS_TOKEN", TokenOfEach())
    run = Run(tmp_path / "run", monkeypatch)
    run.form_group()
    chance = random.Random(seed)
    lengths = [chance.randint(0, 15) for _ in range(8)]
    batch = chance.randint(1, 20), chance.choice([None, 2])
    cohort = Cohort(lambda: StreamReplica(lengths, batch, 2, shuffle_buffer=30), chance)
    for _ in range(3):
        cohort.start()
    num_steps = 2 * cohort.replicas[0].sampler.num_batches
    model: dict[int, list[int]] = {}
    while len(model) < num_steps:
        train_with_faults(cohort, chance)
        model = dict(json.loads(cohort.saved)[2]) if cohort.saved else {}
        if len(model) < num_steps:
            cohort.quorum += 1 << 20
            cohort.start()
    run.succeed()
    trained = Counter(number for numbers in model.values() for number in numbers)
    assert trained == Counter({number: 2 for number in range(sum(lengths))})
    (proof,) = audit(run.path)
    assert proof.holds, proof.problems
    assert [epoch.once for epoch in proof.epochs] == [sum(lengths)] * 2


def test_the_order_does_not_depend_on_the_history():
    """Each step has the same samples, for any number of ranks and workers."""

    def by_step(*worlds):
        found: dict[int, list] = {}
        for world in worlds:
            for step, _, samples in world.trained:
                found.setdefault(step, []).extend(samples)
        return {step: sorted(samples) for step, samples in found.items()}

    lengths, batch = [13, 40, 7, 25, 31], (8, 3)
    alone = StreamWorld(1, lengths, batch)
    alone.run(3)
    first = StreamWorld(3, lengths, batch, num_workers=2)
    first.run(3, num_steps=20)
    second = StreamWorld(4, lengths, batch, first.state(), num_workers=3)
    second.run(3)
    assert by_step(first, second) == by_step(alone)


def order_of(stream: ElasticStream, epoch=0) -> list:
    """All samples of an epoch, in their order."""
    size = len(stream.dataset)
    return stream.dataset.__getitems__(list(range(epoch * size, (epoch + 1) * size)))


def test_epochs_differ_and_seeds_too():
    """Shards and samples come in another order each time; unshuffled in the one that is given."""
    lengths = [20] * 10
    stream = stream_of(lengths)
    assert order_of(stream) != order_of(stream, 1)
    assert order_of(stream) == order_of(stream_of(lengths))
    plain = stream_of(lengths, shuffle=False, num_lanes=1)
    assert order_of(plain) == order_of(plain, 1) == sorted(Shards(lengths).all())


def test_samples_are_shuffled_within_the_buffer():
    """Of one lane, a sample moves by less than its window; and nearly all do move."""
    stream = stream_of([500], num_lanes=1, shuffle_buffer=50)
    moved = [abs(place - index) for place, (_, index) in enumerate(order_of(stream))]
    assert max(moved) < 50
    assert sum(map(bool, moved)) > 450


def test_a_state_is_small_whatever_the_buffer_holds():
    """Positions, not samples."""
    states = [stream_of([10_000] * 50, shuffle_buffer=size).state_dict() for size in (1, 10**5)]
    assert len(str(states[1])) <= len(str(states[0])) + 5 < 500


@pytest.mark.parametrize(
    ("size", "num_workers", "micro_batch"), [(1, 0, None), (2, 2, None), (4, 4, 8), (8, 1, 3)]
)
def test_nothing_is_read_twice_where_the_numbers_divide(size, num_workers, micro_batch):
    """Each lane is read by one worker, but for an epoch's last round, of which there is none."""
    world = StreamWorld(
        size, [64] * 64, (64, micro_batch), num_workers=num_workers, shuffle_buffer=500
    )
    world.run(1)
    made = Counter()
    for loader in world.loaders:
        for read in {id(read): read for read in loader.reads}.values():
            made += read.made
    assert made == Shards([64] * 64).all()


def test_a_reader_that_can_not_seek_passes_over_little():
    """Lanes begin inside of shards: at most once a lane, however many samples a step takes."""
    lengths, num_lanes = [30] * 40, 8
    shards = Shards(lengths, seeks=False)
    order_of(stream_of(lengths, read=shards, num_lanes=num_lanes))
    again = shards.made.total() - sum(lengths)
    assert again <= num_lanes * max(lengths)


def test_any_sample_can_be_asked_for_at_any_time():
    """Also backwards, and twice: by a replica that makes a step again."""
    stream = stream_of([13, 0, 40, 7], shuffle_buffer=20)
    forwards = order_of(stream)
    numbers = random.Random(0).choices(range(60), k=300)
    assert stream.dataset.__getitems__(numbers) == [forwards[n] for n in numbers]
    assert stream.dataset[5] == forwards[5]


def test_a_forked_or_pickled_dataset_shares_no_open_file(monkeypatch):
    """The position of an open file is that of both processes."""
    shards = Shards([30])
    stream = stream_of([30], read=shards, shuffle=False)
    stream.dataset.__getitems__([0, 1])
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert stream.dataset.__getitems__([2, 3]) == [(0, 2), (0, 3)]
    assert shards.begun == {0: 2}


@pytest.mark.parametrize(
    ("really", "said", "what"),
    [(9, 10, "ended before sample 9"), (11, 10, "has more samples")],
)
def test_a_shard_of_another_length_is_told(really, said, what):
    """A sample would be missing, or never trained, silently."""
    stream = stream_of([said, 5], read=Shards([really, 5]))
    with pytest.raises(ValueError, match=f"shard 0 has 10 samples by `lengths`, but {what}"):
        order_of(stream)


def test_a_state_of_other_shards_is_refused():
    """Other lengths, names, lanes, buffer, global batch: the position would mean other samples."""
    state = stream_of([9, 8, 7]).state_dict()
    stream_of([9, 8, 7]).load_state_dict(state)
    for key, other in {
        "dataset_len": stream_of([9, 8]),
        "lengths": stream_of([8, 9, 7]),
        "num_lanes": stream_of([9, 8, 7], num_lanes=1),
        "shuffle_window": stream_of([9, 8, 7], shuffle_buffer=2),
        "global_batch": stream_of([9, 8, 7], batch=8, num_lanes=2),
    }.items():
        with pytest.raises(ConfigError, match=f"^{key}="):
            other.load_state_dict(state)


def test_shards_may_be_moved_but_not_renamed(tmp_path):
    """A folder's name is no part of the order, the order of its files is."""

    def named(*names):
        read = Shards([3, 3])
        batch = BatchDivision(2, None, 0, 1)
        return ElasticStream([tmp_path / name for name in names], read, [3, 3], **vars(batch))

    state = named("a/1.tar", "a/2.tar").state_dict()
    named("b/1.tar", "b/2.tar").load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^shards="):
        named("a/2.tar", "a/1.tar").load_state_dict(state)


def test_bad_arguments_are_refused():
    """Each names its key."""
    for key, arguments in {
        "lengths": {"lengths": [1, 2, 3]},
        "shuffle_buffer": {"shuffle_buffer": 0},
        "num_lanes": {"num_lanes": 0},
    }.items():
        given = {"lengths": [3, 4], "global_batch_size": 2, **arguments}
        with pytest.raises(ConfigError, match=f"^{key}="):
            ElasticStream([0, 1], Shards([3, 4]), **given)
    with pytest.raises(ConfigError, match=r"^lengths=-1"):
        stream_of([-1])


def test_a_loader_of_another_dataset_is_refused():
    """It would load something else by the stream's numbers."""
    stream = stream_of([9, 8, 7])
    loader = StreamLoader(stream, 0, 0)
    loader.dataset = stream_of([9, 8, 7]).dataset
    with pytest.raises(ConfigError, match=r"create the loader with stream\.dataset"):
        next(stream.batches(loader))


def test_shards_that_several_workers_read_are_told_of(caplog):
    """Once, with what to do; nothing is said where each is read by one."""
    with caplog.at_level(logging.WARNING):
        stream = stream_of([9] * 16, batch=4)
        next(stream.batches(StreamLoader(stream, 4, 0)))
        assert not caplog.messages
        stream = stream_of([9] * 16, batch=8, size=8)
        for _ in range(2):
            next(stream.batches(StreamLoader(stream, 3, 0)))
        stream = stream_of([9] * 16, BatchDivision(16, 2, 0, 1))
        next(stream.batches(StreamLoader(stream, 2, 0)))
    workers, ranks, micro_batches = caplog.messages
    assert "3.0 of this rank's workers read each shard" in workers
    assert "a num_workers that divides 4" in workers
    assert "8 ranks share 4 lanes" in ranks
    assert "2.0 of this rank's" in micro_batches and "micro-batches of 4 samples" in micro_batches


def test_samples_are_counted_once(tmp_path):
    """And again if the shards are others."""
    shards = Shards([4, 0, 6])
    file = tmp_path / "lengths.json"
    for _ in range(2):
        assert count_samples(["a", "b", "c"], lambda s, i: shards("abc".index(s), i), file) == [
            4, 0, 6,
        ]  # fmt: skip
    assert shards.begun == {0: 1, 1: 1, 2: 1}
    other = Shards([5, 6])
    assert count_samples(["x", "y"], lambda s, i: other("xy".index(s), i), file) == [5, 6]
    assert count_samples([], other) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(0, 2), (2, 5)], [(0, 3), (3, 5)]),
        ([2, 3], [3, 2]),
        (["data/two"], ["data/three"]),
        ([{"path": "data/x", "part": 2}], [{"path": "data/x", "part": 3}]),
    ],
)
def test_shards_of_any_kind_are_known_by_what_they_are(before, after, tmp_path):
    """Ranges, numbers, one file alone: what was counted of others does not count."""
    size = {"two": 2, "three": 3}

    def read(shard, start):
        if isinstance(shard, tuple):
            return range(shard[0] + start, shard[1])
        number = shard["part"] if isinstance(shard, dict) else shard
        return range(start, size[number[5:]] if isinstance(number, str) else number)

    file = tmp_path / "lengths.json"
    counted = count_samples(before, read, file)
    assert count_samples(before, read, file) == counted
    assert count_samples(after, read, file) != counted
    lengths = [4] * len(before)
    state = ElasticStream(before, read, lengths, 2, seed=0).state_dict()
    ElasticStream(before, read, lengths, 2, seed=0).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^shards="):
        ElasticStream(after, read, lengths, 2, seed=0).load_state_dict(state)


def test_a_stream_and_a_sampler_have_the_same_batches():
    """The same size, number and parts of each, so whatever divides a sampler divides a stream."""
    stream = stream_of([20, 17], BatchDivision(8, 3, 1, 3))
    sampler = ElasticSampler(37, 8, seed=3, micro_batch_size=3, rank=1, world_size=3)
    assert (stream.num_batches, len(stream)) == (sampler.num_batches, len(sampler))
    with torch.no_grad():
        assert [len(part) for part in stream] == [len(part) for part in sampler]
    assert replace(stream._plan, batch=BatchDivision(8)).facts() == stream._plan.facts()
