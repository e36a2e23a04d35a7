"""OpenMetrics of one node: a text file that is always written, and a port if one is asked for.

    <run>/metrics/<task>.prom    replaced in one step every `EVERY_S`, where a server has the files
                                 every `SELDOM_S`; as node_exporter's textfile collector reads it,
                                 by a link into its folder
    http://127.0.0.1:<port>/metrics   with `launcher.agent.metrics_port`

Every metric has the labels run, task and node. All work is on a thread of its own: a file system
that hangs delays the file, and nothing else. The names are documented in docs/watching.md.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest

from hpc_elastic.files import write_atomic
from hpc_elastic.progress import Progress

_log = logging.getLogger(__name__)

EVERY_S = 5.0
SELDOM_S = 120.0
LOOPBACK = "127.0.0.1"
LABELS = ("run", "task", "node")
_PREFIX = "hpc_elastic_"


def _gauge(text: str) -> Any:
    return field(default=None, metadata={"kind": GaugeMetricFamily, "text": text})


def _counter(text: str) -> Any:
    return field(default=None, metadata={"kind": CounterMetricFamily, "text": text})


@dataclass(frozen=True)
class Sample:
    """What is known of a node at one moment; None: not known, and left out."""

    step: float | None = _gauge("Optimizer steps done.")
    steps_per_second: float | None = _gauge("Over the last half minute or so.")
    samples: float | None = _gauge("Samples seen, as the script reports them.")
    loss: float | None = _gauge("The last loss, as the script reports it.")
    group_nodes: float | None = _gauge("Nodes in the group; 0 while it is formed.")
    group_workers: float | None = _gauge("Workers in the group.")
    rounds: float | None = _counter("How often the group was formed.")
    restarts: float | None = _counter("Restarts that were spent on workers' failures.")
    requeues: float | None = _counter("How often this task has gone back to the queue.")
    notices: float | None = _counter("Whether this node is to be left: preempted, or out of time.")
    checkpoint_age_seconds: float | None = _gauge("Since the last checkpoint of this group.")
    checkpoint_blocked_seconds: float | None = _counter("Training held up by checkpoints.")
    goodput_ratio: float | None = _gauge("Share of this task's time that made new steps.")
    up_seconds: float | None = _gauge("Since this task was started.")


class Tally:
    """What is added up over the rounds of one task (pure); monotonic seconds.

    Args:
        now: When the task was started.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._furthest: int | None = None
        self._step: tuple[int, float] | None = None
        self._useful_s = 0.0
        self._marks: list[tuple[float, int]] = []
        self._boundary: tuple[int | None, float] = (None, now)
        self._busy_s = self._busy_before_s = 0.0

    def new_round(self) -> None:
        """The workers are new, and so are their pages."""
        self._busy_before_s += self._busy_s
        self._busy_s, self._step, self._marks = 0.0, None, []

    def up_s(self, now: float) -> float:
        """Return the seconds since the task was started."""
        return max(now - self._since, 1e-9)

    def look(self, worker: Progress, now: float) -> Sample:
        """Return what is known now.

        Args:
            worker: What the node's first worker has published.
            now: The time.
        """
        self._note_step(worker.step, now)
        if worker.boundary is not None and worker.boundary != self._boundary[0]:
            self._boundary = (worker.boundary, now)
        self._busy_s = worker.busy_s
        age_s = None if self._boundary[0] is None else now - self._boundary[1]
        up_s = self.up_s(now)
        return Sample(
            step=worker.step, steps_per_second=self._rate(), samples=worker.samples,
            loss=worker.loss, checkpoint_age_seconds=age_s,
            checkpoint_blocked_seconds=self._busy_before_s + self._busy_s,
            goodput_ratio=min(1.0, self._useful_s / up_s), up_seconds=up_s,
        )  # fmt: skip

    def _note_step(self, step: int | None, now: float) -> None:
        if step is None or (self._step is not None and step == self._step[0]):
            return
        if self._step is not None and step > self._step[0]:
            made, at = self._step
            new = step - max(made, self._furthest or made)
            self._useful_s += (now - at) * max(0, new) / (step - made)
        self._furthest = step if self._furthest is None else max(step, self._furthest)
        self._step = (step, now)
        self._marks = [*self._marks[-6:], (now, step)]

    def _rate(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return max(0, last - first) / max(end - start, 1e-9)


class Exporter:
    """Writes and serves one node's metrics, until it is closed.

    Args:
        file: The text file; its folder is made.
        labels: The values of `LABELS`.
        look: Returns what is known now; called every `EVERY_S`, on another thread.
        port: To serve on, at 127.0.0.1; None: none. One that is taken is logged, and is no error.
        is_local: Whether the file is on a file system of this node.
    """

    def __init__(
        self,
        file: Path,
        labels: tuple[str, str, str],
        look: Callable[[], Sample],
        port: int | None = None,
        *,
        is_local: bool = True,
    ) -> None:
        self._file = file
        self._file_every_s = EVERY_S if is_local else SELDOM_S
        self._labels = labels
        self._look = look
        self._registry = CollectorRegistry(auto_describe=False)
        self._sample = Sample()
        self._registry.register(self)
        self._over = threading.Event()
        self._server = self._serve(port) if port is not None else None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Return the metrics (prometheus-client calls this)."""
        return families(self._sample, self._labels)

    def close(self) -> None:
        """Write the last state, and end; a file system that hangs is not waited for."""
        self._over.set()
        self._thread.join(1.0)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, port: int) -> Any:
        try:
            server, _ = start_http_server(port, addr=LOOPBACK, registry=self._registry)
        except OSError as e:
            _log.warning("no metrics on port %d: %s", port, e)
            return None
        return server

    def _run(self) -> None:
        last, written = False, -math.inf
        while not last:
            last = self._over.wait(EVERY_S)
            try:
                self._sample = self._look()
                if not last and now_s() - written < self._file_every_s:
                    continue
                written = now_s()
                self._file.parent.mkdir(exist_ok=True)
                text = generate_latest(self._registry).decode()  # type: ignore[no-untyped-call]
                write_atomic(self._file, text)
            except OSError as e:
                _log.info("%s: not written: %s", self._file, e)


def families(
    sample: Sample, labels: tuple[str, str, str]
) -> list[GaugeMetricFamily | CounterMetricFamily]:
    """Return a sample as metrics; what is not known is left out."""
    made = []
    for item in fields(sample):
        value = getattr(sample, item.name)
        if value is not None:
            kind, text = item.metadata["kind"], item.metadata["text"]
            family = kind(_PREFIX + item.name, text, labels=LABELS)
            family.add_metric(labels, float(value))
            made.append(family)
    return made


def now_s() -> float:
    """Return monotonic seconds."""
    return time.monotonic()
