"""The first step of a node's workers, as its agent tells of it."""

from collections.abc import Sequence
from typing import Any

from hpc_elastic.agent.elastic_agent import FirstStepLog, first_step_fields
from hpc_elastic.worker.shared_page import WorkerStatus

BLANK = WorkerStatus(None, None, None, None, None, None, 0)


def worker(step: int | None, time: float | None = None, **more: Any) -> WorkerStatus:
    """What a worker has published."""
    fields = {**vars(BLANK), "step": step, "first_step": step, "first_time": time, **more}
    return WorkerStatus(**fields)


class Pages:
    """A worker's page that can be changed, and the events that were written."""

    def __init__(self, *workers: WorkerStatus) -> None:
        self.workers = list(workers)
        self.written: list[dict[str, Any]] = []

    def beginning(self) -> FirstStepLog:
        """Of a round of these workers."""
        return FirstStepLog(
            self.write, 3, [_Page(self.workers, i) for i in range(len(self.workers))]
        )

    def write(self, **fields: Any) -> None:
        """Write the event."""
        self.written.append(fields)


class _Page:
    def __init__(self, workers: Sequence[WorkerStatus], at: int) -> None:
        self._workers, self._at = workers, at

    def read(self) -> WorkerStatus:
        """What the worker last published."""
        return self._workers[self._at]


def test_an_event_once_all_workers_of_the_node_have_made_a_step():
    """With the slowest one's time, and what restoring took."""
    pages = Pages(worker(8, 100.0, restored=7, restore_s=2.0), BLANK)
    beginning = pages.beginning()
    assert not beginning.poll()
    pages.workers[1] = worker(8, 101.0, restored=7, restore_s=2.5)
    assert beginning.poll()
    (event,) = pages.written
    assert (event["round"], event["step"], event["restored"]) == (3, 8, 7)
    assert (event["restore_s"], event["time"], event["counted"]) == (2.5, 101.0, False)


def test_the_time_that_it_took_from_the_start():
    """In seconds, on the node's own clock; never less than nothing."""
    fields = first_step_fields([worker(1, 100.0), worker(1, 104.5)], 90.0)
    assert fields["start_s"] == 14.5 and fields["restored"] is None and fields["restore_s"] == 0.0
    assert first_step_fields([worker(1, 80.0)], 90.0)["start_s"] == 0.0


def test_workers_that_only_count_say_so():
    """One is enough."""
    assert first_step_fields([worker(1, 1.0, counted=True), worker(1, 1.0)], 0.0)["counted"]
