"""Who contributes to the mean of a step (pure).

Only members that hold the newest state contribute. In the first step of a quorum (its *call 0*) a
member that heals computes with old parameters, and adds zero; from the next step on, and where
everybody has healed before the forward pass, all do. At step 0 nobody holds anything that is worth
a forward pass, so all wait for the state there, whatever the mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from hpc_elastic.ft import lineage
from hpc_elastic.ft.protocol import Placement


class WorldSizeMode(Enum):
    """How many members contribute where there are more than ``min_replica_size``.

    Attributes:
        DYNAMIC: All of them.
        FIXED_WITH_SPARES: ``min_replica_size``; the others are spares that add zero.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class Share:
    """One member's part in the mean.

    Attributes:
        rank: Its place among the contributors; None: it adds zero.
        size: Contributors, at least 1 in a quorum.
    """

    rank: int | None
    size: int


NOBODY = Share(None, 0)
"""Before the first quorum."""


def share(placement: Placement, everyone: bool, most: int | None) -> Share:
    """Return a member's part, the same sizes on all members.

    Args:
        placement: Its place in the quorum.
        everyone: All members hold the newest state, those that had to heal included.
        most: So many contribute at most; None: no limit.
    """
    rank, size = placement.cohort_rank, placement.cohort_size
    if everyone:
        rank, size = placement.replica_rank, placement.replica_world_size
    if most is None:
        return Share(rank, size)
    return Share(rank if rank is not None and rank < most else None, min(size, most))


@dataclass(frozen=True)
class Progress:
    """What one replica's parameters have gone through.

    Attributes:
        step: Steps committed.
        batches_committed: Contributions in them, those of all members.
        lineage: The token of this history.
    """

    step: int
    batches_committed: int
    lineage: str

    @staticmethod
    def begun(init_sync: bool) -> Progress:
        """Return the progress of parameters as a script makes them; see `Manager`'s init_sync."""
        return Progress(0, 0, lineage.fresh() if init_sync else lineage.known(0, 0))

    @staticmethod
    def loaded(step: int, batches_committed: int) -> Progress:
        """Return the progress of a checkpoint that all groups load alike."""
        return Progress(step, batches_committed, lineage.known(step, batches_committed))

    def after_step(self, quorum_id: int, contributors: int) -> Progress:
        """Return the progress after one more step."""
        return replace(
            self,
            step=self.step + 1,
            batches_committed=self.batches_committed + contributors,
            lineage=lineage.after_step(self.lineage, quorum_id, contributors),
        )
