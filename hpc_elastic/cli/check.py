"""``doctor``: whether runs will work on this cluster; ``audit``: whether one has trained all."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_elastic._util import counted, sigterm_as_interrupt
from hpc_elastic.cli import options
from hpc_elastic.errors import ConfigError

if TYPE_CHECKING:
    from hpc_elastic.data.audit import Proof
    from hpc_elastic.doctor.probe_job import Report

_DOCTOR_HELP = """
\b
The settings are those of `hpc-elastic run`, as --KEY VALUE or KEY=VALUE. Settings that are not
given have the defaults of the cluster.

\b
Examples:
  hpc-elastic doctor                                     without submitting a job
  hpc-elastic doctor partition=gpu time=4:00:00 nodes=1:16
  hpc-elastic doctor --script train.py                   what a change of the nodes would cost it
  hpc-elastic doctor partition=gpu gpus_per_node=4 --probe
  hpc-elastic doctor --partition gpu --probe --probe-nodes 8 --dir /scratch/$USER
  hpc-elastic doctor container.runtime=apptainer container.image=torch.sif --probe
  hpc-elastic doctor --probe --json > doctor.json        for a bug report

\b
Exit codes: 0 no check failed; 1 a check failed; 2 wrong arguments; 130 interrupted.
Keys of --json: schema (1), verdict, time, versions, asked, findings (check, verdict, found, why,
remedy), facts. A verdict is ok, warn, fail or unknown. Environment variables are left out.
"""


def _keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from dataclasses import fields

    from hpc_elastic.config.schema import SlurmSettings

    names = ["nodes", "nproc_per_node", *(field.name for field in fields(SlurmSettings))]
    return [f"{name}=" for name in names if name.startswith(incomplete)]


@click.command(epilog=_DOCTOR_HELP, context_settings={"ignore_unknown_options": True})
@click.argument("settings", nargs=-1, metavar="[SETTING]...", shell_complete=_keys)
@click.option("--probe", is_flag=True, help="Submit a job that tests the nodes, of about a minute.")
@click.option(
    "--probe-nodes", "nodes", type=click.IntRange(1, 64), default=2, show_default=True,
    help="Number of nodes of --probe.",
)  # fmt: skip
@click.option(
    "--wait-s", type=click.FloatRange(0, min_open=True), default=300, show_default=True,
    metavar="SECONDS", help="Longest wait of --probe in the queue.",
)  # fmt: skip
@click.option(
    "--dir", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".",
    help="Directory of the runs: hydra.sweep.dir, or one above it.  [default: .]",
)  # fmt: skip
@click.option(
    "--script", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Script of the runs: its level, by reading it, if it is left as it is.",
)  # fmt: skip
@options.as_json
def doctor_command(
    settings: tuple[str, ...], probe: bool, nodes: int, wait_s: float, folder: Path,
    script: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Check whether elastic runs will work on this cluster, and print remedies.

    The checks cover this login node, Slurm and the directory of the runs. With --probe a job tests
    the steps of a run on real nodes: they connect, read each other's files, reduce a tensor,
    receive signals, and one of them is requeued and starts again. The job ends by itself, and
    Ctrl-C cancels it.

    A failed check means that runs fail, or are not requeued; a warning is a loss that can be
    avoided.
    """
    from hpc_elastic._console import console
    from hpc_elastic.doctor import cluster, examine
    from hpc_elastic.doctor.findings import Verdict, print_findings, worst_verdict
    from hpc_elastic.doctor.script_level import check_script

    try:
        wanted = cluster.parse_settings(options.split_settings(settings))
    except ConfigError as e:
        raise click.UsageError(str(e)) from e
    found = examine.examine_login_node(wanted, folder)
    if script is not None:
        found.findings.insert(0, check_script(script.read_text(), script.name))
    if probe:
        ends = sigterm_as_interrupt()  # as Ctrl-C does: the job is cancelled
        with ends, _progress(quiet=as_json) as show_step:
            found = examine.examine_nodes(
                found, wanted, folder, num_nodes=nodes, timeout_s=wait_s, report=show_step
            )
    if as_json:
        report = {
            "schema": 1, "verdict": worst_verdict(found.findings).value, "time": time.time(),
            "versions": found.versions, "asked": cluster.settings_json(wanted),
            "findings": [finding.to_json() for finding in found.findings], "facts": found.facts,
        }  # fmt: skip
        options.print_json(report)
    else:
        print_findings(found.findings, console(), probed=probe)
    return 1 if worst_verdict(found.findings) is Verdict.FAIL else 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Report]:
    """Show progress on standard error: one line that changes, or a line for each step."""
    from hpc_elastic._console import console

    errors = console(stderr=True)
    if errors.is_terminal and not quiet:
        with errors.status("submitting the probe") as status:
            yield status.update
        return
    last = ""

    def report(text: str) -> None:
        nonlocal last
        if text != last:
            print(text, file=sys.stderr, flush=True)
            last = text

    yield report


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
