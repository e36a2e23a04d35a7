"""``hpc-elastic clean``: remove old checkpoints of a run, and what aborted saves have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import (
    CheckpointNotFoundError,
    RunDirectoryError,
    SlurmError,
)
from hpc_elastic.files import is_there
from hpc_elastic.rundir import RunDir

if TYPE_CHECKING:
    from hpc_elastic.checkpoint.cleaning import Cleaning, Item

_EXAMPLES = """
\b
Examples:
  hpc-elastic clean last --keep-last 1 --dry-run
  hpc-elastic clean multirun/2030-01-31/12-00-00/3 --keep-last 2
  hpc-elastic clean last --keep-last 1 --directory /scratch/me/checkpoints

\b
--json prints one object:
  directory     of the checkpoints
  kept          the good steps that stay, newest first
  damaged       what is wrong with those that were read and are not good, by step
  removed       [{"folder", "num_bytes"}]; with --dry-run, what would be removed
  left          of these, what could not be removed
  freed_bytes   together
  dry_run       whether nothing was done
"""


@click.command(epilog=_EXAMPLES)
@options.run
@click.option(
    "--keep-last", type=click.IntRange(min=0), required=True, metavar="N",
    help="Keep the newest N checkpoints that are good. 0 keeps none, and needs --yes.",
)  # fmt: skip
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
    help="Where the run's checkpoints are. [default: where it has saved]",
)  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be removed, and do nothing.")
@click.option("-y", "--yes", is_flag=True, help="With --keep-last 0: really remove all.")
@options.as_json
def command(
    run: Path, keep_last: int, directory: Path | None, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Remove a run's checkpoints that are older than the newest N good ones.

    A checkpoint counts as good only after all its bytes were read and their checksums are right, so
    that a damaged one is never kept in place of a good one. Where fewer than N are good, none is
    removed. What aborted saves have left goes as well. Checkpoints in the nodes' memory are left
    alone, and so are those that are newer than the oldest one kept: a run that goes on restores one
    of these. Checkpointer(keep_every=...) is not known here: what it keeps for ever goes, too.

    The exit code is 1 if something could not be removed.
    """
    _require_meant(run, keep_last, yes=yes or dry_run)
    cleaning, left = clean(run, directory, keep_last=keep_last, dry_run=dry_run)
    if as_json:
        print(json.dumps(_as_json(cleaning, left, dry_run=dry_run), indent=2))
    else:
        _print(cleaning, left, dry_run=dry_run)
    return 1 if left else 0


def _require_meant(run: Path, keep_last: int, *, yes: bool) -> None:
    if keep_last == 0 and not yes:
        what = "removes every checkpoint: the run could not be resumed"
        raise click.UsageError(f"--keep-last 0 {what}. Add --yes if that is meant")
    if keep_last == 0 and _goes_on(run):
        remedy = "keep at least one, or cancel the run first"
        raise RunDirectoryError(f"{run} goes on, and restores its newest checkpoint: {remedy}")


def clean(
    run: Path, directory: Path | None, *, keep_last: int, dry_run: bool
) -> tuple[Cleaning, list[Item]]:
    """Remove what may go.

    Returns:
        What was to go, and what of it is left.

    Raises:
        CheckpointNotFoundError: the run has no directory of checkpoints.
        CheckpointError: it can not be read.
    """
    from hpc_elastic import fence
    from hpc_elastic.checkpoint import cleaning

    RunDir(run).load()
    folder = directory or _only_directory(RunDir(run))
    try:
        last = fence.last_record(RunDir(run).rdzv)
    except OSError as e:
        raise RunDirectoryError(f"{RunDir(run).rdzv}: {e.strerror}") from e
    is_over = cleaning.fenced_by(last, run_goes_on=_goes_on(run))
    found = cleaning.plan(folder, keep_last=keep_last, is_over=is_over)
    return found, [] if dry_run else cleaning.remove(found)


def _only_directory(run: RunDir) -> Path:
    """Return where the run's checkpoints are, or what aborted saves have left of them."""
    from hpc_elastic.checkpoint.folders import directories

    try:
        found = directories(run) or [d for d in [run.checkpoints] if d.is_dir()]
    except OSError as e:
        raise RunDirectoryError(f"{e.filename or run.path}: {e.strerror}") from e
    if not found:
        remedy = "if its script saves elsewhere, say so with --directory DIR"
        raise CheckpointNotFoundError(f"{run.path} has no checkpoints: {remedy}")
    if len(found) > 1:
        which = f"choose one with --directory DIR: {', '.join(map(str, found))}"
        raise CheckpointNotFoundError(f"{run.path} saves to several directories; {which}")
    return found[0]


def _goes_on(run: Path) -> bool:
    """Tell whether the run may have a task; where Slurm does not say, it may."""
    from hpc_elastic.submit.living import tasks_of

    try:
        return bool(tasks_of(RunDir(run).load()).left())
    except (SlurmError, RunDirectoryError) as e:
        if not is_there(RunDir(run).spec):
            raise
        click.echo(f"taken for a run that goes on: {e}", err=True)
        return True


def _as_json(cleaning: Cleaning, left: list[Item], *, dry_run: bool) -> dict[str, Any]:
    return {
        "directory": str(cleaning.directory),
        "kept": cleaning.kept,
        "damaged": {str(step): problem for step, problem in cleaning.damaged.items()},
        "removed": [{"folder": str(i.folder), "num_bytes": i.num_bytes} for i in cleaning.going],
        "left": [str(item.folder) for item in left],
        "freed_bytes": _freed(cleaning, left),
        "dry_run": dry_run,
    }


def _freed(cleaning: Cleaning, left: list[Item]) -> int:
    return sum(i.num_bytes for i in cleaning.going) - sum(i.num_bytes for i in left)


def _print(cleaning: Cleaning, left: list[Item], *, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    for item in cleaning.going:
        print(f"{verb} {item.folder.name} ({item.num_bytes / 1e6:,.1f} MB)")
    for step, problem in cleaning.damaged.items():
        print(f"damaged: step {step}: {problem}")
    kept = ", ".join(map(str, cleaning.kept)) or "none"
    would = "would be freed" if dry_run else "freed"
    print(f"kept as good: {kept}; {_freed(cleaning, left) / 1e6:,.1f} MB {would}")
    for item in left:
        click.echo(f"could not be removed: {item.folder}", err=True)
