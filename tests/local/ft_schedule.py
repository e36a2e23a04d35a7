"""Random schedules of faults for a training of two to five replicas (pure)."""

import random
from dataclasses import dataclass

HARD = ("kill", "node", "stop")
"""The others lose a step by them. A worker dies; its agent dies with it; it is stopped."""
SOFT = ("coordinator", "slow", "hold", "join", "notice")
"""Nobody loses anything by them: the coordinator dies; a worker is slow, or holds the GIL; one
joins; one leaves, as announced."""
KINDS = (*HARD, *SOFT)
SPAN_S = 2.0
_LENGTHS_S = {
    "kill": (0.0, 0.8),  # until a new process takes its place
    "node": (0.0, 0.8),
    "stop": (0.05, 1.8),  # until it continues
    "coordinator": (0.0, 1.2),  # until another one is started
    "slow": (0.05, 0.8),
    "hold": (0.2, 1.5),
    "join": (0.0, 0.0),
    "notice": (0.0, 0.5),  # until a new process takes the place of the one that has left
}
PLACES = ("quorum", "allreduce", "commit")
"""Before which call of its step a replica is slow, or holds the GIL."""


@dataclass(frozen=True)
class Fault:
    """What happens: `HARD` or `SOFT`, so many seconds after the begin, for so long.

    Attributes:
        slot: Which replica it is about; "join" has none: the last slot's first process starts.
        place: One of `PLACES`.
    """

    at_s: float
    kind: str
    slot: int
    length_s: float
    place: str


@dataclass(frozen=True)
class Schedule:
    """A training and what happens to it.

    Attributes:
        slots: Replicas.
        agents: Each has an agent, which can be given a notice; else the Manager starts its server.
        late: The last of them starts only when "join" says so.
        step_s: How long a step's computation takes, by slot.
        sync: Whether the quorum is waited for at the begin of a step.
        numbers: Floats in the state.
    """

    seed: int
    slots: int
    agents: bool
    late: bool
    step_s: tuple[float, ...]
    sync: bool
    numbers: int
    faults: tuple[Fault, ...]

    @property
    def is_soft(self) -> bool:
        """Whether no step may be lost."""
        return not any(fault.kind in HARD for fault in self.faults)


def schedule(seed: int) -> Schedule:
    """Return the schedule of that seed; one in four has soft faults only."""
    rng = random.Random(seed)
    slots = rng.randint(2, 5)
    agents = seed % 2 == 0
    soft = ("coordinator", "slow", "hold", *(["notice"] if agents else []))
    kinds = soft if seed % 8 in (3, 6) else (*HARD, *HARD, *soft)
    faults = [_fault(rng, rng.choice(kinds), slots) for _ in range(rng.randint(1, 6))]
    late = rng.random() < 0.4
    if late:
        faults.append(_fault(rng, "join", slots))
    return Schedule(
        seed, slots, agents, late,
        step_s=tuple(rng.choice((0.0, 0.002, 0.01)) for _ in range(slots)),
        sync=rng.random() < 0.3,
        numbers=rng.choice((100, 1 << 14, 1 << 18)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )  # fmt: skip


def _fault(rng: random.Random, kind: str, slots: int) -> Fault:
    return Fault(
        at_s=rng.uniform(0.0, SPAN_S),
        kind=kind,
        slot=rng.randrange(slots),
        length_s=rng.uniform(*_LENGTHS_S[kind]),
        place=rng.choice(PLACES),
    )
