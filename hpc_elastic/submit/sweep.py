"""A Hydra sweep as elastic runs: from the overrides of its jobs to their JobReturns.

The launcher plugin hands its arguments to `launch_sweep`. Two differences from Hydra's own
launchers, both because the job runs elsewhere, in several processes:

- callbacks' on_job_start and on_job_end are called here, before the submission and after the
  run has ended, not in the workers;
- with ``launcher.wait=false`` and ``launcher.dry_run=true`` the JobReturns are complete and have
  neither value nor config, since nothing has run yet.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.submit import detach, session
from hpc_elastic.submit.compose import SharingLoader
from hpc_elastic.submit.entry import entry_of
from hpc_elastic.submit.freeze import (
    FrozenJob,
    SharedSections,
    freeze_job,
    write_hydra_files,
)
from hpc_elastic.submit.frozen import remembered_grammar
from hpc_elastic.submit.outcome import Outcome
from hpc_elastic.submit.plan import PlannedRun
from hpc_elastic.submit.prepare import Prepared, several_at_once


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives to a launcher at its set-up."""

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig

    @property
    def dir(self) -> Path:
        """Return the absolute path of the sweep directory."""
        return Path(str(self.config.hydra.sweep.dir)).absolute()


def launch_sweep(
    sweep: Sweep, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Freeze, submit and, unless told otherwise, wait for the jobs of one batch.

    Args:
        sweep: What Hydra set up.
        job_overrides: The overrides of each job.
        initial_job_idx: hydra.job.num of the first.

    Raises:
        HpcElasticError: nothing was submitted. A run that fails later raises when its JobReturn
            is read, as Hydra wants it.
        SystemExit: it was interrupted; what has become of the runs was printed.
    """
    detached = detach.report_file() is not None
    shared = SharedSections()
    with session.ended_by_interrupt():
        jobs = _freeze(sweep, job_overrides, initial_job_idx, shared)
        for job in jobs:
            _on_job_start(sweep, job)
        prepared = _prepare(sweep, jobs, shared)
        if prepared.plan.launcher.dry_run:
            session.announce(prepared)
            return [_returned(job) for job in jobs]
        submitted = session.submit(prepared)
        with session.let_go_on_failure(submitted.handle):
            if detached:
                _detach(prepared, submitted)
            elif not prepared.plan.launcher.wait:
                session.announce(prepared, submitted)
        if prepared.plan.backend == "slurm" and (detached or not prepared.plan.launcher.wait):
            return [_returned(job) for job in jobs]
        outcomes = session.wait(submitted)
    return [_ended(sweep, job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]


def _detach(prepared: Prepared, submitted: session.Submitted) -> None:
    """Tell `hpc-elastic submit` what was submitted; a launcher that goes on leaves its terminal.

    That one does so once: by the second batch of its sweep the command has returned.
    """
    file, plan = detach.report_file(), prepared.plan
    assert file is not None
    if plan.backend == "local" and detach.has_left_terminal():
        return
    log = detach.log_of(plan) if plan.backend == "local" else None
    if log is not None:
        detach.leave_terminal(log)
    detach.tell(file, detach.entry(prepared, list(submitted.handle.job_ids), log=log))


def _prepare(sweep: Sweep, jobs: Sequence[FrozenJob], shared: SharedSections) -> Prepared:
    entry = entry_of(sweep.task_function, "hydra")
    prepared = session.prepare_runs(
        [PlannedRun(job.dir, job.settings, job.overrides) for job in jobs],
        entry,
        sweep=sweep.dir,
        name=str(sweep.config.hydra.job.name),
        source=Path(entry.script).parent if entry.script else Path(entry.cwd),
    )
    several_at_once(partial(write_hydra_files, shared=shared), jobs)
    _make_private(sweep.dir / "multirun.yaml")
    return prepared


def _make_private(file: Path) -> None:
    """Take away others' right to read what Hydra's sweeper wrote: ``launcher.env`` is in it."""
    with suppress(OSError):
        file.chmod(0o600)


def compact(error: HpcElasticError) -> HpcElasticError:
    """Return the same error, of a class that Hydra prints without a traceback.

    The message says all that the user needs; a stack of Hydra's and our internals would bury it.
    With HYDRA_FULL_ERROR=1 it is there. The error stays an instance of its own class.
    """
    if not isinstance(error, CompactHydraException):
        own = type(error)
        error.__class__ = type(own.__name__, (own, CompactHydraException), {})
    return error


def share_composition(context: HydraContext) -> None:
    """Make Hydra's sweeper compose its jobs as cheaply as we do (see `compose`)."""
    if not isinstance(context.config_loader, SharingLoader):
        context.config_loader = cast(Any, SharingLoader(context.config_loader))


def _freeze(
    sweep: Sweep,
    job_overrides: Sequence[Sequence[str]],
    initial_job_idx: int,
    shared: SharedSections,
) -> list[FrozenJob]:
    load = sweep.context.config_loader.load_sweep_config
    with _paused_gc(), remembered_grammar():
        return [
            freeze_job(load(sweep.config, list(overrides)), number, shared)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Spare a burst of a million small objects the collector's looks at it: a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _has_callbacks(sweep: Sweep) -> bool:
    return bool(sweep.context.callbacks.callbacks)


def _on_job_start(sweep: Sweep, job: FrozenJob) -> None:
    if _has_callbacks(sweep):
        config = OmegaConf.create({**job.task, "hydra": job.hydra})
        sweep.context.callbacks.on_job_start(config=config, task_function=sweep.task_function)


def _ended(sweep: Sweep, job: FrozenJob, outcome: Outcome) -> JobReturn:
    returned = _returned(job, outcome.value)
    returned.cfg = OmegaConf.create(job.task)
    returned.hydra_cfg = OmegaConf.create({"hydra": job.hydra})
    if outcome.error is not None:
        returned.status = JobStatus.FAILED
        returned.return_value = compact(outcome.error)
        returned.overrides = [session.as_typed(line) for line in job.overrides]  # Hydra prints them
    if _has_callbacks(sweep):
        config = OmegaConf.create({**job.task, "hydra": job.hydra})
        sweep.context.callbacks.on_job_end(config=config, job_return=returned)
    return returned


def _returned(job: FrozenJob, value: Any = None) -> JobReturn:
    returned = JobReturn(
        overrides=list(job.overrides),
        working_dir=str(job.dir),
        task_name=JobRuntime.instance().get("name"),
        status=JobStatus.COMPLETED,
    )
    returned.return_value = value
    return returned
