"""One submission from its plan to its outcomes: what the Hydra launcher and `launch` share."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.config import RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.rundir import Entry
from hpc_elastic.submit.backend import Handle, TrackedRun, track
from hpc_elastic.submit.outcome import Outcome
from hpc_elastic.submit.plan import Plan, PlannedRun, make_plan
from hpc_elastic.submit.prepare import Prepared, next_array, overlapping, prepare

RENDERED = "rendered: "
"""How a dry run begins the line with the path of each script; `hpc-elastic render` reads it."""

_UNLIMITED = 1 << 30
_LOG_WIDTH = 160
"""Columns of the tables in a log file, where rich would assume 80."""


@dataclass(frozen=True)
class Submitted:
    """Runs handed to a scheduler."""

    handle: Handle
    runs: Sequence[TrackedRun]
    poll_s: float


def lay_out(runs: Sequence[PlannedRun], submission: Path) -> Plan:
    """Return the plan for runs in one sweep directory.

    Raises:
        ConfigError: two runs would share a directory, or settings of the sweep differ.
        SubmissionError: Slurm does not answer.
    """
    shared = overlapping([run.dir for run in runs])
    if shared is not None:
        remedy = "two runs have this directory; make it depend on the run: ${hydra.job.num}"
        raise ConfigError("hydra.sweep.subdir", str(shared), remedy)
    size = _max_array_size(runs[0].settings)
    return make_plan(runs, submission, max_array_size=size, first_array=next_array(submission))


def prepare_runs(
    runs: Sequence[PlannedRun], entry: Entry, *, sweep: Path, name: str, source: Path
) -> Prepared:
    """Plan the runs of one sweep directory and write all their files.

    Args:
        runs: The runs.
        entry: The user's function.
        sweep: Absolute path of the sweep directory.
        name: Name of the user's script or function.
        source: A folder of the user's code, whose git commit is recorded.
    """
    from hpc_elastic.rundir import SUBMISSION
    from hpc_elastic.submit.provenance import provenance

    plan = lay_out(runs, sweep / SUBMISSION)
    return prepare(plan, entry, name=name, provenance=provenance(source))


def submit(prepared: Prepared) -> Submitted:
    """Hand a prepared plan to the scheduler of its launcher."""
    handle: Handle
    if prepared.plan.backend == "slurm":
        from hpc_elastic.submit import slurm_backend

        handle = slurm_backend.submit(prepared)
    else:
        from hpc_elastic.submit import local

        handle = local.submit(prepared)
    labels = [overrides_label(run.overrides) for run in prepared.plan.runs]
    runs = track(prepared.plan, handle.job_ids, labels)
    return Submitted(handle, runs, prepared.plan.launcher.poll_s)


def wait(submitted: Submitted) -> list[Outcome]:
    """Show progress until all runs have ended, then how each did.

    Raises:
        SystemExit: Ctrl-C or SIGTERM. Slurm's runs go on, local ones are ended; which of the two,
            and how to come back, was printed.
    """
    from rich.console import Console

    from hpc_elastic.submit.processes import terminated_as_interrupt
    from hpc_elastic.submit.progress import choose_display, results_table
    from hpc_elastic.submit.wait import Waiter

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    try:
        with terminated_as_interrupt(), choose_display(console) as display:
            waiter = Waiter(submitted.handle, submitted.runs, display, poll_s=submitted.poll_s)
            outcomes = waiter.wait()
        submitted.handle.close()
    except KeyboardInterrupt:
        console.print(submitted.handle.leave(), markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except BaseException:
        submitted.handle.leave()
        raise
    console.print(results_table(outcomes))
    return outcomes


def announce(prepared: Prepared, job_ids: Sequence[str] = ()) -> None:
    """Print what was prepared, and under which ids it was submitted if it was."""
    print(prepared.plan)
    for script in prepared.scripts:
        print(f"{RENDERED}{script}")
    for run in prepared.plan.runs:
        print(f"run directory: {run.dir}")
    if job_ids:
        print(f"submitted: {' '.join(job_ids)}")


def overrides_label(overrides: Sequence[str]) -> str:
    r"""Return the overrides by which people tell the runs of a sweep apart (pure).

    Hydra's sweeper escapes what its grammar could misread (``nodes=1\:4``): not for people.
    """
    ours = ("launcher=", "launcher.", "hydra.", "hydra/")
    shown = [line for line in overrides if not line.lstrip("+").startswith(ours)]
    return re.sub(r"\\(.)", r"\1", " ".join(shown))


def _max_array_size(settings: RunSettings) -> int:
    if not isinstance(settings.launcher, SlurmSettings):
        return _UNLIMITED
    from hpc_elastic.submit.slurm_backend import max_array_size

    return max_array_size(dry_run=settings.launcher.dry_run)
