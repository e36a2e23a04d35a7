"""The command ``hpc-elastic``: its arguments, and one module for each of its commands.

Commands are imported when they are called: ``--help`` answers in the time that Python takes to
start, on a login node whose file system is slow, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.errors import HpcElasticError


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
    try:
        if arguments.command == "render":
            from hpc_elastic.cli.render import render

            return render(arguments.script, others, arguments.output)
        if others:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        from hpc_elastic.cli.attach import attach

        return attach(arguments.sweep, arguments.poll_s)
    except HpcElasticError as e:
        print(f"hpc-elastic {arguments.command}: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpc-elastic", description="Elastic PyTorch runs on Slurm."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

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

    attach = commands.add_parser(
        "attach",
        help="wait for submitted runs and show their progress",
        description="Show the progress of submitted runs, as the launcher does, until they end.",
    )
    attach.add_argument("sweep", type=Path, metavar="SWEEP_DIR", help="sweep directory of the runs")
    attach.add_argument("--poll-s", type=float, default=1.0, help="interval in seconds (1)")
    return parser
