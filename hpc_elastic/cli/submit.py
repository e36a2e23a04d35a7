"""``hpc-elastic submit``: submit what a script would submit, and return at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import SubmissionError

_EXAMPLES = """
\b
Examples:
  hpc-elastic submit train.py launcher=slurm nodes=1:16 launcher.partition=gpu
  hpc-elastic submit train.py -m launcher=slurm lr=0.1,0.001
  hpc-elastic submit --json train.py launcher=local nodes=2

\b
--json prints one object for each submission, in a list:
  launcher   "slurm" or "local"
  sweep      the sweep directory
  job_ids    of the arrays; made up with launcher=local
  runs       [{"run_id", "run"}]: each run's id and directory
  pid, log   launcher=local: the process that goes on, and its output
"""
_LOOK_S = 0.05
_END_S = 10.0


@click.command(epilog=_EXAMPLES, context_settings={"ignore_unknown_options": True})
@options.as_json
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OVERRIDE]...")
def command(as_json: bool, script: str, overrides: tuple[str, ...]) -> int:
    """Submit the runs that `python SCRIPT OVERRIDE...` would run, and return at once.

    Prints for each run its id, its directory, and how to watch and end it. All that follows SCRIPT
    is handed to it: put options of this command before.

    With launcher=slurm the runs are in Slurm then. With launcher=local a launcher goes on behind
    the terminal, as a session of its own; its output is in the sweep directory, and the runs end
    with it, or with this machine.

    What the script prints goes to standard error. If it fails, its exit code is this command's.
    """
    return submit(script, overrides, as_json=as_json)


def submit(script: str, arguments: Sequence[str], *, as_json: bool) -> int:
    """Run the user's script as a detached submission, and print what it has submitted.

    Args:
        script: The user's Hydra script.
        arguments: Its overrides and Hydra flags.
        as_json: Print JSON only.

    Returns:
        0, or the exit code of the user's script.

    Raises:
        SubmissionError: it has submitted nothing.
    """
    with tempfile.TemporaryDirectory(prefix="hpc-elastic-") as folder:
        report = Path(folder, "report")
        report.touch()
        code, told = _run(script, arguments, report)
    if code != 0:
        return code
    if not told:
        remedy = "add launcher=slurm, or +launcher=slurm; a dry run is `hpc-elastic render`"
        raise SubmissionError(f"{script} ended without submitting a run; {remedy}")
    if as_json:
        print(json.dumps(told, indent=2))
        return 0
    for entry in told:
        _print(entry)
    return 0


def _run(script: str, arguments: Sequence[str], report: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the script's exit code, and what it told; a local launcher goes on."""
    from hpc_elastic.submit import detach

    # the override is refused where there is no launcher: no training is to start right here
    argv = [sys.executable, script, *arguments, "launcher.wait=false"]
    env = {**os.environ, detach.VARIABLE: str(report)}
    script_ = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    try:
        while script_.poll() is None:
            told = detach.told(report)
            if told and told[-1]["launcher"] == "local":
                return 0, told
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:  # it has got the same signal
        with suppress(subprocess.TimeoutExpired):
            script_.wait(_END_S)
        raise
    return script_.returncode, detach.told(report)


def _print(entry: dict[str, Any]) -> None:
    if entry["launcher"] == "slurm":
        print(f"submitted to Slurm as job {' '.join(entry['job_ids'])}: {entry['sweep']}")
    else:
        log = options.quoted(Path(entry["log"]))
        print(f"started on this machine by process {entry['pid']}, whose output is in {log}")
    for run in entry["runs"]:
        print_run(run["run_id"], Path(run["run"]))


def print_run(run_id: str, folder: Path) -> None:
    """Print what to do next with a run."""
    print(f"\n{run_id}\n  {folder}")
    for what in ("status {}", "logs {} --follow", "cancel {}"):
        print(f"  hpc-elastic {what.format(run_id)}")
