"""What the event log says of a node's workers that were stopped before they were done (pure).

Each agent says it for its own node: what a restart costs can be told even where the leader, and
with it all that it had heard, is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpc_elastic.progress import Progress


def event_fields(workers: Iterable[Progress]) -> dict[str, Any]:
    """Return how far workers have come.

    Args:
        workers: What they last published; a script that asks at which step to save is believed
            before the count of its optimizers' steps, which begins anew with every start.

    Returns:
        ``step``, the last one that any of them has made, and ``step_time``, Unix seconds of the
        last step that was reported; each only if it is known.
    """
    seen = list(workers)
    asked = [w.passed for w in seen if w.passed is not None]
    steps = asked or [w.step for w in seen if w.step is not None]
    times = [w.step_time for w in seen if w.step_time is not None]
    return {
        **({"step": max(steps)} if steps else {}),
        **({"step_time": round(max(times), 3)} if times else {}),
    }
