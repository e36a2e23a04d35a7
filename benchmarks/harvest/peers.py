"""Models of peers in the same slots: restarts of all, and chains of rigid jobs (pure)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harvest.account import Account, before
from harvest.holes import Holes
from harvest.slots import PASS_S, Slot


@dataclass(frozen=True)
class Restarts:
    """A launcher that stops all nodes whenever one is lost or joins, by its measured costs.

    ``loss_s``: from the loss of a node to the next step of the others; ``join_s``: their pause when
    one joins; ``start_s``: from the start of a task until it is ready to join; ``lost_s``: steps
    that each restart loses, half of the time between two checkpoints.
    """

    name: str
    loss_s: float
    join_s: float
    start_s: float
    lost_s: float = 0.0

    def run(self, slots: Sequence[Slot], until_s: float, *, restore_s: float = 0.0) -> Account:
        """Return what it makes of slots until a time.

        Changes during a pause begin another one. The loss of the node that hosts the store costs no
        more than that of another, although it ends all agents.
        """
        events: list[tuple[float, int]] = []
        for slot in before(slots, until_s):
            if slot.begin_s + self.start_s < slot.end_s:
                events += [(slot.begin_s + self.start_s, 1), (slot.end_s, -1)]
        heapq.heapify(events)
        account, nodes, begin_s = Account(), 0, 0.0
        while events:
            now, change = heapq.heappop(events)
            joins = max(0, change)
            losses = max(0, -change)
            while events and events[0][0] == now:
                _, change = heapq.heappop(events)
                joins, losses = joins + max(0, change), losses + max(0, -change)
            self._train(account, begin_s, min(now, until_s), nodes)
            if now >= until_s:
                return account
            nodes += joins - losses
            pause_s = self.loss_s if losses else self.join_s
            begin_s = now + restore_s + pause_s
            account.num_rounds += 1
        self._train(account, begin_s, until_s, nodes)
        return account

    def _train(self, account: Account, begin_s: float, end_s: float, nodes: int) -> None:
        account.add(begin_s, end_s, nodes, nodes * max(0.0, end_s - begin_s - self.lost_s))


TORCHRUN = Restarts("torchrun, defaults", 45.0, 45.0, 33.0, lost_s=150.0)
TORCHRUN_TUNED = Restarts("torchrun, tuned", 8.0, 6.0, 3.0)
NVRX = Restarts("NVRx ft_launcher", 48.0, 48.0, 33.0)
RESTARTING = (TORCHRUN, TORCHRUN_TUNED, NVRX)


@dataclass(frozen=True)
class Chain:
    """Rigid jobs of fixed length, one after the other; each begins as soon as its nodes are idle.

    It knows the end of each hole, as backfill does, and saves at the very end of each job.
    """

    nodes: int
    length_s: float
    start_s: float = 3.5

    def run(self, holes: Holes, *, jobs: int, restore_s: float = 0.0) -> Account:
        fits = holes.end_s - holes.start_s >= self.length_s
        opens, closes = np.sort(holes.start_s[fits]), np.sort(holes.end_s[fits] - self.length_s)
        passes = np.arange(0.0, max(closes.max(initial=0.0), PASS_S), PASS_S)
        room = np.searchsorted(opens, passes, "right") - np.searchsorted(closes, passes, "left")
        begins = passes[room >= self.nodes]
        account, now = Account(), 0.0
        for _ in range(jobs):
            later = np.searchsorted(begins, now)
            if later == len(begins):
                break
            begin_s, now = float(begins[later]), float(begins[later]) + self.length_s
            trained_s = self.length_s - self.start_s - restore_s
            account.add(begin_s + self.start_s + restore_s, now, self.nodes, self.nodes * trained_s)
            account.num_rounds += 1
        return account
