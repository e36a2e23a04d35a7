"""Worker groups of any size that train without torch: all ranks in this process, in step."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpc_elastic.config.schema import NodeRange
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.worker import reporting
from specs import spec_of, started_run


class Loader:
    """Yields the indices themselves, and draws ahead as a loader's worker processes do."""

    def __init__(self, sampler: ElasticSampler, num_ahead: int = 4) -> None:
        self.batch_sampler = sampler
        self.num_ahead = num_ahead

    def __iter__(self) -> Iterator[list[int]]:
        draws, queue = iter(self.batch_sampler), deque()
        for indices in draws:
            queue.append(indices)
            if len(queue) > self.num_ahead:
                yield queue.popleft()
        yield from queue


class World:
    """All ranks of one group.

    Attributes:
        trained: (step, epoch, indices) of each rank and step, lent samples left out.
    """

    def __init__(
        self, size: int, dataset_len: int, batch: tuple[int | None, ...], state=None, **options
    ) -> None:
        options = {"seed": 3, **options}
        sizes, virtual_ranks = batch[:2], batch[2:]
        batches = [BatchDivision(*sizes, rank, size, *virtual_ranks) for rank in range(size)]
        self.samplers = [self.sampler(dataset_len, batch=each, **options) for each in batches]
        for sampler in self.samplers:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        self.trained: list[tuple[int, int, list[int]]] = []

    def sampler(self, dataset_len: int, batch: BatchDivision, **options) -> ElasticSampler:
        """Make the sampler of a rank."""
        return ElasticSampler(dataset_len, **vars(batch), **options)

    def loader(self, sampler: ElasticSampler, num_ahead: int):
        """Make the loader of a rank."""
        return Loader(sampler, num_ahead)

    def state(self) -> dict:
        """Return the state as a checkpoint of all ranks has it, which must be equal on all."""
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]

    def steps(self, num_epochs: int, num_ahead: int = 4) -> Iterator[int]:
        """Train; yield the step's number after each."""
        loaders = [self.loader(sampler, num_ahead) for sampler in self.samplers]
        for epochs in zip(*(s.epochs(num_epochs) for s in self.samplers), strict=True):
            assert len(set(epochs)) == 1
            batches = [s.batches(each) for s, each in zip(self.samplers, loaders, strict=True)]
            with ExitStack() as stack:
                for each in batches:
                    stack.callback(each.close)
                for group in zip(*batches, strict=True):
                    for batch in group:
                        self._train(batch)
                    yield group[0].step

    def _train(self, batch) -> None:
        for indices, weight in batch.micro_batches():
            self.trained.append((batch.step, batch.epoch, indices if weight else []))

    def run(self, num_epochs: int, num_steps: int | None = None) -> None:
        """Train so many steps, or to the end."""
        for i, _ in enumerate(self.steps(num_epochs), 1):
            if i == num_steps:
                return

    def die(self) -> None:
        """Be killed: what is not written is lost."""
        for sampler in self.samplers:
            if sampler._ledger.ledger is not None:
                sampler._ledger.ledger._process = -1
        reporting._reporter.when_returned.clear()


class Run:
    """A run directory whose groups are formed one after the other."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._monkeypatch = monkeypatch
        self.record = 0
        path.mkdir(parents=True)
        entry = Entry("function", "train", module="user")
        nodes = NodeRange(1, 4)
        started_run(
            RunDir(path), spec_of(path.name, nodes.min, nodes.max, 1, 0, entry, str(path), [(0, 0)])
        )

    def form_group(self) -> None:
        """Let samplers that are made from now on belong to a new group; the old one is over."""
        reporting._reporter.when_returned.clear()
        self.record += 1
        mine = fencing.entry_path(RunDir(self.path).rdzv, self.record)
        self._monkeypatch.setenv(fencing.VARIABLE, str(mine))

    def train_group(self, *args, num_epochs: int, num_steps: int | None = None, **options) -> dict:
        """Train with a new group, a `World` of these arguments; return its state."""
        self.form_group()
        world = World(*args, **options)
        world.run(num_epochs, num_steps)
        return world.state()

    def succeed(self) -> None:
        """Let the functions of the last group have returned, and the run have ended well."""
        reporting.function_returned()
        RunDir(self.path).result.write_text('{"status": "succeeded"}')


def train_on(run, chance, length, batch, num_epochs=3, **options):
    """Train a run with groups of any size that are killed anywhere; return what was trained.

    Returns:
        (step, epoch, indices) that survived, and those that were thrown away.
    """
    survived, lost, state, saved_by = [], [], None, None
    while state is None or state["epoch"] < num_epochs:
        run.form_group()
        world = World(chance.randint(1, 6), length, batch, state, **options)
        saved = 0
        for _ in world.steps(num_epochs, num_ahead=chance.randint(0, 5)):
            if chance.random() < 0.25:
                saved, state, saved_by = len(world.trained), world.state(), world
            if chance.random() < 0.15:
                break
        else:
            saved, state, saved_by = len(world.trained), world.state(), world
        if chance.random() < 0.5:
            for sampler in world.samplers:
                sampler._ledger.ledger.flush()
        if state is None or state["epoch"] < num_epochs:
            world.die()
        survived += world.trained[:saved]
        lost += world.trained[saved:]
    assert saved_by is not None
    return survived, lost
