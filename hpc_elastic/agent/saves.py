"""Tells when the checkpoints of a group begin to fail, and when they are written again.

What writes them is the workers' `Checkpointer`, which never ends a training for it. The agent of
the first rank tells the run's story of it, for all: every rank hears of it if a part of a
checkpoint could not be written. One incident is told once, however many checkpoints it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpc_elastic.control import Progress


class Page(Protocol):
    """The part of a `hpc_elastic.control.ControlPage` that is used here."""

    def read(self) -> Progress:
        """Return what the worker last published."""

    def why_not_saved(self) -> str:
        """Return why the last checkpoint was not written."""


class Saves:
    """The checkpoints of one round.

    Args:
        write: Writes an event, and does not wait for the file system: it may be what fails.
        page: The first rank's control page, just made.
    """

    def __init__(self, write: Callable[..., None], page: Page) -> None:
        self._write = write
        self._page = page
        self._num_unsaved = 0
        self._saved: int | None = None
        """What was saved last when they began to fail."""
        self._failing = False

    def look(self) -> None:
        """Take note of what the worker has published; called several times a second."""
        now = self._page.read()
        if now.num_unsaved != self._num_unsaved:
            self._num_unsaved, self._saved = now.num_unsaved, now.boundary
            if not self._failing:
                self._write("not saved", step=now.unsaved, why=self._page.why_not_saved())
            self._failing = True
        elif self._failing and now.boundary != self._saved:
            self._failing = False
            self._write("saved again", step=now.boundary)
