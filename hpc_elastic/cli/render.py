"""``hpc-elastic render``: the batch script on standard output, all else on standard error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.errors import SubmissionError


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
