"""The stacks of a worker's threads, and its collectives, taken from outside.

The stacks are to be had in any state of the worker.

``py-spy`` is used if it is installed and permitted. Otherwise the worker itself writes its stacks:
at its start it registers faulthandler on `ASK`, a signal that nothing else uses. The handler is in
C: it also runs while a thread holds the interpreter lock in a call that never returns, but not in a
stopped process (SIGSTOP). The stacks go to a file in the node's memory. A worker that has not
registered yet gets no signal, since that would kill it.

What a worker's GPU waits for is in no stack. torch records the collectives of NCCL; a thread of the
worker reads that record when the agent writes to a pipe, unless the interpreter lock is held.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_elastic import _util
from hpc_elastic.shared_files import write_atomic

ASK = signal.SIGRTMAX - 9
"""Real-time signals have no predefined meaning; glibc uses the first two, below SIGRTMIN."""
_SETTLED_S = 0.05
_WRITTEN_WITHIN_S = 2.0
_PY_SPY_WITHIN_S = 5.0
_RECORD = "_dump_nccl_trace_json"  # torch's private function; a build without NCCL has none
_ANSWERED_WITHIN_S = 1.0


def stacks_file(control: Path, local_rank: int) -> Path:
    """Return the file of a worker's stacks, in the node's memory."""
    return control / f"worker-{local_rank}.stack"


def register_handler(control: Path, local_rank: int) -> None:
    """Register the handler that writes this process's stacks (worker, once its rank is known)."""
    file = stacks_file(control, local_rank).open("a")  # stays open: the handler writes to it
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)


def take_stacks(pid: int, file: Path) -> str | None:
    """Return the stacks of a worker's threads; None if they are not available (agent)."""
    command = shutil.which("py-spy") or shutil.which(Path(sys.executable).with_name("py-spy"))
    if command is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            dump = [command, "dump", "--full-filenames", "--pid", str(pid)]
            done = _util.run(dump, timeout_s=_PY_SPY_WITHIN_S)
            if done.returncode == 0 and "Thread" in done.stdout:
                return done.stdout
    if not _has_handler(pid):
        return None
    try:
        os.truncate(file, 0)
        os.kill(pid, ASK)
    except OSError:
        return None
    deadline, size = time.monotonic() + _WRITTEN_WITHIN_S, -1
    while time.monotonic() < deadline:  # until the file is written and has stopped growing
        time.sleep(_SETTLED_S)
        before, size = size, file.stat().st_size
        if size == before and size > 0:
            break
    return file.read_text(errors="replace") or None


def answer_collectives(control: Path, local_rank: int) -> None:
    """Let the agent take this process's collectives (worker, once torch is imported).

    It is called within a step of the training, which no failure here may end.
    """
    record = getattr(sys.modules.get("torch._C._distributed_c10d"), _RECORD, None)
    if record is None:
        return
    pipe, answer = _collectives_files(control, local_rank)

    def answer_each(questions: int) -> None:
        # the folder is gone, and is restored without a pipe; or torch writes another record
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            while True:
                os.read(questions, 1024)
                write_atomic(answer, json.dumps(last_collectives(json.loads(record(True, False)))))

    with contextlib.suppress(OSError, RuntimeError):  # no folder, or no thread can be started
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        questions = os.open(pipe, os.O_RDWR)  # for writing too: no end when the agent closes it
        threading.Thread(
            target=answer_each, args=(questions,), name="collectives", daemon=True
        ).start()


def last_collectives(record: dict[str, Any]) -> dict[str, list[Any]]:
    """Return number, name and end of the last collective of each group (pure).

    ``record`` is that of torch's flight recorder. Source:
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    last: dict[str, list[Any]] = {}
    for entry in record.get("entries", ()):
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        if not entry["is_p2p"] and number > last.get(group, [0])[0]:
            name = entry["profiling_name"].removeprefix("nccl:")
            last[group] = [number, name, entry["state"] == "completed"]
    return last


def take_collectives(control: Path, local_ranks: Sequence[int]) -> dict[int, dict[str, list[Any]]]:
    """Return the `last_collectives` of the workers that answer (agent)."""
    asked, taken = list[int](), dict[int, dict[str, list[Any]]]()
    for local_rank in local_ranks:
        pipe, answer = _collectives_files(control, local_rank)
        with contextlib.suppress(OSError):  # no pipe, or no thread reads it
            answer.unlink(missing_ok=True)
            question = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(question, b"?")
                asked.append(local_rank)
            finally:
                os.close(question)
    deadline = time.monotonic() + _ANSWERED_WITHIN_S
    while len(taken) < len(asked) and time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        for local_rank in asked:
            with contextlib.suppress(OSError, ValueError):  # not yet
                answer = _collectives_files(control, local_rank)[1]
                taken[local_rank] = json.loads(answer.read_text())
    return taken


def _collectives_files(control: Path, local_rank: int) -> tuple[Path, Path]:
    """Return the pipe by which a worker is asked, and the file of its answer."""
    answer = control / f"worker-{local_rank}.collectives"
    return answer.with_suffix(".ask"), answer


def process_state(pid: int) -> str | None:
    """Return the state letter of a process, as in ps(1); None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def main_thread_load_s(pid: int) -> float | None:
    """Return the seconds that a main thread ran or was ready to run (schedstat in proc(5))."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ran, waited, *_ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return (int(ran) + int(waited)) / 1e9
    return None


def has_gpu_open(pid: int) -> bool:
    """Return whether a process has an NVIDIA or AMD GPU open."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith(("/dev/nvidia", "/dev/kfd")):
                    return True
    return False


def _has_handler(pid: int) -> bool:
    """Return whether a process has a handler for `ASK` (proc(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (ASK - 1) & 1)
    return False
