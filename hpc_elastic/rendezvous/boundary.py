"""Where the members of a round stand with their checkpoint boundaries (pure).

Workers announce every checkpoint that is complete. Once nodes wait to be admitted, the members are
asked to *hold*: the next worker that announces a boundary stays there, so that no later step is
made that the restart would undo. The group may be stopped once every member has announced that
boundary: those that had passed it before they were asked are stuck in a collective with those
that hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.record import Agent

STRAGGLE_S = 10.0
"""Members behind the first rank, which holds, are waited for this long. A script may announce its
boundaries on the rank that writes the checkpoints alone."""


@dataclass
class Boundaries:
    """The announcements of one round, as the leader hears of them."""

    seen: bool = False
    """Whether any worker of the run has announced one yet."""
    announced: dict[Agent, int] = field(default_factory=dict)
    """The last step that all workers of a member have announced."""
    held_step: int | None = None
    held_since: float = 0.0
    arrived: set[Agent] = field(default_factory=set)
    """Members that have announced ``held_step``."""

    def new_round(self) -> None:
        """Forget what the last round's members announced."""
        self.announced.clear()
        self.let_go()

    def let_go(self) -> None:
        """The members are not to hold any more: their next boundary counts, not the last one."""
        self.arrived.clear()
        self.held_step = None

    def announce(self, agent: Agent, step: int, held: bool, now: float) -> None:
        """A member has a complete checkpoint of ``step``, and holds there or goes on."""
        self.seen = True
        self.announced[agent] = step
        if held and (self.held_step is None or step > self.held_step):
            self.held_step, self.held_since = step, now
            self.arrived = {a for a, s in self.announced.items() if s >= step}
        elif self.held_step is not None and step >= self.held_step:
            self.arrived.add(agent)

    def reached(self, members: Sequence[Agent], now: float) -> int | None:
        """Return the step at which all members have arrived; None before."""
        if self.held_step is None or not members:
            return None
        everybody = len(self.arrived) >= len(members)
        first_only = members[0] in self.arrived and now - self.held_since >= STRAGGLE_S
        return self.held_step if everybody or first_only else None
