"""Tells when a group's checkpoints begin not to reach their directory, and when they do again.

What writes them is the workers' `Checkpointer`, which never ends a training for it. The agent of
the first rank tells the run's story of it, for all: every rank hears of it if a part of a
checkpoint could not be written. For as long as that agent has the first rank, an incident is told
once, however many checkpoints and rounds it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpc_elastic.progress import Page


class SavingPage(Page, Protocol):
    """The part of a `hpc_elastic.control.ControlPage` that is used here."""

    def why_not_saved(self) -> str:
        """Return why the last checkpoint was not written."""


class Saves:
    """The checkpoints of a run, as one agent knows of them.

    Args:
        write: Writes an event, and does not wait for the file system: it may be what fails.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._page: SavingPage | None = None
        self._num_unsaved = 0
        self._failing = False

    def watch(self, page: SavingPage | None) -> None:
        """Begin another round.

        Args:
            page: The first rank's control page, just made; None: that is another node's.
        """
        self._page, self._num_unsaved = page, 0
        self._failing = self._failing and page is not None

    def look(self) -> None:
        """Take note of what the worker has published; called several times a second."""
        if self._page is None:
            return
        now = self._page.read()
        if now.num_unsaved != self._num_unsaved:
            self._num_unsaved = now.num_unsaved
            if not self._failing:
                self._write("not saved", step=now.unsaved, why=self._page.why_not_saved())
            self._failing = True
        if self._failing and now.stored is not None and now.stored >= (now.unsaved or 0):
            self._failing = False
            self._write("saved again", step=now.stored)
