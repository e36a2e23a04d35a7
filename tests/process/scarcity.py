"""What a process runs out of: threads, and open files."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator


def no_thread(_: threading.Thread) -> None:
    """Stand for `Thread.start` where a limit of processes is reached."""
    raise RuntimeError("can't start new thread")


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no further file; those that are open stay so."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
