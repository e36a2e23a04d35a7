"""The control page: one small memory page that a worker and its agent share.

The worker writes its step, loss, samples and checkpoint boundaries; the agent reads them whenever
it wants, and writes whether the worker is to hold at the next boundary. No socket, no lock, no
collective: a report costs well under a microsecond, and the agent's heartbeats do not wait for the
training process. Each field is eight aligned bytes with one writer.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsFloat

DIRECTORY_VARIABLE = "HPC_ELASTIC_CONTROL_DIR"
LONGEST_HOLD_S = 60.0
"""A worker that holds goes on by itself after this long."""

_log = logging.getLogger(__name__)

_SIZE = 4096
_UNSET = -1
_LAYOUT = "=qqddqqqq"
_STEP, _SAMPLES, _LOSS, _TIME, _TOTAL, _BOUNDARY, _HELD, _HOLD = range(0, 64, 8)
_LOOK_AGAIN_S = 0.005


@dataclass(frozen=True)
class Progress:
    """What a worker last reported; None where it has reported nothing yet."""

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


class ControlPage:
    """One worker's page, seen from either side."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), _SIZE)

    @classmethod
    def create(cls, directory: Path, local_rank: int) -> ControlPage:
        """Make a fresh page (agent, before it starts the worker)."""
        path = _path(directory, local_rank)
        staged = path.with_suffix(".new")
        staged.write_bytes(_BLANK.ljust(_SIZE, b"\0"))
        staged.replace(path)
        return cls(path)

    def report(
        self,
        step: int | None,
        loss: SupportsFloat | None,
        samples: int | None,
        total_steps: int | None = None,
    ) -> None:
        """Publish what is not None (worker)."""
        if total_steps is not None:
            struct.pack_into("=q", self._map, _TOTAL, total_steps)
        if samples is not None:
            struct.pack_into("=q", self._map, _SAMPLES, samples)
        if loss is not None:
            struct.pack_into("=d", self._map, _LOSS, float(loss))
        if step is not None:
            struct.pack_into("=q", self._map, _STEP, step)
            struct.pack_into("=d", self._map, _TIME, time.time())

    def pass_boundary(self, step: int) -> bool:
        """Announce the checkpoint of a step, and stay while the agent asks for it (worker).

        Returns:
            Whether the worker may go on; False if it was held for too long.
        """
        struct.pack_into("=q", self._map, _BOUNDARY, step)
        until = time.monotonic() + LONGEST_HOLD_S
        while (request := self._hold_request()) and time.monotonic() < until:
            struct.pack_into("=q", self._map, _HELD, request)
            time.sleep(_LOOK_AGAIN_S)
        struct.pack_into("=q", self._map, _HELD, 0)
        return time.monotonic() < until

    def _hold_request(self) -> int:
        return int(struct.unpack_from("=q", self._map, _HOLD)[0])

    def hold(self, request: int) -> None:
        """Ask the worker to stay at its next boundary; 0 lets it go (agent)."""
        struct.pack_into("=q", self._map, _HOLD, request)

    def read(self) -> Progress:
        """Return what the worker last published (agent)."""
        step, samples, loss, when, total, boundary, held, _ = struct.unpack_from(_LAYOUT, self._map)
        return Progress(
            step=_known(step),
            samples=_known(samples),
            loss=None if math.isnan(loss) else loss,
            step_time=None if math.isnan(when) else when,
            total_steps=_known(total),
            boundary=_known(boundary),
            held=held,
        )


_BLANK = struct.pack(_LAYOUT, _UNSET, _UNSET, math.nan, math.nan, _UNSET, _UNSET, 0, 0)


def _known(value: int) -> int | None:
    return None if value == _UNSET else value


class _Reporter:
    """The worker's own page, opened on first use; nothing happens outside a run."""

    def __init__(self) -> None:
        self.page: ControlPage | None = None
        self.opened = False
        self.by_user = False

    def find_page(self) -> ControlPage | None:
        if not self.opened:
            self.opened = True
            directory = os.environ.get(DIRECTORY_VARIABLE)
            if directory is not None:
                self.page = ControlPage(_path(Path(directory), int(os.environ["LOCAL_RANK"])))
        return self.page


_reporter = _Reporter()


def report(
    *,
    step: int | None = None,
    loss: SupportsFloat | None = None,
    samples: int | None = None,
    total_steps: int | None = None,
) -> None:
    """Publish this worker's progress to the live display and the run's status.

    May be called by any rank as often as it likes; outside a run it does nothing. The first rank's
    loss is the one shown.

    Args:
        step: Optimizer steps done, at least 0. Without it the steps are counted by a hook on
            torch's optimizers.
        loss: The last loss. A tensor on a GPU is synchronised with: pass one every few steps.
        samples: Samples seen so far, at least 0.
        total_steps: The step at which the training will be done, at least 1. With it, a late node
            is admitted only if what remains repays the restart.
    """
    _reporter.by_user = _reporter.by_user or step is not None
    page = _reporter.find_page()
    if page is not None:
        page.report(step, loss, samples, total_steps)


def report_counted(step: int) -> None:
    """Publish a step that was counted for the script, unless it reports its steps itself."""
    page = None if _reporter.by_user else _reporter.find_page()
    if page is not None:
        page.report(step, None, None)


def checkpoint_boundary(*, step: int) -> None:
    """Say that the checkpoint of a step is complete: a good moment for the group to change.

    Every rank calls it, after each checkpoint, before the next step. It returns at once, unless
    nodes wait to be admitted (``launcher.grow=boundary``): then it stays until the group is
    stopped, so that no later step is made that would be lost. Outside a run it does nothing.

    Args:
        step: Optimizer steps that the checkpoint holds, at least 0.
    """
    page = _reporter.find_page()
    if page is not None and not page.pass_boundary(step):
        _log.warning("held at the checkpoint of step %d for %g s; going on", step, LONGEST_HOLD_S)


def _path(directory: Path, local_rank: int) -> Path:
    return directory / f"worker-{local_rank}"
