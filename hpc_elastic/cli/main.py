"""The command ``hpc-elastic``: its arguments, and one module for each of its commands.

Commands are imported when they are called: ``--help`` answers in the time that Python takes to
start, on a login node whose file system is slow, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpc_elastic.errors import HpcElasticError

if TYPE_CHECKING:
    _Parsers = argparse._SubParsersAction[argparse.ArgumentParser]

_RUN_HELP = "run directory, its directory of checkpoints, or one checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the name of the program; None takes those of this process.

    Returns:
        The exit code: 0, 1 if the command failed (which it said on standard error), or that of
        the user's script.
    """
    parser = _parser()
    arguments, others = parser.parse_known_args(argv)
    if others and arguments.command != "render":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        return _COMMANDS[arguments.command].call(arguments, others)
    except HpcElasticError as e:
        print(f"hpc-elastic {arguments.command}: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpc-elastic", description="Elastic PyTorch runs on Slurm."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS.values():
        command.add_to(commands)
    return parser


def _add_render(commands: _Parsers) -> None:
    render = commands.add_parser(
        "render",
        help="print the batch script of a run, submit nothing",
        usage="hpc-elastic render [-o DIR] SCRIPT [OVERRIDE ...]",
        description="Print the batch script that `python SCRIPT OVERRIDE...` would submit. The run "
        "directories are made, so that the script can be given to sbatch by hand.",
        epilog="Everything else is handed to the script: launcher=slurm nodes=1:16 lr=0.1",
    )
    render.add_argument("script", metavar="SCRIPT", help="your Hydra script, such as train.py")
    render.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write the script(s) to this directory"
    )


def _render(arguments: argparse.Namespace, others: list[str]) -> int:
    from hpc_elastic.cli.render import render

    return render(arguments.script, others, arguments.output)


def _add_attach(commands: _Parsers) -> None:
    attach = commands.add_parser(
        "attach",
        help="wait for submitted runs and show their progress",
        description="Show the progress of submitted runs, as the launcher does, until they end.",
    )
    attach.add_argument("sweep", type=Path, metavar="SWEEP_DIR", help="sweep directory of the runs")
    attach.add_argument("--poll-s", type=float, default=1.0, help="interval in seconds (1)")


def _attach(arguments: argparse.Namespace, _: list[str]) -> int:
    from hpc_elastic.cli.attach import attach

    return attach(arguments.sweep, arguments.poll_s)


def _add_verify(commands: _Parsers) -> None:
    verify = commands.add_parser(
        "verify",
        help="check the checkpoints of a run",
        description="Read all checkpoints of a run and compare their checksums. The exit code is 1 "
        "if one is damaged, or there is none.",
    )
    verify.add_argument("run", type=Path, metavar="RUN", help=_RUN_HELP)
    verify.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _verify(arguments: argparse.Namespace, _: list[str]) -> int:
    from hpc_elastic.cli.verify import verify

    return verify(arguments.run, as_json=arguments.json)


def _add_export(commands: _Parsers) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint as one file for torch.load",
        description="Write the newest good checkpoint of a run as one file of whole tensors, for "
        "torch.load(FILE, weights_only=True).",
        epilog="hpc-elastic export runs/7 --key model -o model.pt",
    )
    export.add_argument("run", type=Path, metavar="RUN", help=_RUN_HELP)
    export.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="such as model.pt"
    )
    export.add_argument("--step", type=int, metavar="N", help="this step instead of the newest")
    export.add_argument(
        "--key", metavar="KEY", help="one key of the Checkpointer's state, such as model"
    )


def _export(arguments: argparse.Namespace, _: list[str]) -> int:
    from hpc_elastic.cli.export import export

    return export(arguments.run, arguments.output, step=arguments.step, key=arguments.key)


def _add_audit(commands: _Parsers) -> None:
    audit = commands.add_parser(
        "audit",
        help="prove that every sample was trained exactly once an epoch",
        description="Read the ledger that a run's samplers have kept, and tell whether every "
        "sample was trained exactly once an epoch, whatever happened to the world size. The exit "
        "code is 1 if one was left out or trained twice.",
    )
    audit.add_argument("run", type=Path, metavar="RUN", help="run directory")
    audit.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _audit(arguments: argparse.Namespace, _: list[str]) -> int:
    from hpc_elastic.cli.audit import audit_run

    return audit_run(arguments.run, as_json=arguments.json)


def _add_lighthouse(commands: _Parsers) -> None:
    lighthouse = commands.add_parser(
        "lighthouse",
        help="coordinate fault-tolerant training without this launcher",
        description="Keep the quorum of hpc_elastic.ft where no run of this launcher does: the "
        "Managers are given its address in TORCHFT_LIGHTHOUSE. May be killed and started again.",
    )
    lighthouse.add_argument(
        "--bind", default="0.0.0.0:29510", metavar="ADDRESS:PORT", help="(0.0.0.0:29510)"
    )
    for name, default, what in (
        ("--min-replicas", 1, "fewest members of a quorum"),
        ("--join-timeout-ms", 100, "how long to wait for replicas that do not ask yet"),
        ("--quorum-tick-ms", 100, "how often to look at the time-outs"),
        ("--heartbeat-timeout-ms", 5000, "a replica that is silent for longer is lost"),
    ):
        lighthouse.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} ({default})"
        )


def _lighthouse(arguments: argparse.Namespace, _: list[str]) -> int:
    from hpc_elastic.cli.lighthouse import lighthouse
    from hpc_elastic.ft.coordination import LighthouseOptions

    options = LighthouseOptions(
        arguments.min_replicas,
        arguments.join_timeout_ms,
        arguments.quorum_tick_ms,
        arguments.heartbeat_timeout_ms,
    )
    return lighthouse(arguments.bind, options)


class _Command(NamedTuple):
    add_to: Callable[[_Parsers], None]
    call: Callable[[argparse.Namespace, list[str]], int]


_COMMANDS = {
    "render": _Command(_add_render, _render),
    "attach": _Command(_add_attach, _attach),
    "verify": _Command(_add_verify, _verify),
    "export": _Command(_add_export, _export),
    "audit": _Command(_add_audit, _audit),
    "lighthouse": _Command(_add_lighthouse, _lighthouse),
}
