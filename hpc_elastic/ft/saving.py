"""Whether this replica group saves after a step: `preemption.should_checkpoint` asks it.

One group saves for all, since all have the same parameters: the first of the contributors. It does
so when it is due, and in the last step before everybody leaves; that save is urgent, for who has
left may commit nothing. All ranks of the group answer the same; if the clock says that it is due,
by the clock of the first rank, one step later.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from hpc_elastic import reports
from hpc_elastic.ft.link import Link
from hpc_elastic.ft.server import Group, open_store

_KEY = "hpc_elastic/ft/save"


class Agreement:
    """The same answer on all ranks of a group, each of which asks once a step.

    Rank 0 announces the next step in the group's store; it has said so before any rank can have
    the verdict on that step. Costs each rank one look into the store a step.

    Args:
        store: The group's.
        is_first: This is rank 0.
    """

    def __init__(self, store: Store, *, is_first: bool) -> None:
        self._store = store
        self._is_first = is_first
        self._asked = 0
        self._announced = 0
        self._prefix = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def at_step(self, *, due: bool) -> bool:
        """Return whether to save now.

        Args:
            due: This rank's clock says that it is time; only rank 0's counts.
        """
        self._asked += 1
        yes = bool(self._store.check([f"{self._prefix}/{self._asked}"]))
        if self._is_first and due and not yes and self._announced <= self._asked:
            self._announced = self._asked + 1
            self._store.add(f"{self._prefix}/{self._announced}", 1)  # returns once it is there
        return yes


class Saving:
    """One worker's answers.

    Args:
        link: Knows what is going to happen at the next step.
        group: This worker's group.
        timeout_s: To connect to its store.
        is_saver: Tells whether this group is the one, by the present quorum.
    """

    def __init__(
        self, link: Link, group: Group, timeout_s: float, is_saver: Callable[[], bool]
    ) -> None:
        self._link = link
        self._group = group
        self._timeout_s = timeout_s
        self._is_saver = is_saver
        self._agreement: Agreement | None = None

    def decide(self, step: int, by_step: bool, by_time: bool) -> bool:
        """Return whether to save now.

        Args:
            step: The script's.
            by_step: The count of steps says that it is due, on all ranks.
            by_time: This process's clock says so.
        """
        is_last = self._link.settle()
        is_saver = self._is_saver()
        reports.save_is_last(is_saver and is_last)
        if not is_saver:
            return False
        if self._group.world_size > 1:
            by_time = self._agreed(by_time)
        return by_step or by_time or is_last

    def _agreed(self, due: bool) -> bool:
        if self._agreement is None:
            store = open_store(self._group, self._timeout_s)
            self._agreement = Agreement(store, is_first=self._group.rank == 0)
        return self._agreement.at_step(due=due)
