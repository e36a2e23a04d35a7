"""Commands, waits and processes of the sandbox: bounded, and identified for good.

A pid alone is recycled, and a state file outlives processes. So a `Process` is a pid and its start
time, and every signal goes through a pid file descriptor after the start time was checked on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Completed = subprocess.CompletedProcess[str]
TREE_MARK = "hpc-elastic-slurm"
"""A file that every unpacked release of Slurm has beside its ``bin``."""

_PROC = Path("/proc")
_COMMAND_POLL_S = 0.05
_PROCESS_POLL_S = 0.02
_TAIL_LINES = 12
_START_FIELD = 19  # field 22 of proc(5)'s stat, counted after the command in parentheses


class SandboxError(RuntimeError):
    """Base of all errors of the sandbox; the text gives the remedy."""


class SandboxTimeoutError(SandboxError, TimeoutError):
    """A bounded wait ended; the text names what was awaited, and ends with the daemon's log."""

    def __init__(self, what: str, timeout_s: float, log_tail: str = "") -> None:
        self.what = what
        self.timeout_s = timeout_s
        tail = f"\n{log_tail}" if log_tail else ""
        super().__init__(f"not within {timeout_s:g} s: {what}{tail}")


class CommandError(SandboxError):
    """A command that the sandbox ran failed.

    Attributes:
        argv: The command.
        exit_code: Its exit code.
        stderr: Its standard error.
    """

    def __init__(self, argv: Sequence[str], exit_code: int, stderr: str) -> None:
        self.argv = tuple(argv)
        self.exit_code = exit_code
        self.stderr = stderr
        super().__init__(f"{' '.join(argv)}: exit code {exit_code}: {stderr.strip()}")


def search_path(env: Mapping[str, str]) -> str:
    """Return PATH with the folders of daemons' programs, which a shell by sudo may lack."""
    return f"{env.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def machine_path(env: Mapping[str, str]) -> str:
    """Return `search_path` without the programs of unpacked releases of Slurm."""
    folders = dict.fromkeys(search_path(env).split(":"))
    return ":".join(folder for folder in folders if not Path(folder, "..", TREE_MARK).exists())


def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    check: bool = True,
    timeout_s: float = 60.0,
) -> Completed:
    """Run a command to its end and return its output.

    Raises:
        CommandError: It failed and `check` is set.
        SandboxTimeoutError: It did not end in time, and was killed.
    """
    environment = os.environ if env is None else env
    try:
        done = subprocess.run(
            argv,
            env={**environment, "PATH": search_path(environment)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxTimeoutError(f"end of `{' '.join(argv)}`", timeout_s) from error
    if check and done.returncode:
        raise CommandError(argv, done.returncode, done.stderr)
    return done


def wait_until(
    what: str | Callable[[], str],
    condition: Callable[[], bool],
    timeout_s: float,
    *,
    log: Path | None = None,
) -> None:
    """Wait until a condition holds.

    Args:
        what: What is awaited, in words that fit after "not within 10 s:"; a function is called at
            the time-out, and can name what is still missing.
        condition: Polled; an exception of it ends the wait.
        timeout_s: Longest wait in seconds.
        log: Log whose last lines the error quotes.

    Raises:
        SandboxTimeoutError: The condition did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise SandboxTimeoutError(text, timeout_s, log_tail(log) if log else "")
        time.sleep(_COMMAND_POLL_S)


def log_tail(log: Path) -> str:
    """Return the last lines of a log, headed by its path."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"({log}: {error.strerror})"
    return "\n".join([f"--- end of {log}:", *lines])


@dataclass(frozen=True)
class Process:
    """Identity of one process, valid even after its pid was recycled.

    Attributes:
        pid: Its pid as this process sees it.
        start_ticks: Clock ticks from boot to its start.
    """

    pid: int
    start_ticks: int


def identify_process(pid: int) -> Process | None:
    """Return the process that has this pid now, or None if there is none."""
    stat = _read_stat(pid)
    return None if stat is None else Process(pid, stat[1])


def state_letter(process: Process) -> str:
    """Return the state letter of proc(5) (``R``, ``S``, ``T``, ...), or ``""`` after the end.

    A zombie counts as ended; it is reaped if it is a child of this process.
    """
    stat = _read_stat(process.pid)
    if stat is None or stat[1] != process.start_ticks:
        return ""
    if stat[0] in "ZX":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
        return ""
    return stat[0]


def is_alive(process: Process) -> bool:
    """Return whether the process still exists."""
    return state_letter(process) != ""


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Signal the process; False, and nothing sent, if it has ended or its pid was recycled."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def kill_process(process: Process, timeout_s: float = 10.0) -> bool:
    """Kill the process and wait for its end; return whether it has ended.

    A process that got a recycled pid is left alone.
    """
    send_signal(process, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PROCESS_POLL_S)
    return True


def first_child(process: Process) -> Process | None:
    """Return the first child of the process, or None if it has none (yet)."""
    try:
        children = (_PROC / f"{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return None
    return identify_process(int(children[0])) if children else None


def namespace_members(init: Process) -> Iterator[Process]:
    """Yield all processes of the pid namespace whose first process is `init`."""
    namespace = _pid_namespace(init.pid)
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and namespace and _pid_namespace(int(entry.name)) == namespace:
            process = identify_process(int(entry.name))
            if process is not None:
                yield process


def stop_tree(init: Process, timeout_s: float = 20.0) -> bool:
    """Stop every process of init's namespace, including those forked meanwhile.

    A process that waits for a file server without an answer (state ``D``) counts as stopped once
    signalled: it runs no further than to the end of its system call.

    Returns:
        Whether all are stopped.
    """
    deadline = time.monotonic() + timeout_s
    signalled: set[Process] = set()
    while time.monotonic() < deadline:
        states = {process: state_letter(process) for process in namespace_members(init)}
        running = [
            process
            for process, state in states.items()
            if state not in ("", "T", "t") and not (state == "D" and process in signalled)
        ]
        if not running:
            return True
        for process in running:
            send_signal(process, signal.SIGSTOP)
        signalled.update(running)
        time.sleep(_PROCESS_POLL_S)
    return False


def continue_tree(init: Process) -> None:
    """Continue every process of init's namespace."""
    for process in list(namespace_members(init)):
        send_signal(process, signal.SIGCONT)


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of a pid, or None if no process has it."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 1 :].split()
    return fields[0], int(fields[_START_FIELD])


def _pid_namespace(pid: int) -> str:
    try:
        return str((_PROC / str(pid) / "ns/pid").readlink())
    except OSError:
        return ""
