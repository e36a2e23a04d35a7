"""Several looks at each worker of a node, over a second or two.

All workers are looked at at the same time, and for no longer than `WITHIN_S`: the leader takes a
node that does not answer for one that hangs. What is not seen until then is done without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.agent import stacks
from hpc_elastic.progress import Page

WITHIN_S = 10.0
"""A fair part of `rendezvous.hang.ANSWER_S`, and room for a look that py-spy fails at."""
_PAUSES_S = (0.3, 0.5, 0.8)
"""Between two looks at a stack."""
_OUT_OF_REACH = ("T", "Z", None)


class Looks:
    """The looks at one worker; all attributes grow while it is looked at.

    Args:
        pid: Its process; None: it is gone.
        page: Its control page.
        dump: Where it writes its stacks.
    """

    def __init__(self, pid: int | None, page: Page, dump: Path) -> None:
        self.pid = pid
        self.texts: list[str] = []
        """Its stacks, one look after the other."""
        self.was_busy = False
        """Whether it was at what takes long: then there are no further stacks."""
        self._page = page
        self._dump = dump

    def look(self, deadline: float) -> None:
        """Look until something is known, or the time is over; monotonic seconds."""
        for pause_s in (0.0, *_PAUSES_S):
            time.sleep(pause_s)
            published = self._page.read()
            self.was_busy = bool(published.busy or published.held)
            if self.was_busy or time.monotonic() > deadline:
                return
            self._look()

    def _look(self) -> None:
        if self.pid is None or stacks.process_state(self.pid) in _OUT_OF_REACH:
            return
        text = stacks.take(self.pid, self._dump)
        if text:
            self.texts.append(text)


def look_at(workers: Sequence[Looks]) -> None:
    """Look at all workers, each on a thread of its own; return when all is seen, or in time."""
    deadline = time.monotonic() + WITHIN_S
    threads = [
        threading.Thread(target=worker.look, args=(deadline,), name="stack", daemon=True)
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
