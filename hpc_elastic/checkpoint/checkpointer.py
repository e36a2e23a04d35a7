"""The Checkpointer: what a training script saves and restores with.

    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        step = checkpointer.load_latest() or 0
        while step < steps:
            train_one_step()
            step += 1
            checkpointer.save_if_due(step)

Every rank makes one, and calls it at the same steps. A save copies the state into host memory and
returns; a thread writes, checks and commits it (`save` has the theory). What is committed is
complete, on every rank, and verified when it is read.
"""

from __future__ import annotations

import gc
import itertools
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import torch

from hpc_elastic.checkpoint.equality import Comparer
from hpc_elastic.checkpoint.generators import capture_generators
from hpc_elastic.checkpoint.memory_tier import MemoryStore, MemoryTier
from hpc_elastic.checkpoint.owner import Owner, RankGroup, claim
from hpc_elastic.checkpoint.prune import Retention
from hpc_elastic.checkpoint.restore import Restorer
from hpc_elastic.checkpoint.save import Save, SaveContext
from hpc_elastic.checkpoint.sharding import Planner
from hpc_elastic.checkpoint.snapshot import Snapshots, is_out_of_memory
from hpc_elastic.checkpoint.state import Flat, flatten, require_complete
from hpc_elastic.checkpoint.store import Cleaner, Store, remember_directory
from hpc_elastic.errors import (
    CheckpointError,
    CheckpointFencedError,
    CheckpointMismatchError,
    ConfigError,
    InexactError,
    near_miss,
)
from hpc_elastic.run.directory import default_checkpoints
from hpc_elastic.worker import optimizer_steps, reporting
from hpc_elastic.worker.checkpoint_trigger import should_checkpoint

_log = logging.getLogger(__name__)

_NICENESS = 19  # of the thread that writes: it gets what the training leaves of the cores
_CLEANED_UP_IN_S = 1.0  # a blocking save waits so long for removals, which are sooner over
_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()  # of this process
_numbers: dict[Path, itertools.count[int]] = {}
"""Counts the saves of each directory, so that no two share a staging folder."""
_restored: dict[Path, int] = {}  # last step by directory; -1: there was none


class Checkpointer:
    """Saves a state, and restores the newest one that verifies.

    The state is a mapping from names to

    - objects with state_dict() and load_state_dict(): modules, which are stored under the names of
      the bare model, whatever DistributedDataParallel and torch.compile have wrapped; optimizers,
      without functions in their groups; schedulers, samplers;
    - tensors, which are restored in place;
    - dicts of your own values: tensors, NumPy arrays and numbers, int, float, complex, str, bytes,
      bool, None, timedelta, and lists, tuples, sets and dicts of them. Their types come back
      exactly; a defaultdict's factory has to be a builtin type or None. They are restored in place:
      dicts, lists and sets at every depth, where the checkpoint has one of the same type there, and
      tensors of the same name; tuples are replaced.

    Values that are no tensors are saved as rank 0 has them. Tensors that are not sharded are stored
    once, so they have to be the same on all ranks: names, shapes and types are compared at the
    making and at each save, a sample of the numbers at the first save, after a change, and at each
    tenth. Ranks that differ are refused (buffers of modules are not compared: rank 0's count).
    `CheckpointOptions.per_rank` names the keys that each rank has for itself.

    An object that is neither module nor optimizer gets back on each rank what its state_dict() was
    there; but tensors of 64 KiB and more in the state of one that cannot be iterated are stored
    once, and compared, too. Under another number of ranks, one that can be iterated (a data loader:
    its state is one rank's position), or whose state was not the same on all ranks, is refused by
    `load_latest`, unless `CheckpointOptions.accept_inexact` names its key; `hpc_elastic.data` has
    what fits any number. The step, and each rank's random number generators, are saved too.

    Attributes:
        failures: Saves that could not be committed, so far.
        blocked_s: Seconds for which the last save held up the training.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        directory: str | os.PathLike[str] | None = None,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        memory_tier: MemoryTier | None = None,
        options: CheckpointOptions | None = None,
    ) -> None:
        """Prepare, and begin to make the buffers that saves will use (every rank; collective).

        Args:
            state: What to save and restore.
            directory: On a file system that all ranks share; made if need be. None: the folder
                ``checkpoints`` of the run; outside of a run that of Hydra's output directory, or of
                the working directory, of rank 0.
            keep_last: How many of the newest checkpoints are kept, at least 1.
            keep_every: Checkpoints of steps that are a multiple of this are kept for ever.
            memory_tier: Keep saves in the nodes' memory, too, and write only some of them to the
                directory; see `MemoryTier`.
            options: See `CheckpointOptions`.

        Raises:
            ConfigError: an argument is wrong, the directory cannot be written, the state holds
                what cannot be stored, or the ranks have different tensors under a key. The message
                names it and the remedy.
            CheckpointError: there are several ranks, but no process group yet.
        """
        self.failures: int = 0
        self.blocked_s: float = 0.0
        self._options = options or CheckpointOptions()
        if not isinstance(state, Mapping) or not state:
            raise ConfigError("state", state, 'give a mapping such as {"model": model}')
        for key in state:
            if not isinstance(key, str) or not key:
                raise ConfigError("state", key, "its keys have to be texts")
        self._state = dict(state)
        rule = Retention(keep_last, keep_every)
        if unknown := [key for key in self._options.per_rank if key not in self._state]:
            remedy = f"the state has {', '.join(self._state)}{near_miss(unknown[0], self._state)}"
            raise ConfigError("per_rank", unknown[0], remedy)
        flat = flatten(self._state, self._options.per_rank)
        self._group = RankGroup.current()
        store = Store(self._find_directory(directory))
        self._refusal = _refuse_second(store.directory, self._state, self._options.boundary)
        store.prepare()
        owner = self._claim(store)
        for key in flat.rank_values["positions"]:
            if self._group.rank == 0 and key not in self._options.accept_inexact:
                _log.warning(
                    "%s: the state of %s is one rank's position in its data, and is restored under "
                    "the same number of ranks only: hpc_elastic.data has what fits any number",
                    key, type(self._state[key]).__name__,
                )  # fmt: skip
        self._planner = Planner(self._group.rank, self._group.world_size, self._options.replicated)
        self._comparer = Comparer(self._planner, self._group)
        num_bytes = self._expected_bytes(flat)
        self._comparer.compare_structure(flat)
        self._mismatch: CheckpointMismatchError | None = None  # of the last save, not raised yet
        self._compares = False  # whether the next save compares numbers even out of turn
        self._memory: MemoryStore | None = None
        if memory_tier is not None:
            self._memory = MemoryStore(memory_tier, store.directory, self._group, num_bytes)
        self._context = SaveContext(
            store, self._group, owner, rule, self._options.timeout_s, Cleaner(store),
            memory=self._memory, remarks={f"state of {k}" for k in self._options.accept_inexact},
        )  # fmt: skip
        self._snapshots = Snapshots()
        self._save: Save | None = None
        self._has_no_memory = False  # for a snapshot, which is logged once
        self._is_remembered = False  # whether the directory is recorded for the run
        self._numbers = _numbers.setdefault(store.directory, itertools.count())
        if self._options.boundary:
            optimizer_steps.watch()
        self._overwritten = set[str]()  # tensors in which a failed restore has left other numbers
        self._complete: tuple[object, int] = None, 0
        """The plan, and the number of optimizers that had stepped, when nothing was missing."""
        _open.add(self)
        if self._options.asynchronous:
            self._snapshots.warm_up(flat, num_bytes)

    def _find_directory(self, given: str | os.PathLike[str] | None) -> Path:
        """Return the directory of all ranks: that of rank 0 unless one is given (collective).

        Each process of torchrun has an output directory of Hydra's, named by the second of its
        start.
        """
        mine = str(Path(given or default_checkpoints()).absolute())
        all_given = self._group.gather_json([mine, bool(given)])
        directory = all_given[0][0]
        for rank, (other, is_given) in enumerate(all_given):
            if is_given and other != directory:
                remedy = f"rank {rank} has it, and rank 0 {directory}: give all ranks the same"
                raise ConfigError("directory", other, f"{remedy}, as by hydra.run.dir=FOLDER")
        return Path(directory)

    def save(self, step: SupportsIndex, *, urgent: bool | None = None) -> bool:
        """Save the state as of a step (every rank, at the same steps).

        Returns as soon as the state may change again; an urgent save, and any without
        ``asynchronous``, when it is committed. What goes wrong with writing never ends the
        training: it is logged, counted in `failures`, and raised by `wait`. Where the ranks turn
        out to differ in what is stored once, no save can succeed: the next one raises that.

        Args:
            step: Optimizer steps done, at least 0, and no fewer than at the last save or restore.
                The same step again replaces its checkpoint, if the state has changed since.
            urgent: The group is about to end (the same on every rank): write to the directory, do
                only what is needed, and return when it is committed; an earlier save that is not
                almost written is given up. By default, whether `should_checkpoint` has found that
                the group changes at this step, unless the option ``boundary`` is False.

        Returns:
            Whether the step is saved, or being saved; False if it was skipped or failed.

        Raises:
            ConfigError: the step is no number, or something in the state cannot be stored; the
                directory is another run's; or it has a later step, which this training has not
                restored, so that a restart would go on from that.
            CheckpointMismatchError: the save before was refused because the ranks differ.
        """
        begin = time.monotonic()
        try:
            index = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            index = -1
        if index < 0:
            raise ConfigError("step", step, "give the number of optimizer steps done, at least 0")
        repeats = self._require_newest(index)
        step, number = index, next(self._numbers)
        with reporting.busy():
            if urgent is None:
                urgent = self._options.boundary and reporting.save_is_urgent(step)
            to_store = repeats or urgent or self._memory is None or self._memory.shared_due(number)
            # One that is no boundary may be of a step after that from which the training goes on.
            replaces = repeats or not self._options.boundary
            save = Save(self._context, step, number, urgent, to_store, replaces)
            page = reporting.own_page() if self._options.boundary else None
            pauses = page is not None and page.pauses_at(step)
            blocking = urgent or pauses or not self._options.asynchronous
            if not self._finish_earlier(save):
                return False
            blocking = self._start(save, blocking=blocking)
            self.blocked_s = time.monotonic() - begin
            if (page := reporting.own_page()) is not None:
                page.report_blocked(self.blocked_s)
            _log.debug("step %d: training was held up for %.3f s", step, self.blocked_s)
            is_saved = not blocking or save.error is None
            if blocking and is_saved and self._options.boundary:
                reporting.mark_checkpoint(step=step)
        return is_saved

    def save_if_due(
        self,
        step: SupportsIndex,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        overhead: float | None = None,
    ) -> bool:
        """Save if `should_checkpoint` returns true; call it on every rank, after every step.

        Args:
            step: As of `save`.
            every_steps: As of `should_checkpoint`, and so are the others.
            every_s: Seconds between two checkpoints.
            overhead: The share of the time that checkpoints may take.

        Returns:
            Whether the step is saved, or being saved.

        Raises:
            ConfigError: As of `save`.
            ValueError: As of `should_checkpoint`.
        """
        is_due = should_checkpoint(
            operator.index(step), every_steps=every_steps, every_s=every_s, overhead=overhead
        )
        return is_due and self.save(step)

    def load_latest(self) -> int | None:
        """Fill the state from the newest checkpoint that verifies (every rank; collective).

        Which ones were passed over, and why, is in the log. Ranks that the checkpoint has no
        random number generators for, since there were fewer, get new ones (`derive_generators`).

        Returns:
            The step; None if there is no checkpoint at all.

        Raises:
            CheckpointCorruptError: there are checkpoints, but none verifies. To begin anew, move
                them away. The state may have damaged numbers: it cannot be saved.
            CheckpointError: the checkpoint does not fit the state, or not this number of ranks;
                the message names the key. The state may be filled in part.
        """
        begin = time.monotonic()
        self._settle()
        context, options = self._context, self._options
        restorer = Restorer(
            context.store, self._group, context.damaged, self._memory,
            options.accept_inexact, self._overwritten,
        )  # fmt: skip
        with reporting.busy():
            step = restorer.restore(self._state, options.strict, with_rng=options.rng)
        self._save = None
        self._newest = _restored[self.directory] = -1 if step is None else step
        self._is_newest_own = True
        if options.boundary:
            reporting.note_restored(step or 0)
            if (page := reporting.own_page()) is not None:
                page.report_restored(step, time.monotonic() - begin)
        return step

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._context.store.directory

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way on this rank."""
        return self._save is None or self._save.done.is_set()

    def wait(self) -> None:
        """Wait until everything is committed.

        Raises:
            CheckpointFencedError: the group is over; the last save was not committed.
            CheckpointError: the last save failed; the message has the reason. The earlier
                checkpoints are as they were.
        """
        self._settle()
        save = self._save
        if save is not None and save.problem is not None:
            self._save = None
            raise save.problem

    def close(self) -> None:
        """Wait until everything is committed, and what is not kept is removed; see `wait`."""
        try:
            self.wait()
        finally:
            _open.discard(self)
            self._context.cleaner.wait()
            if self._memory is not None:
                self._memory.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait until everything is committed; an error of the block goes first."""
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise

    # ---- one save -------------------------------------------------------------------------

    def _claim(self, store: Store) -> Owner:
        """Find whose the directory is, and mark it if it has no owner (every rank; collective)."""
        boundary, newest, at_once = self._options.boundary, -1, True
        owner, refusal = Owner(self._group.run, boundary=boundary), None
        if self._group.rank == 0:
            newest = max(store.steps(), default=-1)
            try:
                owner = Owner.current(self._state, boundary=boundary)
                verdict = claim(
                    store.directory, owner, self._options.take_over, has_steps=newest >= 0
                )
                refusal, at_once = verdict.problem, verdict.at_once
            except ConfigError as e:
                refusal = e
            except OSError as e:
                remedy = f"it cannot be seen whose it is ({e}): see that it can be read"
                refusal = ConfigError("directory", str(store.directory), remedy)
        facts = refusal and [refusal.key, str(refusal.value), refusal.remedy]
        is_inexact = isinstance(refusal, InexactError)
        newest, facts, is_inexact, at_once = self._group.broadcast_json(
            [newest, facts, is_inexact, at_once]
        )
        self._newest = int(newest) if boundary else -1  # no save may have an earlier step
        self._is_newest_own = self._newest <= _restored.get(store.directory, -1)
        """Whether this training has saved or restored it."""
        if facts:
            refusal = (InexactError if is_inexact else ConfigError)(*facts)
            if at_once:
                raise refusal
            _log.info("%s; it may restore from there, and not save", refusal)
            self._refusal = refusal
        return owner

    def _require_newest(self, step: int) -> bool:
        """Return whether the step is the last one that was saved or restored, and not a later one.

        What counts is the same on all ranks: what rank 0 has seen at the construction, and the
        calls.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._overwritten:
            remedy = "load_latest() failed when it had changed this: begin with a new state"
            raise InexactError("state", min(self._overwritten), remedy)
        if step > self._newest:
            self._newest, self._is_newest_own = step, True
            return False
        if not self._is_newest_own:
            remedy = (
                f"{self.directory} has a checkpoint of step {self._newest}, which this training "
                "has not restored, and a restart would go on from that: call load_latest() before "
                "the first save; or, to begin anew, give another directory, or move that away"
            )
            raise InexactError("step", step, remedy)
        if step < self._newest:
            remedy = (
                f"step {self._newest} was saved or restored before, and a restart would go on from "
                "that: give every save of a Checkpointer the number of optimizer steps done; after "
                "a return to an earlier state, call load_latest()"
            )
            raise InexactError("step", step, remedy)
        return True

    def _finish_earlier(self, save: Save) -> bool:
        """Ensure that no earlier save is under way; return False to skip the new one instead."""
        earlier = self._save
        if earlier is None or earlier.done.is_set():
            return True
        if save.urgent:
            earlier.abort_if_unfinished()
        elif self._options.when_busy == "skip" and earlier.step != save.step:
            reason = f"step {earlier.step} is still being written"
            _log.warning("the checkpoint of step %d is skipped: %s", save.step, reason)
            try:
                threading.Thread(target=save.mark_failed, args=(reason,)).start()
            except RuntimeError:
                save.mark_failed(reason)
            return False
        else:
            _log.debug("step %d waits for step %d to be written", save.step, earlier.step)
        earlier.done.wait()
        return True

    def _start(self, save: Save, *, blocking: bool) -> bool:
        """Take a snapshot, and write it at once (True), or in a thread behind the training."""
        if self._mismatch is not None:
            mismatch, self._mismatch, self._compares = self._mismatch, None, True
            raise mismatch
        blocking = self._hold_still(save, blocking=blocking)
        self._save = save
        if not blocking:
            # Not a daemon: the program's end waits for it.
            name = f"checkpoint-{save.step}"
            thread = threading.Thread(target=self._run, args=(save, _NICENESS), name=name)
            try:
                thread.start()
                return False
            except RuntimeError as e:
                _log.warning("%s: step %d is written at once", e, save.step)
        self._run(save)
        if blocking and not save.urgent:
            self._context.cleaner.wait(_CLEANED_UP_IN_S)
        return blocking

    def _hold_still(self, save: Save, *, blocking: bool) -> bool:
        """Take a snapshot; return whether it is written at once, as there is no room for a copy."""
        flat = flatten(self._state, self._options.per_rank)
        plan = self._planner.plan(flat.tensors, flat.first, flat.own)
        known, num_stepped = self._complete
        now = plan, len(optimizer_steps.stepped_optimizers())
        if self._options.boundary and (plan is not known or now[1] != num_stepped):
            require_complete(self._state, flat.tensors.values())
            self._complete = now
        described = self._comparer.describe(flat, save.number, compare=self._compares)
        self._compares = False
        if self._options.rng:
            flat.rank_values["rng"] = capture_generators()
        borrow, copy = self._snapshots.borrow, self._snapshots.copy
        for take in [borrow] if blocking else [copy, borrow]:
            try:
                save.snapshot = replace(take(flat, plan), described=described)
                return blocking
            except Exception as e:
                if not is_out_of_memory(e):
                    raise
                why = str(e).partition("\n")[0]
            if not blocking:
                level = logging.DEBUG if self._has_no_memory else logging.WARNING
                _log.log(level, "saves are written while the training waits: there is no memory "
                         "to copy the state to (%s)", why)  # fmt: skip
                blocking = self._has_no_memory = True
        save.give_up(f"there is no memory for it: {why}")
        return True

    def _run(self, save: Save, niceness: int = 0) -> None:
        os.nice(niceness)  # of this thread only: nice(2), "C library/kernel differences"
        try:
            if save.snapshot is not None:
                save.run()
            if save.error is None:
                self._note_commit(save)
            elif save.problem is None:
                _log.info("%s", save.error)
            else:
                self.failures += 1
                if isinstance(save.problem, CheckpointMismatchError):
                    self._mismatch = save.problem
                _log.error("%s; the earlier ones are as they were", save.problem)
                is_fenced = isinstance(save.problem, CheckpointFencedError)  # others save
                if not is_fenced and (page := reporting.own_page()) is not None:
                    page.report_not_saved(save.step, str(save.problem))
        finally:
            save.finish()

    def _note_commit(self, save: Save) -> None:
        page = reporting.own_page() if self._options.boundary else None
        if save.is_stored:
            if page is not None:
                page.report_stored(save.step, save.duration_s)
            if self._group.rank == 0 and not self._is_remembered:
                self._is_remembered = True
                try:
                    remember_directory(self.directory)
                except OSError as e:
                    _log.warning("`checkpoints verify` has to be given %s: %s", self.directory, e)
        if page is not None:
            page.announce(save.step)

    def _settle(self) -> None:
        if self._save is not None:
            with reporting.busy():
                self._save.done.wait()

    def _expected_bytes(self, flat: Flat) -> int:
        """Estimate the size of this rank's part once the optimizers have their states."""
        planned = self._planner.plan(flat.tensors, flat.first, flat.own).num_bytes
        whole = sum(tensor.nbytes for tensor in flat.tensors.values())
        coming = 0
        for item in self._state.values():
            if isinstance(item, torch.optim.Optimizer) and not item.state:  # made in its first step
                momentum = int(bool(item.defaults.get("momentum")))
                copies = 2 if "betas" in item.defaults else momentum
                coming += copies * sum(p.nbytes for p in optimizer_steps.parameters_of(item))
        return planned + (coming * planned // whole if whole else coming)


def _refuse_second(directory: Path, state: Mapping[str, Any], boundary: bool) -> ConfigError | None:
    """Refuse a second Checkpointer, in a run, that this process cannot have beside an open one.

    At a change of the group a worker stays in the first one's save until it is stopped, so that a
    second one whose saves are boundaries would never save that step: the script would go on from a
    mixed state. Two that save different states to one directory would replace each other's
    checkpoints. Outside of a run, where scripts and notebooks open one to look at weights, this
    returns why it may not save; None if it may.
    """
    mine = directory, boundary, tuple(sorted(state))
    in_run = reporting.own_page() is not None

    def others() -> set[tuple[Path, bool, tuple[str, ...]]]:
        found = {(c.directory, c._options.boundary, tuple(sorted(c._state))) for c in _open}
        conflict = in_run and boundary
        return {c for c in found - {mine} if c[0] == directory or (conflict and c[1])}

    if others():
        gc.collect()  # an unreferenced one may wait for that
    if not (found := others()):
        return None
    where, _, keys = min(found, key=lambda each: (each[0] != directory, each))
    named = f", with the state {', '.join(keys)}" if where == directory else ""
    both = all(each[1] for each in found) and boundary
    remedy = (
        "and a change of the group stops the workers right after the save of one of them: put both "
        "states into one Checkpointer, close() the one that only restores, or give options="
        "CheckpointOptions(boundary=False), and a directory of its own, to one that may restore an "
        "older step, as of the best model"
        if both
        else "and each would remove the other's checkpoints: give each a directory of its own, or "
        "close() the one that only restores"
    )
    refusal = ConfigError(
        "directory",
        str(directory),
        f"this script has an open Checkpointer of {where}{named}, {remedy}",
    )
    if in_run:
        raise refusal
    return refusal


@dataclass(frozen=True)
class CheckpointOptions:
    """How a Checkpointer works.

    Attributes:
        asynchronous: Write behind the training's back. Otherwise `Checkpointer.save` returns when
            all is committed.
        when_busy: What a save does while an earlier one is still being written: ``wait`` for it,
            or ``skip`` the new one.
        rng: Save and restore the random number generators of each rank (`state`).
        strict: Refuse to restore a checkpoint that has other keys than the state.
        replicated: Who writes what all ranks have: ``spread`` over all, or the ``first``.
        accept_inexact: Keys of the state whose objects are restored under another world size as
            rank 0 had them, though each rank had a state of its own: samples are trained twice or
            never, if it is a position in data.
        per_rank: Keys of the state whose tensors and values each rank has for itself; stored and
            given back as they are, under the same number of ranks only: pipeline stages, experts
            that are not replicated, an optimizer that has its state on the owner only.
        timeout_s: How long one rank waits for another to finish writing, more than 0.
        boundary: Whether a save is a moment at which the group may change, and the run goes on from
            there. One Checkpointer of a script has that. False for one beside it, as of the best
            model: after a change of the group its newest step may be older than the other's.
        take_over: Id of the run whose directory of checkpoints this run goes on from, and which
            saves there no more; ``"no run"`` where no run has made it.
    """

    asynchronous: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    rng: bool = True
    strict: bool = True
    replicated: Literal["spread", "first"] = "spread"
    accept_inexact: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    timeout_s: float = 600.0
    boundary: bool = True
    take_over: str | None = None

    def __post_init__(self) -> None:
        for key, allowed in (("when_busy", ("wait", "skip")), ("replicated", ("spread", "first"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(key, getattr(self, key), f"give one of {', '.join(allowed)}")
        for key in ("accept_inexact", "per_rank"):
            if isinstance(keys := getattr(self, key), str):
                raise ConfigError(key, keys, f"give a tuple of keys: ({keys!r},)")
        if not self.timeout_s > 0:
            raise ConfigError("timeout_s", self.timeout_s, "give a number of seconds above 0")


def is_any_open() -> bool:
    """Return whether this process has a Checkpointer that is not closed."""
    return bool(_open)


def _settle_all() -> None:
    for each in list(_open):
        each._settle()


# A run ends when all workers have returned; what is committed later is fenced.
reporting.when_returned(_settle_all)
