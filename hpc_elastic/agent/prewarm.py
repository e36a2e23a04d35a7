"""What a spare does until it becomes a worker: import ahead, then wait (see `agent/spares`).

Nothing of it may show later: the worker goes on as a process that was started just then. Imports
run in the main thread, since modules keep thread-local state; their output is kept, and comes
first in the worker's log.

Imports must not slow the training beside them, and an ordinary user can not take back a higher nice
value, nor SCHED_IDLE (sched(7)): a spare rests between imports, and is SCHED_BATCH, which wakes up
without pushing others aside and can be taken back.

Before any training the agent imports torch too, and is needed first: where no CPU is free
meanwhile, a spare begins after it, or is a worker by then that has imported nothing, which costs no
more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path

from hpc_elastic.readable import readable

_OUTPUTS = (1, 2)
_REST = 2.0
"""Seconds of rest for each second of CPU time."""
_SLICE_S = 0.005
_WINDOW_S = 0.2
"""Over so long a spare sees whether a CPU is free."""
_ALONG = {"torch": ("torch._dynamo", "hpc_elastic.checkpoint.checkpointer")}
"""The first optimizer of a process imports the former, which takes as long as torch itself."""
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMPY_"),
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "TORCH", "PYTORCH_"),
)
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_")
"""The agent sets such variables for each worker; they are read when a process group is made."""


def fits(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Tell whether a process started with one environment can take over another one."""
    return _read_at_start(before) == _read_at_start(now)


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
    }


def warn_of_late_variables(before: Mapping[str, str]) -> None:
    """Name the variables that the script sets for its own `import torch`, which came before it.

    The choice of GPUs is in time: it is read when the first one is used.
    """
    was, now = _read_at_start(before), _read_at_start(os.environ)
    changed = {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
    late = sorted(name for name in changed if not name.startswith("CUDA_"))
    if late:
        print(
            f"hpc_elastic: the script sets {', '.join(late)}, but this process had imported torch "
            "before: set them in launcher.env, or set launcher.agent.spares=false",
            file=sys.stderr,
        )


def wait_for_use(how: str, modules: list[str]) -> None:
    """Import the modules, then block until the agent makes this process a worker.

    Ends the process if the agent has no use for it.

    Args:
        how: The descriptor of the socket to the agent, and ``paced`` or ``at once``.
        modules: What to import; one that can not be imported is told to the agent.
    """
    number, _, pace = how.partition(" ")
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    _keep_output()
    with uncollected(), _in_the_background(channel) if pace == "paced" else _later(channel):
        failed = _import_ahead(modules, channel)
    with channel:
        with contextlib.suppress(OSError):  # handed over before, and the socket closed since
            report = {"failed": failed, "holds_gpu": _holds_gpu()}
            channel.sendall(json.dumps(report).encode() + b"\n")
        env, outputs = _receive(channel)
    _take_environment(env)
    for descriptor, output in zip(_OUTPUTS, outputs, strict=True):
        _go_on_in(descriptor, output)


def _import_ahead(modules: list[str], channel: socket.socket) -> dict[str, str]:
    """Import modules, until this process is needed; return why which of them can not be imported.

    What is left then may be nothing that the user's script wants.
    """
    failed = {}
    for name in (each for module in modules for each in (module, *_ALONG.get(module, ()))):
        if _is_needed(channel):
            break
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as e:
            if name in modules:
                failed[name] = f"{type(e).__name__}: {e}"
    return failed


def _is_needed(channel: socket.socket, wait_s: float = 0.0) -> bool:
    return bool(readable(channel, timeout_s=wait_s))


def _holds_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector from what is imported, here and later: its looks take a tenth of a second.

    All that there is then is taken for what lasts as long as the process (`gc.freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _later(channel: socket.socket) -> Iterator[None]:
    """Begin once a CPU is free, or the agent, which imports as well, does without; or at need."""
    agent, cpus = os.getppid(), {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with contextlib.suppress(OSError):  # a kernel that does not count
        looked = time.monotonic(), _wanted_s(agent), _free_s(cpus)
        while not _is_needed(channel, _WINDOW_S):
            before, looked = looked, (time.monotonic(), _wanted_s(agent), _free_s(cpus))
            passed, wanted, free = (now - then for now, then in zip(looked, before, strict=True))
            if free > 0.8 * passed or wanted < 0.5 * passed:
                break
    yield


def _wanted_s(pid: int) -> float:
    """Return how long a main thread has run, or was ready to (proc(5), schedstat)."""
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


def _free_s(cpus: Collection[str]) -> float:
    """Return how long these CPUs were idle, or busy with niced processes (proc(5), stat)."""
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *times = line.split()
        if name in cpus:
            _, niced, _, idle, waits = map(int, times[:5])
            ticks += niced + idle + waits
    return ticks / os.sysconf("SC_CLK_TCK")


class _Rests(MetaPathFinder):
    """Finds nothing, and rests before each import in proportion to what the last ones took."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._needed = False
        self._since = time.thread_time()

    def find_spec(self, *_: object) -> None:
        spent = time.thread_time() - self._since
        if self._needed or spent < _SLICE_S:
            return
        self._needed = _is_needed(self._channel, spent * _REST)
        self._since = time.thread_time()


@contextlib.contextmanager
def _in_the_background(channel: socket.socket) -> Iterator[None]:
    """Leave the CPU to others, until the agent needs this process."""
    ordinary = os.sched_getscheduler(0) == os.SCHED_OTHER
    if ordinary:
        _set_policy(os.SCHED_BATCH)
    rests = _Rests(channel)
    sys.meta_path.insert(0, rests)
    try:
        yield
    finally:
        sys.meta_path.remove(rests)
        if ordinary:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    """Set it for every thread: those that an import has started have their parent's."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def _keep_output() -> None:
    for descriptor in _OUTPUTS:
        kept = os.memfd_create("hpc_elastic-spare")
        os.dup2(kept, descriptor)
        os.close(kept)


def _go_on_in(descriptor: int, output: int) -> None:
    """Turn stdout or stderr to the worker's, and write what was kept there."""
    kept = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.dup2(output, descriptor)
    os.close(output)
    while kept:
        kept = kept[os.write(descriptor, kept) :]


def _receive(channel: socket.socket) -> tuple[dict[str, str], list[int]]:
    first, outputs, _, _ = socket.recv_fds(channel, 1 << 16, len(_OUTPUTS))
    if not first:
        os._exit(0)
    message = bytearray(first)
    with contextlib.suppress(ConnectionResetError):  # closed before our report was read
        for part in iter(partial(channel.recv, 1 << 16), b""):
            message += part
    return json.loads(message)["env"], outputs


def _take_environment(env: dict[str, str]) -> None:
    """Change what differs; the rest stays as C libraries may have seen it."""
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
