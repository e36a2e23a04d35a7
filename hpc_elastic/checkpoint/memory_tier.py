"""Near memory first: saves in the nodes' memory, and only every k-th in the shared directory.

    Checkpointer(state, memory_tier=MemoryTier(shared_every=10))

A save goes to ``/dev/shm`` of the node, and from there at once to a worker on the next node
(`node_memory`), so that it survives the loss of a node; two neighbours lost at once take it with
them, and the run goes on from the shared directory. A restore takes the newest step that is
complete in the memory of all nodes together, if it is newer than the newest in the directory.

A node's memory holds up to three steps of its own ranks, and of its neighbour's: two that are
kept and one that is written. Where that does not fit on every node, all saves go to the directory.
With ``when_busy="skip"`` ranks may skip different steps, and fewer of those in memory are complete.

A save is brought together again by steps that all ranks take with the same knowledge, so that none
waits for another for nothing: an error of one rank is kept until the vote at the end, and that rank
takes part till then.

1. Each node checks what it has of the save; the ranks exchange what is good.
2. The parts, which are small, are sent to all, and merged. Each rank names the files it needs.
3. Each file goes from the first node that has it to those that need it and lack it.

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
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
import xxhash

from hpc_elastic.checkpoint import node_memory
from hpc_elastic.checkpoint.equality import merge
from hpc_elastic.checkpoint.manifest import FileEntry, Manifest, RankPart, checksum_text
from hpc_elastic.checkpoint.node_memory import MemorySave, NodeMemory
from hpc_elastic.checkpoint.owner import RankGroup
from hpc_elastic.errors import CheckpointError, ConfigError
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import read_bytes, write_atomic
from hpc_elastic.transport.interface import own_addresses
from hpc_elastic.worker.process_group import device

_log = logging.getLogger(__name__)

_GATHERED_BYTES = 16 << 20

Needed = Callable[[Manifest], Collection[str]]  # which files of it this rank has to read


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
        """Meet the others (collective); CheckpointError if another's folder fails."""
        self._tier = tier
        self._group = group
        self._token = int.from_bytes(blake2b(group.token.encode(), digest_size=7).digest())
        self._saves: dict[int, MemorySave] = {}
        self._num_bytes = num_bytes
        error: Exception | None = None
        number = None
        if group.rank == 0:
            try:
                number = node_memory.identity(directory)
            except OSError as e:
                error = e
        number, drawn = group.broadcast_json([number, secrets.token_hex(32)])
        if number is None:
            raise CheckpointError(f"rank 0 cannot write to {directory}: {error or 'see its log'}")
        try:
            base = node_memory.base_folder(tier.memory)
            self._memory = NodeMemory.of(base, number, directory)
            run = fencing.own_run_dir()
            secret = read_bytes(RunDir(run).secret) if run else b""
            self._key = hmac.digest(secret, f"checkpoint copies|{drawn}".encode(), "sha256")
            self._receiver = node_memory.Receiver(self._memory, self._key, own_addresses())
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
        room = node_memory.free_bytes(self._memory.folder) + self._memory.num_bytes()
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

        A copy that fails is only logged. After an OSError nothing is left of the part.
        """
        if not self.active:
            return
        self._memory.prune(step)
        save = MemorySave(step, self._token, self._group.world_size)
        folder, rank = self._memory.make(save), self._group.rank
        if (folder / f"part-{rank}.json").exists():
            return
        room = node_memory.free_bytes(folder)
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
            node_memory.push(self._addresses[to], self._key, save, folder, rank)
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

        What this rank needs is in the returned folder, and verified. None, on every rank, if that
        cannot be; the reason is logged.
        """
        save = self._saves[step]
        manifest = _Gathering(self._group, self._nodes, self._memory, save).run(needed)
        return None if manifest is None else (self._memory.path(save), manifest)

    def forget_newer(self, step: int) -> None:
        """Remove the saves of later steps than the restored one; -1: none was (every rank)."""
        self._memory.forget_newer(step)

    def close(self) -> None:
        """Take no more copies. What is in memory stays."""
        self._receiver.close()


@dataclass(frozen=True)
class NodeDirectory:
    """Which ranks are on one node, the same on every rank."""

    of_rank: tuple[int, ...]  # number of each rank's node

    @classmethod
    def of(cls, names: Sequence[str]) -> NodeDirectory:
        """Number the nodes of all ranks, by their names, as they come."""
        order = list(dict.fromkeys(names))
        return cls(tuple(order.index(name) for name in names))

    def ranks(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, where in enumerate(self.of_rank) if where == node]

    def first(self, node: int) -> int:
        """Return the first rank of a node, which acts for it."""
        return self.of_rank.index(node)

    def share(self, rank: int) -> tuple[int, int]:
        """Return the place of a rank among those of its node, and their number."""
        mine = self.ranks(self.of_rank[rank])
        return mine.index(rank), len(mine)

    def neighbour(self, rank: int) -> int | None:
        """Return the rank, on the next node, that keeps copies of a rank's saves; None if alone."""
        nodes = sorted(set(self.of_rank))
        if len(nodes) == 1:
            return None
        there = self.ranks(nodes[(nodes.index(self.of_rank[rank]) + 1) % len(nodes)])
        return there[self.share(rank)[0] % len(there)]

    def union(self, rows: Sequence[Sequence[int]]) -> dict[int, set[int]]:
        """Return, for each node, the places at which the row of one of its ranks has no zero."""
        found: dict[int, set[int]] = {node: set() for node in sorted(set(self.of_rank))}
        for node, row in zip(self.of_rank, rows, strict=True):
            found[node] |= {i for i, number in enumerate(row) if number}
        return found


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
        needed = (node_memory.NUM_KEPT + 1) * steps + own[node]
        room = min(rows[rank][1] for rank in nodes.ranks(node))
        if needed > room:
            return node, needed, room
    return None


class _Gathering:
    """One save that is being brought together, by every rank; `_carry` is for those it names."""

    def __init__(
        self, group: RankGroup, nodes: NodeDirectory, memory: NodeMemory, save: MemorySave
    ) -> None:
        self._group, self._nodes, self._memory, self._save = group, nodes, memory, save
        self._node = nodes.of_rank[group.rank]
        self._acts = nodes.first(self._node) == group.rank
        self._problem: str | None = None

    def run(self, needed: Needed) -> Manifest | None:
        """Bring it together: every rank has what it needs, verified, in its node's folder then."""
        save, world = self._save, range(self._save.world_size)
        index, count = self._nodes.share(self._group.rank)
        ranks = [rank for rank in self._memory.saves().get(save, []) if rank in world]
        good = self._memory.good_parts(save, ranks[index::count])
        rows = self._group.gather([int(rank in good) for rank in world])
        held = self._nodes.union(rows)
        if lost := set(world).difference(*held.values()):
            self._warn(f"no node has the files of ranks {sorted(lost)[:8]}")
            return None
        parts = self._all_parts(good, rows)
        try:
            manifest = merge(parts, step=save.step, world_size=save.world_size, created=time.time())
        except CheckpointError as e:
            self._warn(str(e))
            return None
        return manifest if self._fetch(manifest, parts, held, needed) else None

    def _all_parts(
        self, good: Mapping[int, RankPart], rows: Sequence[Sequence[int]]
    ) -> list[RankPart]:
        """Return every part, as sent by the first rank that has checked it."""
        senders = [column.index(1) for column in zip(*rows, strict=True)]
        parts: dict[int, RankPart] = {}
        for sender in sorted(set(senders)):
            mine = [part for part, by in enumerate(senders) if by == sender and part in good]
            sent = self._group.broadcast_json([good[part].to_json() for part in mine], sender)
            parts |= {part.rank: part for part in map(RankPart.from_json, sent)}
        return [parts[rank] for rank in sorted(parts)]

    def _fetch(
        self,
        manifest: Manifest,
        parts: Sequence[RankPart],
        held: Mapping[int, set[int]],
        needed: Needed,
    ) -> bool:
        files = [(part.rank, file) for part in parts for file in part.files]
        names: Collection[str] = ()
        try:
            names = needed(manifest)
        except CheckpointError as e:
            self._problem = str(e)
        wanted = self._nodes.union(self._group.gather([int(f.name in names) for _, f in files]))
        lacking = {
            node: [i for i in wanted[node] if files[i][0] not in ranks]
            for node, ranks in held.items()
        }
        num_bytes = sum(files[i][1].num_bytes for i in lacking[self._node])
        folder = self._memory.make(self._save)
        if self._acts and num_bytes > node_memory.free_bytes(folder):
            self._problem = f"{folder} has no room for {num_bytes} bytes from other nodes"
        if not self._agreed():
            return False
        for i, (rank, file) in enumerate(files):
            source = self._nodes.first(next(n for n, ranks in held.items() if rank in ranks))
            sinks = [self._nodes.first(node) for node, them in lacking.items() if i in them]
            # A broadcast reaches several at once, and is for all ranks.
            if len(sinks) > 1 or (sinks and self._group.rank in (source, *sinks)):
                self._carry(source, sinks, folder / file.name, file)
        if not self._agreed():
            return False
        for part in parts:  # of ranks whose files this node now has, for the next loss of a node
            path = folder / f"part-{part.rank}.json"
            has_files = all((folder / file.name).exists() for file in part.files)
            if self._acts and lacking[self._node] and has_files and not path.exists():
                with suppress(OSError):
                    write_atomic(path, part.to_json())
        return True

    def _carry(self, source: int, sinks: Sequence[int], path: Path, file: FileEntry) -> None:
        """Take part in bringing one file from a rank to others, on nodes that lack it.

        What fails here is noted, and the other ranks get the blocks that they wait for.
        """
        size = min(file.num_bytes, _GATHERED_BYTES)
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        rank, checksum = self._group.rank, xxhash.xxh3_64()
        lacks = rank in sinks
        staged = path.with_name(f".{path.name}.new") if lacks else path
        with ExitStack() as stack:
            f: BinaryIO | None = None
            with self._kept():
                if lacks or rank == source:
                    f = stack.enter_context(staged.open("wb" if lacks else "rb"))
            for begin in range(0, file.num_bytes, _GATHERED_BYTES):
                block = buffer[: file.num_bytes - begin]
                data = memoryview(block.numpy())  # type: ignore[arg-type]
                with self._kept():
                    if f is not None and not lacks:
                        f.readinto(data)  # type: ignore[attr-defined]
                moved = block.to(device())
                if len(sinks) > 1:
                    dist.broadcast(moved, src=source)
                elif rank == source:
                    dist.send(moved, dst=sinks[0])
                else:
                    dist.recv(moved, src=source)
                if moved.device != block.device:
                    block.copy_(moved)
                checksum.update(data)
                with self._kept():
                    if f is not None and lacks:
                        f.write(data)
        if lacks and checksum_text(checksum.hexdigest()) != file.checksum:
            self._problem = f"{file.name} was changed on its way"
        elif lacks:
            with self._kept():
                staged.rename(path)

    def _agreed(self) -> bool:
        if self._problem is not None:
            _log.warning("step %d in memory: %s", self._save.step, self._problem)
        agreed = self._group.all_agree(self._problem is None)
        if not agreed and self._problem is None:
            self._warn("another rank could not bring it together; its log has the reason")
        return agreed

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an error for the vote, since the other ranks go on."""
        try:
            yield
        except OSError as e:
            self._problem = str(e)

    def _warn(self, why: str) -> None:
        _log.warning("step %d in memory is passed over: %s", self._save.step, why)
