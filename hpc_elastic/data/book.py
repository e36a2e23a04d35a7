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

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import asdict
from threading import RLock
from typing import Any

from hpc_elastic import reports
from hpc_elastic.data.ledger import End, Ledger, Stretch, origin
from hpc_elastic.data.plan import Place, Plan, require_word
from hpc_elastic.errors import ConfigError

Name = tuple[int, int]

_PROCESS = secrets.token_hex(8)


def own_token() -> str:
    """Return what tells this process's files from those of all other replicas."""
    return _PROCESS


class Book:
    """What one sampler writes down; nothing outside of a run.

    Args:
        name: The sampler's; None: nothing is written.
        group: Returns this process's rank and the world size, those of its replica if it is one.
        is_replica: It lives on when the group changes.
    """

    def __init__(
        self, name: str | None, group: Callable[[], tuple[int, int]], *, is_replica: bool
    ) -> None:
        self._name = name
        self._group = group
        self._is_replica = is_replica
        self._origin = None
        if name is not None:
            require_word(name)
            self._origin = origin()
        self.ledger: Ledger | None = None
        self._parent: Name | None = None
        self._stretch: Name | None = None
        self._begun = False
        self._step: int | None = None
        """How far the training is; None if it has neither begun nor loaded a state."""
        self._num_loaded = 0
        if self._origin is not None:
            reports.when_returned(self.end)
        self._lock = RLock()
        """A replica's state is also read by the thread that sends it to others."""

    @property
    def is_written(self) -> bool:
        """Whether there is a ledger at all."""
        return self._origin is not None

    def loaded(self, made_by: dict[str, Any] | None, step: int) -> None:
        """A state was loaded, made by a stretch of this run or another; the next is its child.

        Args:
            made_by: What the state says of its maker.
            step: Global batches that it has been trained on.
        """
        is_ours = made_by and self._origin and made_by["run_id"] == self._origin.run_id
        self._parent = tuple(made_by["stretch"]) if made_by and is_ours else None
        self._step = step
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
            self._begin((self._origin.record, self._num_loaded), plan, place, *self._group())

    def begin_quorum(self, quorum_id: int, plan: Plan, place: Place) -> None:
        """Begin the stretch of a quorum, if it has not begun; once for each group of ranks.

        To be called when a step of it is committed, before it is noted.
        """
        if self._origin is None or self._group()[0] != 0:
            return
        last, number = self._stretch or (None, -1)
        if self._begun and last == quorum_id:
            return
        with self._lock:
            if self._begun:
                self._parent = self._stretch
            self._begin((quorum_id, number + 1 if last == quorum_id else 0), plan, place, 0, 1)

    def trained(self, before: Place, start: int, count: int) -> None:
        """Note that the step after a place is done, with a range of the epoch's positions."""
        with self._lock:
            if self.ledger and self._begun:
                self.ledger.add(before.step + 1, before.epoch, start, count)
                self._step = before.step + 1

    def end(self) -> None:
        """Write that the training is over: the user's function has returned."""
        ended = self._stretch if self._begun else self._parent
        if self._origin is None or ended is None or self._step is None:
            return
        if self._is_replica and self._group()[0] != 0:
            return
        by = self._own_name(ended)
        with self._lock, contextlib.suppress(ConfigError):  # another sampler trained by its name
            self._open().end(End(ended, self._step, by, self._origin.generation))

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

    def _own_name(self, ended: Name) -> Name:
        """Return the name of this process's own stretch, or that which it would have."""
        if self._origin is not None and not self._is_replica:
            return self._origin.record, self._num_loaded
        return ended if self._begun else (ended[0], ended[1] + 1)

    def _open(self) -> Ledger:
        assert self._origin is not None
        if self.ledger is None:
            writer = f"record-{self._origin.record}.rank-{self._group()[0]}"
            if self._is_replica:
                writer = f"replica-{own_token()}"
            self.ledger = Ledger(self._origin.folder / f"{self._name}.{writer}.jsonl")
        return self.ledger

    def _begin(self, name: Name, plan: Plan, place: Place, rank: int, world_size: int) -> None:
        assert self._name is not None
        self._open().begin(
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
        self._stretch, self._begun, self._step = name, True, place.step
