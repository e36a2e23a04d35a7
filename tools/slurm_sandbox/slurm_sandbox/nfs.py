"""A shared folder as through NFS: each node has a client with caches of its own.

Without it all nodes see one folder through one kernel, at once. With it every node, and the *login
node*, has a FUSE mount of the folder (``nfs_client.c``, which defines what is cached for how long),
bound over the folder in the node's mount namespace. The folder itself is the server's disk: on the
machine, outside the nodes, it shows what the server has.

A client is a process outside its node, so that a paused node does not hold up the kernel. It is
killed before its node, so that data which the node has not sent is lost as in a power cut.

The server's faults are one file that all clients read (its lines: see ``nfs_client.c``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .config import LOGIN, Layout, SandboxConfig, client_options
from .daemons import start_daemon, wait_for_daemon
from .processes import SandboxError, is_alive, kill_process, run_command
from .state import State

ALL = "*"
CHANGES = (
    *("setattr", "create", "write", "mkdir", "symlink", "mknod", "link", "rename", "unlink"),
    "rmdir",
)
"""The operations that change something."""
OPERATIONS = (
    *("lookup", "getattr", "open", "read", "commit", "opendir", "readdir", "readlink", "statfs"),
    *CHANGES,
)
"""The operations of a server, by the names of its counters."""
LOST = "LOST"
"""Instead of an error: the operation is done, its reply is lost, and the client tries again."""
REPLACES = "REPLACES"
"""Instead of an error: a link replaces an existing name without an error."""

_SOURCE = Path(__file__).with_name("nfs_client.c")
_PROGRAMS = "-programs"  # no sandbox can have this name
_RECORD = struct.Struct("16sQ")


@dataclass(frozen=True)
class FaultRule:
    """One fault of the server: operations that fail.

    Attributes:
        number: Identifies the rule; a client counts by it how often the rule has applied.
        client: ``node2``, ``login`` or ``*``.
        error: Number of the error, 0 for a reply that is lost, -2 for a link that replaces.
        times: How often at most; 0 for always.
        operations: Names of `OPERATIONS`.
        pattern: Shell pattern of paths below the folder; ``*`` matches slashes, too.
    """

    number: int
    client: str
    error: int
    times: int
    operations: tuple[str, ...]
    pattern: str


@dataclass(frozen=True)
class ServerFaults:
    """All faults of the server.

    Attributes:
        epoch: Goes up when the server restarts.
        stopped: The clients without an answer, or ``*``.
        rules: The operations that fail.
        last_rule: The highest number of a rule so far.
        traced: Whether clients record their operations; see `trace_operations`.
    """

    epoch: int = 0
    stopped: tuple[str, ...] = ()
    rules: tuple[FaultRule, ...] = field(default_factory=tuple)
    last_rule: int = 0
    traced: bool = False


def faults_to_text(server: ServerFaults) -> str:
    """Return the text of the fault file, which the clients read; pure."""
    lines = [f"epoch {server.epoch}", f"last {server.last_rule}"]
    lines += [f"stopped {client}" for client in server.stopped]
    lines += ["trace"] * server.traced
    lines += [
        f"rule {rule.number} {rule.client} {rule.error} {rule.times} "
        f"{','.join(rule.operations)} {rule.pattern}"
        for rule in server.rules
    ]
    return "\n".join([*lines, ""])


def faults_from_text(text: str) -> ServerFaults:
    """Parse the text of `faults_to_text`."""
    server = ServerFaults()
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "epoch":
            server = replace(server, epoch=int(rest))
        elif kind == "last":
            server = replace(server, last_rule=int(rest))
        elif kind == "trace":
            server = replace(server, traced=True)
        elif kind == "stopped":
            server = replace(server, stopped=(*server.stopped, rest))
        elif kind == "rule":
            number, client, error, times, operations, pattern = rest.split(" ", 5)
            names = tuple(operations.split(","))
            rule = FaultRule(int(number), client, int(error), int(times), names, pattern)
            server = replace(server, rules=(*server.rules, rule))
    return server


def read_faults(state: State) -> ServerFaults:
    """Return the faults of a sandbox's server."""
    try:
        return faults_from_text(_faults(state.layout).read_text())
    except FileNotFoundError:
        return ServerFaults()


def write_faults(state: State, server: ServerFaults) -> None:
    """Replace the faults; clients follow from their next operation on."""
    fresh = _faults(state.layout).with_suffix(".new")
    fresh.write_text(faults_to_text(server))
    fresh.replace(_faults(state.layout))


def stop_server(state: State, client: str = ALL) -> None:
    """Let no operation of a client end, until `start_server`."""
    server = read_faults(state)
    write_faults(state, replace(server, stopped=(*server.stopped, client)))


def start_server(state: State) -> None:
    """Let a stopped server answer again."""
    write_faults(state, replace(read_faults(state), stopped=()))


def restart_server(state: State) -> None:
    """Restart the server: open files are ESTALE, data that was not sent is lost."""
    server = read_faults(state)
    write_faults(state, replace(server, epoch=server.epoch + 1))


def fail_operations(
    state: State,
    error: str,
    *,
    client: str = ALL,
    pattern: str = ALL,
    operations: Sequence[str] = (),
    times: int = 0,
) -> None:
    """Let operations fail, until `heal_server`; `SlurmSandbox.fail_files` has the arguments."""
    number = {LOST: 0, REPLACES: -2}.get(error, getattr(errno, error, None))
    if number is None:
        raise ValueError(f"no such error: {error!r}; use a name of errno(3), {LOST} or {REPLACES}")
    default = {"EROFS": CHANGES, LOST: ("link",), REPLACES: ("link",)}.get(error, ("write",))
    wanted = tuple(operations) or default
    unknown = sorted(set(wanted) - {*OPERATIONS})
    if unknown:
        known = ", ".join(OPERATIONS)
        raise ValueError(f"no such operations: {', '.join(unknown)}; known are {known}")
    server = read_faults(state)
    rule = FaultRule(server.last_rule + 1, client, number, times, wanted, pattern)
    rules = (*server.rules, rule)
    write_faults(state, replace(server, rules=rules, last_rule=rule.number))


def heal_server(state: State) -> None:
    """Undo all faults of the server."""
    if state.config.nfs:
        server = read_faults(state)
        write_faults(state, replace(server, stopped=(), rules=()))


def count_operations(layout: Layout, client: str) -> dict[str, int]:
    """Return the counters of a client: operations by name, and the bytes read and written.

    Answers from the client's caches are not counted. The numbers go on when a node restarts.
    """
    try:
        return parse_counters(_counts(layout, client).read_bytes())
    except FileNotFoundError:
        return {}


def parse_counters(content: bytes) -> dict[str, int]:
    """Parse the counter file of a client; pure."""
    records = _RECORD.iter_unpack(content)
    return {name.rstrip(b"\0").decode(): number for name, number in records}


def trace_operations(state: State, on: bool) -> None:
    """Start to record the operations of all clients, from nothing; or stop."""
    for client in clients(state.config) if on else ():
        _trace(state.layout, client).unlink(missing_ok=True)
    write_faults(state, replace(read_faults(state), traced=on))


def read_trace(layout: Layout, client: str) -> list[tuple[str, str]]:
    """Return the recorded operations of a client, each with its path."""
    try:
        lines = _trace(layout, client).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(operation, path) for operation, _, path in (line.partition(" ") for line in lines)]


def path_of_client(state: State, client: str, path: Path) -> Path:
    """Return the path at which the machine sees the folder as a client does.

    Raises:
        ValueError: The path is not in the folder.
    """
    return state.layout.nfs / client / path.relative_to(state.config.nfs)


def client_program(root: Path) -> Path:
    """Return the program of the clients; compile it unless this source was compiled before.

    Raises:
        CommandError: The compiler fails; the text gives the reason.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = root / _PROGRAMS / f"nfs_client-{digest}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}")
    flags = ["-std=gnu11", "-O2", "-D_FILE_OFFSET_BITS=64", "-I/usr/include/fuse3"]
    run_command(["gcc", *flags, str(_SOURCE), "-o", str(fresh), "-lfuse3", "-lpthread"])
    fresh.replace(target)
    return target


def clients(config: SandboxConfig) -> tuple[str, ...]:
    """Return the names of all clients; none without a shared folder."""
    return (LOGIN, *config.node_names) if config.nfs else ()


def process_name(client: str) -> str:
    """Return the name of a client's process in the state."""
    return f"nfs-{client}"


def start_client(state: State, client: str) -> State:
    """Start a client with empty caches, unless it runs, and wait until it is mounted.

    Returns:
        The state with its process; unchanged without a shared folder.
    """
    name = process_name(client)
    if not state.config.nfs or (name in state.processes and is_alive(state.processes[name])):
        return state
    layout, point = state.layout, state.layout.nfs / client
    Path(state.config.nfs).mkdir(parents=True, exist_ok=True)
    layout.nfs_control.mkdir(parents=True, exist_ok=True)
    _unmount(mounted_below(point))
    point.mkdir(parents=True, exist_ok=True)
    argv = [str(client_program(layout.directory.parent)), client, state.config.nfs, str(point)]
    argv += [str(layout.nfs_control), client_options(state.config.nfs_options)]
    state = start_daemon(state, name, argv)
    wait_for_daemon(state, name, f"the mount of {client}", lambda: bool(mounted_below(point)))
    return state


def kill_client(state: State, client: str) -> None:
    """Kill a client: data that it has not sent is lost, and its mount stops answering.

    Raises:
        SandboxError: It does not end.
    """
    process = state.processes.get(process_name(client))
    if process is not None and not kill_process(process):
        raise SandboxError(f"{process_name(client)} (pid {process.pid}) does not end")
    _unmount(mounted_below(state.layout.nfs / client))


def remove_clients(state: State) -> None:
    """Kill all clients, and unmount everything in the sandbox's directory.

    Raises:
        SandboxError: Something cannot be unmounted.
    """
    for client in clients(state.config):
        kill_client(state, client)
    left = mounted_below(state.layout.nfs)
    _unmount(left)
    if mounted_below(state.layout.nfs):
        raise SandboxError(f"cannot be unmounted: {', '.join(map(str, left))}")


def mounted_below(folder: Path) -> list[Path]:
    """Return the mounts at a folder and below it, the last one first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return [point for point in reversed(points) if point.is_relative_to(folder)]


def _unmount(points: Iterable[Path]) -> None:
    for point in points:
        run_command(["umount", "--lazy", str(point)], check=False)


def _faults(layout: Layout) -> Path:
    return layout.nfs_control / "faults"


def _trace(layout: Layout, client: str) -> Path:
    return layout.nfs_control / f"{client}.trace"


def _counts(layout: Layout, client: str) -> Path:
    return layout.nfs_control / f"{client}.counts"
