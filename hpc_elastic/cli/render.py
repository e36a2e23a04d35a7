"""``hpc-elastic render``: the batch script on standard output, all else on standard error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import SubmissionError

_EXAMPLES = """
\b
Examples:
  hpc-elastic render train.py launcher=slurm nodes=1:16
  hpc-elastic render -o scripts train.py -m launcher=slurm lr=0.1,0.2 launcher.partition=gpu,cpu
  hpc-elastic render --json train.py launcher=slurm nodes=1:16 | jq -r '.[].script'

\b
--json prints one object for each script, in a list; several need no -o:
  script   its file, which sbatch takes
  sweep    the sweep directory
  tasks    how many it would submit
  runs     [{"run_id", "run"}]: the runs that they belong to, by id and directory
"""


@click.command(
    epilog=_EXAMPLES,
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Write the scripts to this directory.",
)  # fmt: skip
@options.as_json
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OVERRIDE]...")
def command(output: Path | None, as_json: bool, script: str, overrides: tuple[str, ...]) -> int:
    """Print the batch script that `python SCRIPT OVERRIDE...` would submit.

    The run directories are made, so that the script can be given to sbatch by hand. All that
    follows SCRIPT is handed to it. What it prints goes to standard error; if it fails, its exit
    code is this command's.
    """
    return render(script, overrides, output, as_json=as_json)


def render(
    script: str, arguments: Sequence[str], output: Path | None, *, as_json: bool = False
) -> int:
    """Run the user's script as a dry run, and hand on the batch script that it made.

    Args:
        script: The user's Hydra script.
        arguments: Its overrides and Hydra flags.
        output: Directory for the scripts; None prints the only one.
        as_json: Print which scripts there are, and what each would submit.

    Returns:
        0, or the exit code of the user's script.

    Raises:
        SubmissionError: it made no batch script, or several, and nothing says where to.
    """
    done = dry_run(script, arguments)
    if done.returncode != 0:
        return done.returncode
    scripts = rendered(done.stdout)
    if not scripts:
        remedy = "only launcher=slurm has one: add launcher=slurm, or +launcher=slurm"
        raise SubmissionError(f"{script} made no batch script; {remedy}")
    files = scripts if output is None else _write(scripts, output)
    if as_json:
        told = [_as_json(*pair) for pair in zip(scripts, files, strict=True)]
        print(json.dumps(told, indent=2))
    elif output is None:
        _print(script, scripts)
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


def _print(script: str, scripts: Sequence[Path]) -> None:
    if len(scripts) > 1:
        why = "different resources, launcher.gang, or MaxArraySize"
        what = f"{script} makes {len(scripts)} batch scripts ({why})"
        raise SubmissionError(f"{what}: write them to a directory with -o DIR")
    sys.stdout.write(scripts[0].read_text())


def _as_json(script: Path, file: Path) -> dict[str, Any]:
    """Return what a batch script would submit; the file is the script, or its copy."""
    from hpc_elastic.rundir import ArrayFiles, RunDir

    tasks = ArrayFiles.of(script).run_dirs()
    runs = [{"run_id": RunDir(d).load().run_id, "run": str(d)} for d in dict.fromkeys(tasks)]
    sweep = str(script.parent.parent)
    return {"script": str(file.absolute()), "sweep": sweep, "tasks": len(tasks), "runs": runs}


def _write(scripts: Sequence[Path], output: Path) -> list[Path]:
    try:
        output.mkdir(parents=True, exist_ok=True)
        files = [Path(shutil.copy(script, output / script.name)) for script in scripts]
    except OSError as e:
        raise SubmissionError(f"can not write to {output}: {e.strerror}") from e
    for file in files:
        print(f"wrote {file}", file=sys.stderr)
    return files
