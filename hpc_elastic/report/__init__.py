"""What a run does, and what happened to it: on a login node, without torch, without a server.

- `run_view`      what a run is doing: its files, and its tasks in the scheduler; its texts
- `details`       all that `status` and `report` show of one run
- `attempts`      the events as attempts of tasks, rounds and leaders
- `node_time`     what node time was spent on
- `timeline`      the events as entries with causes and cost
- `sentences`     the timeline as text
- `progress_log`  the lines of progress.jsonl, and the pace of the training
- `report`        all of it as values: the JSON form
- `charts`        the charts of a report in Vega-Lite
- `page`          the report as HTML; as PNG it needs the extra ``report``
- `log_files`     the log files of a run as one stream of lines, also as they grow

Whatever imports this package binds it to `hpc_elastic.report`, where the function of that name was.
So the package can be called, as that function.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")

KINDS = {
    "useful": "steps that were not made before",
    "replayed": "steps that were made again after a node or worker was lost",
    "checkpoint": "the training waits for a checkpoint",
    "restore": "finding and loading a checkpoint",
    "import": "workers start and import, until their first step",
    "rendezvous": "the group forms",
    "start": "the agent of the node starts",
    "idle": "other nodes train, and this one does not",
}
"""What node time is spent on, the best first: its name and its meaning."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key, in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


class _CallablePackage(ModuleType):
    def __call__(self, **values: Any) -> None:
        """Call `hpc_elastic.worker.reporting.report`."""
        from hpc_elastic.worker.reporting import report

        report(**values)


sys.modules[__name__].__class__ = _CallablePackage
