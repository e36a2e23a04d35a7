"""The fence of worker groups: whether a worker may still act for the run.

Every decision about the group of a run is a numbered entry in its run directory
(`rendezvous.log_entry`). A worker group belongs to the entry that formed it, and is over as soon
as a later entry exists: another leader was elected, or another group was formed. A worker that was
paused or cut off must not commit a checkpoint then, so it calls `check_fence` first.

With ``ft=true`` the workers of a replica outlive other replicas and leaders. They may act as long
as the last entry has their attempt of their task as a member that is not lost, and does not end the
run.

    from hpc_elastic import check_fence

    check_fence()  # right before the rename that commits
    staged.rename(checkpoint)
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpc_elastic.errors import CheckpointFencedError
from hpc_elastic.shared_files import names_listed, numbers_in, read_text

VARIABLE = "HPC_ELASTIC_FENCE"  # path of the entry that formed the worker's group
REPLICA_VARIABLE = "HPC_ELASTIC_FENCE_REPLICA"
"""``task:attempt:replica`` of a worker of a replica; not set for other workers."""


def check_fence() -> None:
    """Return if this worker's group is the present one of the run; outside of a run, always.

    It costs one listing of a small directory on the shared file system. Call it right before an
    action that must not happen twice, in the process that does it.

    Raises:
        CheckpointFencedError: The group is over. Commit nothing, and let the agent stop this
            process; the run goes on without it.
        OSError: The run directory cannot be read.
    """
    mine = own_entry()
    if mine is None:
        return
    newest = last_index(mine.parent)
    if newest <= number(mine.name):
        return
    replica_ = os.environ.get(REPLICA_VARIABLE)
    if replica_ is None:
        raise CheckpointFencedError(
            f"this worker belongs to the group of {mine}, but entry {newest} exists: "
            "another group or another leader has taken over"
        )
    task, attempt, _ = replica_.rsplit(":", 2)
    entry = json.loads(json.loads(read_text(entry_path(mine.parent, newest)))["entry"])
    names = [(member["task"], member["attempt"]) for member in entry["members"]]
    is_lost = int(entry["lost"].get(task, -1)) >= int(attempt)
    if (task, int(attempt)) not in names or entry["ending"] or is_lost:
        raise CheckpointFencedError(
            f"this worker belongs to {task}, attempt {attempt}, which is no member in entry "
            f"{newest} of {mine.parent}: it was lost, or the run has ended"
        )


def replica(task: str, attempt: int, number: int) -> str:
    """Return the value of `REPLICA_VARIABLE` for the workers of an attempt of a task."""
    return f"{task}:{attempt}:{number}"


def fencing_token() -> str | None:
    """Return the name of this worker's group; None outside of a run.

    ``r<entry>``: groups of an earlier entry are over. ``f<entry>s<replica>``: a replica of a run
    with ``ft=true``; other replicas may live.
    """
    mine = own_entry()
    if mine is None:
        return None
    replica_ = os.environ.get(REPLICA_VARIABLE)
    if replica_ is None:
        return f"r{number(mine.name)}"
    return f"f{number(mine.name)}s{replica_.rpartition(':')[2]}"


def own_entry() -> Path | None:
    """Return the entry that formed this worker's group; None outside of a run."""
    mine = os.environ.get(VARIABLE)
    return Path(mine) if mine else None


def own_run_dir() -> Path | None:
    """Return the directory of this worker's run; None outside of a run."""
    mine = own_entry()
    return None if mine is None else mine.parent.parent


def entry_path(folder: Path, which: int) -> Path:
    """Return the file of an entry."""
    return folder / f"entry.{which}.json"


def last_index(folder: Path) -> int:
    """Return the highest number of an entry in a folder; 0 if there is none."""
    return max(entries_in(folder), default=0)


def entries_in(folder: Path) -> frozenset[int]:
    """Return the numbers of all entries in a folder, which is opened again for clients of NFS."""
    return frozenset(numbers_in(names_listed(folder), "entry.", ".json"))


def number(name: str) -> int:
    """Return the number in the name of an entry's file; 0 for another file."""
    return max(numbers_in([name], "entry.", ".json"), default=0)
