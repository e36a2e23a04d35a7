"""``hpc-elastic verify``: check every checkpoint of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from hpc_elastic.checkpoint import folders
from hpc_elastic.checkpoint.manifest import MANIFEST
from hpc_elastic.checkpoint.store import Store, read_manifest
from hpc_elastic.checkpoint.store import verify as verify_folder
from hpc_elastic.cli import options
from hpc_elastic.errors import CheckpointError, CheckpointNotFoundError
from hpc_elastic.rundir import RunDir


@dataclass(frozen=True)
class Finding:
    """One checkpoint, as it was found.

    Attributes:
        folder: Its folder.
        step: The step that it holds; None if that can not be read.
        num_bytes: What its files should have together.
        world_size: Ranks that wrote it.
        created: Unix seconds.
        problems: What is wrong with it; nothing if it is good.
    """

    folder: str
    step: int | None = None
    num_bytes: int | None = None
    world_size: int | None = None
    created: float | None = None
    problems: tuple[str, ...] = ()


_HELP = """
\b
Examples:
  hpc-elastic verify last
  hpc-elastic verify runs/7 --json | jq '.[] | select(.problems == []) | .step'

\b
--json prints one object for each checkpoint, in a list, the newest first; null is what can not be
read:
  folder       its directory
  step         that it holds
  num_bytes    what its files should have together
  world_size   ranks that wrote it
  created      Unix seconds
  problems     what is wrong with it, each a sentence; [] if it is good
"""


@click.command(epilog=_HELP)
@options.checkpoints
@options.as_json
def command(run: Path, as_json: bool) -> int:
    """Read all checkpoints of a run and compare their checksums.

    RUN is a run, its directory of checkpoints, or one checkpoint. The exit code is 1 if one is
    damaged, or there is none.
    """
    return verify(run, as_json=as_json)


def verify(run: Path, *, as_json: bool) -> int:
    """Print what was found.

    Returns:
        0 if every checkpoint is good, else 1.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    findings = [examine(folder) for folder in find_checkpoints(run)]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    return 1 if any(finding.problems for finding in findings) else 0


def find_checkpoints(path: Path) -> list[Path]:
    """Return the folders of the checkpoints, the newest first.

    Args:
        path: A run directory, a directory of checkpoints, or one checkpoint.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    directories = [path] if Store(path).steps() else folders.directories(RunDir(path))
    found = [(Store(d).folder(step), step) for d in directories for step in Store(d).steps()]
    if found:
        return [folder for folder, _ in sorted(found, key=lambda one: -one[1])]
    remedy = "give a run that has saved one, or a directory with step-<number>/ in it"
    raise CheckpointNotFoundError(f"{path} has no checkpoints: {remedy}")


def examine(folder: Path) -> Finding:
    """Check one checkpoint, all of its bytes."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as e:
        return Finding(str(folder), problems=(str(e),))
    return Finding(
        str(folder),
        manifest.step,
        sum(file.num_bytes for file in manifest.files),
        manifest.world_size,
        manifest.created,
        tuple(verify_folder(folder)),
    )


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("checkpoint", "saved", "size", "ranks", "state")
    has_several = len({Path(finding.folder).parent for finding in findings}) > 1
    for finding in findings:
        table.add_row(*(escape(cell) for cell in _cells(finding, whole=has_several)))
    console = Console()
    console.print(table)
    for problem in (problem for finding in findings for problem in finding.problems):
        console.print(f"damaged: {problem}", markup=False, highlight=False, soft_wrap=True)


def _cells(finding: Finding, *, whole: bool) -> Iterator[str]:
    yield finding.folder if whole else Path(finding.folder).name
    created = finding.created
    yield "?" if created is None else time.strftime("%F %T", time.localtime(created))
    yield "?" if finding.num_bytes is None else f"{finding.num_bytes / 1e6:,.1f} MB"
    yield "?" if finding.world_size is None else str(finding.world_size)
    yield "damaged" if finding.problems else "good"
