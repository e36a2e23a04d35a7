"""The folder in which the ranks of a group write one save, before it is committed (`saving`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.checkpoint.group import Group
from hpc_elastic.checkpoint.manifest import Part
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.checkpoint.writer import write_text
from hpc_elastic.files import is_there, names_in


@dataclass(frozen=True)
class Staging:
    """One save's folder, as one rank sees it.

    Attributes:
        store: The directory that it is in.
        folder: Its name is known to the group only.
        group: Who writes there.
    """

    store: Store
    folder: Path
    group: Group

    @property
    def others(self) -> range:
        """The ranks that rank 0 waits for."""
        return range(1, self.group.world_size)

    def names(self) -> set[str]:
        """Return the names in it; none if it is not there.

        A client of NFS goes on to list a folder that rank 0 has renamed, unless its parent is
        listed first (`files`).
        """
        return {".", *names_in(self.folder)} if is_there(self.folder) else set()

    def part(self, rank: int) -> Part:
        """Read what a rank wrote."""
        return Part.from_json((self.folder / f"part-{rank}.json").read_text())

    def failure(self, names: Container[str], ranks: Iterable[int]) -> str | None:
        """Say which of the ranks gave up, and why; None if none of them did.

        Args:
            names: What is in the folder.
            ranks: Whose marks count.
        """
        for rank in ranks:
            if f"failed-{rank}.json" in names:
                return f"rank {rank} gave up: {self._reason(rank)}"
        return None

    def leave_mark(self, reason: str) -> None:
        """Tell the other ranks that this one does not take part in the save."""
        if self.group.world_size == 1:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            mark = self.folder / f"failed-{self.group.rank}.json"
            write_text(mark, json.dumps({"reason": reason}), sync=False)

    def take_back(self, reason: str) -> None:
        """Remove what this rank has written, and leave its mark; the folder, if it is alone.

        The part goes first: rank 0 may have read it, and looks for it again before it commits.
        """
        with contextlib.suppress(OSError):
            if self.group.world_size == 1:
                self.store.remove(self.folder)
                return
            for name in (f"part-{self.group.rank}.json", f"shard-{self.group.rank}.safetensors"):
                (self.folder / name).unlink(missing_ok=True)
        self.leave_mark(reason)

    def _reason(self, rank: int) -> str:
        try:
            return str(json.loads((self.folder / f"failed-{rank}.json").read_text())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return "no reason given"
