"""Warm workers: one process per worker slot of a node that has imported torch in advance.

Most of a restart of the worker group is the start of an interpreter and `import torch` in every
worker. A warm worker has done both: it is started with the worker's own command line, imports the
modules of `launcher.agent.warm_imports`, and then blocks in a read. To make it a worker, the agent
sends what a new process would inherit, and closes the socket:

    warm worker to agent   {"failed": {module: why}, "holds_gpu": bool, "no_fork": why or null} in a
                           line, after the imports
    agent to warm worker   {"env": {...}} as JSON up to the end of the stream, and with its first
                           byte the descriptors of the worker's stdout and stderr

The end of the stream without data means that the agent has ended or does not need the process. A
warm worker that still imports when it is needed is used: it is ahead of a new process.

With ``launcher.agent.warm_workers=fork`` one process of a node imports. If a fork of it is as a new
process (`_why_not_forked`), it becomes the *parent*, from which all warm workers are forked; if
not, each imports for itself:

    agent to parent        `_FORK`, and with it the descriptor of the new warm worker's socket
    fork to agent          its process id, on that socket; from then on it is any warm worker

A fork is a child of the agent, as a process that the agent has started: the process between it and
the parent ends at once, and the agent adopts orphans (`signals.adopt_orphans`).

Settings that a process reads only at its start cannot be sent: `is_compatible` compares them, and
if they differ a new process is started instead.

Until then the process must leave no trace, as if it were started at that moment. Imports run in the
main thread, since modules keep thread-local state. Their output is kept, and comes first in the
worker's log. Imports must not slow the training down, but an ordinary user cannot undo a higher
nice value or SCHED_IDLE (sched(7)). So a warm worker pauses between imports, and uses SCHED_BATCH,
which wakes up without preempting others and can be undone.

All calls come from the agent's main thread: Linux ends a child with the *thread* that started it
(PR_SET_PDEATHSIG, which every worker sets).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_elastic._util import readable
from hpc_elastic.agent import signals
from hpc_elastic.agent.stacks import has_gpu_open
from hpc_elastic.config.schema import WarmWorkers
from hpc_elastic.shared_files import read_json
from hpc_elastic.slurm.environment import mig_slices, of_slot
from hpc_elastic.worker.shared_page import WARM_WORKER_VARIABLE

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_IMPORTED_WITHIN_S = 60.0
"""Several workers wait this long for the only process of their node that imports, and a thread of
the agent with them; a process for each would take longer."""
_FORKED_WITHIN_S = 5.0
_PARENT = -1  # the slot of the process that forks the others
_FORK = b"f"


class _Forked(subprocess.Popen[bytes]):
    """A child of this process that another one has forked; its only argument is the process id."""

    def _execute_child(self, args: Sequence[str], *_: object) -> None:  # private: it starts nothing
        self.pid, self._child_created = int(args[0]), True


@dataclass
class _WarmWorker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    env: dict[str, str]
    cwd: Path | None
    ready: bool = False
    received: bytes = b""
    is_parent: bool = False

    def kill(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(signals.KILL_WAIT_S)


class WarmWorkerPool:
    """The warm workers of one node, by slot; few import at a time while the workers train."""

    def __init__(
        self, slots: int, command: Sequence[str], how: WarmWorkers = "fork", *, num_warming: int = 1
    ) -> None:
        self._forks = how != "spawn"
        self._slots = slots
        self._command = tuple(command)
        self._num_warming = num_warming
        self._workers: dict[int, _WarmWorker] = {}
        self._missing: list[int] = []
        self._paced = False
        self._dead: list[int] = []  # exit codes that `maintain` has not returned yet
        self._warned: set[str] = set()

    def fill(self, *, paced: bool) -> None:
        """Start a warm worker for every slot without one.

        ``paced``: the workers train, so few are started at a time, with little CPU, and `maintain`
        starts the others.
        """
        if self._forks and self._slots > 1 and mig_slices(os.environ):
            self._import_each("each has a part of a GPU")
        parent = self._workers.get(_PARENT)
        if parent and not (parent.cwd == _cwd() and is_compatible(parent.env, os.environ)):
            self._workers.pop(_PARENT).kill()
        self._refresh()
        self._missing = [slot for slot in range(self._slots) if slot not in self._workers]
        self._paced = paced
        self._start_missing()

    def maintain(self) -> list[int]:
        """Read reports, start the next processes; return the exit codes of those that ended."""
        self._refresh()
        dead, self._dead = self._dead, []
        return dead

    def _refresh(self) -> None:
        for slot, worker in list(self._workers.items()):
            keep = self._handle_report(worker)
            if (code := worker.process.poll()) is not None:
                what = "parent of the warm workers"
                if slot != _PARENT:
                    what = f"warm worker of slot {slot}"
                _log.warning("the %s ended by itself, with exit code %d", what, code)
                self._dead.append(code)
            if not keep or code is not None:
                self._workers.pop(slot).kill()
            elif worker.is_parent and slot != _PARENT:
                self._workers[_PARENT] = self._workers.pop(slot)
                self._missing.insert(0, slot)
        self._start_missing()

    def _start_missing(self) -> None:
        warming = sum(not worker.ready for worker in self._workers.values())
        at_once = self._num_warming if self._paced else self._slots
        if self._forks and _PARENT not in self._workers:
            at_once = 1
        while self._missing and warming < at_once:
            self._start(self._missing.pop(0))
            warming += 1

    def _import_each(self, why: str) -> None:
        _log.warning("warm workers are not forked: %s", why)
        self._forks = False

    def resize(self, slots: int) -> None:
        """Change the number of slots."""
        self._slots = slots
        self._missing = [slot for slot in self._missing if slot < slots]
        for slot in [slot for slot in self._workers if slot >= slots or not slots]:
            self._workers.pop(slot).kill()

    def await_imports(self, timeout_s: float) -> bool:
        """Wait until all have imported, or died; return False after the time-out."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._refresh()
            if all(worker.ready for worker in self._workers.values()):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    @property
    def pids(self) -> list[int]:
        """The process ids of the warm workers."""
        return [worker.process.pid for worker in self._workers.values()]

    def take_worker(
        self, slot: int, command: Sequence[str], env: Mapping[str, str], outputs: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Make the warm worker of a slot a worker; return None if a new one must be started.

        ``slot`` is the worker's local rank; ``env`` is its whole environment. The process gets
        copies of ``outputs``, the descriptors for its stdout and stderr.
        """
        deadline = time.monotonic() + _IMPORTED_WITHIN_S
        while self._forks and self._slots > 1 and time.monotonic() < deadline:
            if self.await_imports(_POLL_S):
                break
        worker = self._workers.pop(slot, None)
        self._missing = [other for other in self._missing if other != slot]
        if worker is None:
            return None
        self._handle_report(worker)
        if (
            worker.process.poll() is None
            and tuple(command) == self._command
            and worker.cwd == _cwd()
            and is_compatible(worker.env, env)
        ):
            message, num_sent = json.dumps({"env": dict(env)}).encode(), 0
            with worker.channel, contextlib.suppress(OSError):  # it must not block the agent
                num_sent = socket.send_fds(worker.channel, [message], list(outputs))
            if num_sent == len(message):
                state = "had imported" if worker.ready else "was still importing"
                _log.info("slot %d: process %d, which %s", slot, worker.process.pid, state)
                return worker.process
        if (code := worker.process.poll()) is not None:
            self._dead.append(code)
        _log.info("slot %d: its warm worker cannot be used, a new process is started", slot)
        worker.kill()
        return None

    def close(self) -> None:
        """End all warm workers."""
        self._missing = []
        while self._workers:
            self._workers.popitem()[1].kill()

    def _start(self, slot: int) -> None:
        """Start a warm worker as torch starts a worker, or fork it; an error is only logged."""
        env, cwd = of_slot(os.environ, slot, self._slots), _cwd()
        parent = self._workers.get(_PARENT)
        try:
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as on_error:
                on_error.callback(ours.close)
                if parent is not None:
                    signals.adopt_orphans()
                    socket.send_fds(parent.channel, [_FORK], [theirs.fileno()])
                    theirs.close()
                    ours.settimeout(_FORKED_WITHIN_S)
                    if not (pid := ours.recv(32)):
                        raise OSError("it could not be forked")
                    process: subprocess.Popen[bytes] = _Forked([pid.decode()])
                else:
                    how = f"{theirs.fileno()} {'paced' if self._paced else 'fast'} {self._forks}"
                    process = subprocess.Popen(
                        self._command,
                        env={**env, WARM_WORKER_VARIABLE: how},
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                on_error.pop_all()
        except OSError as e:
            _log.warning("no warm worker for slot %d: %s", slot, e)
            if parent is not None:
                self._workers.pop(_PARENT).kill()
            return
        ours.setblocking(False)
        self._workers[slot] = _WarmWorker(process, ours, env, cwd, ready=parent is not None)

    def _handle_report(self, worker: _WarmWorker) -> bool:
        """Log the report of a warm worker, each text once; return whether it may be kept."""
        if worker.ready:
            return True
        with contextlib.suppress(OSError):  # BlockingIOError: nothing new
            worker.received += worker.channel.recv(1 << 16)
        if not worker.received.endswith(b"\n"):
            return True
        worker.ready, report = True, json.loads(worker.received)
        worker.is_parent = self._forks and report["no_fork"] is None
        if self._forks and not worker.is_parent:
            self._import_each(report["no_fork"])
        failed = report["failed"].items()
        texts = [f"{module} is not imported in advance: {why}" for module, why in failed]
        if report["holds_gpu"]:
            texts.append("a module opens the GPU; such processes are not kept")
        for text in texts:
            if text not in self._warned:
                self._warned.add(text)
                _log.warning("launcher.agent.warm_imports: %s", text)
        return not report["holds_gpu"]


def _cwd() -> Path | None:
    """Return the working directory; None if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


_OUTPUTS = (1, 2)
_PAUSE_FACTOR = 2.0  # seconds of pause for each second of CPU time
_SLICE_S = 0.005
_ALSO_IMPORTED = {"torch": ("torch._dynamo", "hpc_elastic.checkpoint.checkpointer")}
"""The first optimizer of a process imports the first one, which takes as long as torch itself."""
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMPY_"),
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "TORCH", "PYTORCH_"),
)
_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_")
"""The agent sets such variables for each worker; a process group reads them at its creation."""
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: nothing has called cuInit
_in_time = {"CUDA_", "TORCHINDUCTOR_CACHE_DIR"}


def is_compatible(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether a process started with one environment can take over another one."""
    return _read_at_start(before) == _read_at_start(now)


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
    }


def warn_of_late_variables(before: Mapping[str, str]) -> None:
    """Warn of variables that the script sets for its `import torch`, which has happened already.

    The choice of GPUs is not too late, unless a module has asked for them at its import
    (`note_choice_of_gpus`). Nor is the folder of compiled graphs, which torch itself sets where
    kept graphs are put back (`worker_main.CompileCache`).
    """
    was, now = _read_at_start(before), _read_at_start(os.environ)
    changed = {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
    late = sorted(name for name in changed if not name.startswith(tuple(_in_time)))
    if late:
        print(
            f"hpc_elastic: the script sets {', '.join(late)}, but this process had imported torch "
            "before: set them in launcher.env, or set launcher.agent.warm_workers=false",
            file=sys.stderr,
        )


def note_choice_of_gpus() -> None:
    """Record whether this process has made it: `torch.cuda.is_available` does so for good."""
    with contextlib.suppress(OSError, AttributeError):  # the driver is not loaded
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED:
            _in_time.discard("CUDA_")


def wait_for_use(how: str, modules: list[str]) -> None:
    """Import the modules, then block until the agent makes this process, or a fork, a worker.

    Ends the process if the agent does not need it. ``how`` is the descriptor of the socket to the
    agent, ``paced`` or ``fast``, and whether it may be the parent.
    """
    number, pace, forks = how.split()
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    for descriptor in _OUTPUTS:
        kept = os.memfd_create("hpc_elastic-warm-worker")
        os.dup2(kept, descriptor)
        os.close(kept)
    gc.disable()
    with _in_the_background(channel) if pace == "paced" else contextlib.nullcontext():
        failed = _import_ahead(modules, channel)
    gc.freeze()  # a garbage collection among imported objects would take 0.1 s each time
    gc.enable()
    note_choice_of_gpus()
    with contextlib.suppress(OSError):  # made a worker before, and the socket closed
        torch = sys.modules.get("torch")
        holds_gpu = torch is not None and bool(torch.cuda.is_initialized())
        no_fork = _why_not_forked(channel) if forks == "True" and not _is_needed(channel) else None
        report = {"failed": failed, "holds_gpu": holds_gpu, "no_fork": no_fork}
        channel.sendall(json.dumps(report).encode() + b"\n")
    with _serve_forks(channel) as channel:
        env, outputs = _receive_start(channel)
    # change only what differs: C libraries may hold pointers to the rest
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    for descriptor, output in zip(_OUTPUTS, outputs, strict=True):
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.dup2(output, descriptor)
        os.close(output)
        while text:  # the output of the imports comes first
            text = text[os.write(descriptor, text) :]


def _why_not_forked(channel: socket.socket) -> str | None:
    """Return what a fork of this process would share with others, or lack; None if nothing."""
    if "CUDA_" not in _in_time or has_gpu_open(os.getpid()):
        return "a module asks for the GPUs at its import"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be threads: they are counted below
        probe = os.fork()  # libraries of linear algebra end their threads here
    if probe == 0:
        os._exit(getattr(sys.modules.get("torch.cuda"), "_is_in_bad_fork", bool)())
    if os.waitpid(probe, 0)[1]:
        return "torch refuses the GPUs in a fork, since a module asks for them at its import"
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208 - only their number
        return f"the imports have started {num_threads - 1} threads"
    own = {0, *_OUTPUTS, channel.fileno()}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this listing
            if int(descriptor.name) not in own:
                return f"the imports have opened {descriptor.readlink()}"
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line.split()[-1] for line in maps if line.split()[1] == "rw-s"]
    return f"the imports have shared {shared[0]}" if shared else None


def _serve_forks(channel: socket.socket) -> socket.socket:
    """Fork warm workers until this process is to be one; return its socket to the agent."""
    for number in signals.NOTICES:  # a fork keeps this one (`signals.ignore_notices_here`)
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(ConnectionError):  # closed before the report was read
        while channel.recv(1, socket.MSG_PEEK) == _FORK:
            _, own, _, _ = socket.recv_fds(channel, 1, 1)
            with socket.socket(fileno=own[0]) as forks, contextlib.suppress(OSError):
                if _fork():
                    channel.close()
                    channel = socket.socket(fileno=forks.detach())
                    channel.sendall(str(os.getpid()).encode())
    signals.ignore_preemption_signals()
    return channel


def _fork() -> bool:
    """Fork a child of the agent's that is as a new process; return whether this is it."""
    agent = os.getppid()
    if between := os.fork():
        os.waitpid(between, 0)
        return False
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.001)
    signals.end_with_agent(agent)
    os.setsid()
    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by os.fork
        sys.modules["numpy.random"].seed()
    return True


def _import_ahead(modules: list[str], channel: socket.socket) -> dict[str, str]:
    """Import modules until this process is needed; return the failures by module."""
    failed = {}
    for name in (each for module in modules for each in (module, *_ALSO_IMPORTED.get(module, ()))):
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


class _ImportPacer:
    """Import hook that only pauses before each import, in proportion to the last ones' time."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._needed = False
        self._since = time.thread_time()

    def find_spec(self, *_: object) -> None:
        spent = time.thread_time() - self._since
        if self._needed or spent < _SLICE_S:
            return
        self._needed = _is_needed(self._channel, spent * _PAUSE_FACTOR)
        self._since = time.thread_time()


@contextlib.contextmanager
def _in_the_background(channel: socket.socket) -> Iterator[None]:
    ordinary = os.sched_getscheduler(0) == os.SCHED_OTHER
    if ordinary:
        _set_policy(os.SCHED_BATCH)
    pacer = _ImportPacer(channel)
    sys.meta_path.insert(0, pacer)
    try:
        yield
    finally:
        sys.meta_path.remove(pacer)
        if ordinary:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> None:
    """Set the policy of every thread, since those of an import inherit the present one."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def _receive_start(channel: socket.socket) -> tuple[dict[str, str], list[int]]:
    first, outputs, _, _ = socket.recv_fds(channel, 1 << 16, len(_OUTPUTS))
    if not first:
        os._exit(0)
    message = bytearray(first)
    with contextlib.suppress(ConnectionResetError):  # closed before the report was read
        for part in iter(partial(channel.recv, 1 << 16), b""):
            message += part
    return json.loads(message)["env"], outputs


def is_training(status: Path) -> bool:
    """Return whether a run has a group that trains, by its status."""
    try:
        return (read_json(status) or {}).get("phase") == "training"
    except (OSError, ValueError):
        return False
