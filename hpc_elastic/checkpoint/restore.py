"""Restore: the newest checkpoint that verifies, chosen by all ranks together.

Rank 0 names a step, every rank checks its share of the files, and one vote decides; so a shard is
read by one rank only before it counts. Ranks that cannot see a file, or the folder, vote against
it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_elastic.checkpoint import state
from hpc_elastic.checkpoint.collectives import RankGroup
from hpc_elastic.checkpoint.manifest import Manifest
from hpc_elastic.checkpoint.memory_tier import MemoryStore
from hpc_elastic.checkpoint.store import Store, file_problem, read_manifest
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

_log = logging.getLogger(__name__)

_NONE = -1
_LOOK_AGAIN_S = (0.0, 0.2, 1.0)
"""Pauses before a rank believes that it cannot see what rank 0 sees."""


@dataclass(frozen=True)
class Restorer:
    """Restores from one directory, and from near memory if there is a tier; all ranks make one."""

    store: Store
    group: RankGroup
    ranks: state.RankStates
    damaged: set[int]
    """Gets the steps that do not verify."""
    tier: MemoryStore | None

    def restore(self, into: Mapping[str, Any], strict: bool, *, with_rng: bool) -> int | None:
        """Fill a state; see `Checkpointer.restore` (every rank; collective)."""
        tier, rank = self.tier, self.group.rank
        needed = partial(state.files_needed, state=into, strict=strict, ranks=self.ranks)
        self.damaged.clear()
        for step, is_near in self._candidates():
            found = tier.gather(step, needed) if tier and is_near else self._find_stored(step)
            if found is None:
                continue
            folder, manifest = found
            self._load(manifest, folder, into, strict)
            if with_rng:
                mine = manifest.rank_values.get(rank, {}).get("rng")
                first = manifest.rank_values.get(0, {}).get("rng")
                if mine is not None:
                    state.restore(mine)
                elif first is not None:
                    state.derive(step, rank, first)
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

    def _candidates(self) -> Iterator[tuple[int, bool]]:
        """Give all steps, newest first, and whether it is in near memory that they are.

        The same on every rank: the directory is as rank 0 sees it.
        """
        near = self.tier.steps() if self.tier is not None else []
        stored = self.store.steps() if self.group.rank == 0 else []
        count = self.group.broadcast_int(len(stored))
        for i in range(count):
            step = self.group.broadcast_int(stored[i] if stored else _NONE)
            while near and near[0] > step:
                yield near.pop(0), True
            yield step, False
        for step in near:
            yield step, True

    def _find_stored(self, step: int) -> tuple[Path, Manifest] | None:
        """Return a checkpoint of the directory if it is good, the same answer on every rank.

        Each rank checks its share of the files.
        """
        folder, problems = self.store.folder(step), []
        manifest: Manifest | None = None
        try:
            manifest = self._read_manifest(folder)
            share = manifest.files[self.group.rank :: self.group.world_size]
            problems = [p for entry in share if (p := file_problem(folder, entry))]
        except CheckpointError as e:
            problems = [str(e)]
        for problem in problems:
            _log.warning("%s", problem)
        if self.group.all_agree(not problems):
            assert manifest is not None
            return folder, manifest
        _log.warning("%s is passed over: it does not verify on every rank", folder)
        self.damaged.add(step)
        return None

    def _read_manifest(self, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint that rank 0 sees; another node may see it later."""
        for pause_s in _LOOK_AGAIN_S:
            with contextlib.suppress(CheckpointNotFoundError):
                return read_manifest(folder)
            time.sleep(pause_s)
            self.store.steps()  # opening a directory makes a client of NFS ask the server
        return read_manifest(folder)

    def _load(
        self, manifest: Manifest, folder: Path, into: Mapping[str, Any], strict: bool
    ) -> None:
        error: CheckpointError | None = None
        try:
            state.load(manifest, folder, into, strict=strict, ranks=self.ranks)
        except CheckpointError as e:
            error = e
        except Exception as e:  # whatever it is: the other ranks wait for the vote
            error = CheckpointError(f"{folder} cannot be restored: {e!r}")
            error.__cause__ = e
        if not self.group.all_agree(error is None):
            raise error or CheckpointError(
                f"another rank could not restore {folder}; its log has the reason"
            )
