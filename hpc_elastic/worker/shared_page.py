"""The control page: one small memory page that a worker and its agent share.

The worker writes its step, loss, samples, metrics and checkpoints, when it made its first step, how
long its checkpoints took and why one was not written. The agent reads them whenever it wants, and
writes one *checkpoint request*: where the worker is to save, and whether it is to stay there. There
is no socket, no lock and no collective: a report costs well under a microsecond, and the agent's
heartbeats do not wait for the training process. Each field is eight aligned bytes, written and read
in one piece, with one writer; a text is complete before the number that announces it.

Checkpoint requests. The agent writes the number and the step of a request. A worker that comes to a
step first publishes that it has (`SharedPage.poll_checkpoint`), and then reads the request; at the
first step at or beyond the requested one it waits until the request is confirmed, replaced or
withdrawn. So an agent that reads the published steps a few milliseconds after it has written a
request knows which workers will see it in time: those with a smaller step, and those that wait.
(The milliseconds stand in for a memory barrier, which Python does not have: a store is visible to
other cores long before.) A confirmed request with ``pause`` keeps the worker at that checkpoint
until another request replaces it or the agent releases it. A request without a step names the next
checkpoint of each worker, for scripts that do not call `should_checkpoint`.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_elastic.errors import HpcElasticError

ROUND_VARIABLE = "HPC_ELASTIC_ROUND"
RESULTS_VARIABLE = "HPC_ELASTIC_RESULTS"
"""Name of the folder with what the workers return; without it, it is the round's."""
WARM_WORKER_VARIABLE = "HPC_ELASTIC_WARM_WORKER"
"""Set for a process that is started ahead of its use (`hpc_elastic.agent.warm_workers`)."""
DIRECTORY_VARIABLE = "HPC_ELASTIC_CONTROL_DIR"
AGENT_VARIABLE = "HPC_ELASTIC_AGENT_PID"
CPUS_VARIABLE = "HPC_ELASTIC_CPUS"
"""The CPUs near each GPU of the node, by local rank: JSON (``launcher.agent.numa``)."""
LONGEST_PAUSE_S = 60.0  # a worker that stays at a checkpoint continues by itself after this long
LONGEST_WAIT_S = 60.0  # a worker waits this long for the confirmation of a step; then it fails

_SIZE = 4096
_UNSET = -1
_NO_REQUEST = 0
_STEP_BITS = 40
_NEXT_CHECKPOINT = (1 << _STEP_BITS) - 1
"""The bits of a step; as a step, it stands for a request without one: no step is as large."""
(
    _STEP, _SAMPLES, _LOSS, _TIME, _TOTAL, _BOUNDARY, _PAUSED, _PASSED, _WAITING, _WANTED,
    _LEAVE_BY, _RELEASED, _REQUEST, _CONFIRMED, _NOTICE_BY, _FIRST, _FIRST_TIME, _RESTORED,
    _RESTORE_S, _BLOCKED_S, _COUNTED, _PULSE, _BUSY, _BUSY_S, _GOODPUT, _UNSAVED, _NUM_UNSAVED,
    _WHY_BYTES, _STORED, _RETURNED, _AGREED, _SAVE_S, _GROUP, _BAD_STEP, _BAD_LOSS,
) = range(35)  # fmt: skip
_FIRST_METRIC, MOST_METRICS = 64, 16  # the fields of the script's own metrics
_METRICS_BYTES = 63
_WHY_AT, _LONGEST_WHY = 2048, 1024
"""Where on the page stands why a checkpoint was not written, and its bytes at most."""
_METRICS_AT = 3072  # where the names of the metrics stand, a line each
_COUNTS = {
    "step": _STEP, "samples": _SAMPLES, "total_steps": _TOTAL, "boundary": _BOUNDARY,
    "passed": _PASSED, "agreed": _AGREED, "first_step": _FIRST, "restored": _RESTORED,
    "unsaved": _UNSAVED, "stored": _STORED, "group": _GROUP, "bad_step": _BAD_STEP,
}  # fmt: skip
"""Fields of `WorkerStatus` that begin with `_UNSET`, and are None then."""
_TIMES = {
    "step_time": _TIME, "leave_by": _LEAVE_BY, "first_time": _FIRST_TIME,
    "restore_s": _RESTORE_S, "save_s": _SAVE_S,
}  # fmt: skip
"""Those that begin with NaN, and are None then."""
_NUMBERS = {
    "paused": _PAUSED, "waiting": _WAITING, "wanted": _WANTED, "pulse": _PULSE, "busy": _BUSY,
    "num_unsaved": _NUM_UNSAVED,
}  # fmt: skip
"""Those that begin with 0."""
_NO_NUMBER = (*_TIMES.values(), _LOSS, _NOTICE_BY, _GOODPUT)
_POLL_INTERVAL_S = 0.002


@dataclass(frozen=True)
class CheckpointRequest:
    """What the leader asks of all workers of a round.

    ``step`` is where to save, at the first step at or beyond it that a worker polls, from 1 to
    2**40 - 2; 0 only asks how far the workers are; None: at each worker's next checkpoint.
    """

    number: int  # rises with each request, from 1 to 2**22; stays when a request is confirmed
    step: int | None
    confirmed: bool = False  # all workers act on it; before that they wait at the step
    pause: bool = False  # they stay at that checkpoint, since the group is about to change
    released: bool = False  # they need not stay any more


class SharedPage:
    """One worker's page, seen from either side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as f:
            page = memoryview(mmap.mmap(f.fileno(), _SIZE))
        self._numbers = page.cast("q")  # one item is read and written in one piece
        self._floats = page.cast("d")
        self._why = page[_WHY_AT : _WHY_AT + _LONGEST_WHY]
        self._metric_names = page[_METRICS_AT:]
        self._metrics: dict[str, int] = {}
        self._has_begun = False

    @classmethod
    def create(cls, directory: Path, local_rank: int) -> SharedPage:
        """Make a fresh page (agent, before it starts the worker)."""
        path = directory / f"worker-{local_rank}"
        staged = path.with_suffix(".new")
        staged.write_bytes(bytes(_SIZE))
        page = cls(staged)
        for at in _NO_NUMBER:
            page._floats[at] = math.nan
        for at in _COUNTS.values():
            page._numbers[at] = _UNSET
        staged.replace(path)
        return page

    @classmethod
    def of(cls, directory: Path, local_rank: int) -> SharedPage:
        """Return the page that the agent has made (worker)."""
        return cls(directory / f"worker-{local_rank}")

    def report(
        self,
        step: int | None,
        loss: float | None,
        samples: int | None,
        total_steps: int | None = None,
    ) -> None:
        """Publish what is not None (worker); a report of nothing is a sign of life."""
        self._numbers[_PULSE] += 1
        if total_steps is not None:
            self._numbers[_TOTAL] = total_steps
        if samples is not None:
            self._numbers[_SAMPLES] = samples
        if loss is not None:
            self._floats[_LOSS] = loss
            if not math.isfinite(loss) and self._numbers[_BAD_STEP] == _UNSET:
                self._floats[_BAD_LOSS] = loss
                self._numbers[_BAD_STEP] = max(0, self._numbers[_STEP] if step is None else step)
        if step is not None:
            now = time.time()
            self._numbers[_STEP] = step
            self._floats[_TIME] = now
            if not self._has_begun and step > max(0, self._numbers[_RESTORED]):
                self._floats[_FIRST_TIME] = now
                self._numbers[_FIRST] = step  # last: with it, the time is there
                self._has_begun = True

    def report_metrics(self, metrics: Mapping[str, float]) -> bool:
        """Publish values of the script's metrics; return whether there was room for all."""
        has_room = True
        for name, value in metrics.items():
            at = self._metrics.get(name)
            if at is not None:
                self._floats[at] = value
                continue
            begin, text = self._numbers[_METRICS_BYTES], f"{name}\n".encode()
            end, at = begin + len(text), _FIRST_METRIC + len(self._metrics)
            if len(self._metrics) == MOST_METRICS or end > len(self._metric_names):
                has_room = False
                continue
            self._metrics[name] = at
            self._floats[at] = value
            self._metric_names[begin:end] = text
            self._numbers[_METRICS_BYTES] = end  # last: with it, name and value are there
        return has_room

    def report_counted_step(self, number: int) -> None:
        """Publish the n-th step since the worker's start, for a script that reports none."""
        self._numbers[_COUNTED] = 1
        self.report(max(0, self._numbers[_RESTORED]) + number, None, None)

    def set_explicit_steps(self) -> None:
        """Publish that the script reports its steps: what was counted before is forgotten."""
        self._numbers[_COUNTED] = 0
        self._numbers[_FIRST] = _UNSET
        self._has_begun = False

    def report_restored(self, step: int | None, took_s: float) -> None:
        """Publish which step was restored, None: there was no checkpoint, and how long it took."""
        self._floats[_RESTORE_S] = took_s
        if step is not None:
            self._numbers[_RESTORED] = step

    def report_blocked(self, seconds: float) -> None:
        """Publish for how many seconds a checkpoint has blocked the training (worker)."""
        self._floats[_BLOCKED_S] += seconds

    def report_stored(self, step: int, seconds: float) -> None:
        """Publish that the checkpoint of a step is in its directory, after so long (worker)."""
        self._numbers[_STORED] = step
        self._floats[_SAVE_S] = seconds

    def report_group(self, size: int) -> None:
        """Publish the size of torch's process group at an optimizer step, 0: none (worker)."""
        self._numbers[_GROUP] = size

    def report_return(self) -> None:
        """Publish that the user's function has returned, and its value is written (worker)."""
        self._numbers[_RETURNED] = 1

    def report_not_saved(self, step: int, why: str) -> None:
        """Publish that the checkpoint of a step could not be written (worker)."""
        text = why.encode(errors="replace")[:_LONGEST_WHY]
        self._why[: len(text)] = text
        self._numbers[_WHY_BYTES] = len(text)
        self._numbers[_UNSAVED] = step
        self._numbers[_NUM_UNSAVED] += 1  # last: with it, all else is there

    def poll_checkpoint(self, step: int) -> bool:
        """Publish that a step is done, and return whether all ranks save there (worker).

        It returns at once, unless a request for this step or an earlier one is not confirmed yet.
        Raises HpcElasticError if that was neither confirmed nor withdrawn within `LONGEST_WAIT_S`.
        """
        previous, self._numbers[_PASSED] = self._numbers[_PASSED], step
        request = self._numbers[_REQUEST]
        if request == _NO_REQUEST:
            return False
        return self._await_request(range(max(previous, 0) + 1, step + 1), request)

    def _await_request(self, new_steps: range, request: int) -> bool:
        """Wait while a request for one of these steps is not confirmed; none was polled before."""
        until, step = time.monotonic() + LONGEST_WAIT_S, new_steps.stop - 1
        while request & _NEXT_CHECKPOINT in new_steps:
            number = request >> _STEP_BITS
            self._numbers[_WAITING] = number
            if self._numbers[_CONFIRMED] >> 1 == number:
                self._numbers[_AGREED] = step
                return True
            if time.monotonic() > until:
                raise HpcElasticError(
                    f"the checkpoint of step {step} was not confirmed within {LONGEST_WAIT_S:g} s: "
                    "see the log of this node's agent for the missing nodes"
                )
            time.sleep(_POLL_INTERVAL_S)
            request = self._numbers[_REQUEST]
        return False

    def set_busy(self, by: int, took_s: float = 0.0) -> None:
        """Publish that a long operation starts (1), or has ended (-1) after ``took_s`` (worker)."""
        self._numbers[_BUSY] += by
        if self._numbers[_BUSY] == 0:
            self._floats[_BUSY_S] += took_s

    def want_checkpoint(self) -> None:
        """Request a checkpoint of the whole group (worker, rank 0)."""
        self._numbers[_WANTED] += 1

    def release_node(self, within_s: float) -> None:
        """Request that this node be released (worker)."""
        self._floats[_LEAVE_BY] = time.monotonic() + within_s

    def announce(self, step: int) -> None:
        """Announce the checkpoint of a step, and go on (worker)."""
        self._numbers[_BOUNDARY] = step

    def pause_at(self, step: int) -> bool:
        """Announce a checkpoint, and stay while requested; return False if that took too long."""
        self.announce(step)
        until = time.monotonic() + LONGEST_PAUSE_S
        while (number := self._pause_request(step)) and time.monotonic() < until:
            self._numbers[_PAUSED] = number
            time.sleep(_POLL_INTERVAL_S)
        self._numbers[_PAUSED] = 0
        return time.monotonic() < until

    def pauses_at(self, step: int) -> bool:
        """Return whether the worker is to stay at the checkpoint of a step (worker)."""
        return self._pause_request(step) != 0

    def changes_group_at(self, step: int) -> bool:
        """Return whether the group changes at a step at which `poll_checkpoint` returned true.

        The same on all ranks: save to shared storage, and stay there. It stays so while the worker
        is at that step: no later request is confirmed before all workers have passed it.
        """
        return self._numbers[_AGREED] == step and bool(self._numbers[_CONFIRMED] & 1)

    def _pause_request(self, step: int) -> int:
        """Return the number of the request to stay at a checkpoint; 0 if there is none."""
        request = self._numbers[_REQUEST]
        number, at = request >> _STEP_BITS, request & _NEXT_CHECKPOINT
        is_asked = self._numbers[_CONFIRMED] == number << 1 | 1 and (
            at == _NEXT_CHECKPOINT or at <= self._numbers[_AGREED] <= step
        )
        return number if is_asked and number > self._numbers[_RELEASED] else 0

    @property
    def notice_left_s(self) -> float | None:
        """Seconds until the node has to be left; None without a notice (worker)."""
        by = self._floats[_NOTICE_BY]
        return None if math.isnan(by) else by - time.monotonic()

    @property
    def goodput(self) -> float | None:
        """The share of its node's time that made new steps; None: not known yet (worker)."""
        return _given(self._floats[_GOODPUT])

    def set_goodput(self, share: float) -> None:
        """Publish the share of this node's time that made new steps (agent)."""
        self._floats[_GOODPUT] = share

    def request_checkpoint(self, request: CheckpointRequest | None) -> None:
        """Replace the checkpoint request; None withdraws it (agent)."""
        if request is None:
            self._numbers[_REQUEST] = _NO_REQUEST
            return
        number = request.number
        if request.confirmed:
            self._numbers[_CONFIRMED] = number << 1 | request.pause
        if request.released:
            self._numbers[_RELEASED] = number
        step = _NEXT_CHECKPOINT if request.step is None else request.step
        self._numbers[_REQUEST] = number << _STEP_BITS | step

    def set_deadline(self, by: float) -> None:
        """Publish when the node is taken, in monotonic seconds (agent)."""
        self._floats[_NOTICE_BY] = by

    def read(self) -> WorkerStatus:
        """Return what the worker last published (agent)."""
        numbers, floats = self._numbers, self._floats
        names = bytes(self._metric_names[: numbers[_METRICS_BYTES]]).decode().splitlines()
        values: dict[str, Any] = {name: numbers[at] for name, at in _NUMBERS.items()}
        for name, at in _COUNTS.items():
            values[name] = None if numbers[at] == _UNSET else numbers[at]
        for name, at in _TIMES.items():
            values[name] = _given(floats[at])
        return WorkerStatus(
            **values,
            loss=floats[_LOSS] if math.isfinite(floats[_LOSS]) else None,
            blocked_s=floats[_BLOCKED_S],
            counted=bool(numbers[_COUNTED]),
            busy_s=floats[_BUSY_S],
            returned=bool(numbers[_RETURNED]),
            bad_loss="" if values["bad_step"] is None else str(floats[_BAD_LOSS]),
            metrics={
                name: value
                for name, value in zip(names, floats[_FIRST_METRIC:], strict=False)
                if math.isfinite(value)
            },
        )

    def why_not_saved(self) -> str:
        """Return why the last checkpoint was not written (agent)."""
        return bytes(self._why[: self._numbers[_WHY_BYTES]]).decode(errors="replace")


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker last published; None where it has published nothing yet."""

    step: int | None
    samples: int | None
    loss: float | None
    step_time: float | None  # Unix seconds at which ``step`` was reported
    total_steps: int | None
    boundary: int | None  # the last step whose checkpoint was announced
    paused: int  # the number of the request for which the worker stays there; 0 if it does not
    passed: int | None = None  # the last step at which it asked whether to save
    waiting: int = 0  # the number of the last request for whose confirmation it waited, or waits
    agreed: int | None = None  # the last step at which a confirmed request made it save
    wanted: int = 0  # how often it has asked for a checkpoint of the group
    leave_by: float | None = None  # monotonic seconds by which the script wants its node to be left
    first_step: int | None = None  # the first step that it has made, beyond what it restored
    first_time: float | None = None  # Unix seconds at which ``first_step`` was reported
    restored: int | None = None  # the step of the checkpoint that it restored
    restore_s: float | None = None
    """Seconds that it took to look for a checkpoint and to restore it."""
    blocked_s: float = 0.0  # seconds for which checkpoints have held up its training, all together
    counted: bool = False
    """The script reports no steps: they are counted, from what was restored on, else from 0."""
    pulse: int = 0  # how often it has reported anything: a sign of life, whatever the step
    busy_s: float = 0.0  # seconds that ended operations other than steps took, all together
    num_unsaved: int = 0  # how many of its checkpoints could not be written
    unsaved: int | None = None  # the step of the last one of those
    stored: int | None = None  # the last step whose checkpoint it has seen in the directory
    save_s: float | None = None
    """Seconds that this checkpoint took, from the copy of the state to its commit."""
    returned: bool = False
    """Whether the user's function has returned: the only sign that the worker has succeeded."""
    group: int | None = None
    """The size of its process group at its last optimizer step that was checked; 0: it has none."""
    bad_step: int | None = None  # the step at which it first reported a loss that is not finite
    bad_loss: str = ""  # that loss, ``nan`` or ``inf``
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The script's own metrics that are finite: others have no JSON form."""
    busy: int = 0
    """Not 0: it does something long that is no step, such as a checkpoint (`reports.busy`)."""
