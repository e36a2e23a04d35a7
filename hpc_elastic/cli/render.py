"""``hpc-elastic render``: the batch script on standard output, all else on standard error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hpc_elastic.errors import SubmissionError

_EXAMPLES = """
\b
Examples:
  hpc-elastic render train.py launcher=slurm nodes=1:16
  hpc-elastic render -o scripts train.py -m launcher=slurm lr=0.1,0.2 launcher.partition=gpu,cpu
"""


@click.command(
    epilog=_EXAMPLES,
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Write the scripts to this directory.",
)  # fmt: skip
@click.argument("script")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OVERRIDE]...")
def command(output: Path | None, script: str, overrides: tuple[str, ...]) -> int:
    """Print the batch script that `python SCRIPT OVERRIDE...` would submit.

    The run directories are made, so that the script can be given to sbatch by hand. All that
    follows SCRIPT is handed to it.
    """
    return render(script, overrides, output)


def render(script: str, arguments: Sequence[str], output: Path | None) -> int:
    """Run the user's script as a dry run, and hand on the batch script that it made.

    Args:
        script: The user's Hydra script.
        arguments: Its overrides and Hydra flags.
        output: Directory for the scripts; None prints the only one.

    Returns:
        0, or the exit code of the user's script.

    Raises:
        SubmissionError: it made no batch script, or several and ``output`` is None.
    """
    done = dry_run(script, arguments)
    if done.returncode != 0:
        return done.returncode
    scripts = rendered(done.stdout)
    if not scripts:
        remedy = "only launcher=slurm has one: add launcher=slurm, or +launcher=slurm"
        raise SubmissionError(f"{script} made no batch script; {remedy}")
    if output is not None:
        return _write(scripts, output)
    if len(scripts) > 1:
        why = "different resources, launcher.gang, or MaxArraySize"
        what = f"{script} makes {len(scripts)} batch scripts ({why})"
        raise SubmissionError(f"{what}: write them to a directory with -o DIR")
    sys.stdout.write(scripts[0].read_text())
    return 0


def dry_run(script: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the script with ``launcher.dry_run=true``; its output goes to standard error, too."""
    argv = [sys.executable, script, *arguments, "launcher.dry_run=true"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    return done


def rendered(output: str) -> list[Path]:
    """Return the batch scripts that a dry run says it has made (pure)."""
    from hpc_elastic.submit.session import RENDERED

    lines = output.splitlines()
    return [Path(line.removeprefix(RENDERED)) for line in lines if line.startswith(RENDERED)]


def _write(scripts: Sequence[Path], output: Path) -> int:
    try:
        output.mkdir(parents=True, exist_ok=True)
        for script in scripts:
            print(f"wrote {shutil.copy(script, output / script.name)}", file=sys.stderr)
    except OSError as e:
        raise SubmissionError(f"can not write to {output}: {e.strerror}") from e
    return 0
