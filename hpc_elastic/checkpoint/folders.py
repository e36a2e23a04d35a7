"""Where the checkpoints of a run are: the one home of that fact, for workers and for commands.

A script chooses the directory of its Checkpointer. Where that is not ``<run>/checkpoints``, rank 0
writes it down in the run directory at the first checkpoint that it commits there:

    <run>/saves_to/<hash of the path>     the path of the directory, one line

Nothing here needs torch, so that the command line can use it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpc_elastic import fence
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.files import write_atomic
from hpc_elastic.rundir import RunDir


def remember(directory: Path) -> None:
    """Write down that this worker's run saves to a directory (rank 0; outside of a run: nothing).

    Args:
        directory: The Checkpointer's, as an absolute path.

    Raises:
        OSError: the run directory can not be written.
    """
    record = fence.own_record()
    if record is None:
        return
    run = RunDir(record.parent.parent)
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    if directory != run.checkpoints and not (run.saves_to / name).exists():
        run.saves_to.mkdir(exist_ok=True)
        write_atomic(run.saves_to / name, f"{directory}\n")


def directories(run: RunDir) -> list[Path]:
    """Return the directories that hold checkpoints of a run: the customary one first.

    Raises:
        OSError: the run directory, or one of them, can not be read.
    """
    try:
        notes = sorted(run.saves_to.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        notes = []
    known = [Path(note.read_text().rstrip("\n")) for note in notes if note.name[0] != "."]
    found = dict.fromkeys([run.checkpoints, *known])
    return [directory for directory in found if Store(directory).steps()]
