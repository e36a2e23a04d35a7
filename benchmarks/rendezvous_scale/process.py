"""A process of its own for each side, with a pipe to it, and as many sockets as it needs."""

import contextlib
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

_SPARE_FILES = 200
_END_S = 20.0


class NoAnswerError(Exception):
    """A process has ended, or says nothing for too long."""


def allow_files(count: int) -> None:
    """Raise the soft limit of open files to the number that the connections need."""
    wanted = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < wanted:
        raise SystemExit(f"{count} connections need {wanted} open files; ulimit -Hn is {hard}")
    if soft not in (resource.RLIM_INFINITY,) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def side(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run ``work(pipe, *arguments)`` in a fresh process; it is to end when the pipe closes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(_END_S)
        process.kill()
        process.join()


def answer(pipe: Connection, patience_s: float) -> Any:
    try:
        if pipe.poll(patience_s):
            return pipe.recv()
    except EOFError:
        raise NoAnswerError("it has ended") from None
    raise NoAnswerError(f"nothing for {patience_s:g} s")
