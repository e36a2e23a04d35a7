"""One submission from its plan to its outcomes: what the Hydra launcher and `launch` share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hpc_elastic.config.schema import RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.launcher.plan import Plan, PlannedRun, make_plan
from hpc_elastic.launcher.prepare import (
    Prepared,
    next_array,
    overlapping,
    prepare,
    remove_rendered,
    with_free_numbers,
)
from hpc_elastic.launcher.wait import Outcome, SubmittedTasks, TrackedRun, track
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry

RENDERED = "rendered: "
"""How a dry run begins the line with the path of each script, for `hpc-elastic submit`."""

_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Submitted:
    """Runs handed to a scheduler."""

    handle: SubmittedTasks
    runs: Sequence[TrackedRun]
    poll_interval_s: float


def lay_out(runs: Sequence[PlannedRun], submission: Path) -> Plan:
    """Return the plan for runs in one sweep directory.

    Raises:
        ConfigError: two runs would share a directory, or settings of the sweep differ; a run may
            get more workers than its global batch has samples.
        SubmissionError: Slurm does not answer.
    """
    shared = overlapping([run.dir for run in runs])
    if shared is not None:
        remedy = "two runs have this directory; make it depend on the run: ${hydra.job.num}"
        raise ConfigError("hydra.sweep.subdir", str(shared), remedy)
    for run in runs:
        _require_batch_for_all(run.settings)
    size = _max_array_size(runs[0].settings)
    return make_plan(runs, submission, max_array_size=size, first_array=next_array(submission))


def _require_batch_for_all(settings: RunSettings) -> None:
    batch = settings.launcher.global_batch
    if batch is None:
        return
    from hpc_elastic.data.batch import check

    nproc = settings.nproc_per_node
    wrong = check(batch, settings.nodes.max, nproc if isinstance(nproc, int) else None)
    if wrong is not None:
        raise ConfigError("launcher.global_batch", batch, wrong)


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
    from hpc_elastic.launcher.prepare import graces, provenance
    from hpc_elastic.run.directory import SUBMISSION

    found = provenance(source)
    remove_rendered([run.dir for run in runs], sweep / SUBMISSION)

    def prepare_anew() -> Prepared:
        plan = lay_out(runs, sweep / SUBMISSION)
        if plan.backend == "local" and not plan.launcher.dry_run:
            from hpc_elastic.launcher import local

            local.require_possible(plan)
        return prepare(plan, entry, name=name, provenance=found, graces=graces(plan.runs))

    return with_free_numbers(prepare_anew)


def submit(prepared: Prepared) -> Submitted:
    """Hand a prepared plan to the scheduler of its launcher."""
    handle: SubmittedTasks
    if prepared.plan.backend == "slurm":
        from hpc_elastic.launcher import slurm

        handle = slurm.submit(prepared)
    else:
        from hpc_elastic.launcher import local

        handle = local.submit(prepared)
    with let_go_on_failure(handle):
        folders = [run.dir for run in prepared.plan.runs]
        registry.add(dict(zip(prepared.run_ids, folders, strict=True)))
        labels = [overrides_label(run.overrides) for run in prepared.plan.runs]
        runs = track(prepared.plan, handle.job_ids, labels)
    return Submitted(handle, runs, prepared.plan.launcher.poll_interval_s)


@contextmanager
def let_go_on_failure(handle: SubmittedTasks) -> Iterator[None]:
    """Let go of a submission if what follows it fails, and say what has become of it.

    Until somebody waits for them, processes of ``launcher=local`` would go on without a launcher.
    """
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(handle.leave()) from e
    except BaseException:
        print(handle.leave(), file=sys.stderr)
        raise


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """End this program with a message, and no traceback, on Ctrl-C or SIGTERM.

    The message is that of the KeyboardInterrupt, if whoever was interrupted gave it one.

    Raises:
        SystemExit: it was interrupted.
    """
    from hpc_elastic.launcher.local import terminated_as_interrupt

    try:
        with terminated_as_interrupt():
            yield
    except KeyboardInterrupt as e:
        print(str(e) or "interrupted: nothing was submitted", file=sys.stderr)
        sys.exit(130)


def wait(submitted: Submitted, out: TextIO | None = None) -> list[Outcome]:
    """Show progress until all runs have ended, then how each did.

    Args:
        submitted: The runs.
        out: Where it is shown; None: on standard output.

    Raises:
        SystemExit: Ctrl-C or SIGTERM. Slurm's runs go on, local ones are ended; which of the two,
            and how to come back, was printed.
    """
    from hpc_elastic.launcher.local import terminated_as_interrupt
    from hpc_elastic.launcher.wait import Waiter, choose_display, console_for, places, results_table

    console = console_for(out or sys.stdout)
    try:
        with terminated_as_interrupt(), choose_display(console) as display:
            waiter = Waiter(
                submitted.handle, submitted.runs, display, poll_interval_s=submitted.poll_interval_s
            )
            outcomes = waiter.wait()
        submitted.handle.close()
    except KeyboardInterrupt:
        console.print(submitted.handle.leave(), markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except BaseException:
        submitted.handle.leave()
        raise
    dirs = [run.dir for run in submitted.runs]
    where = places(dirs, submitted.runs[0].submission.parent, Path.cwd())
    try:
        console.print()
        console.print(results_table(outcomes))
        console.print(where, markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"interrupted: the runs had ended; {where}") from e
    return outcomes


def announce(prepared: Prepared, submitted: Submitted | None = None) -> None:
    """Print what was prepared, and how to come back to it if it was submitted."""
    from hpc_elastic.launcher.wait import places

    plan = prepared.plan
    print(plan)
    for script in prepared.scripts if submitted is None else ():
        print(f"{RENDERED}{script}")
    print(places([run.dir for run in plan.runs], plan.submission.parent, Path.cwd()))
    if submitted is not None:
        print(submitted.handle.leave())


def overrides_label(overrides: Sequence[str]) -> str:
    r"""Return the overrides by which people tell the runs of a sweep apart (pure).

    Hydra's sweeper escapes what its grammar could misread (``nodes=1\:4``): not for people.
    """
    ours = ("launcher=", "launcher.", "hydra.", "hydra/")
    return " ".join(as_typed(line) for line in overrides if not line.lstrip("+").startswith(ours))


def as_typed(override: str) -> str:
    r"""Return an override without the escapes of Hydra's sweeper (pure): ``nodes=1:4``."""
    return re.sub(r"\\(.)", r"\1", override)


def _max_array_size(settings: RunSettings) -> int:
    if not isinstance(settings.launcher, SlurmSettings):
        return _UNLIMITED
    from hpc_elastic.launcher.slurm import max_array_size

    return max_array_size(dry_run=settings.launcher.dry_run)
