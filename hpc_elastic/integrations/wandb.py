"""Weights & Biases in an elastic run: one W&B run, online and offline, each step once.

    from hpc_elastic.integrations.wandb import init

    run = init(project="digits")
    run.log({"loss": loss}, step=step)

`tracking` has what a restart must keep. Of W&B that needs three things. Its service writes the
run's file (``<run>/wandb/*/run-<id>.wandb``) every 15 s: here 20 times a second. Offline that file
has the truth; online the server has, and what the file has beyond it is sent again. And W&B
completes the row of a step only when a later step is logged, which may be after the checkpoint. So
the row that is not complete, and those of the last second, are in ``<run>/trackers/wandb.json``
too, from which the next worker continues.

So a row is whole in W&B or not there at all, and all rows up to the last step are there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations import tracking
from hpc_elastic.shared_files import make_folder, read_bytes
from hpc_elastic.worker import reporting

try:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record
except ImportError as e:
    raise ImportError("hpc_elastic.integrations.wandb needs W&B: pip install wandb") from e

_log = logging.getLogger(__name__)

_FLUSH_S = 0.05
_RECENT_S = 1.0
_MAX_RECENT = 32
"""How old and how many are the complete rows that are kept, in case W&B has not written them."""
_ROW = ""
"""Key of whole rows in the `LastSteps`."""


def init(**options: Any) -> WandbRun:
    """Start or continue the W&B run of this training; every rank calls it, once.

    Outside of a run of this package it is a W&B run of its own.

    Args:
        options: As of ``wandb.init``, without ``id`` and ``resume``. ``dir`` is the run directory
            if it is not given; else it is a folder that all nodes share.

    Raises:
        ConfigError: ``id`` or ``resume`` is given.
    """
    for key in ("id", "resume"):
        if key in options:
            raise ConfigError(key, options[key], "leave it out: it follows from the run's id")
    own = tracking.own_run()
    if not tracking.is_logger():
        return WandbRun(wandb.init(mode="disabled"), None, None)
    if own is None:
        return WandbRun(wandb.init(**options), None, None)
    folder = Path(options.pop("dir", None) or own.path)
    wandb_id = re.sub(r"[^\w-]", "-", own.run_id)
    settings = options.pop("settings", None) or {}
    if isinstance(settings, wandb.Settings):
        settings.x_transaction_log_flush_interval = _FLUSH_S
    else:
        settings = {**settings, "x_transaction_log_flush_interval": _FLUSH_S}
    run = wandb.init(id=wandb_id, resume="allow", dir=str(folder), settings=settings, **options)
    return WandbRun(run, own, folder / "wandb")


class WandbRun:
    """The W&B run of a training; it has all that W&B's own has. Other ranks' runs do nothing.

    Attributes:
        run: W&B's run, for what needs its type. Do not log with it.
    """

    def __init__(self, run: Any, own: tracking.OwnRun | None, folder: Path | None) -> None:
        self.run, self._own = run, own
        self._rows: _Rows | None = None
        if own is not None and folder is not None:
            first = None if run.offline else int(run.starting_step)
            earlier = read_rows(folder, run.id, first)
            last = max(earlier, default=-1)
            if first is not None:
                for step in sorted(step for step in earlier if step >= first):
                    run.log(earlier[step], step=step, commit=True)
                last = max(last, first - 1)
            kept = own.path / "trackers" / "wandb.json"
            self._rows = _Rows(run, kept, last, self._annotate)
            reporting.when_returned(self._complete)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Finish it, as failed if there is an error."""
        self.finish(0 if kind is None else 1)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log values of a step, unless this row was complete before the last restart.

        Args:
            values: As of W&B.
            step: Optimizer steps done, at least 0, and not less than in the last call. All values
                of a step are one row.
            commit: Whether the row is complete now; None: with the first value of a later step.

        Raises:
            ConfigError: There is no step: W&B's own count would start anew at a restart.
        """
        if self._rows is None:
            self.run.log(dict(values), step=step, commit=commit)
        elif step is None:
            raise ConfigError("step", None, "pass it: run.log(values, step=step)")
        else:
            self._rows.add(values, step)
            if commit:
                self._rows.complete()

    def finish(self, exit_code: int | None = None) -> None:
        """Finish the W&B run; with an exit code other than 0 the last row stays for a restart."""
        if not exit_code:
            self._complete()
        self._rows = None
        self.run.finish(exit_code)

    def _complete(self) -> None:
        if self._rows is not None:
            self._rows.complete()

    def _annotate(self, _: int) -> None:
        if self._own is not None:
            self.run.summary[tracking.EVENTS] = self._own.describe_events()


class _Rows:
    """The rows of a W&B run; those that W&B may not have written yet are in a file too.

    That file is written at each log, without fsync: it survives the death of the process. ``last``
    is the last row that W&B has; ``annotate`` is `LastSteps`'s.
    """

    def __init__(self, run: Any, file: Path, last: int, annotate: Callable[[int], None]) -> None:
        self._run = run
        self._step, self._row = last, dict[str, Any]()
        self._recent = deque[tuple[float, int, dict[str, Any]]](maxlen=_MAX_RECENT)
        """Complete rows, with the time at which W&B received them."""
        for step, row in _read_kept(file):
            if step > last:
                self.complete()
                self._step, self._row = step, row
        last = self._recent[-1][1] if self._recent else last
        self._latest = 0
        """The largest step that this worker has logged."""
        self._has_warned = False
        self._steps = tracking.LastSteps({_ROW: last}, annotate)
        make_folder(file.parent)
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def add(self, values: Mapping[str, Any], step: int) -> None:
        """Add values to the row of a step; the row of an earlier step is complete then."""
        if step < self._latest and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "W&B drops %s of step %d, as step %d was logged before: log it with the present "
                'step, beside its own number ("epoch"), and call run.define_metric(name, '
                'step_metric="epoch")', ", ".join(values), step, self._latest
            )  # fmt: skip
        self._latest = max(self._latest, step)
        if not self._steps.is_new(_ROW, step) or step < self._step:
            return
        if step > self._step:
            self.complete()
            self._step = step
        self._row.update(values)
        while self._recent and time.monotonic() - self._recent[0][0] > _RECENT_S:
            self._recent.popleft()
        kept = [[step, row] for _, step, row in self._recent]
        kept.append([step, _plain(self._row)])
        # the rest of a longer one stays behind the line
        os.pwrite(self._fd, json.dumps(kept).encode() + b"\n", 0)

    def complete(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._step, commit=True)
            self._recent.append((time.monotonic(), self._step, _plain(self._row)))
            self._row = {}


def _read_kept(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows in the file of an earlier worker; only the last one may be incomplete."""
    try:
        return [
            (int(step), dict(row)) for step, row in json.loads(read_bytes(file).splitlines()[0])
        ]
    except (OSError, ValueError, TypeError, IndexError):
        return []


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a row: numbers and text; images and tables are not."""
    kept = dict[str, Any]()
    for key, value in row.items():
        with contextlib.suppress(TypeError, ValueError):
            kept[key] = json.loads(json.dumps(value, default=float))
    return kept


def read_rows(folder: Path, wandb_id: str, first: int | None) -> dict[int, dict[str, Any]]:
    """Return the rows of a W&B run in the files of a folder, by step, as far as they are needed.

    The folder is ``<dir>/wandb``. ``first`` is the first step that is needed; None: only the last
    row.
    """
    files = folder.glob(f"*run-*-{wandb_id}/run-{wandb_id}.wandb")  # by time:
    rows = dict[int, dict[str, Any]]()
    for file in sorted(files, key=lambda f: f.parent.name.partition("run-")[2], reverse=True):
        for record in read_records(file.read_bytes()):
            items = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
            if "_step" in items:
                values = {k: json.loads(v) for k, v in items.items() if not k.startswith("_")}
                rows.setdefault(int(items["_step"]), values)
        if rows and (first is None or min(rows) <= first):
            break
    return rows


def read_records(data: bytes) -> Iterator[Any]:
    """Yield the records of a .wandb file, which has the format of LevelDB's log.

    A header of 7 bytes, then blocks of 32 KiB with fragments: checksum (4 bytes), length (2), kind
    (1: whole, 2: first, 3: middle, 4: last). The end may be cut off.
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not kind or at + 7 + length > len(data):
            return
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)
