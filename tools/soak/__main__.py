"""``scripts/soak``: the command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from slurm_sandbox import SandboxConfig, SandboxError, SlurmSandbox, disk
from slurm_sandbox.releases import SUITES
from soak import report
from soak.checks import Check, checks
from soak.plan import NUM_NODES, plan
from soak.play import Record, play

_DISK_SIZE = "256m"
_DOC = """Throw random faults at two runs on a Slurm sandbox, and check what must hold.

Needs root, and a sandbox of its own, which it brings up and takes down. The exit code is 1 if
something did not hold; then the seed and the folder with all of the run's files are told.
"""


def main() -> int:
    """Run the command; return its exit code."""
    options = _parse()
    seed = options.seed if options.seed is not None else int(time.time())
    out, progress = Console(highlight=False, width=options.width), Console(stderr=True)
    faults = plan(seed, options.minutes)
    out.print(f"seed {seed}, {options.minutes:g} minutes")
    if options.plan:
        out.print(report.planned(faults))
        return 0

    def say(line: str) -> None:
        clock = time.strftime("%H:%M:%S")
        progress.print(f"{clock} {line}", highlight=False, markup=False, soft_wrap=True)

    try:
        config = SandboxConfig(name=options.sandbox, nodes=NUM_NODES + 1, slurm=options.slurm)
        with _folder() as folder, _sandbox(config) as sandbox:
            record = play(sandbox, folder / "disk", faults, options.minutes, say)
            found = checks(record, sandbox, folder / "alone")
            _print(out, record, found)
            failed = any(check.problems for check in found)
            if failed:
                with contextlib.suppress(shutil.Error):  # of files that vanish meanwhile
                    shutil.copytree(folder / "disk", folder / "kept", symlinks=True)
                again = f"scripts/soak --seed {seed} --minutes {options.minutes:g}"
                slurm = f" --slurm {options.slurm}" if options.slurm else ""
                out.print(f"FAILED. The same faults again: {again}{slurm}")
                out.print(f"files: {folder / 'kept'}")
    except SandboxError as e:
        out.print(f"soak: {e}", markup=False)
        return 2
    return int(failed)


def _print(out: Console, record: Record, found: list[Check]) -> None:
    out.print(report.faults(record))
    if rest := report.rest(record):
        out.print(rest, markup=False)
    out.print(report.verdicts(found))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder with a disk of its own in it; it stays if something is kept in it."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-elastic-soak-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # the run is none of the user's
    try:
        if not disk.mount_memory(folder / "disk", _DISK_SIZE):
            raise SandboxError(f"{folder / 'disk'} could not be mounted: that needs root")
        try:
            yield folder
        finally:
            disk.unmount(folder / "disk")
    finally:
        if not (folder / "kept").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _sandbox(config: SandboxConfig) -> Iterator[SlurmSandbox]:
    """Bring a sandbox up, whose nodes see the disk, and down again whatever happens."""
    name = config.name
    if SlurmSandbox(name).status()["up"]:
        raise SandboxError(f"sandbox {name} is up, and does not see the disk: --sandbox NEW_NAME")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield SlurmSandbox.up(config)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave half of it
        SlurmSandbox(name).down()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=_DOC, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="how long faults are thrown (default 30)"
    )
    parser.add_argument("--seed", type=int, help="of the faults; default: another one each time")
    parser.add_argument("--sandbox", default="soak", help="its name (default soak)")
    parser.add_argument(
        "--slurm", choices=sorted(SUITES), help="the release of Slurm; default: the machine's own"
    )
    parser.add_argument("--plan", action="store_true", help="print the faults, and do nothing")
    parser.add_argument("--width", type=int, default=160, help="of the tables")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
