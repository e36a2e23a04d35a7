"""The control page: one small memory page that a worker and its agent share.

The worker writes its step, loss, samples and checkpoint boundaries, when it made its first step,
how long its checkpoints took and why one was not written; the agent reads them whenever it wants,
and writes what it asks of the worker: to save at a step that all ranks agree on, to stay at its
next checkpoint, and by when the node is to be left. No socket, no lock, no collective: a report
costs well under a microsecond, and the agent's heartbeats do not wait for the training process.
Each field is eight aligned bytes, written and read in one piece, with one writer; a text is there
before the number that tells of it.

Agreeing on a step. The agent writes a *proposal*, a number and a step. A worker that comes to a
step first publishes that it has (`SharedPage.passes`), and then looks for a proposal; at the
proposed step it waits until that is confirmed, moved or taken back. So an agent that reads the
published steps a few milliseconds after it has written a proposal knows which workers will see it
in time: all those whose step is smaller, and those that wait. (The milliseconds stand in for a
memory barrier, which Python does not have: a store is visible to other cores long before.)
"""

from __future__ import annotations

import math
import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, SupportsFloat

from hpc_elastic.errors import HpcElasticError

ROUND_VARIABLE = "HPC_ELASTIC_ROUND"
RESULTS_VARIABLE = "HPC_ELASTIC_RESULTS"
"""Name of the folder with what the workers return; without it, it is the round's."""
WARM_WORKER_VARIABLE = "HPC_ELASTIC_WARM_WORKER"
"""Set for a process that is started ahead of its use (`hpc_elastic.agent.warm_workers`)."""
DIRECTORY_VARIABLE = "HPC_ELASTIC_CONTROL_DIR"
LONGEST_HOLD_S = 60.0
"""A worker that holds goes on by itself after this long."""
LONGEST_WAIT_S = 60.0
"""A worker waits this long for its agent's word on a proposed step; then it fails."""

_SIZE = 4096
_UNSET = -1
_NO_PROPOSAL = 0
_STEP_BITS = 40
(
    _STEP, _SAMPLES, _LOSS, _TIME, _TOTAL, _BOUNDARY, _HELD, _PASSED, _WAITING, _WANTED, _LEAVE_BY,
    _HOLD, _PROPOSAL, _CONFIRMED, _NOTICE_BY, _FIRST, _FIRST_TIME, _RESTORED, _RESTORE_S,
    _BLOCKED_S, _COUNTED, _PULSE, _BUSY, _BUSY_S, _GOODPUT, _UNSAVED, _NUM_UNSAVED, _WHY_BYTES,
    _STORED, _RETURNED,
) = range(30)  # fmt: skip
_WHY_AT, _LONGEST_WHY = 2048, 1024
"""Where on the page stands why a checkpoint was not written, and its bytes at most."""
_BLANK = {
    field: _UNSET
    for field in (
        _STEP, _SAMPLES, _TOTAL, _BOUNDARY, _PASSED, _FIRST, _RESTORED, _UNSAVED, _STORED,
    )
}  # fmt: skip
_NO_NUMBER = (_LOSS, _TIME, _LEAVE_BY, _NOTICE_BY, _FIRST_TIME, _RESTORE_S, _GOODPUT)
_LOOK_AGAIN_S = 0.002


class SharedPage:
    """One worker's page, seen from either side."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as f:
            page = memoryview(mmap.mmap(f.fileno(), _SIZE))
        self._numbers = page.cast("q")  # one item is read and written in one piece
        self._floats = page.cast("d")
        self._why = page[_WHY_AT : _WHY_AT + _LONGEST_WHY]
        self._has_begun = False
        """Whether the first step is on the page (worker)."""

    @classmethod
    def create(cls, directory: Path, local_rank: int) -> SharedPage:
        """Make a fresh page (agent, before it starts the worker)."""
        path = _file(directory, local_rank)
        staged = path.with_suffix(".new")
        staged.write_bytes(bytes(_SIZE))
        page = cls(staged)
        for field in _NO_NUMBER:
            page._floats[field] = math.nan
        for field, value in _BLANK.items():
            page._numbers[field] = value
        staged.replace(path)
        return page

    @classmethod
    def of(cls, directory: Path, local_rank: int) -> SharedPage:
        """Return the page that the agent has made (worker)."""
        return cls(_file(directory, local_rank))

    # ---- the worker ---------------------------------------------------------------------

    def report(
        self,
        step: int | None,
        loss: SupportsFloat | None,
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
            self._floats[_LOSS] = float(loss)
        if step is not None:
            now = time.time()
            self._numbers[_STEP] = step
            self._floats[_TIME] = now
            if not self._has_begun:
                self._begin(step, now)

    def _begin(self, step: int, now: float) -> None:
        """Publish the first step, unless it is only said where the training goes on from."""
        if step > max(0, self._numbers[_RESTORED]):
            self._floats[_FIRST_TIME] = now
            self._numbers[_FIRST] = step  # last: with it, the time is there
            self._has_begun = True

    def count(self, number: int) -> None:
        """Publish the n-th step since the worker's start, where nobody says which step that is."""
        self._numbers[_COUNTED] = 1
        self.report(max(0, self._numbers[_RESTORED]) + number, None, None)

    def tell(self) -> None:
        """Publish that the script reports its steps: what was counted before is forgotten."""
        self._numbers[_COUNTED] = 0
        self._numbers[_FIRST] = _UNSET
        self._has_begun = False

    def restored(self, step: int | None, took_s: float) -> None:
        """Publish which step was restored, None: there was no checkpoint, and how long it took."""
        self._floats[_RESTORE_S] = took_s
        if step is not None:
            self._numbers[_RESTORED] = step

    def blocked(self, seconds: float) -> None:
        """Publish that a checkpoint has held up the training for so long (worker)."""
        self._floats[_BLOCKED_S] += seconds

    def stored(self, step: int) -> None:
        """Publish that the checkpoint of a step is in its directory (worker)."""
        self._numbers[_STORED] = step

    def returned(self) -> None:
        """Publish that the user's function has returned, and its value is written (worker)."""
        self._numbers[_RETURNED] = 1

    def not_saved(self, step: int, why: str) -> None:
        """Publish that the checkpoint of a step could not be written (worker)."""
        text = why.encode(errors="replace")[:_LONGEST_WHY]
        self._why[: len(text)] = text
        self._numbers[_WHY_BYTES] = len(text)
        self._numbers[_UNSAVED] = step
        self._numbers[_NUM_UNSAVED] += 1  # last: with it, all else is there

    def passes(self, step: int) -> bool:
        """Publish that a step is done; tell whether all ranks are to save there (worker).

        Returns at once, unless this very step is proposed and not confirmed yet.

        Raises:
            HpcElasticError: the agent has not said for `LONGEST_WAIT_S` what became of it.
        """
        self._numbers[_PASSED] = step
        proposal = self._numbers[_PROPOSAL]
        return proposal != _NO_PROPOSAL and self._is_agreed(step, proposal)

    def _is_agreed(self, step: int, proposal: int) -> bool:
        until = time.monotonic() + LONGEST_WAIT_S
        while proposal != _NO_PROPOSAL and _step_of(proposal) == step:
            number = proposal >> _STEP_BITS
            self._numbers[_WAITING] = number
            if self._numbers[_CONFIRMED] == number:
                return True
            if time.monotonic() > until:
                raise HpcElasticError(
                    f"nobody confirmed the checkpoint of step {step} for {LONGEST_WAIT_S:g} s; "
                    "the log of this node's agent says whom it waits for"
                )
            time.sleep(_LOOK_AGAIN_S)
            proposal = self._numbers[_PROPOSAL]
        return False

    def occupy(self, by: int, took_s: float = 0.0) -> None:
        """Say that something long begins (1), or is over (-1) after so long (worker)."""
        self._numbers[_BUSY] += by
        if self._numbers[_BUSY] == 0:
            self._floats[_BUSY_S] += took_s

    def want(self) -> None:
        """Ask for a checkpoint of the whole group (worker, rank 0)."""
        self._numbers[_WANTED] += 1

    def leave(self, within_s: float) -> None:
        """Ask for this node to be left (worker)."""
        self._floats[_LEAVE_BY] = time.monotonic() + within_s

    def announce(self, step: int) -> None:
        """Announce the checkpoint of a step, and go on (worker)."""
        self._numbers[_BOUNDARY] = step

    def pass_boundary(self, step: int) -> bool:
        """Announce the checkpoint of a step, and stay while the agent asks for it (worker).

        While a later step is proposed it goes on: the others wait for it there.

        Returns:
            Whether the worker may go on; False if it was held for too long.
        """
        self.announce(step)
        until = time.monotonic() + LONGEST_HOLD_S
        while (request := self._held_at(step)) and time.monotonic() < until:
            self._numbers[_HELD] = request
            time.sleep(_LOOK_AGAIN_S)
        self._numbers[_HELD] = 0
        return time.monotonic() < until

    def _held_at(self, step: int) -> int:
        """Return the request to stay at a checkpoint; 0: go on."""
        is_last = _step_of(self._numbers[_PROPOSAL]) <= step
        return self._numbers[_HOLD] if is_last else 0

    @property
    def is_held(self) -> bool:
        """Whether the worker is to stay at its next checkpoint (worker)."""
        return self._numbers[_HOLD] != 0

    @property
    def notice_left_s(self) -> float | None:
        """Seconds until the node has to be left; None if nothing of the kind is known (worker)."""
        by = self._floats[_NOTICE_BY]
        return None if math.isnan(by) else by - time.monotonic()

    @property
    def goodput(self) -> float | None:
        """The share of its node's time that made new steps; None: not known yet (worker)."""
        return _given(self._floats[_GOODPUT])

    # ---- the agent ----------------------------------------------------------------------

    def tell_goodput(self, share: float) -> None:
        """Say which share of this node's time has made new steps (agent)."""
        self._floats[_GOODPUT] = share

    def hold(self, request: int) -> None:
        """Ask the worker to stay at its next boundary; 0 lets it go (agent)."""
        self._numbers[_HOLD] = request

    def propose(self, number: int, step: int) -> None:
        """Propose to save at a step; takes back what was proposed before (agent).

        Args:
            number: Of the proposal, from 1 to 2**22; 0 takes the last one back.
            step: From 0 to 2**40 - 1.
        """
        self._numbers[_PROPOSAL] = number << _STEP_BITS | step if number else _NO_PROPOSAL

    def confirm(self, number: int) -> None:
        """Say that all ranks will save at the step of a proposal (agent)."""
        self._numbers[_CONFIRMED] = number

    def give_notice(self, by: float) -> None:
        """Say by when the node has to be left, in monotonic seconds (agent)."""
        self._floats[_NOTICE_BY] = by

    def read(self) -> WorkerStatus:
        """Return what the worker last published (agent)."""
        numbers = self._numbers
        return WorkerStatus(
            step=_known(numbers[_STEP]),
            samples=_known(numbers[_SAMPLES]),
            loss=_given(self._floats[_LOSS]),
            step_time=_given(self._floats[_TIME]),
            total_steps=_known(numbers[_TOTAL]),
            boundary=_known(numbers[_BOUNDARY]),
            held=numbers[_HELD],
            passed=_known(numbers[_PASSED]),
            waiting=numbers[_WAITING],
            wanted=numbers[_WANTED],
            leave_by=_given(self._floats[_LEAVE_BY]),
            first_step=_known(numbers[_FIRST]),
            first_time=_given(self._floats[_FIRST_TIME]),
            restored=_known(numbers[_RESTORED]),
            restore_s=_given(self._floats[_RESTORE_S]),
            blocked_s=self._floats[_BLOCKED_S],
            counted=bool(numbers[_COUNTED]),
            pulse=numbers[_PULSE],
            busy=numbers[_BUSY],
            busy_s=self._floats[_BUSY_S],
            num_unsaved=numbers[_NUM_UNSAVED],
            unsaved=_known(numbers[_UNSAVED]),
            stored=_known(numbers[_STORED]),
            returned=bool(numbers[_RETURNED]),
        )

    def why_not_saved(self) -> str:
        """Return why the last checkpoint was not written (agent)."""
        return bytes(self._why[: self._numbers[_WHY_BYTES]]).decode(errors="replace")


def _step_of(proposal: int) -> int:
    return proposal & (1 << _STEP_BITS) - 1


def _known(value: int) -> int | None:
    return None if value == _UNSET else value


def _given(value: float) -> float | None:
    return None if math.isnan(value) else value


def _file(directory: Path, local_rank: int) -> Path:
    return directory / f"worker-{local_rank}"


# ---- What a worker has published on its control page, as its agent reads it


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker last published; None where it has published nothing yet."""

    step: int | None
    samples: int | None
    loss: float | None
    step_time: float | None
    """Unix seconds at which ``step`` was reported."""
    total_steps: int | None
    boundary: int | None
    """The last step whose checkpoint was announced."""
    held: int
    """Not 0: the worker stays there; the number of the request that it obeys."""
    passed: int | None = None
    """The last step at which it asked whether to save."""
    waiting: int = 0
    """The number of the last proposal that it waited, or waits, for."""
    wanted: int = 0
    """How often it has asked for a checkpoint of the group."""
    leave_by: float | None = None
    """Monotonic seconds by which the script wants its node to be left."""
    first_step: int | None = None
    """The first step that it has made, beyond what it restored."""
    first_time: float | None = None
    """Unix seconds at which ``first_step`` was reported."""
    restored: int | None = None
    """The step of the checkpoint that it restored."""
    restore_s: float | None = None
    """Seconds that it took to look for a checkpoint and to restore it."""
    blocked_s: float = 0.0
    """Seconds for which checkpoints have held up its training, all together."""
    counted: bool = False
    """The script reports no steps: they are counted, from what was restored on, else from 0."""
    pulse: int = 0
    """How often it has reported anything: a sign of life, whatever the step."""
    busy_s: float = 0.0
    """How long it was at something that is no step, in all, but for what is under way."""
    num_unsaved: int = 0
    """How many of its checkpoints could not be written."""
    unsaved: int | None = None
    """The step of the last one of those."""
    stored: int | None = None
    """The last step of which it has seen a checkpoint come into the directory."""
    returned: bool = False
    """Whether the user's function has returned: the only sign that the worker has succeeded."""
    busy: int = 0
    """Not 0: it does something long that is no step, such as a checkpoint (`reports.busy`)."""


class ReadablePage(Protocol):
    """Where it is read: a `hpc_elastic.worker.shared_page.SharedPage`, or what stands for one."""

    def read(self) -> WorkerStatus:
        """Return what the worker last published."""
