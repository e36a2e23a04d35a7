"""Starting the daemons: munged, slurmctld, and in each node's namespaces one slurmd.

Every daemon is *gated*: it is spawned as a shell that waits for a line, its identity is recorded,
and only then does the line arrive and the shell become the daemon. Whoever is killed between the
two steps leaves no process behind that the state file does not know.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import config as texts
from . import user
from .commands import machine_path, run, tail, wait_until
from .config import CONTROLLER, LOGIN, SandboxConfig
from .errors import SandboxError
from .layout import Layout
from .processes import Process, identify, is_alive, only_child
from .state import State, save

_START_TIMEOUT_S = 30.0
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Whoever starts a daemon may ignore these; then every job under it would, and never end."""
_GATE = 'read -r go || exit 1; exec "$@" </dev/null'
_BECOME = """#!/bin/sh
# become.sh NAME COMMAND...: name these namespaces, give them the sandbox's hosts, run COMMAND.
set -e
hostname "$1"
name=$1
shift
{mounts}
{shared}
mount --bind {etc}/hosts /etc/hosts
[ ! -e /etc/nsswitch.conf ] || mount --bind {etc}/nsswitch.conf /etc/nsswitch.conf
exec "$@"
"""
_ON_LOGIN = """#!/bin/sh
# on_login.sh COMMAND...: run COMMAND where the shared folder is seen as a login node sees it.
set -e
{shared}
cd "$(pwd)"
exec "$@"
"""


def write_files(config: SandboxConfig, layout: Layout) -> None:
    """Write all that the daemons read, and make the directories that they write to."""
    spools = [f"spool/{node}" for node in config.node_names]
    for name in ("etc", "log", "pid", "state", "dev", "munge", *spools):
        (layout.directory / name).mkdir(parents=True, exist_ok=True)
    machine = os.uname().nodename
    version = texts.parse_version(run([program(layout, "slurmd"), "-V"]).stdout)
    etc = layout.slurm_conf.parent
    layout.slurm_conf.write_text(texts.slurm_conf(config, layout))
    (etc / "gres.conf").write_text(texts.gres_conf(config, layout))
    (etc / "cgroup.conf").write_text(texts.cgroup_conf(version))
    (etc / "hosts").write_text(texts.hosts(config, layout, machine))
    (etc / "nsswitch.conf").write_text(texts.nsswitch_conf(_read("/etc/nsswitch.conf")))
    mounts = user.mount_lines(layout, user.open_lines(layout, config.open_paths))
    shared = texts.bind_line(config, layout, '"$name"')
    (etc / "passwd").write_text(user.with_user(_read("/etc/passwd"), layout))
    (etc / "group").write_text(user.with_group(_read("/etc/group")))
    (etc / "become.sh").write_text(_BECOME.format(etc=etc, mounts=mounts, shared=shared))
    shared = texts.bind_line(config, layout, LOGIN)
    (etc / "login.sh").write_text(user.login_script(layout, f"{mounts}\n{shared}"))
    (etc / "on_login.sh").write_text(_ON_LOGIN.format(shared=shared))
    layout.home.mkdir()
    os.chown(layout.home, user.USER_ID, user.USER_ID)
    for index in range(config.gpus_per_node):
        os.mknod(layout.gpu_device(index), 0o666 | 0o020000, os.makedev(1, 3))
    _write_munge_key(layout)


def _read(path: str) -> str:
    """Return the text of a file, ``""`` if there is none."""
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


def _write_munge_key(layout: Layout) -> None:
    """Make the sandbox's own key; munged insists that it owns it and that nobody else reads it."""
    layout.munge_key.write_bytes(os.urandom(128))
    layout.munge_key.chmod(0o400)
    for path in (layout.munge_key, layout.munge_key.parent):
        shutil.chown(path, "munge", "munge")


def spawn(state: State, name: str, argv: Sequence[str]) -> State:
    """Start a daemon, its identity on record before it runs its first instruction.

    Returns:
        The state with the daemon, saved.
    """
    read_end, write_end = os.pipe()
    try:
        process = _spawn_gated(state.layout, name, argv, read_end)
        state = save(state.with_process(name, process))
        os.write(write_end, b"go\n")
    finally:
        os.close(read_end)
        os.close(write_end)
    return state


def _spawn_gated(layout: Layout, name: str, argv: Sequence[str], gate: int) -> Process:
    log = str(layout.log(name))
    environment = {
        "PATH": path(layout),
        "SLURM_CONF": str(layout.slurm_conf),
        "LANG": "C.UTF-8",
    }
    pid = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", _GATE, "gate", *argv],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, gate, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=_SIGNALS,
    )
    process = identify(pid)
    if process is None:
        raise SandboxError(f"{name} ended before it was recorded; see {log}")
    return process


def path(layout: Layout) -> str:
    """Return the PATH with which the sandbox's Slurm is found first."""
    theirs = machine_path(os.environ)
    return theirs if layout.programs is None else f"{layout.programs}:{theirs}"


def program(layout: Layout, name: str) -> str:
    """Return how to call one of Slurm's programs, whichever release a shell finds first."""
    return shutil.which(name, path=path(layout)) or name


def become_argv(layout: Layout, name: str) -> list[str]:
    """Return what stands before a daemon's command so that it runs under a name of its own."""
    return ["sh", str(layout.slurm_conf.parent / "become.sh"), name]


def munged_argv(layout: Layout) -> list[str]:
    """Return the command of the sandbox's own munged."""
    home = layout.munge_socket.parent
    return [
        *("unshare", "--uts", "--mount", *become_argv(layout, CONTROLLER)),
        *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"),
        *("munged", "--foreground", f"--socket={layout.munge_socket}"),
        f"--key-file={layout.munge_key}",
        *(f"--pid-file={home}/munged.pid", f"--seed-file={home}/munged.seed"),
    ]


def slurmctld_argv(layout: Layout) -> list[str]:
    """Return the command of the controller; it runs on the machine's network, under its name."""
    become = become_argv(layout, CONTROLLER)
    return ["unshare", "--uts", "--mount", *become, program(layout, "slurmctld"), "-D"]


def slurmd_argv(layout: Layout, node: str) -> list[str]:
    """Return the command that starts a node: its namespaces, its init, its slurmd.

    `nsenter` and not `ip netns exec`, which would hide the machine's /sys from the node.
    """
    return [
        *("nsenter", f"--net=/run/netns/{layout.namespace(node)}"),
        *("unshare", "--uts", "--mount", "--propagation=slave", "--pid", "--fork"),
        *("--kill-child", "--mount-proc", *become_argv(layout, node)),
        *("env", f"--chdir={layout.directory}/log"),  # where a step daemon that crashes dumps core
        *(sys.executable, "-I", "-S", str(Path(__file__).with_name("node_init.py"))),
        *(program(layout, "slurmd"), "-D", "-N", node, *_stepd(layout)),
    ]


def _stepd(layout: Layout) -> list[str]:
    """Return the option that names the step daemon where slurmd would take the machine's."""
    return [] if layout.tree is None else ["-d", program(layout, "slurmstepd")]


def start_munged(state: State) -> State:
    """Start munged and wait for its socket."""
    state = spawn(state, "munged", munged_argv(state.layout))
    wait_started(state, "munged", "munged's socket", state.layout.munge_socket.exists)
    return state


def start_slurmctld(state: State) -> State:
    """Start the controller; `wait_for_controller` tells when it answers."""
    return spawn(state, "slurmctld", slurmctld_argv(state.layout))


def wait_for_controller(state: State) -> None:
    """Wait until the controller answers."""
    environment = {**os.environ, "SLURM_CONF": str(state.layout.slurm_conf)}
    ping = [program(state.layout, "scontrol"), "ping"]

    def answers() -> bool:
        done = run(ping, env=environment, check=False)
        return done.returncode == 0 and "UP" in done.stdout

    wait_started(state, "slurmctld", "an answer of slurmctld", answers)


def start_slurmd(state: State, node: str) -> State:
    """Start a node; what is recorded is the process outside it whose end is the node's end."""
    state = spawn(state, node, slurmd_argv(state.layout, node))
    wait_started(state, node, f"the first process of {node}", lambda: bool(init_of(state, node)))
    return state


def init_of(state: State, node: str) -> Process | None:
    """Return the first process of a node, or None if the node is dead."""
    outer = state.processes.get(node)
    return only_child(outer) if outer is not None and is_alive(outer) else None


def wait_started(state: State, name: str, what: str, condition: Callable[[], bool]) -> None:
    """Wait for a daemon, no longer than it lives."""
    log = state.layout.log(name)

    def started() -> bool:
        if not is_alive(state.processes[name]):
            raise SandboxError(f"{name} ended while it started\n{tail(log)}")
        return condition()

    wait_until(what, started, _START_TIMEOUT_S, log=log)
