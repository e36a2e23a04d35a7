"""The daemons of a sandbox: how each is started, and how Slurm is called.

munged and slurmctld run on the machine, one slurmd runs in each node's namespaces; slurmdbd and its
database run with accounting.

Every daemon is *gated*: it is spawned as a shell that waits for a line, its identity is recorded,
and only then does the line arrive and the shell become the daemon. So a command that is killed
between the two steps leaves no process that the state file does not know.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import config as texts
from .config import CONTROLLER, DATABASE, USER_ID, Layout, SandboxConfig
from .processes import (
    Completed,
    Process,
    SandboxError,
    first_child,
    identify_process,
    is_alive,
    log_tail,
    machine_path,
    run_command,
    search_path,
    wait_until,
)
from .state import State, save_state

_START_TIMEOUT_S = 30.0
_ACCOUNTING_TIMEOUT_S = 60.0
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Reset in daemons: a caller may ignore them, and then every job below the daemon would, too."""
_GATE = 'read -r go || exit 1; exec "$@" </dev/null'
_NVIDIA = 195
"""Major number of NVIDIA's devices (devices.txt in Linux); without its driver none opens."""
_UNAVAILABLE = ("down", "drain", "fail")


def write_files(config: SandboxConfig, layout: Layout) -> None:
    """Write all files that the daemons read, and make the directories that they write to."""
    spools = [f"spool/{node}" for node in config.node_names]
    for name in ("etc", "log", "pid", "state", "dev", "munge", *spools):
        (layout.directory / name).mkdir(parents=True, exist_ok=True)
    version = texts.parse_version(run_command([slurm_program(layout, "slurmd"), "-V"]).stdout)
    opened = texts.open_lines(layout, config.open_paths)
    files = {
        "slurm.conf": texts.slurm_conf(config, layout),
        "gres.conf": texts.gres_conf(config, layout),
        "cgroup.conf": texts.cgroup_conf(version, constrain_devices=config.constrain_devices),
        "hosts": texts.hosts(config, layout, os.uname().nodename),
        "nsswitch.conf": texts.nsswitch_conf(_read("/etc/nsswitch.conf")),
        "passwd": texts.passwd(_read("/etc/passwd"), layout),
        "group": texts.group(_read("/etc/group")),
        **texts.scripts(config, layout, opened),
    }
    for name, text in files.items():
        layout.slurm_conf.with_name(name).write_text(text)
    layout.home.mkdir()
    os.chown(layout.home, USER_ID, USER_ID)
    for index in range(config.num_devices):
        os.mknod(layout.gpu_device(index), 0o666 | 0o020000, os.makedev(_NVIDIA, index))
    layout.munge_key.write_bytes(os.urandom(128))
    layout.munge_key.chmod(0o400)
    for path in (layout.munge_key, layout.munge_key.parent):  # munged insists on both
        shutil.chown(path, "munge", "munge")


def _read(path: str) -> str:
    """Return the text of a file, ``""`` if there is none."""
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


def slurm_path(layout: Layout) -> str:
    """Return the PATH that finds the sandbox's Slurm first."""
    machine = machine_path(os.environ)
    return machine if layout.programs is None else f"{layout.programs}:{machine}"


def slurm_program(layout: Layout, name: str) -> str:
    """Return the path of one of Slurm's programs, of the sandbox's release."""
    return shutil.which(name, path=slurm_path(layout)) or name


def start_daemon(state: State, name: str, argv: Sequence[str]) -> State:
    """Start a daemon; its identity is recorded before it runs its first instruction.

    Returns:
        The state with the daemon, saved.
    """
    read_end, write_end = os.pipe()
    try:
        process = _spawn_gated(state.layout, name, argv, read_end)
        state = save_state(state.with_process(name, process))
        os.write(write_end, b"go\n")
    finally:
        os.close(read_end)
        os.close(write_end)
    return state


def _spawn_gated(layout: Layout, name: str, argv: Sequence[str], gate: int) -> Process:
    log = str(layout.log(name))
    environment = {
        "PATH": slurm_path(layout),
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
    process = identify_process(pid)
    if process is None:
        raise SandboxError(f"{name} ended before it was recorded; see {log}")
    return process


def wait_for_daemon(state: State, name: str, what: str, condition: Callable[[], bool]) -> None:
    """Wait until a daemon has started, no longer than it lives."""
    log = state.layout.log(name)

    def has_started() -> bool:
        if not is_alive(state.processes[name]):
            raise SandboxError(f"{name} ended while it started\n{log_tail(log)}")
        return condition()

    wait_until(what, has_started, _START_TIMEOUT_S, log=log)


def start_munged(state: State) -> State:
    """Start munged and wait for its socket."""
    state = start_daemon(state, "munged", munged_argv(state.layout))
    wait_for_daemon(state, "munged", "munged's socket", state.layout.munge_socket.exists)
    return state


def munged_argv(layout: Layout) -> list[str]:
    """Return the command of the sandbox's own munged."""
    home = layout.munge_socket.parent
    return [
        *_as_controller(layout),
        *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"),
        *("munged", "--foreground", f"--socket={layout.munge_socket}"),
        f"--key-file={layout.munge_key}",
        *(f"--pid-file={home}/munged.pid", f"--seed-file={home}/munged.seed"),
    ]


def start_slurmctld(state: State) -> State:
    """Start the controller; `wait_for_controller` waits until it answers."""
    argv = [*_as_controller(state.layout), slurm_program(state.layout, "slurmctld"), "-D"]
    return start_daemon(state, "slurmctld", argv)


def wait_for_controller(state: State) -> None:
    """Wait until the controller answers."""

    def answers() -> bool:
        done = run_slurm(state, ["scontrol", "ping"], check=False)
        return done.returncode == 0 and "UP" in done.stdout

    wait_for_daemon(state, "slurmctld", "an answer of slurmctld", answers)


def start_slurmd(state: State, node: str) -> State:
    """Start a node: its namespaces, its init, its slurmd.

    `nsenter` and not `ip netns exec`, which would hide the machine's /sys from the node.
    """
    layout = state.layout
    argv = [
        *("nsenter", f"--net=/run/netns/{layout.namespace(node)}"),
        *("unshare", "--uts", "--mount", "--propagation=slave", "--pid", "--fork"),
        *("--kill-child", "--mount-proc", *_become(layout, node)),
        *("env", f"--chdir={layout.directory}/log"),  # where a step daemon that crashes dumps core
        *(sys.executable, "-I", "-S", str(Path(__file__).with_name("node_init.py"))),
        *(slurm_program(layout, "slurmd"), "-D", "-N", node),
        # slurmd of another release would start the machine's step daemon
        *([] if layout.tree is None else ["-d", slurm_program(layout, "slurmstepd")]),
    ]
    state = start_daemon(state, node, argv)
    started = f"the first process of {node}"
    wait_for_daemon(state, node, started, lambda: init_of(state, node) is not None)
    return state


def remove_cgroups(config: SandboxConfig) -> None:
    """Remove the cgroups that the nodes' slurmd have made for devices; no process is left there."""
    for node in config.node_names:
        top = Path("/sys/fs/cgroup/devices", f"slurm_{node}")
        for folder in sorted(top.glob("**/"), reverse=True):
            folder.rmdir()


def init_of(state: State, node: str) -> Process | None:
    """Return the first process of a node, or None if the node is dead."""
    outer = state.processes.get(node)
    return first_child(outer) if outer is not None and is_alive(outer) else None


def _as_controller(layout: Layout) -> list[str]:
    """Return the prefix of a daemon that runs on the machine's network under its own host name."""
    return ["unshare", "--uts", "--mount", *_become(layout, CONTROLLER)]


def _become(layout: Layout, name: str) -> list[str]:
    """Return the prefix of a command that names its namespaces; see ``become.sh``."""
    return ["sh", str(layout.slurm_conf.with_name("become.sh")), name]


def start_accounting(state: State) -> State:
    """Start the database and slurmdbd, and register the cluster; slurmctld is not running yet.

    Both listen on the sandbox's network only. The database's administrator is root on its socket.
    The one account with a password is slurmdbd's, and only slurmdbd.conf holds that.

    Raises:
        SandboxError: One of them does not start; the text ends with its log.
    """
    layout, password = state.layout, secrets.token_hex(16)
    conf = layout.slurm_conf.with_name("slurmdbd.conf")
    conf.touch(0o600)  # slurmdbd refuses one that others can read
    conf.write_text(texts.slurmdbd_conf(layout, password))
    state = _start_database(state, password)
    argv = [*_as_controller(layout), slurm_program(layout, "slurmdbd"), "-D"]
    state = start_daemon(state, "slurmdbd", argv)
    listed = ["sacctmgr", "-n", "list", "cluster"]
    wait_until(
        "an answer of slurmdbd",
        lambda: run_slurm(state, listed, check=False).returncode == 0,
        _ACCOUNTING_TIMEOUT_S,
        log=layout.log("slurmdbd"),
    )
    run_slurm(state, ["sacctmgr", "-i", "add", "cluster", state.config.cluster])
    return state


def _start_database(state: State, password: str) -> State:
    layout, home = state.layout, state.layout.database
    home.mkdir()
    shutil.chown(home, "mysql", "mysql")
    install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={home}/data"]
    run_command([*install, "--skip-test-db", "--auth-root-socket-user=root"], timeout_s=120.0)
    argv = [
        *("mariadbd", "--no-defaults", "--user=mysql", f"--datadir={home}/data"),
        *(f"--socket={home}/socket", f"--pid-file={home}/pid", "--skip-name-resolve"),
        *(f"--bind-address={layout.controller_address}", f"--port={layout.database_port}"),
        "--innodb-flush-log-at-trx-commit=0",  # it lives no longer than the sandbox
    ]
    state = start_daemon(state, "mariadbd", argv)
    wait_for_daemon(state, "mariadbd", "the database's socket", (home / "socket").exists)
    accounts = (
        f"CREATE USER slurm IDENTIFIED BY '{password}'; "
        f"GRANT ALL ON {DATABASE}.* TO slurm; CREATE DATABASE {DATABASE};"
    )
    client = ["mariadb", "--no-defaults", "--user=root", f"--socket={home}/socket"]
    run_command(client, stdin=accounts)
    return state


def slurm_env(state: State) -> dict[str, str]:
    """Return the variables that point Slurm's commands at the sandbox.

    PATH is among them unless the present one finds the sandbox's release already.
    """
    conf = {"SLURM_CONF": str(state.layout.slurm_conf)}
    wanted, present = slurm_path(state.layout), search_path(os.environ)
    is_found = state.layout.programs is None and set(wanted.split(":")) == set(present.split(":"))
    return conf if is_found else {**conf, "PATH": wanted}


def run_slurm(
    state: State, argv: Sequence[str], *, check: bool = True, timeout_s: float = 60.0
) -> Completed:
    """Run a Slurm command against the sandbox and return its output."""
    env = {**os.environ, **slurm_env(state)}
    return run_command(argv, env=env, check=check, timeout_s=timeout_s)


def node_states(state: State) -> dict[str, str]:
    """Return Slurm's state of each node, such as ``idle`` or ``down*``; empty without an answer."""
    done = run_slurm(state, ["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"], check=False)
    return dict(line.split() for line in done.stdout.splitlines())


def is_idle(node_state: str) -> bool:
    """Return whether a node in that state is available and unused; pure."""
    return node_state == "idle"


def is_available(node_state: str) -> bool:
    """Return whether a node in that state answers Slurm and may run jobs; pure."""
    return "*" not in node_state and not node_state.startswith((*_UNAVAILABLE, "unknown"))


def needs_resume(node_state: str) -> bool:
    """Return whether Slurm gives a node in that state no jobs until it is resumed; pure."""
    return node_state.startswith(_UNAVAILABLE)


def wait_for_nodes(
    state: State, nodes: Sequence[str], accept: Callable[[str], bool], timeout_s: float
) -> None:
    """Wait until Slurm reports an acceptable state for each of the nodes.

    Raises:
        SandboxTimeoutError: Names the nodes in other states.
    """

    def others() -> list[str]:
        states = node_states(state)
        found = {node: states.get(node, "unknown") for node in nodes}
        return [f"{node} is {found[node]}" for node in nodes if not accept(found[node])]

    def what() -> str:
        return f"{accept.__name__}: {', '.join(others())}"

    wait_until(what, lambda: not others(), timeout_s, log=state.layout.log("slurmctld"))


def resume_nodes(state: State, nodes: Iterable[str]) -> None:
    """Resume the nodes that Slurm has marked down or drained."""
    states = node_states(state)
    away = ",".join(node for node in nodes if needs_resume(states.get(node, "")))
    if away:
        resume = ["scontrol", "update", f"nodename={away}", "state=resume"]
        run_slurm(state, resume, check=False)


def cancel_jobs(state: State) -> None:
    """Cancel every job at once: SIGKILL first, so that none uses its KillWait."""
    listed = run_slurm(state, ["squeue", "-h", "-a", "-o", "%A"])
    ids = list(dict.fromkeys(listed.stdout.split()))
    if ids:
        run_slurm(state, ["scancel", "--full", "--signal=KILL", *ids], check=False)
        run_slurm(state, ["scancel", *ids], check=False)
