"""``hpc-elastic export``: a checkpoint as one file that plain torch reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from hpc_elastic.checkpoint.manifest import Manifest
from hpc_elastic.checkpoint.store import read_manifest
from hpc_elastic.checkpoint.store import verify as verify_folder
from hpc_elastic.cli import options
from hpc_elastic.cli.verify import find_checkpoints
from hpc_elastic.errors import CheckpointCorruptError, CheckpointNotFoundError
from hpc_elastic.words import counted

_EXAMPLES = """
\b
Examples:
  hpc-elastic export last --key model -o model.pt
  hpc-elastic export runs/7 --step 1000 -o all.pt

\b
--json prints one object:
  run           what was given for it
  checkpoint    the folder that was read
  step          that it holds
  key           that was written; null: all of them
  file          that was written
  num_bytes     its size
  num_tensors   in it
"""


@click.command(epilog=_EXAMPLES)
@options.checkpoints
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True,
    metavar="FILE", help="Such as model.pt.",
)  # fmt: skip
@click.option("--step", type=int, metavar="N", help="This step instead of the newest.")
@click.option("--key", metavar="KEY", help="One key of the Checkpointer's state, such as model.")
@options.as_json
def command(run: Path, output: Path, step: int | None, key: str | None, as_json: bool) -> int:
    """Write the newest good checkpoint of a run as one file of whole tensors.

    It is for torch.load(FILE, weights_only=True). RUN is a run, its directory of checkpoints, or
    one checkpoint. A damaged one is passed over, and named on standard error.

    The exit code is 1 if nothing was written.
    """
    return export(run, output, step=step, key=key, as_json=as_json)


def export(
    run: Path, output: Path, *, step: int | None, key: str | None, as_json: bool = False
) -> int:
    """Write a checkpoint to a file, and say which.

    Args:
        run: A run directory, a directory of checkpoints, or one checkpoint.
        output: The file.
        step: Which checkpoint; None takes the newest that is good.
        key: One key of the state; None for all.
        as_json: Say it as JSON on standard output.

    Returns:
        0.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: the state has no such key, or the output can not be written.
    """
    folder, manifest = choose(run, step)
    # torch is imported here: a login node checks the arguments and the files without it.
    from hpc_elastic.checkpoint.export import export as write

    num_tensors = write(manifest, folder, output, key)
    if as_json:
        told = {
            "run": str(run.absolute()), "checkpoint": str(folder.absolute()),
            "step": manifest.step, "key": key, "file": str(output.absolute()),
            "num_bytes": output.stat().st_size, "num_tensors": num_tensors,
        }  # fmt: skip
        print(json.dumps(told, indent=2))
        return 0
    what = f"{key} of step {manifest.step}" if key else f"step {manifest.step}"
    print(f"wrote {what} to {output}: {counted(num_tensors, 'tensor')}", file=sys.stderr)
    return 0


def choose(run: Path, step: int | None) -> tuple[Path, Manifest]:
    """Return the checkpoint that was asked for, verified.

    Raises:
        CheckpointNotFoundError: there is none of that step, or it is not clear which are meant.
        CheckpointCorruptError: it is damaged, or all are.
    """
    folders = find_checkpoints(run)
    directories = sorted({str(folder.parent) for folder in folders})
    if len(directories) > 1:
        remedy = f"give one of them in place of RUN: {', '.join(directories)}"
        raise CheckpointNotFoundError(f"{run} has checkpoints in several directories; {remedy}")
    wanted = folders if step is None else [f for f in folders if f.name == f"step-{step:08d}"]
    if not wanted:
        known = ", ".join(folder.name for folder in folders)
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {step}, only {known}")
    for folder in wanted:
        problems = verify_folder(folder)
        if not problems:
            return folder, read_manifest(folder)
        print(f"{folder.name} is damaged: {problems[0]}", file=sys.stderr)
    raise CheckpointCorruptError(f"{run} has no good checkpoint; {problems[0]}")
