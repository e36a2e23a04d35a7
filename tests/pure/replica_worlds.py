"""Replicas that share batches under a manager that a test plays, all in this process, in step."""

import json
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from data_worlds import Loader
from hpc_elastic.data import ElasticSampler
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.worker import reporting


class TokenOfEach:
    """Instead of a process's token: another one at each use, as replicas share this process."""

    def __str__(self) -> str:
        """Return a new token."""
        return secrets.token_hex(8)


@dataclass(eq=False)
class PlayedManager:
    """What a replica's manager knows; the world sets it."""

    step: int = 0
    rank: int | None = None
    size: int = 0
    quorum: int = -1
    parts: dict[str, Any] = field(default_factory=dict)
    pending: tuple[int, dict[str, Any]] | None = None

    def current_step(self) -> int:
        """Return the step, that of a state which has come included."""
        return self.pending[0] if self.pending else self.step

    def participating_rank(self) -> int | None:
        """Return what the world says."""
        return self.rank

    def is_participating(self) -> bool:
        """Tell what the world says."""
        return self.rank is not None

    def num_participants(self) -> int:
        """Return what the world says."""
        return self.size

    def quorum_id(self) -> int:
        """Return what the world says."""
        return self.quorum

    def register_state_dict_fn(self, key, load, save) -> None:
        """Keep it."""
        self.parts[key] = load, save

    def state(self) -> tuple[int, str]:
        """Return the state for another replica, as it goes over a network."""
        return self.step, json.dumps({key: save() for key, (_, save) in self.parts.items()})

    def heal(self) -> None:
        """Take over the state that has come."""
        if self.pending:
            (self.step, state), self.pending = self.pending, None
            for key, (load, _) in self.parts.items():
                load(state[key])


class Replica:
    """One process that trains with a loop as a user writes it.

    Attributes:
        model: The samples of each step that its parameters have gone through.
        drawn: (indices, weight) of the present step.
    """

    def __init__(self, length: int, batch: tuple[int, int | None], num_epochs: int, **options):
        self.manager = PlayedManager()
        batch = BatchDivision(*batch, rank=0, world_size=1)
        self.sampler = self.make_sampler(length, batch, manager=self.manager, **options)
        self.num_epochs = num_epochs
        self.model: dict[int, list[int]] = {}
        self.drawn: list[tuple[list[int], float]] = []
        self.epochs_ended: list[int] = []
        self._training = self._train()

    def make_sampler(self, length: int, batch: BatchDivision, **options) -> ElasticSampler:
        """Make what it draws from."""
        return ElasticSampler(length, **vars(batch), seed=3, **options)

    def make_loader(self):
        """Make what it loads with."""
        return Loader(self.sampler)

    def _train(self) -> Iterator[None]:
        loader = self.make_loader()
        for epoch in self.sampler.epochs(self.num_epochs):
            for batch in self.sampler.batches(loader):
                yield  # zero_grad
                self.drawn = list(batch.micro_batches())
                yield  # step
            self.epochs_ended.append(epoch)

    def goes_on(self) -> bool:
        """Run to the next point where the manager acts; False: it has ended."""
        return next(self._training, self) is not self

    def checkpoint(self) -> str:
        """Return what a checkpoint on a disk holds."""
        return json.dumps([self.manager.step, self.sampler.state_dict(), list(self.model.items())])

    def restore(self, checkpoint: str) -> None:
        """Load it."""
        self.manager.step, state, model = json.loads(checkpoint)
        self.sampler.load_state_dict(state)
        self.model = dict(model)

    def die(self) -> None:
        """Be killed: what is not written is lost."""
        if self.sampler._ledger.ledger is not None:
            self.sampler._ledger.ledger._process = -1
        if self.sampler._ledger.record_end in reporting._reporter.when_returned:
            reporting._reporter.when_returned.remove(self.sampler._ledger.record_end)


class Cohort:
    """Replicas that train in step."""

    def __init__(self, make, chance: random.Random) -> None:
        self.make = make
        self.chance = chance
        self.replicas: list[Replica] = []
        self.quorum = 0
        self.saved: str | None = None

    def start(self) -> None:
        """Add a replica, from the newest checkpoint."""
        replica = self.make()
        if self.saved:
            replica.restore(self.saved)
        if replica.goes_on():
            self.replicas.append(replica)

    def kill(self, replica: Replica) -> None:
        """End one without a word."""
        replica.die()
        self.replicas.remove(replica)

    def step(
        self, *, spares: int = 0, commits=lambda replica: True, killed=(), killed_early=()
    ) -> None:
        """Make one step.

        Args:
            spares: So many do not contribute.
            commits: Says whose step is committed.
            killed: Who dies in the middle of it.
            killed_early: Who dies once it is known who is there, and states are given.
        """
        self.enter(spares)
        for replica in killed_early:
            self.kill(replica)
        for replica in self.replicas:
            assert replica.goes_on()
        for replica in killed:
            self.kill(replica)
        self._end(commits)

    def enter(self, spares: int = 0) -> None:
        """Form a quorum; those who are behind get the state of one that is not."""
        self.quorum += 1
        newest = max(r.manager.step for r in self.replicas)
        cohort = [r for r in self.replicas if r.manager.step == newest]
        new = [r for r in self.replicas if r not in cohort]
        contributors = cohort[: max(1, len(cohort) - spares)]
        state = None
        for replica in self.replicas:
            m = replica.manager
            m.quorum, m.size = self.quorum, len(contributors)
            m.rank = contributors.index(replica) if replica in contributors else None
        for replica in new:
            source = self.chance.choice(cohort)
            step, state = source.manager.state()
            replica.manager.pending = step, json.loads(state)
            replica.model = dict(source.model)

    def _end(self, commits) -> None:
        trained = sorted(i for r in self.replicas for part, w in r.drawn if w for i in part)
        for replica in self.replicas:
            replica.manager.heal()
            if commits(replica):
                replica.manager.step += 1
                replica.model[replica.manager.step] = trained
        self.resume()

    def resume(self) -> None:
        """Let the loops come round; some of them end."""
        for replica in list(self.replicas):
            if self.chance.random() < 0.2:
                self.saved = replica.checkpoint()
            if not replica.goes_on():
                self.saved = replica.checkpoint()
                self.replicas.remove(replica)


def train_with_faults(cohort, chance, most=5):
    """Train to the end while replicas are killed, join, are spares, and miss commits."""
    while cohort.replicas:
        if len(cohort.replicas) < most and chance.random() < 0.15:
            cohort.start()
        what, victim = chance.random(), chance.choice(cohort.replicas)
        everybody = cohort.replicas[:]
        if what < 0.1:  # killed in the step: nobody commits
            cohort.step(killed=[victim], commits=lambda _: False)
        elif what < 0.15:  # it has perhaps given its state to others, and taken no part itself
            cohort.step(killed_early=[victim], commits=lambda _: False)
        elif what < 0.25:  # killed right behind it: some commit, others do not
            told = chance.sample(everybody, chance.randint(0, len(everybody)))
            cohort.step(commits=lambda replica, told=told: replica in told)
            if victim in cohort.replicas:
                cohort.kill(victim)
        else:
            cohort.step(spares=chance.choice([0, 0, 0, 1]))
