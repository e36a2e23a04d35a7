"""The control page: one small memory page that a worker and its agent share.

The worker writes its step, loss and samples; the agent reads them whenever it wants. No socket, no
lock, no collective: a report costs well under a microsecond, and the agent's heartbeats do not wait
for the training process. Each field is eight aligned bytes with one writer.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsFloat

DIRECTORY_VARIABLE = "HPC_ELASTIC_CONTROL_DIR"
_SIZE = 4096
_UNSET = -1
_STEP, _SAMPLES, _LOSS, _TIME = 0, 8, 16, 24


@dataclass(frozen=True)
class Progress:
    """What a worker last reported; None where it has reported nothing yet."""

    step: int | None
    samples: int | None
    loss: float | None
    step_time: float | None
    """Unix seconds at which ``step`` was reported."""


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
        staged.write_bytes(struct.pack("=qqdd", _UNSET, _UNSET, math.nan, math.nan).ljust(_SIZE))
        staged.replace(path)
        return cls(path)

    def report(self, step: int | None, loss: SupportsFloat | None, samples: int | None) -> None:
        """Publish what is not None (worker)."""
        if samples is not None:
            struct.pack_into("=q", self._map, _SAMPLES, samples)
        if loss is not None:
            struct.pack_into("=d", self._map, _LOSS, float(loss))
        if step is not None:
            struct.pack_into("=q", self._map, _STEP, step)
            struct.pack_into("=d", self._map, _TIME, time.time())

    def read(self) -> Progress:
        """Return what the worker last published (agent)."""
        step, samples, loss, when = struct.unpack_from("=qqdd", self._map)
        return Progress(
            None if step == _UNSET else step,
            None if samples == _UNSET else samples,
            None if math.isnan(loss) else loss,
            None if math.isnan(when) else when,
        )


class _Reporter:
    """The worker's own page, opened on first use; nothing happens outside a run."""

    def __init__(self) -> None:
        self.page: ControlPage | None = None
        self.opened = False
        self.by_user = False

    def report(self, step: int | None, loss: SupportsFloat | None, samples: int | None) -> None:
        if not self.opened:
            self.opened = True
            directory = os.environ.get(DIRECTORY_VARIABLE)
            if directory is not None:
                self.page = ControlPage(_path(Path(directory), int(os.environ["LOCAL_RANK"])))
        if self.page is not None:
            self.page.report(step, loss, samples)


_reporter = _Reporter()


def report(
    *, step: int | None = None, loss: SupportsFloat | None = None, samples: int | None = None
) -> None:
    """Publish this worker's progress to the live display and the run's status.

    May be called by any rank as often as it likes; outside a run it does nothing. The first rank's
    loss is the one shown.

    Args:
        step: Optimizer steps done, at least 0. Without it the steps are counted by a hook on
            torch's optimizers.
        loss: The last loss. A tensor on a GPU is synchronised with: pass one every few steps.
        samples: Samples seen so far, at least 0.
    """
    _reporter.by_user = _reporter.by_user or step is not None
    _reporter.report(step, loss, samples)


def report_counted(step: int) -> None:
    """Publish a step that was counted for the script, unless it reports its steps itself."""
    if not _reporter.by_user:
        _reporter.report(step, None, None)


def _path(directory: Path, local_rank: int) -> Path:
    return directory / f"worker-{local_rank}"
