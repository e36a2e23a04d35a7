"""OpenMetrics of one node: a text file, and a port if one is configured.

    <run>/metrics/<task>.prom    replaced atomically every `EVERY_S`, on a network file system every
                                 `SLOW_EVERY_S`; in the format of node_exporter's textfile
                                 collector, which reads it by a link into its folder
    http://127.0.0.1:<port>/metrics   with `launcher.agent.metrics_port`

Every metric has the labels run, task and node. All work is on a thread of its own: a file system
that hangs delays only the file. The names are documented in docs/reference/metrics.md.

The load of a worker is the CPU time per step that its main thread used, or waited for while ready
(proc(5), schedstat). It is the rank's own part of a step, since a rank that waits in a collective
sleeps. It does not measure waits for a disk, a data loader or a GPU: there the CPU thread spins, on
slow and on fast ranks alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from socketserver import ThreadingMixIn
from statistics import fmean
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest

from hpc_elastic._util import ThroughputMeter
from hpc_elastic.agent.stacks import main_thread_load_s
from hpc_elastic.gpus import has_nvidia_smi, list_gpus
from hpc_elastic.shared_files import make_folder, write_atomic
from hpc_elastic.worker.shared_page import SharedPage, WorkerStatus

_log = logging.getLogger(__name__)

EVERY_S = 5.0
SLOW_EVERY_S = 120.0
GPUS_EVERY_S = 30.0  # a call of nvidia-smi takes a second of CPU time on some nodes
LABELS = ("run", "task", "node")


def _gauge(text: str) -> Any:
    return field(default=None, metadata={"kind": GaugeMetricFamily, "text": text})


def _counter(text: str) -> Any:
    return field(default=None, metadata={"kind": CounterMetricFamily, "text": text})


@dataclass(frozen=True)
class Sample:
    """The values of a node at one moment; None for unknown values, which are left out."""

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
    gpu_use_ratio: float | None = _gauge("Share of time in which a kernel ran; mean of the GPUs.")
    gpu_memory_ratio: float | None = _gauge("Used share of the memory of the fullest GPU.")


_PACE_S = 30.0


class TaskCounters:
    """Totals over the rounds of one task, from ``now`` on (pure); monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._furthest: int | None = None
        self._step: tuple[int, float] | None = None
        self._useful_s = 0.0
        self._meter = ThroughputMeter(_PACE_S)
        self._boundary: tuple[int | None, float] = (None, now)
        self._busy_s = self._busy_before_s = 0.0

    def new_round(self) -> None:
        """Start a round with new workers and pages."""
        self._busy_before_s += self._busy_s
        self._busy_s, self._step, self._meter = 0.0, None, ThroughputMeter(_PACE_S)

    def up_s(self, now: float) -> float:
        """Return the seconds since the task was started."""
        return max(now - self._since, 1e-9)

    def update(self, worker: WorkerStatus, now: float) -> Sample:
        """Return the present values, by the page of the node's first worker."""
        step = worker.step
        if step is not None and (self._step is None or step != self._step[0]):
            if self._step is not None and step > self._step[0]:
                made, at = self._step
                new = step - max(made, self._furthest or made)
                self._useful_s += (now - at) * max(0, new) / (step - made)
            self._furthest = step if self._furthest is None else max(step, self._furthest)
            self._step = (step, now)
        self._meter.record_count(step, now)
        if worker.boundary is not None and worker.boundary != self._boundary[0]:
            self._boundary = (worker.boundary, now)
        self._busy_s = worker.busy_s
        age_s = None if self._boundary[0] is None else now - self._boundary[1]
        up_s = self.up_s(now)
        return Sample(
            step=step, steps_per_second=self._meter.rate, samples=worker.samples,
            loss=worker.loss, checkpoint_age_seconds=age_s,
            checkpoint_blocked_seconds=self._busy_before_s + self._busy_s,
            goodput_ratio=min(1.0, self._useful_s / up_s), up_seconds=up_s,
        )  # fmt: skip


class GpuMeter:
    """The use of a task's GPUs (`granted_gpus`), by nvidia-smi; no values without it.

    ``on_failure`` is called with the first reason why they cannot be measured: a GPU that is about
    to fail makes nvidia-smi hang.
    """

    def __init__(self, granted: Sequence[str], on_failure: Callable[[str], object]) -> None:
        self._granted = granted if has_nvidia_smi() else ()
        self._on_failure: Callable[[str], object] | None = on_failure
        self._last, self._next = Sample(), -math.inf
        self.fails = False

    def measure(self, now: float) -> Sample:
        """Return the values, at most `GPUS_EVERY_S` old; after a failure, none for ten times that.

        It may take half a minute.
        """
        if self._granted and now >= self._next:
            try:
                self._last, pause_s = _gpu_sample(self._granted), GPUS_EVERY_S
                self.fails = False
            except (OSError, ValueError, subprocess.TimeoutExpired) as e:
                self._last, pause_s, self.fails = Sample(), 10 * GPUS_EVERY_S, True
                _log.info("the use of the GPUs is not measured: %s", e)
                if self._on_failure is not None:
                    self._on_failure(str(e))
                    self._on_failure = None
            self._next = now + pause_s
        return self._last


def _gpu_sample(granted: Sequence[str]) -> Sample:
    ours = [gpu for gpu in list_gpus() if "?" in granted or gpu.is_one_of(granted)]
    use = [gpu.use / 100 for gpu in ours if gpu.use is not None]
    memory = [gpu.used / gpu.total for gpu in ours if gpu.total and gpu.used is not None]
    return Sample(
        gpu_use_ratio=fmean(use) if use else None, gpu_memory_ratio=max(memory, default=None)
    )


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server with few threads, for every user of the node: a new connection ends the oldest."""

    daemon_threads = True
    request_queue_size = 64
    _MOST = 16

    def __init__(self, *args: Any) -> None:
        self._open: dict[Any, None] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        for oldest in list(self._open)[: 1 - self._MOST]:
            self._open.pop(oldest, None)
            with contextlib.suppress(OSError):  # it has ended just now
                oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Write nothing: a client has hung up, or was hung up on."""


class Exporter:
    """Writes and serves one node's metrics, until it is closed.

    ``take_sample`` is called every `EVERY_S`, on another thread. ``port`` is one at 127.0.0.1; one
    in use is logged, and is no error. ``is_local``: the file is on a file system of this node.
    """

    def __init__(
        self,
        file: Path,
        labels: tuple[str, str, str],
        take_sample: Callable[[], Sample],
        port: int | None = None,
        *,
        is_local: bool = True,
    ) -> None:
        self._file = file
        self._file_every_s = EVERY_S if is_local else SLOW_EVERY_S
        self._labels = labels
        self._take_sample = take_sample
        self._registry = CollectorRegistry(auto_describe=False)
        self._sample = Sample()
        self._registry.register(self)
        self._over = threading.Event()
        self._server: Any = None
        if port is not None:
            try:
                app = make_wsgi_app(self._registry)
                self._server = make_server("127.0.0.1", port, app, _Server, _Handler)
                threading.Thread(target=self._server.serve_forever, daemon=True).start()
            except OSError as e:
                _log.warning("no metrics on port %d: %s", port, e)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Return the metrics, without unknown values (prometheus-client calls this)."""
        sample, made = self._sample, []
        for item in fields(sample):
            value = getattr(sample, item.name)
            if value is not None:
                kind, text = item.metadata["kind"], item.metadata["text"]
                family = kind(f"hpc_elastic_{item.name}", text, labels=LABELS)
                family.add_metric(self._labels, float(value))
                made.append(family)
        return made

    def close(self) -> None:
        """Write the last values, and end without waiting for a file system that hangs."""
        self._over.set()
        self._thread.join(1.0)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _run(self) -> None:
        last, written = False, -math.inf
        while not last:
            last = self._over.wait(EVERY_S)
            try:
                self._sample = self._take_sample()
                if not last and time.monotonic() - written < self._file_every_s:
                    continue
                written = time.monotonic()
                make_folder(self._file.parent)
                text = generate_latest(self._registry).decode()  # type: ignore[no-untyped-call]
                write_atomic(self._file, text)
            except OSError as e:
                _log.info("%s: not written: %s", self._file, e)


_FEWEST_STEPS = 3
_SHORTEST_S = 4.0


class WorkerLoads:
    """The load per step of each worker, over consecutive windows."""

    def __init__(self) -> None:
        self.number = 0  # of the last window
        self.last: list[tuple[int, float, float]] = []  # rank, load and time in s of a step
        self._start: dict[int, tuple[int, float, float]] = {}  # step, load, time, by rank

    def update(self, found: Mapping[int, tuple[int | None, float | None]], now: float) -> None:
        """Update with (step, seconds of load so far) of each rank."""
        known = {r: (s, b, now) for r, (s, b) in found.items() if s is not None and b is not None}
        if known.keys() != self._start.keys() or any(
            known[r][0] < self._start[r][0] for r in known
        ):
            self._start = known
            return
        window = []
        for rank, end in known.items():
            num_steps, load_s, took_s = (b - a for a, b in zip(self._start[rank], end, strict=True))
            if num_steps < _FEWEST_STEPS or took_s < _SHORTEST_S:
                return
            window.append((rank, load_s / num_steps, took_s / num_steps))
        if window:
            self.number += 1
            self.last, self._start = window, known


def apart_workers(workers: Mapping[int, WorkerStatus], world_size: int | None) -> dict[int, int]:
    """Return the size of each group that has not ``world_size`` (None: any), by global rank."""
    return {
        rank: worker.group
        for rank, worker in workers.items()
        if worker.group is not None and world_size is not None and worker.group != world_size
    }


class WorkerObserver:
    """The measurements of one task's workers, over all rounds; ``base`` returns other fields."""

    def __init__(self, base: Callable[[], Sample], gpu_meter: GpuMeter) -> None:
        self._base = base
        self._gpu_meter, self._gpus = gpu_meter, Sample()
        self._counters = TaskCounters(time.monotonic())
        self._loads = WorkerLoads()
        self._pages: Mapping[int, SharedPage] = {}
        self._pids: Callable[[], Mapping[int, int]] = dict
        self._world_size: int | None = None
        self._lock = threading.Lock()

    def start_round(
        self,
        pages: Mapping[int, SharedPage],
        pids: Callable[[], Mapping[int, int]],
        world_size: int | None = None,
    ) -> None:
        """Start to measure the workers of another round (agent's thread).

        ``pages`` are by global rank, in order, and ``pids`` by local rank. ``world_size`` is None
        if they need no process group.
        """
        with self._lock:
            self._world_size = world_size
            self._pages, self._pids, self._loads = pages, pids, WorkerLoads()
            self._counters.new_round()

    def progress(self) -> dict[str, Any]:
        """Return the content of a heartbeat: values of the first worker, and the loads of all."""
        pages, loads = self._pages, self._loads
        if not pages:
            return {}
        workers = {rank: page.read() for rank, page in pages.items()}
        first, apart = workers[min(workers)], apart_workers(workers, self._world_size)
        bad = [[r, w.bad_step, w.bad_loss] for r, w in workers.items() if w.bad_step is not None]
        progress = {
            "step": first.step, "total": first.total_steps, "loss": first.loss,
            "samples": first.samples, "blocked_s": round(first.blocked_s, 3),
            "metrics": first.metrics, "gpu_use": self._gpus.gpu_use_ratio,
            "gpu_memory": self._gpus.gpu_memory_ratio,
            **({"apart": list(apart.items())} if apart else {}),
            **({"bad_loss": bad[0]} if bad else {}),
        }  # fmt: skip
        return {**progress, "loads": [loads.number, loads.last]} if loads.number else progress

    def gpus_fail(self) -> bool:
        """Return whether the GPUs cannot be measured."""
        return self._gpu_meter.fails

    def sample(self) -> Sample:
        """Return the present values, and measure the loads."""
        now = time.monotonic()
        self._gpus = self._gpu_meter.measure(now)
        others = [*vars(self._base()).items(), *vars(self._gpus).items()]
        known = {name: value for name, value in others if value is not None}
        with self._lock:
            if not self._pages:
                return replace(Sample(up_seconds=self._counters.up_s(now)), **known)
            published = {rank: page.read() for rank, page in self._pages.items()}
            first, pids = min(published), self._pids()
            loads = {
                rank: main_thread_load_s(pids[rank - first]) if rank - first in pids else None
                for rank in published
            }
            self._loads.update({r: (w.step, loads[r]) for r, w in published.items()}, now)
            sample = self._counters.update(published[first], now)
            for page in self._pages.values():
                page.set_goodput(sample.goodput_ratio or 0.0)
        return replace(sample, **known)
