"""Bring together a save that lies in the memory of several nodes (every rank; collective).

Every step of this is taken by all ranks with the same knowledge, so that none waits for another in
vain: an error of one rank is kept until the vote at the end, and it goes on taking part till then.

1. Each node checks what it has of the save; the ranks tell each other what is good.
2. The parts, which are small, are told to all, and merged. Each rank says which files it needs.
3. Each file goes from the first node that has it to those that need it and lack it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from hpc_elastic.checkpoint.exchange import Route, gather, tell
from hpc_elastic.checkpoint.group import Group
from hpc_elastic.checkpoint.manifest import FileEntry, Manifest, Part, merge
from hpc_elastic.checkpoint.memory import Memory, Save, free_bytes
from hpc_elastic.errors import CheckpointError

Needed = Callable[[Manifest], Collection[str]]
"""Tells which files of a checkpoint this rank has to read."""

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Nodes:
    """Which ranks are on one node, the same on every rank.

    Attributes:
        of_rank: Number of each rank's node.
    """

    of_rank: tuple[int, ...]

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

    def union(self, rows: Sequence[Sequence[int]]) -> dict[int, set[int]]:
        """Return, for each node, the places at which one of its ranks has no zero.

        Args:
            rows: One for each rank.
        """
        found: dict[int, set[int]] = {node: set() for node in sorted(set(self.of_rank))}
        for node, row in zip(self.of_rank, rows, strict=True):
            found[node] |= {i for i, number in enumerate(row) if number}
        return found


class Gathering:
    """One save that is being brought together."""

    def __init__(self, group: Group, nodes: Nodes, memory: Memory, save: Save) -> None:
        self._group = group
        self._nodes = nodes
        self._memory = memory
        self._save = save
        self._node = nodes.of_rank[group.rank]
        self._acts = nodes.first(self._node) == group.rank
        self._problem: str | None = None

    def run(self, needed: Needed) -> Manifest | None:
        """Bring it together.

        Returns:
            Its manifest, if every rank has what it needs, verified, in its node's folder of the
            save; else None, on every rank.
        """
        mine = self._check_mine()
        rows = gather(self._group, [int(r in mine) for r in range(self._save.world_size)])
        held = self._nodes.union(rows)
        lost = set(range(self._save.world_size)).difference(*held.values())
        if lost:
            self._say(f"no node has the files of ranks {sorted(lost)[:8]}")
            return None
        parts = self._tell_parts(mine, held)
        try:
            manifest = merge(
                parts, step=self._save.step, world_size=self._save.world_size, created=time.time()
            )
        except CheckpointError as e:
            self._say(str(e))
            return None
        return manifest if self._fetch(manifest, parts, held, needed) else None

    def _check_mine(self) -> dict[int, Part]:
        """Read and check this rank's share of what its node has."""
        ranks = self._memory.saves().get(self._save, [])
        index, count = self._nodes.share(self._group.rank)
        wanted = [rank for rank in ranks if rank < self._save.world_size]
        return self._memory.good_parts(self._save, wanted[index::count])

    def _tell_parts(
        self, mine: Mapping[int, Part], held: Mapping[int, Collection[int]]
    ) -> list[Part]:
        """Tell each part to all, by the first rank that has checked it."""
        rows = gather(self._group, [int(r in mine) for r in range(self._save.world_size)])
        teller = {
            part: next(rank for rank, row in enumerate(rows) if row[part])
            for part in range(self._save.world_size)
        }
        parts: dict[int, Part] = {}
        for rank in sorted(set(teller.values())):
            told = {p: mine[p].to_json() for p, by in teller.items() if by == rank and p in mine}
            text = tell(self._group, rank, json.dumps(told).encode())
            parts |= {int(p): Part.from_json(part) for p, part in json.loads(text).items()}
        return [parts[rank] for rank in sorted(parts)]

    def _fetch(
        self,
        manifest: Manifest,
        parts: Sequence[Part],
        held: Mapping[int, set[int]],
        needed: Needed,
    ) -> bool:
        files = [(part.rank, file) for part in parts for file in part.files]
        wanted = self._needs(manifest, [file for _, file in files], needed)
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
            source = next(node for node, ranks in held.items() if rank in ranks)
            sinks = [self._nodes.first(node) for node, them in lacking.items() if i in them]
            route = Route(self._group, self._nodes.first(source), sinks)
            if route.is_mine:
                self._carry(route, folder / file.name, file)
        if not self._agreed():
            return False
        self._keep_parts(parts, folder, lacking)
        return True

    def _needs(
        self, manifest: Manifest, files: Sequence[FileEntry], needed: Needed
    ) -> dict[int, set[int]]:
        """Tell, for each node, which files its ranks need."""
        names: Collection[str] = ()
        try:
            names = needed(manifest)
        except CheckpointError as e:
            self._problem = str(e)
        rows = gather(self._group, [int(file.name in names) for file in files])
        return self._nodes.union(rows)

    def _carry(self, route: Route, path: Path, file: FileEntry) -> None:
        """Take part in bringing one file to the nodes that lack it.

        What fails here is noted, and the other ranks get the blocks that they wait for.
        """
        checksum, lacks = xxhash.xxh3_64(), self._group.rank in route.sinks
        staged = path.with_name(f".{path.name}.new") if lacks else path
        with ExitStack() as stack:
            f: BinaryIO | None = None
            with self._noted():
                if lacks or self._group.rank == route.source:
                    f = stack.enter_context(staged.open("wb" if lacks else "rb"))
            for block in _blocks(file.num_bytes):
                data = memoryview(block.numpy())  # type: ignore[arg-type]
                with self._noted():
                    if f is not None and not lacks:
                        f.readinto(data)  # type: ignore[attr-defined]
                route.carry(block)
                checksum.update(data)
                with self._noted():
                    if f is not None and lacks:
                        f.write(data)
        if lacks and f"xxh3_64:{checksum.hexdigest()}" != file.checksum:
            self._problem = f"{file.name} was changed on its way"
        elif lacks:
            with self._noted():
                staged.rename(path)

    def _keep_parts(
        self, parts: Sequence[Part], folder: Path, lacking: Mapping[int, Sequence[int]]
    ) -> None:
        """Note that this node has now all files of a rank, for the next loss of a node."""
        for part in parts:
            path = folder / f"part-{part.rank}.json"
            complete = all((folder / file.name).exists() for file in part.files)
            if self._acts and lacking[self._node] and complete and not path.exists():
                with suppress(OSError):
                    staged = path.with_name(f".{path.name}.new")
                    staged.write_text(part.to_json())
                    staged.rename(path)

    def _agreed(self) -> bool:
        if self._problem is not None:
            _log.warning("step %d in memory: %s", self._save.step, self._problem)
        agreed = self._group.all_say(self._problem is None)
        if not agreed and self._problem is None:
            self._say("another rank could not bring it together; its log says why")
        return agreed

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep an error for the vote."""
        try:
            yield
        except OSError as e:
            self._problem = str(e)

    def _say(self, why: str) -> None:
        _log.warning("step %d in memory is passed over: %s", self._save.step, why)


def _blocks(num_bytes: int) -> Iterator[torch.Tensor]:
    """Give memory for so many bytes, block by block; it is the same each time."""
    buffer = torch.empty(min(num_bytes, _BLOCK_BYTES), dtype=torch.uint8)
    for begin in range(0, num_bytes, _BLOCK_BYTES):
        yield buffer[: num_bytes - begin]
