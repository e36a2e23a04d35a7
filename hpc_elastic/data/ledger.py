"""The ledger: each rank writes down which samples it has trained on, for `audit` to prove from.

    <run>/ledger/<name>.record-<n>.rank-<r>.jsonl
    <run>/ledger/<name>.replica-<token>.jsonl

``name`` is the sampler's, n the number of the record that formed the worker group (`fence`), r the
rank; the token is a replica process's, where replicas live on when the group changes (`ledger`). So
each file has one writer, once. The lines:

    {"ledger": 2, "name": ...}                             a stretch begins: see `LedgerSegment`
    [step, num_steps, epoch, start, stride, count]         from `step` on, so many steps: the i-th
                                                           took `count` positions of the epoch's
                                                           order, from start + i * stride on
    {"ledger": 2, "ended": ...}                            the training is over: see `TrainingEnd`

Positions, not indices, and one line for as many steps as follow the same rule: a line covers all
steps between two flushes, but where an epoch ends.

Stretches tell what came of the work. A *stretch* is what one group trains from one loaded state
on, named by (record, number of states loaded before), or by (quorum, number of states loaded in
it); a state carries the name of the stretch that made it. So a stretch's parent is known, and from
which of its steps on it went another way.

When it is written: a step is noted once it is trained, and written at the next save at the latest
(`ElasticSampler.state_dict`), before that checkpoint can be complete; else every ten seconds. A
process that is killed takes the steps with it that no checkpoint has, and these are trained again.
A save has the file synced behind its back, for a node that loses its power.

The end of the training is written as well, once the user's function has returned or the epochs that
`ElasticSampler.epochs` was asked for are done. A run that succeeded has to have such a line behind
everything else; so the loss of what its last group wrote does not go unnoticed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import End as EndOfEpoch
from hpc_elastic.data.epoch_plan import EpochPlan, SamplePosition, require_word
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.worker import reporting

VERSION = 2
FOLDER = "ledger"
FLUSH_S = 10.0
"""A line at most this often, between saves."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The run and the worker group that this process belongs to."""

    folder: Path
    """The run's ledger."""
    run_id: str
    record: int
    """Number of the record that formed the group."""
    generation: int
    """How often the run had been resumed."""


def origin() -> Origin | None:
    """Return where this worker belongs; None outside of a run, where no ledger is written.

    ``torchrun --rdzv-backend=slurm`` has no run directory, and counts as outside.
    """
    record = fencing.own_record()
    if record is None:
        return None
    run = record.parent.parent
    try:
        spec = RunDir(run).load()
    except RunDirectoryError:
        return None
    return Origin(run / FOLDER, spec.run_id, fencing.number(record.name), spec.generation)


@dataclass(frozen=True)
class LedgerSegment:
    """The head of a stretch: who trains, from which state on, and on what.

    Attributes:
        name: The sampler's.
        stretch: (record or quorum, number of states loaded): equal on all ranks of a group.
        parent: The stretch that made the state; None if it was the beginning, or another run.
        step: Global batches trained before, over the run.
        epoch: The epoch that it goes on with.
        position: How much of that epoch was trained before.
        rank: The writer's; replicas write 0 of 1, each all of the batch.
        world_size: How many ranks write a share of the batch.
        facts: What has to be equal for the order to be the same: dataset_len, seed, shuffle, order.
        end: What happens to an epoch's last samples.
        global_batch: Samples a step.
    """

    name: str
    stretch: tuple[int, int]
    parent: tuple[int, int] | None
    step: int
    epoch: int
    position: int
    rank: int
    world_size: int
    facts: dict[str, Any]
    end: EndOfEpoch
    global_batch: int

    def plan(self) -> EpochPlan:
        """Return what decides which positions each step of the stretch is to train.

        Raises:
            ConfigError: no sampler has such a plan, so the stretch is damaged.
        """
        length, seed, shuffle = (self.facts[key] for key in ("dataset_len", "seed", "shuffle"))
        return EpochPlan(
            length, seed, shuffle, self.end, BatchDivision(self.global_batch, None, 0, 1)
        )

    @property
    def place(self) -> SamplePosition:
        """Where it begins."""
        return SamplePosition(self.epoch, self.position, self.step)

    def to_json(self) -> str:
        """Return its line."""
        return json.dumps({"ledger": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> LedgerSegment:
        """Read a line back.

        Raises:
            ValueError: it is damaged.
        """
        fields = {key: value for key, value in raw.items() if key != "ledger"}
        try:
            parent = fields["parent"] and tuple(fields["parent"])
            return cls(**{**fields, "stretch": tuple(fields["stretch"]), "parent": parent})
        except (KeyError, TypeError) as e:
            raise ValueError(f"not the beginning of a stretch: {e}") from e


@dataclass(frozen=True)
class TrainingEnd:
    """The training is over in the process that writes this, and goes on in no other one.

    Attributes:
        ended: The stretch that the training is in: the writer's own, or the one that made the
            state that it has loaded, if it has trained nothing since.
        step: The last step of it that counts.
        by: The writer's own stretch, whether or not it has begun.
        generation: How often the run had been resumed.
    """

    ended: tuple[int, int]
    step: int
    by: tuple[int, int]
    generation: int

    def to_json(self) -> str:
        """Return its line."""
        return json.dumps({"ledger": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> TrainingEnd:
        """Read a line back.

        Raises:
            ValueError: it is damaged.
        """
        try:
            ended, by = tuple(raw["ended"]), tuple(raw["by"])
            return cls(ended, int(raw["step"]), by, int(raw["generation"]))
        except (KeyError, TypeError) as e:
            raise ValueError(f"not the end of a training: {e}") from e


@dataclass(frozen=True)
class Span:
    """Steps that follow one rule: step + i takes ``count`` positions from start + i * stride."""

    step: int
    num_steps: int
    epoch: int
    start: int
    stride: int
    count: int

    def joined(self, later: Span) -> Span | None:
        """Return both as one; None if the later one does not go on by the same rule."""
        stride = self.stride if self.num_steps > 1 else later.start - self.start
        goes_on = (
            later.step == self.step + self.num_steps
            and (later.epoch, later.count) == (self.epoch, self.count)
            and later.start == self.start + self.num_steps * stride
            and (later.num_steps == 1 or later.stride == stride)
        )
        if not goes_on:
            return None
        return replace(self, num_steps=self.num_steps + later.num_steps, stride=stride)

    def to_json(self) -> str:
        """Return its line."""
        return json.dumps(list(asdict(self).values()), separators=(",", ":"))


class Ledger:
    """One rank's file; what can not be written is kept, and tried again with the next flush.

    Raises:
        ConfigError: the file is there: another sampler of this group has the same name and rank.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = b""
        self._span: Span | None = None
        self._flushed_at = time.monotonic()
        self._process = os.getpid()
        self._file: int | None = None
        self._open()
        atexit.register(self.flush)

    def begin(self, stretch: LedgerSegment) -> None:
        """Write the head of a stretch at once."""
        self._close_span()
        self._buffer += f"{stretch.to_json()}\n".encode()
        self.flush()

    def end(self, end: TrainingEnd) -> None:
        """Write at once that the training is over."""
        self._close_span()
        self._buffer += f"{end.to_json()}\n".encode()
        self.flush(sync=True)

    def add(self, step: int, epoch: int, start: int, count: int) -> None:
        """Note a step of which this rank trained the positions from start to start + count.

        A count of 0 is noted, too: the rank has taken part.
        """
        span = Span(step, 1, epoch, start, 0, count)
        joined = self._span and self._span.joined(span)
        if joined is None:
            self._close_span()
        self._span = joined or span

    def flush_if_due(self) -> None:
        """Write if the last time is long ago; to be called when all that was noted is final."""
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self.flush()

    def flush(self, *, sync: bool = False) -> None:
        """Write all that was noted.

        Args:
            sync: Have the disk take it too, behind the caller's back.
        """
        if os.getpid() != self._process:
            return  # a child, as a data loader's, has a copy of what is ours to write
        self._close_span()
        self._flushed_at = time.monotonic()
        try:
            self._write()
        except OSError as e:
            _log.warning("%s: not written for now: %s", self._path, e)
            return
        if sync:
            try:
                threading.Thread(target=self._sync, daemon=True).start()
            except RuntimeError:  # no thread is to be had
                self._sync()

    def _close_span(self) -> None:
        if self._span is not None:
            self._buffer += f"{self._span.to_json()}\n".encode()
            self._span = None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, flags, 0o644)
        except FileExistsError:
            raise ConfigError(
                "name",
                self._path.name.split(".")[0],
                f"{self._path} is written already: give each ElasticSampler of a script its own "
                "name, and ranks that share data (tensor parallelism) name=None on all but one",
            ) from None
        except OSError as e:
            _log.warning("%s: not opened for now: %s", self._path, e)

    def _write(self) -> None:
        if self._file is None:
            self._open()
        while self._buffer and self._file is not None:
            self._buffer = self._buffer[os.write(self._file, self._buffer) :]

    def _sync(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a file system that has no sync
                os.fdatasync(self._file)


# ---- A sampler's ledger as the sampler sees it: what it writes, and which stretch its state is of
# What stands in the files is said above. Two kinds of groups write:
#
# - Ranks that are started anew whenever the group changes. Their stretch is named by the record
#   that formed the group; each writes its share of a batch, and the proof needs the shares of
#   all.
# - Replicas that live on when the group changes. Their stretch is named by the quorum. A replica
#   may be killed right after a step that the others have committed with it, so each writes whole
#   batches, as if it were alone, and the proof needs the one that came furthest. A step survives
#   in those who have made it, who write it sooner or later, and in those who were given the
#   state, before which it is written (`ElasticSampler` sees to that).


Name = tuple[int, int]

_PROCESS = secrets.token_hex(8)


def own_token() -> str:
    """Return what tells this process's files from those of all other replicas."""
    return _PROCESS


class LedgerWriter:
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
            reporting.when_returned(self.end)
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

    def begin(self, plan: EpochPlan, place: SamplePosition) -> None:
        """Begin the stretch of this rank's group, once for each state loaded."""
        if self._origin is not None and not self._begun:
            self._begin((self._origin.record, self._num_loaded), plan, place, *self._group())

    def begin_quorum(self, quorum_id: int, plan: EpochPlan, place: SamplePosition) -> None:
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

    def trained(self, before: SamplePosition, start: int, count: int) -> None:
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
            self._open().end(TrainingEnd(ended, self._step, by, self._origin.generation))

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

    def _begin(
        self, name: Name, plan: EpochPlan, place: SamplePosition, rank: int, world_size: int
    ) -> None:
        assert self._name is not None
        self._open().begin(
            LedgerSegment(
                name=self._name,
                stretch=name,
                parent=self._parent,
                **asdict(place),
                rank=rank,
                world_size=world_size,
                facts=plan.facts(),
                end=plan.end,
                global_batch=plan.batch.global_batch_size,
            )
        )
        self._stretch, self._begun, self._step = name, True, place.step
