"""Near memory first: saves in the nodes' memory, and only every k-th in the shared directory.

    Checkpointer(state, memory_tier=MemoryTier(shared_every=10))

A save goes to ``/dev/shm`` of the node, and from there at once to a worker on the next node
(`replication`), so that it survives the loss of a node; two neighbours lost at once take it with
them, and the run goes on from the shared directory. A restore takes the newest step that is
complete in the memory of all nodes together (`replication`), if it is newer than the newest in the
directory.

A node's memory holds up to three steps of its own ranks, and of its neighbour's: two that are
kept and one that is written. Where that does not fit on every node, all saves go to the directory.
With ``when_busy="skip"`` ranks may skip different steps, and fewer of those in memory are complete.

Saves in memory belong to a directory of checkpoints by the number in its ``.memory-id``: one that
is removed and made again does not find those of its predecessor.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from hpc_elastic.checkpoint.collectives import RankGroup
from hpc_elastic.checkpoint.gathering import CopyGathering, Needed, NodeDirectory
from hpc_elastic.checkpoint.manifest import Manifest, RankPart
from hpc_elastic.checkpoint.node_memory import (
    NUM_KEPT,
    MemorySave,
    NodeMemory,
    base_folder,
    free_bytes,
    identity,
)
from hpc_elastic.checkpoint.replication import Receiver, push
from hpc_elastic.errors import CheckpointError, ConfigError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import read_bytes
from hpc_elastic.transport.interface import own_addresses

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryTier:
    """Where saves go.

    Attributes:
        memory: A folder on a memory file system, or a local disk; by default the folder of the
            node's agent in ``/dev/shm``.
        shared_every: The first save of a process goes to the shared directory, and every n-th
            after it; at least 1. Urgent ones always do, and so does the one at which the group
            changes, where the script calls `should_checkpoint`.
        copies: Whether each save goes to a neighbour node, too.
    """

    memory: Path | None = None
    shared_every: int = 10
    copies: bool = True

    def __post_init__(self) -> None:
        if self.shared_every < 1:
            raise ConfigError("memory_tier.shared_every", self.shared_every, "give at least 1")


class MemoryStore:
    """The saves of one directory in the memory of all nodes, as one worker sees them."""

    def __init__(self, tier: MemoryTier, directory: Path, group: RankGroup, num_bytes: int) -> None:
        """Meet the other ranks (every rank; collective).

        A save of this rank will probably take ``num_bytes``. The tier is the same on every rank.
        Raises ConfigError if the memory folder cannot be used, CheckpointError if another rank's
        cannot.
        """
        self._tier = tier
        self._group = group
        self._token = int.from_bytes(blake2b(group.token.encode(), digest_size=7).digest())
        self._saves: dict[int, MemorySave] = {}
        self._num_bytes = num_bytes
        error: Exception | None = None
        number = None
        if group.rank == 0:
            try:
                number = identity(directory)
            except OSError as e:
                error = e
        number, drawn = group.broadcast_json([number, secrets.token_hex(32)])
        if number is None:
            raise CheckpointError(f"rank 0 cannot write to {directory}: {error or 'see its log'}")
        try:
            base = base_folder(tier.memory)
            self._memory = NodeMemory.of(base, number, directory)
            entry = fencing.own_entry()
            secret = read_bytes(RunDir(entry.parent.parent).secret) if entry else b""
            self._key = hmac.digest(secret, f"checkpoint copies|{drawn}".encode(), "sha256")
            self._receiver = Receiver(self._memory, self._key, own_addresses())
        except (OSError, ConfigError, RuntimeError) as e:  # RuntimeError: no thread can be started
            error = e
        if not group.all_agree(error is None):
            raise error or CheckpointError(
                "another rank cannot use its memory; its log has the reason"
            )
        # The group rank that torch's agent gives the workers of a node, or the name of the host.
        machine = f"{socket.gethostname()}|{os.environ.get('SLURM_NODEID', '')}"
        where = os.environ.get("GROUP_RANK", machine)
        peers = group.gather_json([where, *self._receiver.address])
        self._addresses = [(address, port) for _, address, port in peers]
        self._nodes = NodeDirectory.of([node for node, *_ in peers])
        self._neighbour = self._nodes.neighbour(group.rank) if tier.copies else None
        room = free_bytes(self._memory.folder) + self._memory.num_bytes()
        rows = group.gather([num_bytes, room])
        missing = lacking_room(self._nodes, rows, copies=self._neighbour is not None)
        self.active = missing is None
        if missing is not None and group.rank == 0:
            node, needed, has = missing
            _log.warning(
                "checkpoints do not fit into memory: node %d has room for %d bytes there, and may "
                "need %d; all of them go to the shared directory", node, has, needed,
            )  # fmt: skip

    def shared_due(self, number: int) -> bool:
        """Return whether the n-th save of this process, from 0, goes to the shared directory."""
        return not self.active or number % self._tier.shared_every == 0

    def store(self, step: int, write: Callable[[Path], RankPart]) -> None:
        """Store this rank's part of a save here and with the neighbour (in any thread).

        A copy that fails is only logged. After an OSError, as without room, nothing is left of the
        part.
        """
        if not self.active:
            return
        self._memory.prune(step)
        save = MemorySave(step, self._token, self._group.world_size)
        folder, rank = self._memory.make(save), self._group.rank
        if (folder / f"part-{rank}.json").exists():
            return
        room = free_bytes(folder)
        if room < self._num_bytes:  # at the job's limit, memory files would end the job
            why = f"a part of {self._num_bytes} bytes has no room in memory, only {room} are left"
            raise OSError(errno.ENOSPC, why, str(folder))
        try:
            part = write(folder)
            self._num_bytes = sum(file.num_bytes for file in part.files)
        except BaseException:
            for path in (folder / f"shard-{rank}.safetensors", folder / f"part-{rank}.json"):
                path.unlink(missing_ok=True)
            raise
        to = self._neighbour
        if to is None:
            return
        try:
            push(self._addresses[to], self._key, save, folder, rank)
        except (OSError, CheckpointError) as e:
            _log.warning(
                "step %d is in this node's memory only; no copy on that of rank %d (%s): %s",
                step, to, self._addresses[to][0], e,
            )  # fmt: skip

    def steps(self) -> list[int]:
        """Return the steps complete in all nodes' memory, newest first, unverified (collective)."""
        index, _ = self._nodes.share(self._group.rank)
        mine = self._memory.saves() if index == 0 else {}
        rows = [(s.step, s.token, s.world_size, r) for s, ranks in mine.items() for r in ranks]
        self._saves = {s.step: s for s in complete(chain(*self._group.gather_json(rows)))}
        return sorted(self._saves, reverse=True)

    def gather(self, step: int, needed: Needed) -> tuple[Path, Manifest] | None:
        """Bring one of `steps` together, the same on every rank (every rank; collective).

        ``needed`` returns which files of the checkpoint this rank will read: they are in the
        returned folder, and verified. None, on every rank, if that cannot be; the reason is logged.
        """
        save = self._saves[step]
        manifest = CopyGathering(self._group, self._nodes, self._memory, save).run(needed)
        return None if manifest is None else (self._memory.path(save), manifest)

    def forget_newer(self, step: int) -> None:
        """Remove the saves of later steps than the restored one; -1: none was (every rank)."""
        self._memory.forget_newer(step)

    def close(self) -> None:
        """Take no more copies. What is in memory stays."""
        self._receiver.close()


def complete(rows: Iterable[Sequence[int]]) -> list[MemorySave]:
    """Return the saves with every rank's part on some node, in order (pure).

    A row has the step, token, world size and rank of a part that a node has.
    """
    found: dict[MemorySave, set[int]] = {}
    for step, token, world_size, rank in rows:
        found.setdefault(MemorySave(step, token, world_size), set()).add(rank)
    return sorted(s for s, ranks in found.items() if ranks >= set(range(s.world_size)))


def lacking_room(
    nodes: NodeDirectory, rows: Sequence[Sequence[int]], *, copies: bool
) -> tuple[int, int, int] | None:
    """Return the first node that has too little room; None if there is none (pure).

    Beside the saves, the snapshot of each of its workers takes room: of the same machine, and of
    the same job's limit. Each rank's row has the bytes of its part, and the room on its node. The
    result is the node, what it may need and what it has, in bytes.
    """
    numbers = sorted(set(nodes.of_rank))
    own = {node: sum(rows[rank][0] for rank in nodes.ranks(node)) for node in numbers}
    for i, node in enumerate(numbers):
        steps = own[node] + (own[numbers[i - 1]] if copies else 0)
        needed = (NUM_KEPT + 1) * steps + own[node]
        room = min(rows[rank][1] for rank in nodes.ranks(node))
        if needed > room:
            return node, needed, room
    return None
