"""TensorBoard in an elastic run: one folder of event files, each step once.

    from hpc_elastic.integrations.tensorboard import SummaryWriter

    writer = SummaryWriter()
    writer.add_scalar("loss", loss, step)

It is torch's ``SummaryWriter``; `tracking` has what is different. A worker that starts reads the
event files that are there, about a second for 200,000 values.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.integrations import tracking

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils import tensorboard
except ImportError as e:
    raise ImportError(
        "hpc_elastic.integrations.tensorboard needs TensorBoard: pip install tensorboard"
    ) from e


class SummaryWriter(tensorboard.SummaryWriter):
    """A SummaryWriter that writes on rank 0 only, and no step twice. Every rank may use it.

    Outside of a run it is torch's own on rank 0. In a run the names of the files contain the run's
    id, so that runs with one folder do not take each other's steps for their own.

    Args:
        log_dir: On a file system that all nodes share; None: ``<run>/tensorboard``, and outside
            of a run as of torch.
        options: As of torch.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._is_logger = tracking.is_logger()
        self._run = tracking.own_run()
        self._steps: tracking.LastSteps | None = None
        if self._run is not None:
            log_dir = Path(log_dir or self._run.path / "tensorboard")
            mark = f".{re.sub(r'[^A-Za-z0-9_-]', '-', self._run.run_id)}.run"
            options["filename_suffix"] = mark + options.get("filename_suffix", "")
            if self._is_logger:
                self._steps = tracking.LastSteps(read_last_steps(log_dir, mark), self._annotate)
        super().__init__(log_dir, **options)
        if not self._is_logger:
            adders = [name for name in dir(self) if name.startswith("add_")]
            self.__dict__.update(dict.fromkeys(adders, lambda *_, **__: None))

    def _get_file_writer(self) -> Any:
        if not self._is_logger:
            return None
        writer: Any = super()._get_file_writer()
        return writer if self._steps is None else _NewSteps(writer, self._steps)

    def _annotate(self, step: int) -> None:
        if self._run is not None:
            text = self._run.describe_events().replace("\n", "  \n")  # line breaks of Markdown
            self.add_text(tracking.EVENTS, text, step)

    def add_scalars(self, main_tag: str, *_: Any, **__: Any) -> None:
        """Refuse: it makes a folder for each curve, which is not checked for steps."""
        raise ConfigError("add_scalars", main_tag, "call add_scalar for each curve")


class _NewSteps:
    """torch's FileWriter that takes new steps only, and writes each to the file at once."""

    def __init__(self, writer: Any, steps: tracking.LastSteps) -> None:
        self._writer, self._steps = writer, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def add_summary(self, summary: Any, global_step: Any = None, walltime: Any = None) -> None:
        if all(self._steps.is_new(value.tag, int(global_step or 0)) for value in summary.value):
            self._writer.add_summary(summary, global_step, walltime)
            self._writer.flush()


def read_last_steps(folder: Path, mark: str = "") -> dict[str, int]:
    """Return the last step of each tag in the event files of a folder whose names have the mark."""
    last = dict[str, int]()
    for file in (file for file in folder.glob("*tfevents*") if mark in file.name):
        for event in _events(file.read_bytes()):
            for value in event.summary.value:
                last[value.tag] = max(last.get(value.tag, -1), event.step)
    return last


def _events(data: bytes) -> Iterator[Any]:
    """Yield the events of a file; the last one may be cut off.

    An event is framed by its length (8 bytes) and its checksum (4), and a checksum (4) follows.
    """
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + 16 + length > len(data):
            return
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
