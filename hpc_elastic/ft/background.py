"""One function on a thread of its own, whose end others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs it at once, as a daemon: a script that ends is not kept alive by it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._was_raised = False
        self._thread = threading.Thread(target=self._run, name="ft_quorum", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when it has ended; raise what it has raised, each time."""
        self._thread.join()
        if self._error is not None:
            self._was_raised = True
            raise self._error

    def finish(self) -> None:
        """Return when it has ended; raise what it has raised if nobody has been told yet."""
        self._thread.join()
        if not self._was_raised:
            self.wait()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as e:
            self._error = e
