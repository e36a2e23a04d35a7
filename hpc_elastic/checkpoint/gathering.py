"""Bring together a save that lies in the memory of several nodes (every rank; collective).

Every step of this is taken by all ranks with the same knowledge, so that none waits for another for
nothing: an error of one rank is kept until the vote at the end, and that rank takes part till then.

1. Each node checks what it has of the save; the ranks exchange what is good.
2. The parts, which are small, are sent to all, and merged. Each rank names the files it needs.
3. Each file goes from the first node that has it to those that need it and lack it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
import xxhash

from hpc_elastic.checkpoint.collectives import RankGroup
from hpc_elastic.checkpoint.manifest import FileEntry, Manifest, RankPart, merge
from hpc_elastic.checkpoint.node_memory import MemorySave, NodeMemory, free_bytes
from hpc_elastic.errors import CheckpointError
from hpc_elastic.shared_files import write_atomic
from hpc_elastic.worker.process_group import device

_log = logging.getLogger(__name__)

Needed = Callable[[Manifest], Collection[str]]
"""Returns which files of a checkpoint this rank has to read."""

_GATHERED_BYTES = 16 << 20


@dataclass(frozen=True)
class NodeDirectory:
    """Which ranks are on one node, the same on every rank."""

    of_rank: tuple[int, ...]
    """Number of each rank's node."""

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


class CopyGathering:
    """One save that is being brought together."""

    def __init__(
        self, group: RankGroup, nodes: NodeDirectory, memory: NodeMemory, save: MemorySave
    ) -> None:
        self._group = group
        self._nodes = nodes
        self._memory = memory
        self._save = save
        self._node = nodes.of_rank[group.rank]
        self._acts = nodes.first(self._node) == group.rank
        self._problem: str | None = None

    def run(self, needed: Needed) -> Manifest | None:
        """Bring it together; return its manifest, or None on every rank.

        Every rank has what it needs then, verified, in its node's folder of the save.
        """
        save, world = self._save, range(self._save.world_size)
        index, count = self._nodes.share(self._group.rank)
        ranks = [rank for rank in self._memory.saves().get(save, []) if rank in world]
        good = self._memory.good_parts(save, ranks[index::count])
        rows = self._group.gather([int(rank in good) for rank in world])
        held = self._nodes.union(rows)
        lost = set(world).difference(*held.values())
        if lost:
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
        if self._acts and num_bytes > free_bytes(folder):
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
            complete = all((folder / file.name).exists() for file in part.files)
            if self._acts and lacking[self._node] and complete and not path.exists():
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
        if lacks and f"xxh3_64:{checksum.hexdigest()}" != file.checksum:
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
