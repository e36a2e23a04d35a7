"""A sampler's ledger as the sampler sees it: what it writes, and which stretch its state is of.

`ledger` says what stands in the files. Two kinds of groups write:

- Ranks that are started anew whenever the group changes. Their stretch is named by the record that
  formed the group; each writes its share of a batch, and the proof needs the shares of all.
- Replicas that live on when the group changes. Their stretch is named by the quorum. A replica may
  be killed right after a step that the others have committed with it, so each writes whole
  batches, as if it were alone, and the proof needs the one that came furthest. A step survives in
  those who have made it, who write it sooner or later, and in those who were given the state,
  before which it is written (`ElasticSampler` sees to that).
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from threading import RLock
from typing import Any

from hpc_elastic.data.ledger import Ledger, Stretch, origin
from hpc_elastic.data.plan import Place, Plan, require_word

Name = tuple[int, int]

_PROCESS = secrets.token_hex(8)


def own_token() -> str:
    """Return what tells this process's files from those of all other replicas."""
    return _PROCESS


class Book:
    """What one sampler writes down; nothing outside of a run.

    Args:
        name: The sampler's; None: nothing is written.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._origin = None
        if name is not None:
            require_word(name)
            self._origin = origin()
        self.ledger: Ledger | None = None
        self._parent: Name | None = None
        self._stretch: Name | None = None
        self._begun = False
        self._num_loaded = 0
        self._lock = RLock()
        """A replica's state is also read by the thread that sends it to others."""

    @property
    def is_written(self) -> bool:
        """Whether there is a ledger at all."""
        return self._origin is not None

    def loaded(self, made_by: dict[str, Any] | None) -> None:
        """A state was loaded, made by a stretch of this run or another; the next is its child."""
        is_ours = made_by and self._origin and made_by["run_id"] == self._origin.run_id
        self._parent = tuple(made_by["stretch"]) if made_by and is_ours else None
        self._num_loaded += 1
        self._begun = False

    def made_by(self, *, inside: bool = False) -> dict[str, Any] | None:
        """Return what a state of now says of its maker.

        Args:
            inside: It is the loader that asks: the stretch begins with it.
        """
        if self._origin is None:
            return None
        stretch = self._parent
        if self._begun:
            stretch = self._stretch
        elif inside:
            stretch = (self._origin.record, self._num_loaded)
        return {"run_id": self._origin.run_id, "stretch": list(stretch)} if stretch else None

    def begin(self, plan: Plan, place: Place) -> None:
        """Begin the stretch of this rank's group, once for each state loaded."""
        if self._origin is not None and not self._begun:
            rank, world_size = plan.batch.group()
            name = self._origin.record, self._num_loaded
            self._open(f"record-{self._origin.record}.rank-{rank}")
            self._begin(name, plan, place, rank, world_size)

    def begin_quorum(self, quorum_id: int, plan: Plan, place: Place) -> None:
        """Begin the stretch of a quorum, if it has not begun; once for each group of ranks.

        To be called when a step of it is committed, before it is noted.
        """
        if self._origin is None or plan.batch.group()[0] != 0:
            return
        last, number = self._stretch or (None, -1)
        if self._begun and last == quorum_id:
            return
        with self._lock:
            if self._begun:
                self._parent = self._stretch
            self._open(f"replica-{own_token()}")
            self._begin((quorum_id, number + 1 if last == quorum_id else 0), plan, place, 0, 1)

    def trained(self, before: Place, start: int, count: int) -> None:
        """Note that the step after a place is done, with a range of the epoch's positions."""
        with self._lock:
            if self.ledger and self._begun:
                self.ledger.add(before.step + 1, before.epoch, start, count)

    def flush(self) -> None:
        """Write what was noted; for a checkpoint, or because somebody gets our state."""
        with self._lock:
            if self.ledger:
                self.ledger.flush(sync=True)

    def flush_if_due(self) -> None:
        """Write what was noted from time to time."""
        with self._lock:
            if self.ledger:
                self.ledger.flush_if_due()

    def _open(self, writer: str) -> None:
        if self.ledger is None and self._origin is not None:
            self.ledger = Ledger(self._origin.folder / f"{self._name}.{writer}.jsonl")

    def _begin(self, name: Name, plan: Plan, place: Place, rank: int, world_size: int) -> None:
        assert self.ledger is not None and self._name is not None
        self.ledger.begin(
            Stretch(
                name=self._name,
                stretch=name,
                parent=self._parent,
                **asdict(place),
                rank=rank,
                world_size=world_size,
                facts=plan.facts(),
                end=plan.end,
                global_batch=plan.batch.global_batch,
            )
        )
        self._stretch, self._begun = name, True
