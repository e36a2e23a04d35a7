"""``hpc-elastic verify``, ``audit`` and ``export``: check and export what a run has written."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from hpc_elastic._console import console
from hpc_elastic._util import counted
from hpc_elastic.checkpoint.manifest import MANIFEST, Manifest
from hpc_elastic.checkpoint.store import Store, directories_of, problems_of, read_manifest
from hpc_elastic.cli import options
from hpc_elastic.data.audit import Proof, audit
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
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
  hpc-elastic verify last
  hpc-elastic verify runs/7 --json | jq '.[] | select(.problems == []) | .step'

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
    if (path / MANIFEST).exists():
        return [path]
    directories = [path] if Store(path).steps() else directories_of(RunDir(path))
    found = [(Store(d).stored(step), step) for d in directories for step in Store(d).steps()]
    if found:
        return [folder for folder, _ in sorted(found, key=lambda one: -one[1])]
    remedy = "give a run that has saved one, or a directory with step-<number>/ in it"
    raise CheckpointNotFoundError(f"{path} has no checkpoints: {remedy}")


def _examine(folder: Path) -> CheckpointFinding:
    """Check one checkpoint: all its bytes are read."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as e:
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
    table = Table("checkpoint", "saved", "size", "ranks", "state")
    has_several = len({Path(finding.folder).parent for finding in findings}) > 1
    for finding in findings:
        created, num_bytes = finding.created, finding.num_bytes
        table.add_row(
            finding.folder if has_several else Path(finding.folder).name,
            "?" if created is None else time.strftime("%F %T", time.localtime(created)),
            "?" if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB",
            "?" if finding.world_size is None else str(finding.world_size),
            "damaged" if finding.problems else "good",
        )
    out = console()
    out.print(table)
    for problem in (problem for finding in findings for problem in finding.problems):
        out.print(f"damaged: {problem}", soft_wrap=True)


# ---- ``hpc-elastic audit``


_COUNTS = ("once", "twice", "never", "left", "dropped", "padded", "elsewhere")
_ALWAYS_SHOWN = ("once", "twice", "never")


_AUDIT_HELP = """
\b
Examples:
  hpc-elastic audit last
  hpc-elastic audit runs/7 --json | jq '.[].holds'

\b
--json prints one object, with one object for each sampler, by its name:
  holds              whether every sample so far was trained exactly once
  name               of the sampler
  dataset_len        number of samples per epoch
  epochs             a list with the numbers of samples of each epoch, from 0: trained once, twice
                     or never, left to train, dropped at its end, used as padding of its last
                     batch, or trained elsewhere, before the run's first state:
                     epoch, once, twice, never, left, dropped, padded, elsewhere
  last_step          of the surviving history
  stretches          number of times that a group began to train
  replayed_steps     number of recorded steps that were lost; a killed worker has not recorded its
                     last ones, which hpc-elastic events counts too, as "at least" where unknown
  replayed_samples   number of samples of these steps
  open_samples       number of samples of steps that not all ranks have recorded yet
  problems           why `holds` is false, each a sentence
"""


@click.command(epilog=_AUDIT_HELP)
@options.run
@options.as_json
def audit_command(run: Path, as_json: bool) -> int:
    """Check that every sample was trained exactly once per epoch.

    The command reads the ledger of the run's samplers, over all changes of the world size. The exit
    code is 1 if a sample was left out or trained twice, or that is unknown.
    """
    proofs = audit(run)
    if as_json:
        options.print_json({p.name: {"holds": p.holds, **asdict(p)} for p in proofs})
    else:
        for proof in proofs:
            _print_audit(proof)
    return 0 if all(proof.holds for proof in proofs) else 1


def _print_audit(proof: Proof) -> None:
    out = console()
    # without columns of zeros
    counts = [c for c in _COUNTS if c in _ALWAYS_SHOWN or any(getattr(e, c) for e in proof.epochs)]
    table = Table(title=Text(f"{proof.name}: {counted(proof.dataset_len, 'sample')}"))
    for column in ("epoch", *counts):
        table.add_column(column, justify="right")
    for epoch in proof.epochs:
        table.add_row(str(epoch.epoch), *(f"{getattr(epoch, count):,}" for count in counts))
    out.print(table)
    out.print(
        f"{counted(proof.last_step, 'step')}, trained in "
        f"{counted(proof.stretches, 'stretch', 'stretches')}; recorded and lost: "
        f"{counted(proof.replayed_steps, 'step')} ({counted(proof.replayed_samples, 'sample')})"
    )
    if proof.open_samples:
        out.print(f"not yet recorded by all ranks: {counted(proof.open_samples, 'sample')}")
    for problem in proof.problems:
        out.print(f"NOT PROVEN: {problem}")
    if proof.holds:
        out.print("Proven: every sample so far was trained exactly once per epoch")


# ---- ``hpc-elastic export``


_EXPORT_EXAMPLES = """
\b
Examples:
  hpc-elastic export last --key model -o model.pt
  hpc-elastic export runs/7 --step 1000 -o all.pt

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
    folders = find_checkpoints(run)
    directories = sorted({str(folder.parent) for folder in folders})
    if len(directories) > 1:
        remedy = f"give one of them in place of RUN: {', '.join(directories)}"
        raise CheckpointNotFoundError(f"{run} has checkpoints in several directories: {remedy}")
    name = f"step-{step or 0:08d}"
    wanted = folders if step is None else [f for f in folders if f.name.split(".")[0] == name]
    if not wanted:
        known = ", ".join(folder.name for folder in folders)
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {step}, only {known}")
    for folder in wanted:
        problems = _examine(folder).problems
        if not problems:
            return folder, read_manifest(folder)
        print(f"{folder.name} is damaged: {problems[0]}", file=sys.stderr)
    raise CheckpointCorruptError(f"{run} has no good checkpoint; {problems[0]}")
