"""The ledger: each rank records the samples that it has trained on, for the proof of `audit`.

    <run>/ledger/<name>.entry-<n>.rank-<r>.jsonl
    <run>/ledger/<name>.replica-<token>.jsonl

``name`` is the sampler's, n the index of the log entry that formed the worker group (`fencing`), r
the rank. The token identifies a replica process, which lives on when the group changes. So each
file has one writer. A worker takes over the file of the last process in its place on its node, once
that is dead: it renames the file to its own name, and writes on. So the rounds of a run leave a few
files for each worker of an attempt, and not one for each round. A reader that lists the folder
meanwhile lists it again (`audit.read`). The lines:

    {"ledger": 2, "name": ...}                             a stretch begins: see `LedgerSegment`
    [step, num_steps, epoch, start, stride, count]         `num_steps` steps from `step` on: the
                                                           i-th took `count` positions of the
                                                           epoch's order from start + i * stride
    {"ledger": 2, "ended": ...}                            the training is over: see `TrainingEnd`

Lines hold positions, not indices, and one line covers all steps that follow the same rule: all
steps between two flushes, except at the end of an epoch.

A *stretch* is what one group trains from one loaded state on. It is named by (entry, number of
states loaded before), or by (quorum, number of states loaded in it). A replica that catches up
(`hpc_elastic.ft`) loads a state that was made in its own quorum, and branches off the stretch of
the others there, which has the number 0. A state carries the name of the stretch that made it, so a
stretch's parent is known, and the step at which it branched off.

A step is recorded once it is trained. It is written at the next save at the latest
(`ElasticSampler.state_dict`), before that checkpoint can be complete, and otherwise every ten
seconds. A killed process loses the steps that no checkpoint has, and these are trained again. A
save synchronises the file in the background, for the case of a power cut.

The end of the training is also written, once the user's function has returned or the epochs of
`ElasticSampler.epochs` are done. A run that succeeded has such a line as its last one, so the loss
of the last group's ledger is noticed.

Two kinds of groups write:

- Ranks that restart whenever the group changes. Their stretch is named by the log entry that formed
  the group. Each writes its share of a batch, and the proof needs the shares of all.
- Replicas that live on when the group changes. Their stretch is named by the quorum. A replica may
  be killed right after a step that the others have committed with it, so each writes whole batches,
  and the proof needs the one that came furthest. A step survives in the replicas that made it,
  which write it sooner or later, and in those that received the state, before which it is written
  (`ElasticSampler` ensures that).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from hpc_elastic.config.parse import restored
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import End as EndOfEpoch
from hpc_elastic.data.epoch_plan import EpochPlan, SamplePosition
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.shared_files import make_folder, read_text
from hpc_elastic.worker import reporting

VERSION = 2
FOLDER = "ledger"
FLUSH_S = 10.0  # shortest time between two writes, apart from saves

_log = logging.getLogger(__name__)


Name = tuple[int, int]  # of a stretch: (entry or quorum, number of states loaded)


@dataclass(frozen=True)
class LedgerSegment:
    """The head of a stretch: its writer, its start and its plan."""

    name: str
    stretch: Name  # equal on all ranks of a group
    parent: Name | None  # that made the state; None at the start, or if another run made it
    step: int  # global batches trained before, over the run
    epoch: int
    position: int  # samples of that epoch that were trained before
    rank: int  # of the writer; replicas write 0 of 1, each the whole batch
    world_size: int  # ranks that write a share of the batch
    facts: dict[str, Any]  # what fixes the order: dataset_len, seed, shuffle, order
    end: EndOfEpoch
    global_batch: int
    restored: int | None = None
    """Step of the checkpoint that this process has restored; None if it has begun from the start,
    lives on when the group changes, or is older than the field."""

    def plan(self) -> EpochPlan:
        """Return the plan; raise ConfigError if the stretch is damaged, so that there is none."""
        length, seed, shuffle = (self.facts[key] for key in ("dataset_len", "seed", "shuffle"))
        batch = BatchDivision(self.global_batch, None, 0, 1)
        return EpochPlan(length, seed, shuffle, self.end, batch)

    @property
    def place(self) -> SamplePosition:
        """Its start."""
        return SamplePosition(self.epoch, self.position, self.step)


@dataclass(frozen=True)
class TrainingEnd:
    """The end of the training: it is over in the writing process, and continues in no other."""

    ended: Name  # the last stretch: the writer's own, or that of the state it has loaded
    step: int  # the last step of it that counts
    by: Name  # the writer's own stretch, whether or not it has begun
    generation: int  # how often the run had been resumed


def parse_record(raw: dict[str, Any]) -> LedgerSegment | TrainingEnd:
    """Parse a line that is not a span; raise ValueError if it is damaged or of another version."""
    fields = dict(raw)
    if (version := fields.pop("ledger", None)) != VERSION:
        raise ValueError(f"it has version {version}, this reads {VERSION}")
    kind = TrainingEnd if "ended" in fields else LedgerSegment
    try:
        record: LedgerSegment | TrainingEnd = restored(kind, fields)
    except (KeyError, TypeError) as e:
        why = f"neither the beginning of a stretch nor the end of a training: {e}"
        raise ValueError(why) from e
    except ValueError as e:
        raise ValueError(f"impossible values: {raw!s:.80}") from e
    return record


class Span(NamedTuple):
    """Steps that follow one rule: step + i takes ``size`` positions from start + i * stride."""

    step: int
    num_steps: int
    epoch: int
    start: int
    stride: int
    size: int

    def joined(self, later: Span) -> Span | None:
        """Return both as one; None if the later one does not follow the same rule."""
        stride = self.stride if self.num_steps > 1 else later.start - self.start
        goes_on = (
            later.step == self.step + self.num_steps
            and (later.epoch, later.size) == (self.epoch, self.size)
            and later.start == self.start + self.num_steps * stride
            and (later.num_steps == 1 or later.stride == stride)
        )
        if not goes_on:
            return None
        num_steps = self.num_steps + later.num_steps
        return Span(self.step, num_steps, self.epoch, self.start, stride, self.size)


class Ledger:
    """The file of one rank; lines that cannot be written are kept for the next flush.

    ``mark`` is a file of this node with the last file in this place and its writer: it outlives the
    process, but not the agent.
    """

    def __init__(self, path: Path, mark: Path | None = None) -> None:
        self._path, self._mark = path, mark
        self._is_created = False
        self._buffer = b""
        self._span: Span | None = None
        self.flushed_at = time.monotonic()
        self._process = os.getpid()
        self._file: int | None = None
        self._open()
        atexit.register(self.flush)

    def write_record(self, record: LedgerSegment | TrainingEnd) -> None:
        """Write the head of a stretch, or the end of the training, at once."""
        self._close_span()
        self._buffer += f"{json.dumps({'ledger': VERSION, **asdict(record)})}\n".encode()
        self.flush(sync=isinstance(record, TrainingEnd))

    def add_step(self, step: int, epoch: int, start: int, count: int) -> None:
        """Record that this rank trained start to start + count in a step, also a count of 0."""
        span = Span(step, 1, epoch, start, 0, count)
        joined = self._span and self._span.joined(span)
        if joined is None:
            self._close_span()
        self._span = joined or span

    def flush(self, *, sync: bool = False) -> None:
        """Write all recorded steps; ``sync`` also synchronises the file, in the background."""
        if os.getpid() != self._process:
            return  # a child process, such as a loader's, has only a copy
        self._close_span()
        self.flushed_at = time.monotonic()
        try:
            if self._file is None:
                self._open()
            while self._buffer and self._file is not None:
                self._buffer = self._buffer[os.write(self._file, self._buffer) :]
        except OSError as e:
            _log.warning("%s: not written for now: %s", self._path, e)
            return
        if sync:
            try:
                threading.Thread(target=self._sync, daemon=True).start()
            except RuntimeError:  # no thread can be started
                self._sync()

    def _close_span(self) -> None:
        if self._span is not None:
            line = json.dumps(self._span, separators=(",", ":"))
            self._buffer += f"{line}\n".encode()
            self._span = None

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            make_folder(self._path.parent)
            if not self._is_created:  # fails if another process has this name
                os.close(os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o644))
                self._is_created = True
            if self._mark is not None:
                self._take_over(self._mark)
            self._file = os.open(self._path, flags)
        except FileExistsError:
            raise ConfigError(
                "name",
                self._path.name.split(".")[0],
                f"{self._path} exists already: give each ElasticSampler of a script its own "
                "name, and ranks that share data (tensor parallelism) name=None on all but one",
            ) from None
        except OSError as e:
            _log.warning("%s: not opened for now: %s", self._path, e)

    def _take_over(self, mark: Path) -> None:
        """Put the last file of this place where the own one is, still empty."""
        before = _left_file(mark, self._path)
        if before is not None:
            with contextlib.suppress(FileNotFoundError):  # the reply to an earlier try was lost
                before.rename(self._path)
        with contextlib.suppress(OSError):
            mark.write_text(f"{self._path.name}/{os.getpid()}")

    def _sync(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a file system without sync
                os.fdatasync(self._file)


def _left_file(mark: Path, own: Path) -> Path | None:
    """Return the file that the last process in this place has left, if that is dead."""
    with contextlib.suppress(OSError, ValueError):
        name, pid = read_text(mark).split("/")
        with own.with_name(name).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if name != own.name and file.read() == b"\n" and not Path("/proc", pid).exists():
                return own.with_name(name)
    return None


PROCESS_TOKEN = secrets.token_hex(8)  # the token of this process in the names of its files


@dataclass(frozen=True)
class _Origin:
    """The run and the worker group that this process belongs to."""

    folder: Path
    index: int  # index of the log entry that formed the group
    spec: RunSpec


def _find_origin() -> _Origin | None:
    """Return this worker's run and group; None outside (torchrun's), without a ledger."""
    entry = fencing.own_entry()
    if entry is None:
        return None
    run = RunDir(entry.parent.parent)
    try:
        return _Origin(run.path / FOLDER, fencing.number(entry.name), run.load())
    except RunDirectoryError:
        return None


def most_workers() -> int:
    """Return the largest number of workers of this worker's run; 0 if unknown."""
    origin, on_node = _find_origin(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return 0 if origin is None else origin.spec.settings.nodes.max * on_node


class LedgerWriter:
    """The ledger of one sampler; it writes nothing outside of a run, or without a name.

    ``group`` returns this process's rank and the world size, in its replica if it is one, which
    lives on when the group changes.
    """

    def __init__(
        self, name: str | None, group: Callable[[], tuple[int, int]], *, is_replica: bool
    ) -> None:
        self.name = name
        self._group = group
        self._is_replica = is_replica
        self._origin = None
        if name is not None:
            if not re.fullmatch(r"[\w-]+", name):  # a part of a file's name
                raise ConfigError("name", name, "give letters, digits, '_' and '-' only")
            self._origin = _find_origin()
        self.is_written = self._origin is not None
        self.ledger: Ledger | None = None
        self._parent: Name | None = None
        self._stretch: Name | None = None
        self._begun = False
        self._step: int | None = None  # the last step; None before the first step or state
        self._num_loaded = 0
        if self._origin is not None:
            reporting.when_returned(self.record_end)
        self._lock = RLock()  # the thread that sends a replica's state to others also reads it

    def on_state_loaded(self, made_by: dict[str, Any] | None, step: int) -> None:
        """Record that a state was loaded; the next stretch is a child of its `state_maker`."""
        is_ours = made_by and self._origin and made_by["run_id"] == self._origin.spec.run_id
        self._parent = tuple(made_by["stretch"]) if made_by and is_ours else None
        self._step = step
        self._num_loaded += 1
        self._begun = False

    def state_maker(self, *, inside: bool = False) -> dict[str, Any] | None:
        """Return the run and the stretch that make the present state.

        ``inside``: the loader takes the state, with which the stretch begins.
        """
        if self._origin is None:
            return None
        stretch = self._parent
        if self._begun:
            stretch = self._stretch
        elif inside:
            stretch = (self._origin.index, self._num_loaded)
        return {"run_id": self._origin.spec.run_id, "stretch": list(stretch)} if stretch else None

    def begin_segment(self, plan: EpochPlan, place: SamplePosition) -> None:
        """Begin the stretch of this rank's group, once for each state loaded."""
        if self._origin is not None and not self._begun:
            self._begin_stretch((self._origin.index, self._num_loaded), plan, place, *self._group())

    def begin_quorum_segment(self, quorum_id: int, plan: EpochPlan, place: SamplePosition) -> None:
        """Begin the stretch of a quorum, once a step of it is committed, unless it has begun."""
        if self._origin is None or self._group()[0] != 0:
            return
        if self._begun and self._stretch and self._stretch[0] == quorum_id:
            return
        with self._lock:
            if self._begun:
                self._parent = self._stretch
            known = [name for name in (self._stretch, self._parent) if name]
            numbers = [number for by, number in known if by == quorum_id]
            name = quorum_id, max(numbers, default=-1) + 1
            self._begin_stretch(name, plan, place, 0, 1)

    def record_step(self, before: SamplePosition, start: int, count: int) -> None:
        """Record the step after a position, with its range of the epoch's positions."""
        with self._lock:
            if self.ledger and self._begun:
                self.ledger.add_step(before.step + 1, before.epoch, start, count)
                self._step = before.step + 1

    def record_end(self) -> None:
        """Write the end of the training: the user's function has returned."""
        ended = self._stretch if self._begun else self._parent
        if self._origin is None or ended is None or self._step is None:
            return
        if self._is_replica and self._group()[0] != 0:
            return
        if not self._is_replica:  # its own stretch, even if it has not begun
            by = self._origin.index, self._num_loaded
        else:
            by = ended if self._begun else (ended[0], ended[1] + 1)
        with self._lock, contextlib.suppress(ConfigError):  # another sampler has the same name
            self._open_ledger().write_record(
                TrainingEnd(ended, self._step, by, self._origin.spec.generation)
            )

    def flush(self) -> None:
        """Write all recorded steps, for a checkpoint or before the state is sent."""
        with self._lock:
            if self.ledger:
                self.ledger.flush(sync=True)

    def flush_if_due(self) -> None:
        """Write recorded steps if `FLUSH_S` have passed; all of them are final."""
        with self._lock:
            if self.ledger and time.monotonic() - self.ledger.flushed_at > FLUSH_S:
                self.ledger.flush()

    def _open_ledger(self) -> Ledger:
        assert self._origin is not None
        if self.ledger is None:
            writer, mark = f"entry-{self._origin.index}.rank-{self._group()[0]}", None
            if self._is_replica:
                writer = f"replica-{PROCESS_TOKEN}"
            elif (page := reporting.own_page()) is not None:
                mark = page.path.with_name(f"ledger.{page.path.name}.{self.name}")
            self.ledger = Ledger(self._origin.folder / f"{self.name}.{writer}.jsonl", mark)
        return self.ledger

    def _begin_stretch(
        self, name: Name, plan: EpochPlan, place: SamplePosition, rank: int, world_size: int
    ) -> None:
        assert self.name is not None
        restored_step = None if self._is_replica else reporting.restored_step()
        head = LedgerSegment(
            self.name, name, self._parent, place.step, place.epoch, place.position, rank,
            world_size, plan.facts(), plan.end, plan.batch.global_batch_size, restored_step,
        )  # fmt: skip
        self._open_ledger().write_record(head)
        self._stretch, self._begun, self._step = name, True, place.step
