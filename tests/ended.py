"""Processes that do nothing but end, and whether they have."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def sleeping(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing; it does not outlive the context.

    Args:
        *arguments: Of its command line: an agent of a run has the path of its array's file.
    """
    argv = [sys.executable, "-c", "import time; time.sleep(600)", *map(str, arguments)]
    process = subprocess.Popen(argv)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; nobody may have asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
