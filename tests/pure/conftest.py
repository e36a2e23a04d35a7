"""Tests of this folder start no process and open no socket: they are what `--fast` runs."""

import sys
import threading
from collections.abc import Iterator

import pytest

REFUSED = {"os.fork", "os.posix_spawn", "socket.bind", "socket.connect", "subprocess.Popen"}
_thread: int | None = None
"""That of a test; threads that other tests have left may do what they do."""


def _refuse(event: str, _args: tuple[object, ...]) -> None:
    if event in REFUSED and threading.get_ident() == _thread:
        raise RuntimeError(f"{event} in tests/pure: such a test is one of tests/process")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Refuse both; thousands of schedules may use all cores."""
    global _thread
    _thread = None if request.node.get_closest_marker("schedules") else threading.get_ident()
    yield
    _thread = None
