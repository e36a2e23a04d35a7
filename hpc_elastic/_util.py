"""What all parts use: a command that may hang, numbers as text, a throughput, packaged files."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, cast

if TYPE_CHECKING:
    import subprocess

    from _typeshed import FileDescriptorLike

T = TypeVar("T")
_log = logging.getLogger(__name__)

_REAP_S = 1.0


def run(
    argv: Sequence[str],
    *,
    timeout_s: float | None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    errors: Literal["replace", "surrogateescape"] = "replace",
) -> subprocess.CompletedProcess[str]:
    """Run a command that may hang: on a dead controller, a GPU's driver, NFS.

    `subprocess.run` waits without limit for a killed process that the kernel holds. The command has
    a process group of its own, which is killed as a whole: killing a shell alone would leave its
    child behind. ``stdin`` is its standard input.

    The call lasts at most ``timeout_s`` (None: no limit) and `_REAP_S`. ``errors`` is the treatment
    of bytes that are not UTF-8: ``surrogateescape`` for names of files. Raises OSError if it cannot
    be started, and subprocess.TimeoutExpired if it has not ended in time.
    """
    import signal  # at its use, with the next: a Hydra script that is not ours imports this module
    import subprocess

    process = subprocess.Popen(
        argv, env=env, text=True, errors=errors, process_group=0,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, error_output = process.communicate(stdin, timeout=timeout_s)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
    return subprocess.CompletedProcess(argv, process.returncode, output, error_output)


def run_shell(
    command: str,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> tuple[int | None, str, str]:
    """`run` a user's shell command; return exit code (None: no end), output, and what is wrong."""
    import subprocess

    try:
        done = run(["/bin/sh", "-c", command], timeout_s=timeout_s, env=env, stdin=stdin)
    except subprocess.TimeoutExpired:
        return None, "", f"it has not ended after {timeout_s:g} s"
    except OSError as e:
        return None, "", f"it cannot be started: {e}"
    last = done.stderr.strip().rpartition("\n")[2][-200:]
    return done.returncode, done.stdout, f"exit code {done.returncode}: {last}"


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM, and the SIGHUP of a lost terminal, into KeyboardInterrupt.

    By default they end Python at once, and its child processes continue. A SIGHUP that is ignored
    stays so: the program was started by nohup.
    """
    import signal

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [signal.SIGTERM] if is_kept else [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- Counts and lengths of time as text (pure)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: ``1 node``, ``3 nodes``; ``many`` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """Return a length of time, no more exact than is of use: ``4.2 s``, ``3 h 20 min``, ``2 d``."""
    s = max(0.0, seconds)
    if s < 9.95:
        return f"{s:.1f}".removesuffix(".0") + " s"
    if s < 120:
        return f"{s:.0f} s"
    minutes = round(s / 60)
    if s < 600:
        return _both(round(s), 60, "min", "s")
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return _both(minutes, 60, "h", "min")
    return _both(round(s / 3600), 24, "d", "h")


def short(seconds: float) -> str:
    """Return a length of time that may be below a second: ``0.1 ms``, ``4.2 s``."""
    if seconds < 1e-4:
        return "0.1 ms"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else duration(round(seconds, 1))


def _both(number: int, size: int, large: str, small: str) -> str:
    many, few = divmod(number, size)
    return f"{many} {large} {few} {small}" if few else f"{many} {large}"


def quoted(path: Path) -> str:
    """Return a path for a shell, relative to the working directory if it lies below that."""
    import shlex

    near = path.is_relative_to(Path.cwd()) and path != Path.cwd()
    return shlex.quote(str(path.relative_to(Path.cwd()) if near else path))


def node_time(node_s: float, like: float | None = None) -> str:
    """Return node-seconds in a unit that suits them, or the largest number in the same place."""
    size = node_s if like is None else like
    if size < 600:
        return f"{node_s:.1f} node-s"
    return f"{node_s / 60:.1f} node-min" if size < 18_000 else f"{node_s / 3600:,.1f} node-h"


_MARKS = 60
"""Number of counts kept per window."""


class ThroughputMeter:
    """Throughput of a count over a window; times below ``shortest_s`` count as that (pure)."""

    def __init__(self, window_s: float, shortest_s: float = 0.0) -> None:
        self._window_s = window_s
        self._shortest_s = shortest_s
        self._marks: deque[tuple[float, int]] = deque()

    def record_count(self, count: int | None, now: float) -> None:
        """Record the count at a time; None, and a smaller one than before, starts again."""
        marks = self._marks
        if count is None or (marks and count < marks[-1][1]):
            marks.clear()
        if count is None:
            return
        if len(marks) > 1 and now - marks[-2][0] < self._window_s / _MARKS:
            marks.pop()
        marks.append((now, count))
        while len(marks) > 2 and now - marks[1][0] >= self._window_s:
            marks.popleft()

    @property
    def rate(self) -> float | None:
        """The count per second; None before there are two counts."""
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        seconds = max(end - begin, self._shortest_s)
        return (last - first) / seconds if seconds > 0 else None


def folder(name: Literal["conf", "examples", "sbatch_templates"]) -> Path:
    """Return a folder of files that ship with the package.

    A wheel has them inside of the package, a clone beside it. Raises FileNotFoundError if the
    installation is incomplete; reinstall it.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"hpc_elastic has no {name}/ in {package} or beside it: reinstall it")


def readable(
    *files: FileDescriptorLike, timeout_s: float | None = None
) -> list[FileDescriptorLike]:
    """Wait for files; return those that can be read or are at their end.

    By poll(2), since select(2) refuses descriptors above 1024, and data loaders open more files.
    The longest wait is poll's limit, 24 days; None is without limit.
    """
    poll = select.poll()
    by_number = {f if isinstance(f, int) else f.fileno(): f for f in files}
    for number in by_number:
        poll.register(number, select.POLLIN)
    timeout_ms = None if timeout_s is None else min(math.ceil(timeout_s * 1000), 2**31 - 1)
    return [by_number[number] for number, _ in poll.poll(timeout_ms)]


_ESCAPES = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, the cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # strings: the title, links
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
    r"|[\u2028-\u202e\u2066-\u2069]"  # ends of lines, and changes of the direction of text
)
_COLOUR = r"\x1b\[[0-9;:]*m"


def cleaned(text: str, *, colours: bool) -> str:
    """Return a line without control characters and escapes, but perhaps with its colours (pure)."""
    if text.isprintable():
        return text

    def shown(m: re.Match[str]) -> str:
        return m[0] if colours and re.fullmatch(_COLOUR, m[0]) else ""

    found = re.sub(_ESCAPES, shown, text)
    return found + "\x1b[0m" if "\x1b" in found else found


def cleaned_lines(text: str, *, colours: bool) -> str:
    """Return a text of several lines, each `cleaned` (pure)."""
    return "\n".join(cleaned(line, colours=colours) for line in text.split("\n"))


class CleanedStream:
    """A text stream without control characters but tabs and line ends; terminals keep colours."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write without control characters; return the number of characters taken."""
        self.stream.write(cleaned_lines(text, colours=self.stream.isatty()))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))


def terminal_of(stream: TextIO) -> TextIO:
    """Return where a stream writes, for a console that cleans texts itself and moves the cursor."""
    return stream.stream if isinstance(stream, CleanedStream) else stream


@contextlib.contextmanager
def cleaned_output() -> Iterator[None]:
    """Let what is printed meanwhile be without control characters."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, CleanedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
                     errno.ENOMEM))  # fmt: skip
"""Errors of a system that is full for the moment: of a disk, a quota, a table of the kernel."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)


def patiently(work: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Call a function; again, after growing pauses, for two minutes, while the system is full."""
    for pause_s in _PAUSES_S:
        try:
            return work()
        except OSError as e:
            if e.errno not in PASSING:
                raise
            _log.error("tried again in %g s: %s", pause_s, e)
            sleep(pause_s)
    return work()


def hydra_release() -> tuple[int, int]:
    """Return the release of Hydra, such as (1, 4), which decides first whether it is a multirun."""
    from hydra import __version__

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)
