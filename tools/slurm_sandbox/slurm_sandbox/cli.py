"""The command line: ``slurm-sandbox COMMAND``. What is for a machine goes to stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from . import releases, requirements
from .config import PREEMPT_MODES, SandboxConfig
from .errors import SandboxError
from .lifecycle import Status, is_up
from .sandbox import SlurmSandbox
from .state import DEFAULT_ROOT, load

_FAULTS = {
    "kill-node": ("kill_node", "end a node at once, with every process on it"),
    "start-node": ("start_node", "start a dead node and wait until Slurm has it back"),
    "pause-node": ("pause_node", "stop every process of a node"),
    "resume-node": ("resume_node", "let a paused node go on"),
    "partition": ("partition", "cut a node off from the network"),
    "heal": ("heal", "give a node its network back"),
    "writable-node": ("make_writable", "let a read-only node write again"),
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
    _command(commands, "down", "end it and remove everything it made")
    install = _command(commands, "install", "install the packages that it needs")
    install.add_argument("--accounting", action="store_true", help="those of accounting, too")
    install.add_argument("--nfs", action="store_true", help="those of up --nfs, too")
    shown = _command(commands, "status", "tell how it is")
    shown.add_argument("--json", action="store_true", help="for programs")
    _command(commands, "heal-all", "undo every fault and cancel every job")
    for name, (_, help_text) in _FAULTS.items():
        _command(commands, name, help_text).add_argument("node", help="2 or node2")
    read_only = _command(commands, "read-only-node", "let a node see files read-only")
    read_only.add_argument("node", help="2 or node2")
    read_only.add_argument("--spool", action="store_true", help="Slurm's spool, and nothing else")
    _add_server(commands)
    preempt = _command(commands, "preempt", "take nodes away for a job of the high partition")
    preempt.add_argument("nodes", nargs="+", metavar="node", help="2 or node2")
    preempt.add_argument("--for-s", type=float, default=30.0, help="seconds (default 30)")
    return top


def _add_server(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add what there is for a folder that is shared as by NFS (`up --nfs`)."""
    for name, (_, help_text) in _SERVER.items():
        _command(commands, name, f"{help_text} (up --nfs)")
    stop = _command(commands, "stop-server", "let no operation on the shared folder end")
    stop.add_argument("node", nargs="?", help="2, node2 or login (default: all)")
    fail = _command(commands, "fail-files", "let operations of the file server fail")
    fail.add_argument(
        "error",
        help="EIO, ENOSPC, EDQUOT, EROFS...; LOST: done, but unanswered; REPLACES: a link that is "
        "not exclusive",
    )
    fail.add_argument("--node", help="whose: 2, node2 or login (default: all)")
    fail.add_argument("--pattern", default="*", help="shell pattern of paths below the folder")
    fail.add_argument(
        "--operation", action="append", default=[], help="which (default write, or as it fits)"
    )
    fail.add_argument("--times", type=int, default=0, help="how often (default: until heal-server)")
    shown = _command(commands, "operations", "tell what clients have asked the file server for")
    shown.add_argument("--json", action="store_true", help="for programs")
    login = _command(commands, "login", "run a command as on the login node")
    login.add_argument("argv", nargs="+", metavar="COMMAND", help="the command, after --")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help_text, description=help_text)
    command.add_argument("--name", default="default", help="which sandbox (default: default)")
    command.add_argument("--root", type=Path, default=DEFAULT_ROOT, help=argparse.SUPPRESS)
    return command


def _add_up(command: argparse.ArgumentParser) -> None:
    """Add the settings; one that is not given keeps its value in a sandbox that is up."""
    command.add_argument("--nodes", type=int, help="number of nodes (default 4)")
    command.add_argument("--gpus-per-node", type=int, help="pretended GPUs (default 2)")
    command.add_argument("--grace-s", type=int, help="preemption's grace time (default 5)")
    command.add_argument(
        "--accounting",
        action=argparse.BooleanOptionalAction,
        help="run slurmdbd and a database, so that sacct answers (default no)",
    )
    command.add_argument(
        "--slurm",
        choices=sorted(releases.SUITES),
        help="release of Slurm, fetched from Debian if it is not the machine's (default: that one)",
    )
    command.add_argument(
        "--preempt-mode", choices=PREEMPT_MODES, help="of the partition low (default REQUEUE)"
    )
    command.add_argument(
        "--job-requeue",
        action=argparse.BooleanOptionalAction,
        help="requeue jobs that do not say (default yes)",
    )
    command.add_argument("--max-array-size", type=int, help="Slurm's MaxArraySize (default 1001)")
    command.add_argument(
        "--line", action="append", dest="extra_lines", help="a further line of slurm.conf"
    )
    command.add_argument(
        "--nfs",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="let nodes see this folder through NFS clients, each with caches of its own "
        "(default without a value: /tmp/hpc-elastic-shared/NAME)",
    )
    command.add_argument(
        "--nfs-options", help="such as nocto,actimeo=60 (default: as NFS has them)"
    )
    command.add_argument("--install", action="store_true", help="install missing packages")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return _dispatch(arguments)
    except PermissionError as error:
        _say(f"slurm_sandbox: {arguments.command} needs root: {error}")
        return 1
    except (SandboxError, ValueError) as error:
        _say(f"slurm_sandbox: {error}")
        return 1


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "up":
        return _up(arguments)
    if arguments.command == "install":
        missing = requirements.missing_packages(arguments.accounting, nfs=arguments.nfs)
        requirements.install(missing)
        return 0
    sandbox = SlurmSandbox(arguments.name, arguments.root)
    if arguments.command == "status":
        return _status(sandbox, as_json=arguments.json)
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
        _operations(sandbox, as_json=arguments.json)
    elif arguments.command == "login":
        argv = sandbox.on_login(arguments.argv)
        os.execvpe(argv[0], argv, {**os.environ, **sandbox.env})
    elif arguments.command == "preempt":
        print(sandbox.preempt(arguments.nodes, arguments.for_s))
    else:
        getattr(sandbox, _FAULTS[arguments.command][0])(arguments.node)
    return 0


def _up(arguments: argparse.Namespace) -> int:
    config = _asked_config(arguments)
    other = "" if config.slurm == releases.system_release() else config.slurm
    missing = requirements.missing_packages(config.accounting, slurm=other, nfs=bool(config.nfs))
    if missing and arguments.install:
        requirements.install(missing)
    sandbox = SlurmSandbox.up(config, root=arguments.root, report=_say)
    _say(f"{len(sandbox.nodes)} nodes are idle; to use them in this shell:")
    print(f"export {' '.join(f'{name}={quote(text)}' for name, text in sandbox.env.items())}")
    return 0


def _asked_config(arguments: argparse.Namespace) -> SandboxConfig:
    """Return the settings asked for, the others as they are or as they are by default."""
    config = SandboxConfig(name=arguments.name)
    found = load(arguments.name, arguments.root)
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


def _status(sandbox: SlurmSandbox, *, as_json: bool) -> int:
    """Print the status; the exit code is 0 only for a sandbox that is up."""
    status = sandbox.status()
    print(json.dumps(status, indent=1) if as_json else human(status))
    return 0 if status["up"] else 1


def _operations(sandbox: SlurmSandbox, *, as_json: bool) -> None:
    clients = ("login", *sandbox.nodes)
    counted = {client: sandbox.file_operations(client) for client in clients}
    if as_json:
        print(json.dumps(counted, indent=1))
        return
    for client, numbers in counted.items():
        told = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
        print(f"{client:8} {told or 'nothing'}")


def human(status: Status) -> str:
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


def _say(line: str) -> None:
    print(line, file=sys.stderr)
