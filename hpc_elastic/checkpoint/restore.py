"""Restore: the newest checkpoint that verifies, chosen by all ranks together.

Rank 0 names a step. Every rank looks at the sizes and headers of its share of the files, and a vote
decides whether anything is touched. Then each fills its tensors in place, and compares the
checksums of its share on the way, so that no byte is read twice. A second vote decides whether the
objects load that. Else all ranks restore an earlier checkpoint over it, which has to fill all that
was overwritten. Ranks that cannot see a file, or the folder, vote against it.

A state that may have other keys than the checkpoint would keep what is damaged: there, all bytes
are read once more, before the first vote.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.checkpoint.generators import derive_generators, restore_generators
from hpc_elastic.checkpoint.manifest import FileEntry, Manifest
from hpc_elastic.checkpoint.memory_tier import MemoryStore
from hpc_elastic.checkpoint.owner import RankGroup
from hpc_elastic.checkpoint.state import Filling, RankStates
from hpc_elastic.checkpoint.store import Store, directories_of, problems_of, read_manifest
from hpc_elastic.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
)
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import is_there
from hpc_elastic.worker import reporting

_log = logging.getLogger(__name__)

_NONE, _OVER = -1, -2
_LOOK_AGAIN_S = (0.0, 0.2, 1.0)  # pauses before a rank believes that it cannot see what rank 0 sees
_NUM_ATTEMPTS = 5  # attempts in a row to read checkpoints that the other run removes meanwhile


def follow_checkpoints(
    state: Mapping[str, Any],
    run: str | os.PathLike[str],
    *,
    after: int = -1,
    poll_s: float = 10.0,
    timeout_s: float = 3600.0,
) -> Iterator[int]:
    """Fill a state from each new checkpoint of another run, and yield its step.

    For an evaluation alongside a training, or rollouts: it takes no part in that run, and changes
    nothing of it. It skips a checkpoint that a newer one has superseded. The iteration ends when
    the run has its result, with its last checkpoint. Every rank calls it; collective.

    Args:
        state: What to fill, under the keys that the run's `Checkpointer` has; it may lack some,
            such as the optimizer.
        run: The run directory.
        after: The step of the last checkpoint that was used, to go on after a restart.
        poll_s: Seconds between two looks into the directory, above 0.
        timeout_s: Longest wait for a new checkpoint, in seconds.

    Yields:
        The step of the checkpoint that the state is filled with.

    Raises:
        TimeoutError: There was no new checkpoint for `timeout_s`, and the run has no result.
        ConfigError: The checkpoint lacks a key of the state.
        CheckpointError: The checkpoint does not fit the state; the message names the key.
    """
    paths, group = RunDir(Path(run)), RankGroup.current()
    since, num_failed = time.monotonic(), 0
    while True:
        found = _NONE
        if group.rank == 0:
            is_over = is_there(paths.result)  # before the look: the last checkpoint was there then
            found = max((s.steps()[0] for s in _stores(paths)), default=_NONE)
            if found <= after:
                found = _OVER if is_over else _NONE
        newest = group.broadcast_json(found)
        if newest == _OVER:
            return
        if newest > after:
            try:
                step = _restore_newest(paths, group, state, newest)
            except CheckpointError:
                num_failed += 1
                if num_failed == _NUM_ATTEMPTS:
                    raise
                continue
            num_failed = 0
            if step is not None and step > after:
                after = step
                yield step
                since = time.monotonic()
                continue
        if group.broadcast_json(time.monotonic() - since > timeout_s):
            raise TimeoutError(
                f"{paths.path} has no checkpoint after step {after} for {timeout_s:g} s, and no "
                "result: `hpc-elastic status` shows why"
            )
        reporting.report()  # a sign of life
        time.sleep(poll_s)


def _stores(run: RunDir) -> list[Store]:
    try:
        return [Store(directory) for directory in directories_of(run)]
    except OSError as e:  # looked at again
        _log.warning("the checkpoints of %s cannot be listed: %s", run.path, e)
        return []


def _restore_newest(
    run: RunDir, group: RankGroup, state: Mapping[str, Any], newest: int
) -> int | None:
    store, stored = None, set(state)
    for pause_s in _LOOK_AGAIN_S:
        time.sleep(pause_s)
        store = next((s for s in _stores(run) if s.steps()[0] >= newest), None)
        if store is not None:
            break
    if store is not None:
        with contextlib.suppress(CheckpointError):  # it is passed over below
            stored = set(read_manifest(store.stored(store.steps()[0])).values)
    if not group.all_agree(store is not None):
        raise CheckpointError(f"a rank does not see the checkpoint of step {newest} of {run.path}")
    if not group.all_agree(stored >= set(state)):
        remedy = f"the keys have to be those of the run's Checkpointer: {', '.join(sorted(stored))}"
        raise ConfigError("state", sorted(set(state) - stored), remedy)
    assert store is not None
    return Restorer(store, group, set()).restore(state, False, with_rng=False)


@dataclass(frozen=True)
class Restorer:
    """Restores from one directory, and from near memory if there is a tier; all ranks make one."""

    store: Store
    group: RankGroup
    damaged: set[int]  # gets the steps that do not verify
    tier: MemoryStore | None = None
    accept_inexact: Container[str] = ()  # see `RankStates`
    overwritten: set[str] = field(default_factory=set)
    """Has the present tensors with numbers of a checkpoint that is not restored."""

    def restore(self, into: Mapping[str, Any], strict: bool, *, with_rng: bool) -> int | None:
        """Fill a state; see `Checkpointer.load_latest` (every rank; collective)."""
        tier, rank = self.tier, self.group.rank
        ranks = RankStates(self.group, self.accept_inexact)
        self.damaged.clear()

        def compare(manifest: Manifest) -> Filling:
            filling = Filling.of(manifest, into, ranks, strict=strict)
            if lost := sorted(self.overwritten - filling.into.keys()):
                raise CheckpointError(
                    f"{lost[0]} has numbers of a damaged checkpoint (steps {sorted(self.damaged)}),"
                    f" and is not in that of step {manifest.step}: move the damaged ones away"
                )
            return filling

        def fill(manifest: Manifest, folder: Path, verified: Sequence[FileEntry]) -> None:
            with self._vote(folder):
                filling = compare(manifest)
                self.overwritten.update(filling.into.keys() & filling.present.tensors.keys())
                filling.read(folder, verified)
            with self._vote(folder):
                filling.load()
            self.overwritten.clear()

        for step, is_near in self._candidates():
            verified: Sequence[FileEntry] = ()
            try:
                if tier and is_near:
                    found = tier.gather(step, lambda manifest: compare(manifest).files())
                    if found is None:
                        continue
                    folder, manifest = found
                else:
                    folder, manifest, verified = self._find_stored(step, at_once=not strict)
                fill(manifest, folder, verified)
            except CheckpointCorruptError as e:  # on every rank
                _log.warning("%s", e)
                self.damaged.add(step)
                continue
            if with_rng:
                mine = manifest.rank_values.get(rank, {}).get("rng")
                first = manifest.rank_values.get(0, {}).get("rng")
                if mine is not None:
                    restore_generators(mine)
                elif first is not None:
                    derive_generators(step, rank, first)
            if tier is not None:
                tier.forget_newer(step)
            level = logging.INFO if rank == 0 else logging.DEBUG
            _log.log(level, "restored the checkpoint of step %d from %s", step, folder)
            return step
        if tier is not None:
            tier.forget_newer(_NONE)
        if self.damaged:
            raise CheckpointCorruptError(
                f"no checkpoint in {self.store.directory} verifies (steps "
                f"{sorted(self.damaged)}; the log has the reasons): move them away to start anew"
            )
        return None

    def _candidates(self) -> list[tuple[int, bool]]:
        """Return all steps as rank 0 sees them, newest first; True: it is in near memory."""
        near = self.tier.steps() if self.tier is not None else []
        stored = self.group.broadcast_json(self.store.steps() if self.group.rank == 0 else [])
        found = [*((step, False) for step in stored), *((step, True) for step in near)]
        return sorted(found, key=lambda candidate: -candidate[0])

    def _find_stored(
        self, step: int, *, at_once: bool
    ) -> tuple[Path, Manifest, Sequence[FileEntry]]:
        """Return a checkpoint that all find whole, and this rank's share to verify."""
        folder = self.store.stored(step)
        with self._vote(folder):
            manifest = self._read_manifest(folder)
            files, rank, num_ranks = manifest.files, self.group.rank, self.group.world_size
            share = files[len(files) * rank // num_ranks : len(files) * (rank + 1) // num_ranks]
            for problem in problems_of(folder, manifest, share, contents=at_once):
                raise CheckpointCorruptError(problem)
        return folder, manifest, () if at_once else share

    def _read_manifest(self, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint that rank 0 sees; another node may see it later."""
        for pause_s in _LOOK_AGAIN_S:
            with contextlib.suppress(CheckpointNotFoundError):
                return read_manifest(folder)
            time.sleep(pause_s)
            self.store.steps()  # opening a directory makes a client of NFS ask the server
        return read_manifest(folder)

    @contextlib.contextmanager
    def _vote(self, folder: Path) -> Iterator[None]:
        """Let all ranks go on, or none: CheckpointCorruptError where it is damaged (collective)."""
        failed, is_damaged = None, False
        try:
            yield
        except (CheckpointCorruptError, CheckpointNotFoundError) as e:
            _log.warning("%s", e)  # and not kept: its traceback has the tensors
            is_damaged = True
        except CheckpointError as e:
            failed = e
        except Exception as e:  # whatever it is: the other ranks wait for the vote
            failed = CheckpointError(f"{folder} cannot be restored: {e!r}")
            failed.__cause__ = e
        votes = self.group.gather([int(is_damaged), int(failed is not None)])
        if any(damaged for damaged, _ in votes):
            raise CheckpointCorruptError(
                f"{folder} is passed over: it does not verify on every rank"
            )
        if any(has_failed for _, has_failed in votes):
            raise failed or CheckpointError(
                f"another rank could not restore {folder}; its log has the reason"
            )
