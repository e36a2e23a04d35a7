"""The Checkpointer: what a training script saves and restores with.

    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        step = checkpointer.load_latest() or 0
        while step < steps:
            train_one_step()
            step += 1
            checkpointer.save_if_due(step, every_s=600)

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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, SupportsIndex

import torch

from hpc_elastic.checkpoint import state as state_module
from hpc_elastic.checkpoint.collectives import RankGroup
from hpc_elastic.checkpoint.memory_tier import MemoryStore, MemoryTier
from hpc_elastic.checkpoint.restore import Restorer
from hpc_elastic.checkpoint.save import Save, SaveContext
from hpc_elastic.checkpoint.sharding import Planner
from hpc_elastic.checkpoint.snapshot import Snapshots
from hpc_elastic.checkpoint.state import Flat, RankStates, flatten, rank_states
from hpc_elastic.checkpoint.store import Cleaner, Retention, Store, remember
from hpc_elastic.errors import CheckpointError, CheckpointFencedError, ConfigError
from hpc_elastic.run.directory import default_checkpoints
from hpc_elastic.worker import reporting
from hpc_elastic.worker.checkpoint_trigger import should_checkpoint

_log = logging.getLogger(__name__)

_NICENESS = 19
"""Of the thread that writes: it gets what the training leaves of the cores."""
_CLEANED_UP_IN_S = 1.0
"""A save that returns when it is committed waits so long for removals, which are sooner over."""
_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Those of this process whose saves are boundaries, until they are closed."""
_numbers: dict[Path, itertools.count[int]] = {}
"""Counts the saves of each directory, so that no two share a staging folder."""


class Checkpointer:
    """Saves a state, and restores the newest one that verifies.

    The state is a mapping from names to

    - objects with state_dict() and load_state_dict(): modules, optimizers, schedulers, samplers;
    - tensors, which are restored in place;
    - dicts of your own values, restored in place: tensors, NumPy arrays and numbers, int, float,
      complex, str, bytes, bool, None, timedelta, and lists, tuples, sets and dicts of them. Their
      types come back exactly; a defaultdict's factory has to be a builtin type or None.

    Values that are no tensors are saved as rank 0 has them; tensors that are not sharded are taken
    to be the same on all ranks. An object that is neither module nor optimizer gets back on each
    rank what its state_dict() was there. Under another number of ranks, one that can be iterated
    (a data loader: its state is one rank's position), or whose state was not the same on all ranks,
    is refused by `load_latest`, unless `CheckpointOptions.accept_inexact` names its key;
    `hpc_elastic.data` has what fits any number. The step, and each rank's random number generators,
    are saved too.

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
                the working directory.
            keep_last: How many of the newest checkpoints are kept, at least 1.
            keep_every: Checkpoints of steps that are a multiple of this are kept for ever.
            memory_tier: Keep saves in the nodes' memory, too, and write only some of them to the
                directory; see `MemoryTier`.
            options: See `CheckpointOptions`.

        Raises:
            ConfigError: an argument is wrong, the directory cannot be written, or the state holds
                what cannot be stored. The message names it and the remedy.
            CheckpointError: there are several ranks, but no process group yet.
        """
        self.failures = 0
        self.blocked_s = 0.0
        self._options = options or CheckpointOptions()
        if not isinstance(state, Mapping) or not state:
            raise ConfigError("state", state, 'give a mapping such as {"model": model}')
        for key in state:
            if not isinstance(key, str) or not key:
                raise ConfigError("state", key, "its keys have to be texts")
        self._state = dict(state)
        rule = Retention(keep_last, keep_every)
        flat = flatten(self._state)
        store = Store(Path(directory or default_checkpoints()).absolute())
        if self._options.boundary:
            _require_one(store.directory, self._state)
        store.prepare()
        self._group = RankGroup.current()
        for key in rank_states(self._state, flat)["positions"]:
            if self._group.rank == 0 and key not in self._options.accept_inexact:
                _log.warning(
                    "%s: the state of %s is one rank's position in its data, and is restored under "
                    "the same number of ranks only: hpc_elastic.data has what fits any number",
                    key,
                    type(self._state[key]).__name__,
                )
        self._planner = Planner(self._group.rank, self._group.world_size, self._options.replicated)
        self._memory: MemoryStore | None = None
        if memory_tier is not None:
            num_bytes = self._expected_bytes(flat)
            self._memory = MemoryStore(memory_tier, store.directory, self._group, num_bytes)
        self._context = SaveContext(
            store, self._group, rule, self._options.timeout_s, Cleaner(store), memory=self._memory
        )
        self._snapshots = Snapshots()
        self._save: Save | None = None
        self._committed: int | None = None
        self._stored: int | None = None
        """Of what was committed, the last in the shared directory."""
        self._is_remembered = False
        """Whether the directory is recorded for the run."""
        self._numbers = _numbers.setdefault(store.directory, itertools.count())
        if self._options.boundary:
            _open.add(self)
        if self._options.asynchronous:
            self._snapshots.warm_up(flat, self._expected_bytes(flat))

    def save(self, step: SupportsIndex, *, urgent: bool | None = None) -> bool:
        """Save the state as of a step (every rank, at the same steps).

        Returns as soon as the state may change again; an urgent save, and any without
        ``asynchronous``, when it is committed. What goes wrong with writing never ends the
        training: it is logged, counted in `failures`, and raised by `wait`.

        Args:
            step: Optimizer steps done, at least 0. A step that is committed already, and good,
                stays as it is.
            urgent: The group is about to end (the same on every rank): write to the directory, do
                only what is needed, and return when it is committed; an earlier save that is not
                almost written is given up. By default, whether `should_checkpoint` has found that
                the group changes at this step, unless the option ``boundary`` is False.

        Returns:
            Whether the step is saved, or being saved; False if it was skipped or failed.

        Raises:
            ConfigError: the step is no number, or something in the state cannot be stored.
        """
        begin = time.monotonic()
        try:
            index = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            index = -1
        if index < 0:
            raise ConfigError("step", step, "give the number of optimizer steps done, at least 0")
        step, number = index, next(self._numbers)
        with reporting.busy():
            if urgent is None:
                urgent = self._options.boundary and reporting.save_is_urgent(step)
            to_store = urgent or self._memory is None or self._memory.shared_due(number)
            save = Save(self._context, step, number, urgent, to_store)
            page = reporting.own_page() if self._options.boundary else None
            pauses = page is not None and page.pauses_at(step)
            blocking = urgent or pauses or not self._options.asynchronous
            if not self._is_saved_already(save, blocking=blocking):
                if not self._finish_earlier(save):
                    return False
                self._start(save, blocking=blocking)
            self.blocked_s = time.monotonic() - begin
            if (page := reporting.own_page()) is not None:
                page.report_blocked(self.blocked_s)
            _log.debug("step %d: training was held up for %.3f s", step, self.blocked_s)
            if blocking and self._committed == step and self._options.boundary:
                reporting.mark_checkpoint(step=step)
        return not blocking or self._committed == step

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
        random number generators for, since there were fewer, get new ones (`state.derive`).

        Returns:
            The step; None if there is no checkpoint at all.

        Raises:
            CheckpointCorruptError: there are checkpoints, but none verifies. To begin anew, move
                them away.
            CheckpointError: the checkpoint does not fit the state, or not this number of ranks;
                the message names the key. The state may be filled in part.
        """
        begin = time.monotonic()
        self._settle()
        context = self._context
        group, accepted = self._group, self._options.accept_inexact
        ranks = RankStates(group.rank, group.world_size, accepted)
        restorer = Restorer(context.store, group, ranks, context.damaged, self._memory)
        with reporting.busy():
            step = restorer.restore(self._state, self._options.strict, with_rng=self._options.rng)
        self._save = None
        self._committed = step
        self._stored = step if step in context.store.steps() else None
        if self._options.boundary and (page := reporting.own_page()) is not None:
            page.report_restored(step, time.monotonic() - begin)
        return step

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._context.store.directory

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way on this rank."""
        return self._save is None or self._save.is_done

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
        """Close it at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until everything is committed; an error of the block goes first."""
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise

    # ---- one save -------------------------------------------------------------------------

    def _is_saved_already(self, save: Save, *, blocking: bool) -> bool:
        """Whether the step is committed, or being written; if it has to be, wait for it."""
        earlier = self._save
        if earlier is not None and earlier.step == save.step and earlier.to_store >= save.to_store:
            if save.urgent:
                earlier.abort_if_unfinished()
            if blocking:
                earlier.wait()
            if not earlier.error:
                return True
        return save.step == self._stored

    def _finish_earlier(self, save: Save) -> bool:
        """See that no earlier save is under way; False if the new one is skipped instead."""
        earlier = self._save
        if earlier is None or earlier.is_done:
            return True
        if save.urgent:
            earlier.abort_if_unfinished()
        elif self._options.when_busy == "skip":
            reason = f"step {earlier.step} is still being written"
            _log.warning("the checkpoint of step %d is skipped: %s", save.step, reason)
            try:
                threading.Thread(target=save.mark_failed, args=(reason,)).start()
            except RuntimeError:
                save.mark_failed(reason)
            return False
        else:
            _log.debug("step %d waits for step %d to be written", save.step, earlier.step)
        earlier.wait()
        return True

    def _start(self, save: Save, *, blocking: bool) -> None:
        """Take a snapshot, and write it: at once, or in a thread behind the training."""
        flat = flatten(self._state)
        pieces = self._planner.plan(flat.tensors, flat.first)
        rank_values: dict[str, Any] = dict(rank_states(self._state, flat))
        if self._options.rng:
            rank_values["rng"] = state_module.capture()
        take = self._snapshots.borrow if blocking else self._snapshots.copy
        save.snapshot = take(flat, pieces, rank_values)
        self._save = save
        if not blocking:
            # Not a daemon: the program's end waits for it.
            name = f"checkpoint-{save.step}"
            thread = threading.Thread(target=self._run, args=(save, _NICENESS), name=name)
            try:
                thread.start()
                return
            except RuntimeError as e:
                _log.warning("%s: step %d is written at once", e, save.step)
        self._run(save)
        if blocking and not save.urgent:
            self._context.cleaner.wait(_CLEANED_UP_IN_S)

    def _run(self, save: Save, niceness: int = 0) -> None:
        os.nice(niceness)  # of this thread only: nice(2), "C library/kernel differences"
        try:
            save.run()
            if save.error is None:
                self._note_commit(save)
            elif save.problem is None:
                _log.info("%s", save.error)
            else:
                self.failures += 1
                _log.error("%s; the earlier ones are as they were", save.problem)
                is_fenced = isinstance(save.problem, CheckpointFencedError)  # others save
                if not is_fenced and (page := reporting.own_page()) is not None:
                    page.report_not_saved(save.step, str(save.problem))
        finally:
            save.finish()

    def _note_commit(self, save: Save) -> None:
        self._committed = save.step
        page = reporting.own_page() if self._options.boundary else None
        if save.is_stored:
            self._stored = save.step
            if page is not None:
                page.report_stored(save.step, save.duration_s)
            if self._group.rank == 0 and not self._is_remembered:
                self._is_remembered = True
                try:
                    remember(self.directory)
                except OSError as e:
                    _log.warning("`verify` and others have to be given %s: %s", self.directory, e)
        if page is not None:
            page.announce(save.step)

    def _settle(self) -> None:
        if self._save is not None:
            with reporting.busy():
                self._save.wait()

    def _expected_bytes(self, flat: Flat) -> int:
        """Estimate the size of this rank's part once the optimizers have their states."""
        planned = sum(piece.num_bytes for piece in self._planner.plan(flat.tensors, flat.first))
        whole = sum(tensor.nbytes for tensor in flat.tensors.values())
        coming = 0
        for item in self._state.values():
            if isinstance(item, torch.optim.Optimizer) and not item.state:  # made in its first step
                momentum = int(bool(item.defaults.get("momentum")))
                parameters = [p for group in item.param_groups for p in group["params"]]
                copies = 2 if "betas" in item.defaults else momentum
                coming += copies * sum(p.nbytes for p in parameters)
        return planned + (coming * planned // whole if whole else coming)


def _require_one(directory: Path, state: Mapping[str, Any]) -> None:
    """Refuse a second Checkpointer whose saves are boundaries, in a run.

    At a change of the group a worker stays in the first one's save until it is stopped, so the
    second never saves that step: the script would go on from a mixed state. Two that save different
    states to one directory would also replace each other's checkpoints.

    Raises:
        ConfigError: there is an open one, of another directory or with another state.
    """
    if reporting.own_page() is None:
        return

    def others() -> set[tuple[Path, tuple[str, ...]]]:
        mine = directory, tuple(sorted(state))
        return {(each.directory, tuple(sorted(each._state))) for each in _open} - {mine}

    if others():
        gc.collect()  # an unreferenced one may wait for that
    if found := others():
        where, keys = min(found)
        named = f", with the state {', '.join(keys)}" if where == directory else ""
        raise ConfigError(
            "directory",
            str(directory),
            f"this script has an open Checkpointer of {where}{named}, and a change of the group "
            "stops the workers right after the save of one of them: put both states into one "
            "Checkpointer, close() the one that only restores, or give options="
            "CheckpointOptions(boundary=False) to one that may restore an older step, as of the "
            "best model",
        )


# ---- How a Checkpointer works, as its user wishes (pure)


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
        timeout_s: How long one rank waits for another to finish writing, more than 0.
        boundary: Whether a save is a moment at which the group may change, and the run goes on from
            there. One Checkpointer of a script has that. False for one beside it, as of the best
            model: after a change of the group its newest step may be older than the other's.
    """

    asynchronous: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    rng: bool = True
    strict: bool = True
    replicated: Literal["spread", "first"] = "spread"
    accept_inexact: tuple[str, ...] = ()
    timeout_s: float = 600.0
    boundary: bool = True

    def __post_init__(self) -> None:
        for key, allowed in (("when_busy", ("wait", "skip")), ("replicated", ("spread", "first"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(key, getattr(self, key), f"give one of {', '.join(allowed)}")
        if isinstance(self.accept_inexact, str):
            remedy = f"give a tuple of keys: ({self.accept_inexact!r},)"
            raise ConfigError("accept_inexact", self.accept_inexact, remedy)
        if not self.timeout_s > 0:
            raise ConfigError("timeout_s", self.timeout_s, "give a number of seconds above 0")
