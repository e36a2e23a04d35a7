"""Tells of the first step that the workers of a node make in a round.

Each agent writes that event for its own node, as it writes all that concerns its node alone. The
leader could do it for all, but then each first step had to travel with the heartbeats, and be
waited for by whoever leads by then; one short append beside the log files that a node opens for
each worker and round anyway costs a thousand nodes less, and no leader can lose it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hpc_elastic.progress import Page, Progress


class Beginning:
    """The beginning of one round on one node.

    Args:
        write: Writes the event, and does not wait for the file system: one that hangs does not
            concern whoever watches workers.
        round_: The number of the round.
        pages: Its workers' control pages, just made.
    """

    def __init__(self, write: Callable[..., None], round_: int, pages: Sequence[Page]) -> None:
        self._write = write
        self._round = round_
        self._pages = pages
        self._started = time.time()

    def look(self) -> bool:
        """Tell whether all workers have made a step; then, once, the event is written."""
        workers = [page.read() for page in self._pages]
        if not workers or any(worker.first_step is None for worker in workers):
            return False
        self._write(round=self._round, **event_fields(workers, self._started))
        return True


def event_fields(workers: Sequence[Progress], started: float) -> dict[str, Any]:
    """Return what the event says of workers that have all made a step (pure).

    Args:
        workers: At least one.
        started: Unix seconds at which they were started.

    Returns:
        ``step``, the first that was made; ``restored``, the step of the checkpoint, None without
        one; ``restore_s`` and ``start_s``, of the slowest worker, from the start to the first step;
        ``counted``: nobody says which steps these are; ``time`` of the slowest one's step.
    """
    at = max(worker.first_time or started for worker in workers)
    return {
        "step": min(worker.first_step or 0 for worker in workers),
        "restored": max((w.restored for w in workers if w.restored is not None), default=None),
        "restore_s": round(max(worker.restore_s or 0.0 for worker in workers), 3),
        "start_s": round(max(0.0, at - started), 3),
        "counted": any(worker.counted for worker in workers),
        "time": at,
    }
