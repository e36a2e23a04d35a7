"""What one random schedule of the quorum is like."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from hpc_elastic.ft.quorum import QuorumRules


class Kind(Enum):
    """What may go wrong in a schedule.

    Attributes:
        QUIET: Nothing: replicas join and leave as announced, and some are slow.
        KEEPER: As QUIET, and the keeper dies.
        ALL: Everything.
    """

    QUIET = "quiet"
    KEEPER = "keeper"
    ALL = "all"


@dataclass(frozen=True)
class Scenario:
    """The parameters of one schedule; times in seconds.

    Attributes:
        num_groups: Replica groups, 2 to 5.
        num_late: Of those, how many start in the middle.
        step_s: What a step takes, about; the slowest replica may need three times as much.
        heal_s: What it takes to fetch a state.
        is_sync: States are fetched before the forward pass, not beside it.
        is_run: The keeper lives on the node of a group, and dies with it.
        calm_after_s: When nothing goes wrong any more.
    """

    kind: Kind
    num_groups: int
    num_late: int
    rules: QuorumRules
    step_s: float
    heal_s: float
    is_sync: bool
    is_run: bool
    longest_delay_s: float
    calm_after_s: float
    tick_s: float

    @property
    def bound_s(self) -> float:
        """Within this time of calm all replicas are in one quorum and have made steps."""
        waits = 12.0 + 8 * self.longest_delay_s + 4 * self.heal_s
        return waits + 20 * 3 * self.step_s + self.rules.reconnect_timeout_s


def draw(rng: random.Random) -> Scenario:
    """Return a random scenario."""
    kind = rng.choices(list(Kind), [3, 1, 8])[0]
    num_groups = rng.randint(2, 5)
    is_rare = rng.random() < 0.04  # as LocalSGD: calls are far apart
    step_s = rng.uniform(8.0, 20.0) if is_rare else rng.choice((0.05, 0.1, 0.3))
    rules = QuorumRules(
        min_replicas=2 if num_groups > 2 and rng.random() < 0.2 else 1,
        live_timeout_s=60.0 if kind is not Kind.ALL or rng.random() < 0.7 else 3.0,
    )
    return Scenario(
        kind=kind,
        num_groups=num_groups,
        num_late=rng.randint(0, num_groups - 1),
        rules=rules,
        step_s=step_s,
        heal_s=rng.choice((0.02, 0.3, 1.0)),
        is_sync=rng.random() < 0.3,
        is_run=rng.random() < 0.6,
        longest_delay_s=rng.choice((0.02, 0.3, 2.0) if kind is Kind.ALL else (0.02, 0.3)),
        calm_after_s=150.0 if is_rare else rng.uniform(5.0, 9.0),
        tick_s=0.5 if is_rare else 0.1,
    )
