"""The command line ``slurm-sandbox COMMAND``; only output for programs goes to stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from . import releases
from .config import PREEMPT_MODES, SandboxConfig
from .processes import SandboxError
from .sandbox import SandboxStatus, SlurmSandbox, is_up
from .state import DEFAULT_ROOT, load_state

_FAULTS = {
    "kill-node": ("kill_node", "kill every process of a node at once"),
    "start-node": ("start_node", "start a dead node and wait until Slurm uses it"),
    "pause-node": ("pause_node", "stop every process of a node"),
    "resume-node": ("resume_node", "continue a paused node"),
    "partition": ("partition", "disconnect a node from the network"),
    "heal": ("heal", "connect a node to the network again"),
    "writable-node": ("make_writable", "make a read-only node writable again"),
}
_SERVER = {
    "start-server": ("start_server", "let the file server answer again"),
    "restart-server": ("restart_server", "restart the file server: open files are ESTALE"),
    "heal-server": ("heal_server", "undo all faults of the file server"),
}
_SHARED = Path("/tmp/hpc-elastic-shared")
_EPILOG = 'try: eval "$(slurm-sandbox up | tail -1)" && srun -N4 hostname'


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="slurm-sandbox", description="A real multi-node Slurm on this machine.", epilog=_EPILOG
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(_command(commands, "up", "start it, and print how to use it"))
    _command(commands, "down", "end it and remove everything that it made")
    install = _command(commands, "install", "install the packages that it needs")
    install.add_argument("--accounting", action="store_true", help="also those of accounting")
    install.add_argument("--nfs", action="store_true", help="also those of up --nfs")
    shown = _command(commands, "status", "show the state of its nodes")
    shown.add_argument("--json", action="store_true", help="for programs")
    _command(commands, "heal-all", "undo every fault and cancel every job")
    for name, (_, help_text) in _FAULTS.items():
        _command(commands, name, help_text).add_argument("node", help="2 or node2")
    read_only = _command(commands, "read-only-node", "make files read-only on a node")
    read_only.add_argument("node", help="2 or node2")
    read_only.add_argument("--spool", action="store_true", help="only Slurm's spool")
    _add_server(commands)
    preempt = _command(commands, "preempt", "preempt nodes by a job of the high partition")
    preempt.add_argument("nodes", nargs="+", metavar="node", help="2 or node2")
    preempt.add_argument("--for-s", type=float, default=30.0, help="seconds (default 30)")
    return top


def _add_server(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands for a folder that is shared as by NFS (`up --nfs`)."""
    for name, (_, help_text) in _SERVER.items():
        _command(commands, name, f"{help_text} (up --nfs)")
    stop = _command(commands, "stop-server", "let no operation on the shared folder end")
    stop.add_argument("node", nargs="?", help="2, node2 or login (default: all)")
    fail = _command(commands, "fail-files", "let operations of the file server fail")
    fail.add_argument(
        "error",
        help="EIO, ENOSPC, EDQUOT, EROFS...; LOST: done without a reply; REPLACES: a link that is "
        "not exclusive",
    )
    fail.add_argument("--node", help="a client: 2, node2 or login (default: all)")
    fail.add_argument("--pattern", default="*", help="shell pattern of paths below the folder")
    fail.add_argument(
        "--operation",
        action="append",
        default=[],
        help="name of an operation; repeatable (default: write, or what fits the error)",
    )
    fail.add_argument(
        "--times", type=int, default=0, help="number of failures (default: until heal-server)"
    )
    shown = _command(commands, "operations", "show the operations of clients on the file server")
    shown.add_argument("--json", action="store_true", help="for programs")
    login = _command(commands, "login", "run a command on the login node")
    login.add_argument("argv", nargs="+", metavar="COMMAND", help="the command, after --")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help_text, description=help_text)
    command.add_argument("--name", default="default", help="name of the sandbox (default: default)")
    command.add_argument("--root", type=Path, default=DEFAULT_ROOT, help=argparse.SUPPRESS)
    return command


def _add_up(command: argparse.ArgumentParser) -> None:
    """Add the settings; one that is left out keeps its value in a sandbox that is up."""
    command.add_argument("--nodes", type=int, help="number of nodes (default 4)")
    command.add_argument("--gpus-per-node", type=int, help="simulated GPUs (default 2)")
    command.add_argument("--grace-s", type=int, help="preemption's grace time (default 5)")
    command.add_argument(
        "--accounting",
        action=argparse.BooleanOptionalAction,
        help="run slurmdbd and a database, so that sacct answers (default no)",
    )
    command.add_argument(
        "--slurm",
        choices=sorted(releases.SUITES),
        help="release of Slurm, fetched from Debian if not installed (default: the installed one)",
    )
    command.add_argument(
        "--preempt-mode",
        choices=PREEMPT_MODES,
        help="PreemptMode of the partition low (default REQUEUE)",
    )
    command.add_argument(
        "--job-requeue",
        action=argparse.BooleanOptionalAction,
        help="Slurm's JobRequeue (default yes)",
    )
    command.add_argument("--max-array-size", type=int, help="Slurm's MaxArraySize (default 1001)")
    command.add_argument(
        "--line",
        action="append",
        dest="extra_lines",
        help="an additional line of slurm.conf; repeatable",
    )
    command.add_argument(
        "--nfs",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="folder that each node sees through an NFS client of its own (without a value: "
        "/tmp/hpc-elastic-shared/NAME)",
    )
    command.add_argument(
        "--nfs-options", help="mount options such as nocto,actimeo=60 (default: those of NFS)"
    )
    command.add_argument("--install", action="store_true", help="install missing packages")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return _run_subcommand(arguments)
    except PermissionError as error:
        _print_message(f"slurm_sandbox: {arguments.command} needs root: {error}")
        return 1
    except (SandboxError, ValueError) as error:
        _print_message(f"slurm_sandbox: {error}")
        return 1


def _run_subcommand(arguments: argparse.Namespace) -> int:
    if arguments.command == "up":
        return _bring_up(arguments)
    if arguments.command == "install":
        missing = releases.missing_packages(arguments.accounting, nfs=arguments.nfs)
        releases.install_packages(missing)
        return 0
    sandbox = SlurmSandbox(arguments.name, arguments.root)
    if arguments.command == "status":
        return _print_status(sandbox, as_json=arguments.json)
    if arguments.command == "down":
        sandbox.down()
    elif arguments.command == "heal-all":
        sandbox.heal_all()
    elif arguments.command == "read-only-node":
        sandbox.make_read_only(arguments.node, spool=arguments.spool)
    elif arguments.command in _SERVER:
        getattr(sandbox, _SERVER[arguments.command][0])()
    elif arguments.command == "stop-server":
        sandbox.stop_server(arguments.node)
    elif arguments.command == "fail-files":
        sandbox.fail_files(
            arguments.error,
            client=arguments.node,
            pattern=arguments.pattern,
            operations=arguments.operation,
            times=arguments.times,
        )
    elif arguments.command == "operations":
        _print_operations(sandbox, as_json=arguments.json)
    elif arguments.command == "login":
        argv = sandbox.on_login(arguments.argv)
        os.execvpe(argv[0], argv, {**os.environ, **sandbox.env})
    elif arguments.command == "preempt":
        print(sandbox.preempt(arguments.nodes, arguments.for_s))
    else:
        getattr(sandbox, _FAULTS[arguments.command][0])(arguments.node)
    return 0


def _bring_up(arguments: argparse.Namespace) -> int:
    config = _asked_config(arguments)
    other = "" if config.slurm == releases.system_release() else config.slurm
    missing = releases.missing_packages(config.accounting, slurm=other, nfs=bool(config.nfs))
    if missing and arguments.install:
        releases.install_packages(missing)
    sandbox = SlurmSandbox.up(config, root=arguments.root, report=_print_message)
    _print_message(f"{len(sandbox.nodes)} nodes are idle; to use them in this shell:")
    print(f"export {' '.join(f'{name}={quote(text)}' for name, text in sandbox.env.items())}")
    return 0


def _asked_config(arguments: argparse.Namespace) -> SandboxConfig:
    """Return the settings: those given, else those of a sandbox that is up, else the defaults."""
    config = SandboxConfig(name=arguments.name)
    found = load_state(arguments.name, arguments.root)
    if found is not None and is_up(found):
        config = found.config
    names = [
        *("nodes", "gpus_per_node", "grace_s", "accounting", "slurm", "preempt_mode"),
        *("job_requeue", "max_array_size", "nfs_options"),
    ]
    given = {name: getattr(arguments, name) for name in names}
    if arguments.nfs is not None:
        given["nfs"] = str(Path(arguments.nfs or _SHARED / arguments.name).resolve())
    given["extra_lines"] = tuple(arguments.extra_lines) if arguments.extra_lines else None
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _print_status(sandbox: SlurmSandbox, *, as_json: bool) -> int:
    """Print the status; the exit code is 0 only for a sandbox that is up."""
    status = sandbox.status()
    print(json.dumps(status, indent=1) if as_json else status_text(status))
    return 0 if status["up"] else 1


def _print_operations(sandbox: SlurmSandbox, *, as_json: bool) -> None:
    clients = ("login", *sandbox.nodes)
    counted = {client: sandbox.file_operations(client) for client in clients}
    if as_json:
        print(json.dumps(counted, indent=1))
        return
    for client, numbers in counted.items():
        counts = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
        print(f"{client:8} {counts or 'nothing'}")


def status_text(status: SandboxStatus) -> str:
    """Return a status as text for people."""
    head = f"sandbox {status['name']}: {'up' if status['up'] else 'not up'}"
    if not status["nodes"]:
        return head
    rows = [
        f"{node['name']:8} {node['address']:14} processes {node['processes']:8} "
        f"link {node['link']:5} files {node['files']:9} slurm {node['slurm']}"
        for node in status["nodes"]
    ]
    shared = [f"shared as by NFS: {status['nfs']}"] if status["nfs"] else []
    return "\n".join([head, f"SLURM_CONF={status['slurm_conf']}", *shared, *rows])


def _print_message(line: str) -> None:
    print(line, file=sys.stderr)
