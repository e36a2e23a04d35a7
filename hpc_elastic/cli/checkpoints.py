"""``hpc-elastic checkpoints``: ``verify``, ``export`` and ``prune`` those of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic import errors
from hpc_elastic._util import counted
from hpc_elastic.cli import options

if TYPE_CHECKING:
    from hpc_elastic.checkpoint.manifest import Manifest
    from hpc_elastic.run.directory import RunDir


@dataclass(frozen=True)
class CheckpointFinding:
    """The state of one checkpoint; None where the manifest cannot be read."""

    folder: str
    step: int | None = None
    num_bytes: int | None = None
    world_size: int | None = None
    created: float | None = None
    problems: tuple[str, ...] = ()


_VERIFY_HELP = """
\b
Examples:
  hpc-elastic checkpoints verify last
  hpc-elastic checkpoints verify runs/7 --json | jq '.[] | select(.problems == []) | .step'

\b
--json prints a list of objects, one for each checkpoint, the newest first; null if a value cannot
be read:
  folder       its directory
  step         its step
  num_bytes    total size of its files by its manifest
  world_size   number of ranks that wrote it
  created      Unix seconds
  problems     its defects, each a sentence; [] if it is good
"""


@click.command(epilog=_VERIFY_HELP)
@options.checkpoints
@options.as_json
def verify_command(run: Path, as_json: bool) -> int:
    """Read all checkpoints of a run and compare their checksums.

    RUN is a run, its directory of checkpoints, or one checkpoint. The exit code is 1 if a
    checkpoint is damaged, or there is none.
    """
    findings = [_examine(folder) for folder in find_checkpoints(run)]
    if as_json:
        options.print_json([asdict(finding) for finding in findings])
    else:
        _print_findings(findings)
    return 1 if any(finding.problems for finding in findings) else 0


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run or of a directory, the newest first; one alone is itself."""
    from hpc_elastic.checkpoint.manifest import MANIFEST
    from hpc_elastic.checkpoint.store import Store, directories_of
    from hpc_elastic.run.directory import RunDir

    if (path / MANIFEST).exists():
        return [path]
    directories = [path] if Store(path).steps() else directories_of(RunDir(path))
    found = [(Store(d).stored(step), step) for d in directories for step in Store(d).steps()]
    if found:
        return [folder for folder, _ in sorted(found, key=lambda one: -one[1])]
    remedy = "give a run that has saved one, or a directory with step-<number>/ in it"
    raise errors.CheckpointNotFoundError(f"{path} has no checkpoints: {remedy}")


def _examine(folder: Path) -> CheckpointFinding:
    """Check one checkpoint: all its bytes are read."""
    from hpc_elastic.checkpoint.store import problems_of, read_manifest

    try:
        manifest = read_manifest(folder)
    except errors.CheckpointError as e:
        return CheckpointFinding(str(folder), problems=(str(e),))
    return CheckpointFinding(
        str(folder),
        manifest.step,
        sum(file.num_bytes for file in manifest.files),
        manifest.world_size,
        manifest.created,
        tuple(problems_of(folder, manifest)),
    )


def _print_findings(findings: Sequence[CheckpointFinding]) -> None:
    from rich.table import Table

    from hpc_elastic._console import console

    table = Table("checkpoint", "saved", "size", "ranks", "state")
    has_several = len({Path(finding.folder).parent for finding in findings}) > 1
    for finding in findings:
        created, num_bytes, ranks = finding.created, finding.num_bytes, finding.world_size
        table.add_row(
            finding.folder if has_several else Path(finding.folder).name,
            "?" if created is None else time.strftime("%F %T", time.localtime(created)),
            "?" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB",
            "?" if ranks is None else str(ranks),
            "damaged" if finding.problems else "good",
        )
    out = console()
    out.print(table)
    for problem in (problem for finding in findings for problem in finding.problems):
        out.print(f"damaged: {problem}", soft_wrap=True)


# ---- ``hpc-elastic checkpoints export``


_EXPORT_EXAMPLES = """
\b
Examples:
  hpc-elastic checkpoints export last --key model -o model.pt
  hpc-elastic checkpoints export runs/7 --step 1000 -o all.pt

\b
--json prints one object:
  run           path of RUN
  checkpoint    folder of the checkpoint
  step          its step
  key           the exported key; null for all
  file          the written file
  num_bytes     its size
  num_tensors   number of tensors in it
"""


@click.command(epilog=_EXPORT_EXAMPLES)
@options.checkpoints
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True,
    metavar="FILE", help="File to write, such as model.pt.",
)  # fmt: skip
@click.option(
    "--step", type=int, metavar="N", help="Step to export. [default: the newest good one]"
)
@click.option(
    "--key", metavar="KEY", help="Key of the state to export, such as model. [default: all]"
)
@options.as_json
def export_command(
    run: Path, output: Path, step: int | None, key: str | None, as_json: bool
) -> int:
    """Write the newest good checkpoint of a run as one file of whole tensors.

    torch.load(FILE, weights_only=True) reads it. RUN is a run, its directory of checkpoints, or one
    checkpoint. Damaged checkpoints are skipped, and named on standard error.
    """
    folder, manifest = _choose(run, step)
    # imports torch: the arguments and the files are checked without it
    from hpc_elastic.checkpoint.export import export

    num_tensors = export(manifest, folder, output, key)
    if as_json:
        printed = {
            "run": str(run.absolute()), "checkpoint": str(folder.absolute()),
            "step": manifest.step, "key": key, "file": str(output.absolute()),
            "num_bytes": output.stat().st_size, "num_tensors": num_tensors,
        }  # fmt: skip
        options.print_json(printed)
        return 0
    what = f"{key} of step {manifest.step}" if key else f"step {manifest.step}"
    print(f"wrote {what} to {output}: {counted(num_tensors, 'tensor')}", file=sys.stderr)
    return 0


def _choose(run: Path, step: int | None) -> tuple[Path, Manifest]:
    """Return the newest good checkpoint, or that of a step."""
    from hpc_elastic.checkpoint.store import read_manifest

    folders = find_checkpoints(run)
    directories = sorted({str(folder.parent) for folder in folders})
    if len(directories) > 1:
        what = f"give one of them in place of RUN: {', '.join(directories)}"
        what = f"{run} has checkpoints in several directories: {what}"
        raise errors.CheckpointNotFoundError(what)
    name = f"step-{step or 0:08d}"
    wanted = folders if step is None else [f for f in folders if f.name.split(".")[0] == name]
    if not wanted:
        known = ", ".join(folder.name for folder in folders)
        raise errors.CheckpointNotFoundError(
            f"{run} has no checkpoint of step {step}, only {known}"
        )
    for folder in wanted:
        problems = _examine(folder).problems
        if not problems:
            return folder, read_manifest(folder)
        print(f"{folder.name} is damaged: {problems[0]}", file=sys.stderr)
    raise errors.CheckpointCorruptError(f"{run} has no good checkpoint; {problems[0]}")


# ---- ``hpc-elastic checkpoints prune``


_PRUNE_EXAMPLES = """
\b
Examples:
  hpc-elastic checkpoints prune last --keep-last 1 --dry-run
  hpc-elastic checkpoints prune multirun/2030-01-31/12-00-00/3 --keep-last 2
  hpc-elastic checkpoints prune last --keep-last 1 --directory /scratch/me/checkpoints

\b
--json prints one object:
  directory     of the checkpoints
  kept          steps of the good checkpoints that are kept, newest first
  damaged       step -> problem of the checkpoints that were read and are damaged
  removed       [{"folder", "num_bytes"}]; with --dry-run, what would be removed
  left          folders of these that could not be removed
  freed_bytes   freed space in bytes
  dry_run       whether nothing was removed
"""


@click.command(epilog=_PRUNE_EXAMPLES)
@options.changed_run
@click.option(
    "--keep-last", type=click.IntRange(min=0), required=True, metavar="N",
    help="Keep the newest N good checkpoints. 0 keeps none, and needs --yes.",
)  # fmt: skip
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR",
    help="Directory of the checkpoints. [default: where the run has saved]",
)  # fmt: skip
@click.option(
    "-n", "--dry-run", is_flag=True, help="Print what would be removed, and remove nothing."
)
@click.option("-y", "--yes", is_flag=True, help="Confirms --keep-last 0.")
@options.trust
@options.as_json
def prune_command(
    run: Path, keep_last: int, directory: Path | None, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Remove a run's checkpoints that are older than the newest N good ones.

    A checkpoint is good if all its bytes can be read and their checksums match: a damaged one is
    never kept in place of a good one. If fewer than N are good, none is removed. The remains of
    aborted saves are removed too. Checkpoints in the memory of nodes are kept, and so are those
    that are newer than the oldest one kept: a run that goes on restores one of these.
    Checkpointer(keep_every=...) is unknown to this command: checkpoints that it keeps are removed.

    The exit code is 1 if something could not be removed.
    """
    from hpc_elastic.checkpoint import owner, prune
    from hpc_elastic.run import fencing, ownership
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.shared_files import names_in

    files = RunDir(run)
    if keep_last == 0 and not (yes or dry_run):
        what = "removes every checkpoint: the run could not be resumed"
        raise click.UsageError(f"--keep-last 0 {what}. Add --yes to confirm")
    if keep_last == 0 and _has_tasks(files):
        remedy = "keep at least one, or cancel the run first"
        raise errors.RunDirectoryError(f"{run} goes on, and needs its newest checkpoint: {remedy}")
    spec = ownership.load_own(files, files.rdzv, files.saves_to)
    folder = directory or _only_directory(files)
    ownership.require_own(files.path, folder)
    mark = owner.read(folder)
    if mark is not None and mark.in_run and mark.run != spec.run_id:
        raise errors.RunDirectoryError(f"{folder} belongs to {mark} now: prune that run")
    try:
        has_started = files.rdzv.name in names_in(files.path)
        last = fencing.last_index(files.rdzv) if has_started else 0
    except OSError as e:
        raise errors.RunDirectoryError(f"{files.rdzv}: {e.strerror}") from e
    index = last if _has_tasks(files) else None
    cleaning = prune.plan_cleaning(
        folder, keep_last=keep_last, run_id=spec.run_id, last_index=index
    )
    ownership.require_own(folder, *(item.folder for item in cleaning.going))
    left = [] if dry_run else prune.remove_folders(cleaning)
    freed_bytes = sum(i.num_bytes for i in cleaning.going) - sum(i.num_bytes for i in left)
    if as_json:
        removed = [{"folder": str(i.folder), "num_bytes": i.num_bytes} for i in cleaning.going]
        printed = {
            "directory": str(cleaning.directory), "kept": cleaning.kept,
            "damaged": {str(step): problem for step, problem in cleaning.damaged.items()},
            "removed": removed, "left": [str(item.folder) for item in left],
            "freed_bytes": freed_bytes, "dry_run": dry_run,
        }  # fmt: skip
        options.print_json(printed)
        return 1 if left else 0
    verb, would = ("would remove", "would be freed") if dry_run else ("removed", "freed")
    for item in cleaning.going:
        print(f"{verb} {item.folder.name} ({item.num_bytes / 1e6:,.1f} MB)")
    for step, problem in cleaning.damaged.items():
        print(f"damaged: step {step}: {problem}")
    kept = ", ".join(map(str, cleaning.kept)) or "none"
    print(f"kept as good: {kept}; {freed_bytes / 1e6:,.1f} MB {would}")
    for item in left:
        click.echo(f"could not be removed: {item.folder}", err=True)
    return 1 if left else 0


def _only_directory(run: RunDir) -> Path:
    """Return the directory of the run's checkpoints, or of the remains of aborted saves."""
    from hpc_elastic.checkpoint.store import directories_of

    try:
        found = directories_of(run) or [d for d in [run.checkpoints] if d.is_dir()]
    except OSError as e:
        raise errors.RunDirectoryError(f"{e.filename or run.path}: {e.strerror}") from e
    if not found:
        remedy = "if its script saves elsewhere, add --directory DIR"
        raise errors.CheckpointNotFoundError(f"{run.path} has no checkpoints: {remedy}")
    if len(found) > 1:
        which = f"select one with --directory DIR: {', '.join(map(str, found))}"
        raise errors.CheckpointNotFoundError(f"{run.path} saves to several directories; {which}")
    return found[0]


def _has_tasks(files: RunDir) -> bool:
    """Whether the run may have a task; True if the scheduler does not answer."""
    from hpc_elastic.shared_files import is_there
    from hpc_elastic.slurm.scheduler import Scheduler

    try:
        return bool(Scheduler(files, files.load()).list_live_tasks())
    except (errors.SlurmError, errors.LocalQueueError, errors.RunDirectoryError) as e:
        if not is_there(files.spec):
            raise
        click.echo(f"assuming that the run goes on: {e}", err=True)
        return True
