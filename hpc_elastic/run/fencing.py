"""The fence: may this worker still act for its group?

Every decision about a run's group is a numbered record in its run directory
(`rendezvous.log_entry`).
A worker group belongs to the record that formed it, and is over as soon as a later one exists:
another leader was elected, or another group was formed. A worker that was paused or cut off, and
does not know, must not commit a checkpoint then; it asks here first.

With ``ft=true`` the workers of a node outlive other nodes, and leaders. They may act as long as the
last record names their attempt of their task as a member, not as lost, and not the run's end.

    from hpc_elastic import check_fence

    check_fence()  # right before the rename that commits
    staged.rename(checkpoint)
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hpc_elastic.errors import CheckpointFencedError
from hpc_elastic.shared_files import names_listed

VARIABLE = "HPC_ELASTIC_FENCE"
"""Path of the record that formed the worker's group."""
REPLICA_VARIABLE = "HPC_ELASTIC_FENCE_REPLICA"
"""``task:attempt:slot`` of a worker that belongs to a replica; others are no replicas."""

_NAME = re.compile(r"record\.(\d+)\.json")


def check_fence() -> None:
    """Return if this worker's group is the run's present one; outside of a run, always.

    Costs one listing of a small directory on the shared file system. It is to be called right
    before what must not happen twice, by the process that does it; the shorter the time between
    the two, the better.

    Raises:
        CheckpointFencedError: the group is over. Commit nothing, and let the agent stop this
            process; the run goes on without it.
        OSError: the run directory can not be read.
    """
    mine = own_record()
    if mine is None:
        return
    newest = last_record(mine.parent)
    if newest <= number(mine.name):
        return
    replica_ = os.environ.get(REPLICA_VARIABLE)
    if replica_ is None:
        raise CheckpointFencedError(
            f"this worker belongs to the group of {mine}, but record {newest} exists: "
            "another group or another leader has taken over"
        )
    task, attempt, _ = replica_.rsplit(":", 2)
    if not _belongs(json.loads(record_path(mine.parent, newest).read_text()), task, int(attempt)):
        raise CheckpointFencedError(
            f"this worker belongs to {task}, attempt {attempt}, which record {newest} of "
            f"{mine.parent} does not name as a member: it was taken for lost, or the run has ended"
        )


def replica(task: str, attempt: int, slot: int) -> str:
    """Return the value of `REPLICA_VARIABLE` for the workers of an attempt of a task."""
    return f"{task}:{attempt}:{slot}"


def fencing_token() -> str | None:
    """Return a name for this worker's group among those of the run; None outside of a run.

    ``r<record>``: groups of an earlier record are over. ``f<record>s<slot>``: a replica of a run
    with ``ft=true``, which says nothing about others.
    """
    mine = own_record()
    if mine is None:
        return None
    replica_ = os.environ.get(REPLICA_VARIABLE)
    if replica_ is None:
        return f"r{number(mine.name)}"
    return f"f{number(mine.name)}s{replica_.rpartition(':')[2]}"


def _belongs(sealed: dict[str, Any], task: str, attempt: int) -> bool:
    """Tell whether a record names an attempt of a task as a member that is not lost."""
    record = json.loads(sealed["record"])
    member = any(m["task"] == task and m["attempt"] == attempt for m in record["members"])
    return member and not record["ending"] and int(record["lost"].get(task, -1)) < attempt


def own_record() -> Path | None:
    """Return the record that formed this worker's group; None outside of a run."""
    mine = os.environ.get(VARIABLE)
    return Path(mine) if mine else None


def record_path(folder: Path, which: int) -> Path:
    """Return the file of a record."""
    return folder / f"record.{which}.json"


def last_record(folder: Path) -> int:
    """Return the highest number of a record in a folder; 0 if there is none."""
    return max(records_in(folder), default=0)


def records_in(folder: Path) -> frozenset[int]:
    """Return the numbers of all records in a folder.

    It is opened anew, which makes a client of NFS ask the server.
    """
    return frozenset(n for name in names_listed(folder) if (n := number(name)))


def number(name: str) -> int:
    """Return the number in the name of a record's file; 0 if it is none."""
    m = _NAME.fullmatch(name)
    return int(m[1]) if m else 0
