"""``hpc-elastic audit``: was every sample trained exactly once an epoch?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpc_elastic.cli import options
from hpc_elastic.data.audit import EpochProof, Proof, audit
from hpc_elastic.words import counted

_COUNTS = ("once", "twice", "never", "left", "dropped", "padded", "elsewhere")
_ALWAYS_SHOWN = ("once", "twice", "never")


_HELP = """
\b
Examples:
  hpc-elastic audit last
  hpc-elastic audit runs/7 --json | jq '.[].holds'

\b
--json prints one object, which has one for each sampler, by its name:
  holds              whether every sample was trained exactly once, as far as it has come
  name               of the sampler
  dataset_len        samples of an epoch
  epochs             a list; of each epoch, from 0, how many samples were trained once, twice or
                     never, are left to come, were dropped at its end, padded its last batch, or
                     were trained elsewhere, before the run's first state:
                     epoch, once, twice, never, left, dropped, padded, elsewhere
  last_step          of the surviving history
  stretches          how often a group began to train
  replayed_steps     written down and thrown away
  replayed_samples   of these steps
  open_samples       of steps that not all ranks have written down yet
  problems           why it does not hold, each a sentence
"""


@click.command(epilog=_HELP)
@options.run
@options.as_json
def command(run: Path, as_json: bool) -> int:
    """Tell whether every sample was trained exactly once an epoch.

    Reads the ledger that the run's samplers have kept, whatever happened to the world size. The
    exit code is 1 if a sample was left out or trained twice.
    """
    return audit_run(run, as_json=as_json)


def audit_run(run: Path, *, as_json: bool) -> int:
    """Print the proof from a run's ledger.

    Args:
        run: The run directory.
        as_json: Print one JSON object, by the samplers' names, instead of tables.

    Returns:
        0 if it holds, 1 if a sample was left out or trained twice, or it can not be told.

    Raises:
        RunDirectoryError: the run has no ledger, or it is damaged.
    """
    proofs = audit(run)
    if as_json:
        print(json.dumps({p.name: {"holds": p.holds, **asdict(p)} for p in proofs}, indent=2))
    else:
        for proof in proofs:
            _print(proof)
    return 0 if all(proof.holds for proof in proofs) else 1


def _print(proof: Proof) -> None:
    console = Console(highlight=False, markup=False)
    console.print(_table(proof))
    console.print(
        f"{counted(proof.last_step, 'step')}, trained in "
        f"{counted(proof.stretches, 'stretch', 'stretches')}; written down and thrown away: "
        f"{counted(proof.replayed_steps, 'step')} ({counted(proof.replayed_samples, 'sample')})"
    )
    if proof.open_samples:
        console.print(f"not yet written down by all ranks: {counted(proof.open_samples, 'sample')}")
    for problem in proof.problems:
        console.print(f"NOT PROVEN: {problem}")
    if proof.holds:
        console.print("Proven: every sample exactly once an epoch, as far as the training has come")


def _table(proof: Proof) -> Table:
    """Return a table of the epochs; columns that are zero throughout are left out."""
    counts = [c for c in _COUNTS if c in _ALWAYS_SHOWN or any(getattr(e, c) for e in proof.epochs)]
    table = Table(title=Text(f"{proof.name}: {counted(proof.dataset_len, 'sample')}"))
    for column in ("epoch", *counts):
        table.add_column(column, justify="right")
    for epoch in proof.epochs:
        table.add_row(*_row(epoch, counts))
    return table


def _row(epoch: EpochProof, counts: list[str]) -> list[str]:
    return [str(epoch.epoch), *(f"{getattr(epoch, count):,}" for count in counts)]
