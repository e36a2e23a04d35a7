"""Accounting, for those who want sacct: the sandbox's own database server and slurmdbd.

Both listen on the sandbox's network only. The database's administrator is root on its socket; the
one account with a password is slurmdbd's, and only its configuration file holds that.
"""

from __future__ import annotations

import secrets
import shutil

from .client import ask
from .commands import run, wait_until
from .config import CONTROLLER, plugin_lines
from .daemons import become_argv, program, spawn, wait_started
from .layout import Layout
from .state import State

_DATABASE = "slurm_acct_db"
_ANSWER_TIMEOUT_S = 60.0


def start(state: State) -> State:
    """Start the database and slurmdbd, and register the cluster; slurmctld is not running yet.

    Raises:
        SandboxError: One of them does not start; the text ends with its log.
    """
    password = secrets.token_hex(16)
    _write_slurmdbd_conf(state.layout, password)
    state = _start_database(state, password)
    state = spawn(state, "slurmdbd", slurmdbd_argv(state.layout))
    listed = ["sacctmgr", "-n", "list", "cluster"]
    wait_until(
        "an answer of slurmdbd",
        lambda: ask(state, listed, check=False).returncode == 0,
        _ANSWER_TIMEOUT_S,
        log=state.layout.log("slurmdbd"),
    )
    ask(state, ["sacctmgr", "-i", "add", "cluster", state.config.cluster])
    return state


def slurmdbd_conf(layout: Layout, password: str) -> str:
    """Return the text of slurmdbd.conf; pure."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={CONTROLLER}
DbdAddr={layout.controller_address}
DbdPort={layout.slurmdbd_port}
SlurmUser=root
PidFile={layout.directory}/pid/slurmdbd.pid
LogFile={layout.directory}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost={layout.controller_address}
StoragePort={layout.database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc={_DATABASE}
""" + "".join(f"{line}\n" for line in plugin_lines(layout))


def slurmdbd_argv(layout: Layout) -> list[str]:
    """Return the command of slurmdbd."""
    return [
        *("unshare", "--uts", "--mount"),
        *become_argv(layout, CONTROLLER),
        program(layout, "slurmdbd"),
        "-D",
    ]


def mariadbd_argv(layout: Layout) -> list[str]:
    """Return the command of the database server."""
    home = layout.database
    return [
        *("mariadbd", "--no-defaults", "--user=mysql", f"--datadir={home}/data"),
        *(f"--socket={home}/socket", f"--pid-file={home}/pid", "--skip-name-resolve"),
        *(f"--bind-address={layout.controller_address}", f"--port={layout.database_port}"),
        "--innodb-flush-log-at-trx-commit=0",  # it lives no longer than the sandbox
    ]


def _write_slurmdbd_conf(layout: Layout, password: str) -> None:
    path = layout.slurm_conf.with_name("slurmdbd.conf")
    path.touch(0o600)  # slurmdbd refuses one that others can read
    path.write_text(slurmdbd_conf(layout, password))


def _start_database(state: State, password: str) -> State:
    home = state.layout.database
    home.mkdir()
    shutil.chown(home, "mysql", "mysql")
    install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={home}/data"]
    run([*install, "--skip-test-db", "--auth-root-socket-user=root"], timeout_s=120.0)
    state = spawn(state, "mariadbd", mariadbd_argv(state.layout))
    wait_started(state, "mariadbd", "the database's socket", (home / "socket").exists)
    accounts = (
        f"CREATE USER slurm IDENTIFIED BY '{password}'; "
        f"GRANT ALL ON {_DATABASE}.* TO slurm; CREATE DATABASE {_DATABASE};"
    )
    client = ["mariadb", "--no-defaults", "--user=root", f"--socket={home}/socket"]
    run(client, stdin=accounts)
    return state
