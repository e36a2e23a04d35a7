"""A shared folder that nodes see as through NFS: each by a client of its own, with its own caches.

Without it all nodes see one folder through one kernel, at once. With it every node, and the *login
node*, has a FUSE mount of the folder (``nfs_client.c``, which says what is cached for how long),
bound over the folder in the node's mount namespace. The folder itself is the server's disk: whoever
looks at it on the machine, outside the nodes, sees what the server has.

A client is a process outside its node, so that a node that is paused does not hold up the kernel,
and it is killed before its node is, so that what the node has not sent is lost as in a power cut.

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

from .commands import run
from .config import LOGIN, SandboxConfig, client_options
from .daemons import spawn, wait_started
from .errors import SandboxError
from .layout import Layout
from .processes import end, is_alive
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
"""What a server is asked for, by the names under which it is counted."""
LOST = "LOST"
"""In the place of an error: the deed is done, its reply is lost, and the client tries again."""
REPLACES = "REPLACES"
"""In the place of an error: a link takes the place of a name that is there, and nobody is told."""

_SOURCE = Path(__file__).with_name("nfs_client.c")
_PROGRAMS = "-programs"  # no sandbox can have this name
_RECORD = struct.Struct("16sQ")


@dataclass(frozen=True)
class Rule:
    """One fault of the server: operations that fail.

    Attributes:
        number: Tells rules apart; a client counts by it how often the rule has applied.
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
class Server:
    """What is wrong with the server.

    Attributes:
        epoch: Goes up when the server restarts.
        stopped: The clients that get no answer, or ``*``.
        rules: The operations that fail.
        last_rule: The highest number that a rule has had.
        traced: Whether its operations are written down; see `trace`.
    """

    epoch: int = 0
    stopped: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = field(default_factory=tuple)
    last_rule: int = 0
    traced: bool = False


def to_text(server: Server) -> str:
    """Return the text of the file that the clients read; pure."""
    lines = [f"epoch {server.epoch}", f"last {server.last_rule}"]
    lines += [f"stopped {client}" for client in server.stopped]
    lines += ["trace"] * server.traced
    lines += [
        f"rule {rule.number} {rule.client} {rule.error} {rule.times} "
        f"{','.join(rule.operations)} {rule.pattern}"
        for rule in server.rules
    ]
    return "\n".join([*lines, ""])


def from_text(text: str) -> Server:
    """Return what `to_text` wrote."""
    server = Server()
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
            rule = Rule(int(number), client, int(error), int(times), names, pattern)
            server = replace(server, rules=(*server.rules, rule))
    return server


def server_of(state: State) -> Server:
    """Return what is wrong with a sandbox's server."""
    try:
        return from_text(_faults(state.layout).read_text())
    except FileNotFoundError:
        return Server()


def set_server(state: State, server: Server) -> None:
    """Let the clients see other faults, from their next operation on."""
    fresh = _faults(state.layout).with_suffix(".new")
    fresh.write_text(to_text(server))
    fresh.replace(_faults(state.layout))


def stop(state: State, client: str = ALL) -> None:
    """Let no operation of a client end, until `go_on`."""
    server = server_of(state)
    set_server(state, replace(server, stopped=(*server.stopped, client)))


def go_on(state: State) -> None:
    """Let a server that was stopped answer again."""
    set_server(state, replace(server_of(state), stopped=()))


def restart(state: State) -> None:
    """Restart the server: files that are open are ESTALE, what was not sent to it is lost."""
    server = server_of(state)
    set_server(state, replace(server, epoch=server.epoch + 1))


def fail(
    state: State,
    error: str,
    *,
    client: str = ALL,
    pattern: str = ALL,
    operations: Sequence[str] = (),
    times: int = 0,
) -> None:
    """Let operations fail, until `heal`.

    Args:
        state: The sandbox.
        error: Name of the error, such as ``ENOSPC``; ``LOST``: the deed is done and the reply lost;
            ``REPLACES``: a link takes the place of a name that is there.
        client: Whose operations: ``node2``, ``login``, or ``*``.
        pattern: Shell pattern of paths below the folder.
        operations: Which; by default those that change something for EROFS, the link for LOST and
            REPLACES, and writing for all others.
        times: How often; 0 for always.

    Raises:
        ValueError: No such error or operation.
    """
    number = {LOST: 0, REPLACES: -2}.get(error, getattr(errno, error, None))
    if number is None:
        raise ValueError(f"no such error: {error!r}")
    default = {"EROFS": CHANGES, LOST: ("link",), REPLACES: ("link",)}.get(error, ("write",))
    wanted = tuple(operations) or default
    unknown = sorted(set(wanted) - {*OPERATIONS})
    if unknown:
        raise ValueError(f"no such operations: {', '.join(unknown)}")
    server = server_of(state)
    rule = Rule(server.last_rule + 1, client, number, times, wanted, pattern)
    rules = (*server.rules, rule)
    set_server(state, replace(server, rules=rules, last_rule=rule.number))


def heal(state: State) -> None:
    """Undo all faults of the server."""
    if state.config.nfs:
        server = server_of(state)
        set_server(state, replace(server, stopped=(), rules=()))


def operations(layout: Layout, client: str) -> dict[str, int]:
    """Return how often a client has asked the server for what, and how many bytes it has moved.

    What a client answers from its caches is not among it. The numbers go on when a node restarts.
    """
    try:
        content = _counts(layout, client).read_bytes()
    except FileNotFoundError:
        return {}
    records = _RECORD.iter_unpack(content)
    return {name.rstrip(b"\0").decode(): number for name, number in records}


def trace(state: State, on: bool) -> None:
    """Begin to write down what all clients ask the server for, from nothing; or end that."""
    for client in clients(state.config) if on else ():
        _trace(state.layout, client).unlink(missing_ok=True)
    set_server(state, replace(server_of(state), traced=on))


def traced(layout: Layout, client: str) -> list[tuple[str, str]]:
    """Return what a client has asked for while that was written down: operations and paths."""
    try:
        lines = _trace(layout, client).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(operation, path) for operation, _, path in (line.partition(" ") for line in lines)]


def view(state: State, client: str, path: Path) -> Path:
    """Return where the machine sees a path of the folder as a client sees it.

    Raises:
        ValueError: The path is not in the folder.
    """
    return state.layout.nfs / client / path.relative_to(state.config.nfs)


def program(root: Path) -> Path:
    """Return the program of the clients, compiled unless this source has been before.

    Raises:
        CommandError: The compiler fails; the text says why.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = root / _PROGRAMS / f"nfs_client-{digest}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}")
    flags = ["-std=gnu11", "-O2", "-D_FILE_OFFSET_BITS=64", "-I/usr/include/fuse3"]
    run(["gcc", *flags, str(_SOURCE), "-o", str(fresh), "-lfuse3", "-lpthread"])
    fresh.replace(target)
    return target


def clients(config: SandboxConfig) -> tuple[str, ...]:
    """Return the names of all clients; none without a shared folder."""
    return (LOGIN, *config.node_names) if config.nfs else ()


def process_name(client: str) -> str:
    """Return the name under which a client is on record."""
    return f"nfs-{client}"


def start_client(state: State, client: str) -> State:
    """Start a client, if it does not run, with empty caches, and wait until it is mounted.

    Returns:
        The state with its process; the same one without a shared folder.
    """
    name = process_name(client)
    if not state.config.nfs or (name in state.processes and is_alive(state.processes[name])):
        return state
    layout, point = state.layout, state.layout.nfs / client
    Path(state.config.nfs).mkdir(parents=True, exist_ok=True)
    layout.nfs_control.mkdir(parents=True, exist_ok=True)
    _unmount(mounted_below(point))
    point.mkdir(parents=True, exist_ok=True)
    argv = [str(program(layout.directory.parent)), client, state.config.nfs, str(point)]
    argv += [str(layout.nfs_control), client_options(state.config.nfs_options)]
    state = spawn(state, name, argv)
    wait_started(state, name, f"the mount of {client}", lambda: bool(mounted_below(point)))
    return state


def end_client(state: State, client: str) -> None:
    """End a client at once: what it has not sent is lost, and its mount answers no more.

    Raises:
        SandboxError: It does not end.
    """
    process = state.processes.get(process_name(client))
    if process is not None and not end(process):
        raise SandboxError(f"{process_name(client)} (pid {process.pid}) does not end")
    _unmount(mounted_below(state.layout.nfs / client))


def remove(state: State) -> None:
    """End all clients, and make sure that nothing is mounted where files are to be removed.

    Raises:
        SandboxError: Something is.
    """
    for client in clients(state.config):
        end_client(state, client)
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
        run(["umount", "--lazy", str(point)], check=False)


def _faults(layout: Layout) -> Path:
    return layout.nfs_control / "faults"


def _trace(layout: Layout, client: str) -> Path:
    return layout.nfs_control / f"{client}.trace"


def _counts(layout: Layout, client: str) -> Path:
    return layout.nfs_control / f"{client}.counts"
