"""``hpc-elastic audit``: check that every sample was trained exactly once per epoch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic._util import counted
from hpc_elastic.cli import options

if TYPE_CHECKING:
    from hpc_elastic.data.audit import Proof

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
    from hpc_elastic.data.audit import audit

    proofs = audit(run)
    if as_json:
        options.print_json({p.name: {"holds": p.holds, **asdict(p)} for p in proofs})
    else:
        for proof in proofs:
            _print_audit(proof)
    return 0 if all(proof.holds for proof in proofs) else 1


def _print_audit(proof: Proof) -> None:
    from rich.table import Table
    from rich.text import Text

    from hpc_elastic._console import console

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
