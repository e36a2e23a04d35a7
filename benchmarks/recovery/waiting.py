"""Waits until a group trains, and until it has got over a fault."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from evidence.trails import show_ends

from recovery.faults import jobs
from recovery.peers import Peer
from recovery.trail import Fault, Recovery, Worker, group_of, read_workers, recovery
from slurm_sandbox import SlurmSandbox

BOUND_S = 120.0
"""Longer than any time-out that torchrun's rendezvous has by default, but for its join."""
PATIENCE_S = 150.0
_POLL_S = 0.2


def trained(folder: Path, size: int, train_s: float) -> list[Worker]:
    """Wait until the whole group has trained for so long, and return its workers; none if never."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        group = group_of(read_workers(folder), size)
        spans = [w.steps[-1][0] - w.steps[0][0] for w in group if w.steps]
        if len(spans) == size and min(spans) >= train_s:
            return group
        time.sleep(_POLL_S)
    show_ends(folder.rglob("*.log"))
    return []


def outcome(
    sandbox: SlurmSandbox, peer: Peer, folder: Path, fault: Fault
) -> tuple[str, Recovery | None]:
    """Wait for the next step, or for the end of all who could make one."""
    for poll in itertools.count():
        if recovery(read_workers(folder), fault) is not None:
            time.sleep(_POLL_S)  # the others' first steps, and the leader's events
            return "recovered", recovery(read_workers(folder), fault, peer.notices(folder))
        if time.time() - fault.at > BOUND_S:
            return "no step", None
        if poll % 5 == 4 and not set(jobs(sandbox)) - {fault.host}:
            return "all die", None
        time.sleep(_POLL_S)
    raise AssertionError("unreachable")
