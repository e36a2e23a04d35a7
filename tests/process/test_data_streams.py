"""Streams with real data loaders and real ranks: files that worker processes read ahead."""

import multiprocessing
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpc_elastic import Checkpointer
from hpc_elastic.checkpoint import CheckpointOptions
from hpc_elastic.data import ElasticStream, count_samples
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.errors import CheckpointError
from hpc_elastic.run import fencing

FORKS = multiprocessing.get_context("forkserver")
"""Forks where no other thread is: this process has those of the tests before."""
FORKS.set_forkserver_preload(["torch"])

NUM_SAMPLES, NUM_SHARDS, GLOBAL_BATCH = 1600, 16, 16


def read(path, start):
    """Yield the numbers in a text file, one a line."""
    with Path(path).open() as f:
        for i, line in enumerate(f):
            if i >= start:
                yield int(line)


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch):
    """No ledger."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)


@pytest.fixture
def shards(tmp_path):
    """Files of numbers, all different; no two files have the same length."""
    names, begin = [], 0
    for i in range(NUM_SHARDS):
        end = NUM_SAMPLES * (i + 1) ** 2 // NUM_SHARDS**2
        names.append(str(tmp_path / f"{i:02}.txt"))
        Path(names[-1]).write_text("".join(f"{n}\n" for n in range(begin, end)))
        begin = end
    return names


def train(stream, loader, num_epochs, num_steps=None):
    """Return the samples of each epoch, up to a step."""
    seen: dict[int, Counter] = {}
    for _ in stream.epochs(num_epochs):
        for batch in stream.batches(loader):
            for numbers, weight in batch.micro_batches():
                assert weight == len(numbers) * stream._plan.batch.group()[1] / batch.num_samples
                seen.setdefault(batch.epoch, Counter()).update(numbers.tolist())
            if batch.step == num_steps:
                return seen
    return seen


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_that_read_ahead(shards, persistent):
    """Two ranks with two workers save in the middle of an epoch; three go on with one."""

    def make(rank, size, num_workers):
        lengths = count_samples(shards, read)
        batch = BatchDivision(GLOBAL_BATCH, 4, rank, size)
        stream = ElasticStream(shards, read, lengths, **vars(batch), seed=3)
        return stream, DataLoader(
            stream.dataset, batch_sampler=stream, num_workers=num_workers, prefetch_factor=3,
            multiprocessing_context=FORKS, persistent_workers=persistent,
        )  # fmt: skip

    seen = {epoch: Counter() for epoch in range(2)}
    for rank in range(2):
        stream, loader = make(rank, 2, 2)
        for epoch, numbers in train(stream, loader, 2, num_steps=130).items():
            seen[epoch] += numbers
    state = stream.state_dict()
    for rank in range(3):
        stream, loader = make(rank, 3, 1)
        stream.load_state_dict(state)
        for epoch, numbers in train(stream, loader, 2).items():
            seen[epoch] += numbers
    assert seen == {epoch: Counter(range(NUM_SAMPLES)) for epoch in range(2)}


class Opaque(IterableDataset):
    """A stream as users write it: each worker of each rank takes its part of the numbers."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.num_given = rank, world_size, 0

    def __iter__(self):
        worker = get_worker_info()
        num_workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        step = self.world_size * num_workers
        mine = range(self.rank * num_workers + number, NUM_SAMPLES, step)
        while self.num_given < len(mine):
            self.num_given += 1
            yield mine[self.num_given - 1]

    def state_dict(self):
        """Return the position."""
        return {"num_given": self.num_given}

    def load_state_dict(self, state):
        """Go on from a position."""
        self.num_given = state["num_given"]


def opaque_on_ranks(rank, folder, num_steps, options):
    """Train on an opaque stream from the newest checkpoint on; return what was trained."""
    warnings.simplefilter("ignore")  # torchdata 0.11 calls what torch 2.13 has deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader

    world_size = dist.get_world_size()
    stream = Opaque(rank, world_size)
    loader = StatefulDataLoader(stream, batch_size=GLOBAL_BATCH // world_size, num_workers=2)
    seen = []
    with Checkpointer({"loader": loader}, folder, options=options) as checkpoints:
        checkpoints.load_latest()
        for step, numbers in enumerate(loader, 1):
            dist.barrier()
            if step - 1 == num_steps:
                break
            seen += numbers.tolist()
            if step == num_steps:
                checkpoints.save(step)
    return seen


def refused_and_accepted(rank, folder):
    """Restore on one rank what two have saved: as it comes, and accepted by name."""
    with pytest.raises(CheckpointError) as refusal:
        opaque_on_ranks(rank, folder, None, None)
    return str(refusal.value), opaque_on_ranks(
        rank, folder, None, CheckpointOptions(accept_inexact=("loader",))
    )


@pytest.mark.long
def test_an_opaque_loader_is_refused_under_another_world_size(tmp_path):
    """Its state is one rank's position: accepted by name, samples are trained twice."""
    pytest.importorskip("torchdata")
    two = run_ranks(opaque_on_ranks, 2, tmp_path, 41, None)
    ((refusal, one),) = run_ranks(refused_and_accepted, 1, tmp_path)
    assert refusal.startswith("loader: the state of StatefulDataLoader is one rank's position")
    assert "2 ranks saved it, but 1 restore it" in refusal
    assert "accept_inexact=('loader',)" in refusal and "ElasticStream" in refusal
    counts = Counter(n for part in [*two, one] for n in part)
    assert sum(count > 1 for count in counts.values()) > 100


def on_ranks(rank, folder, shards, num_steps):
    """Train from the newest checkpoint up to a step, which is saved, and one more; real ranks."""
    lengths = count_samples(shards, read, folder / "lengths.json")
    stream = ElasticStream(shards, read, lengths, GLOBAL_BATCH, seed=3)
    loader = DataLoader(stream.dataset, batch_sampler=stream, num_workers=2)
    seen = []
    with Checkpointer({"stream": stream}, folder / "checkpoints") as checkpoints:
        checkpoints.load_latest()
        for _ in stream.epochs(1):
            for batch in stream.batches(loader):
                numbers = [
                    n for part, weight in batch.micro_batches() for n in part.tolist() if weight
                ]
                dist.barrier()
                if num_steps and batch.step > num_steps:
                    return seen
                seen += numbers
                if batch.step == num_steps:
                    checkpoints.save(batch.step)
    return seen


@pytest.mark.long
def test_ranks_that_go_trained_nothing_twice(shards, tmp_path):
    """From two ranks to one, with the loaders' workers ahead: all samples, each once."""
    two = run_ranks(on_ranks, 2, tmp_path, shards, 41)
    one = run_ranks(on_ranks, 1, tmp_path, shards, None)
    assert Counter(n for part in [*two, *one] for n in part) == Counter(range(NUM_SAMPLES))
    assert [len(part) for part in two] == [41 * GLOBAL_BATCH // 2] * 2
