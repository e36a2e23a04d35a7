"""Which faults are thrown at a run, from a seed (pure).

Kinds come in random order, and none twice before all have come once, so that a short soak has many
of them. A fault may come *on the heels* of the one before, while the run is still busy with that.
Whom it hits is decided when it is thrown, by `Fault.dice`, among those who are there then.

Only so many faults make a node silent as there are nodes, each on a node of its own, for a run
avoids one that was silent twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soak.kinds import KINDS, Kind

NUM_NODES = 4
"""Of the run; the companion has one more."""
_ON_HEELS = 0.4
"""How often another one comes on the heels of a fault of which that may be."""
_ENOUGH = 1.5
"""So many times as many faults are planned as there is time for by `Kind.takes_s`."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        number: From 1.
        kind: Its name in `KINDS`.
        after_s: Seconds that the run is left alone before it.
        lasts_s: Seconds for which it lasts at least.
        dice: Seed of all that is decided by chance when it is thrown.
        on_heels: Whether it does not wait for the run to get over the one before.
    """

    number: int
    kind: str
    after_s: float
    lasts_s: float
    dice: int
    on_heels: bool = False

    @property
    def of(self) -> Kind:
        """Its kind."""
        return KINDS[self.kind]


def plan(seed: int, minutes: float) -> list[Fault]:
    """Return the faults, in order: more than there will be time for.

    Args:
        seed: The same seed gives the same faults; with more minutes, more of them.
        minutes: How long faults are thrown.
    """
    planner, takes_s = _Planner(random.Random(seed)), 0.0
    for fault in planner.faults():
        takes_s += 0.0 if fault.on_heels else fault.of.takes_s
        if planner.planned and takes_s > _ENOUGH * 60.0 * minutes:
            break
        planner.planned.append(fault)
    return planner.planned


def num_tasks(faults: Sequence[Fault]) -> int:
    """Return how many tasks the run needs so that no fault leaves a node unused."""
    return NUM_NODES + sum(fault.of.costs_task for fault in faults)


def volleys(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Return the faults, those together that come on each other's heels."""
    found: list[list[Fault]] = []
    for fault in faults:
        if fault.on_heels:
            found[-1].append(fault)
        else:
            found.append([fault])
    return found


class _Planner:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._num_silenced = 0
        self.planned: list[Fault] = []

    def faults(self) -> Iterator[Fault]:
        """Yield faults without end; the caller takes them into the plan."""
        while True:
            for kind in self._chance.sample([*KINDS.values()], len(KINDS)):
                if self._may_come(kind):
                    yield self._fault(kind)
                    if kind.pairs and self._chance.random() < _ON_HEELS:
                        yield self._fault(self._companion(kind), on_heels=True)

    def _may_come(self, kind: Kind) -> bool:
        if kind.costs_node and any(fault.of is kind for fault in self.planned):
            return False
        return not kind.strikes or self._num_silenced < NUM_NODES

    def _companion(self, first: Kind) -> Kind:
        """Choose what comes on the heels of another one, which it has not to ask Slurm for."""
        kinds = [k for k in KINDS.values() if k.pairs and self._may_come(k)]
        return self._chance.choice([k for k in kinds if not (first.stops_slurm and k.asks_slurm)])

    def _fault(self, kind: Kind, *, on_heels: bool = False) -> Fault:
        self._num_silenced += kind.strikes
        return Fault(
            number=len(self.planned) + 1,
            kind=kind.name,
            after_s=round(self._chance.uniform(0.0, 2.0 if on_heels else 3.0), 1),
            lasts_s=round(self._chance.uniform(*kind.lasts_s), 1),
            dice=self._chance.getrandbits(32),
            on_heels=on_heels,
        )
