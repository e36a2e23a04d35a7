"""``hpc-elastic resume``: let a run that has stopped go on from its last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import SubmissionError
from hpc_elastic.rundir import RunDir

_EXAMPLES = """
\b
Examples:
  hpc-elastic resume last
  hpc-elastic resume last nodes=2:8 launcher.partition=low launcher.time=12:00:00
  hpc-elastic resume multirun/2030-01-31/12-00-00/3 launcher.exclude=node17

\b
--json prints one object:
  run_id, run, launcher   as at the submission; run is the directory
  generation              how often the run was resumed
  nodes, job_ids          what was asked for, and under which jobs
  log                     launcher=local: the output of the process that goes on
"""


@click.command(epilog=_EXAMPLES)
@options.run
@click.argument("overrides", nargs=-1, metavar="[OVERRIDE]...")
@options.as_json
def command(run: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Let a run that has stopped go on, in the same run directory, and return at once.

    For a run that has failed, was cancelled, or whose tasks are all gone. It goes on from its last
    good checkpoint, as after any other loss of all its nodes: logs, events and rounds go on to be
    written and counted, in new tasks. What it has spent of its restarts is forgotten, and so are
    the nodes that it avoided: launcher.exclude=... names some.

    OVERRIDE is nodes=..., nproc_per_node=... or launcher.KEY=..., as at the submission; what is
    not given stays as it was. The config that the training reads, and its code, stay as they were:
    other overrides are refused.

    A run that still has tasks, or has succeeded, is refused. If this command is interrupted, the
    run can be resumed again.
    """
    return resume_run(run, overrides, as_json=as_json)


def resume_run(run: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Resume a run, and print how to watch it.

    Raises:
        HpcElasticError: it was not resumed; see `hpc_elastic.submit.resume`.
    """
    from hpc_elastic.cli.submit import print_run

    local = RunDir(run).load().launcher == "local"
    told = _locally(run, overrides) if local else _in_slurm(run, overrides)
    if as_json:
        print(json.dumps(told, indent=2))
        return 0
    where = f"output in {told['log']}" if local else f"job {' '.join(told['job_ids'])}"
    print(f"resumed with nodes={told['nodes']} ({where})")
    print_run(told["run_id"], run)
    return 0


def _in_slurm(run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from hpc_elastic.submit.resume import as_json, resume

    resumption, submitted = resume(run, overrides)
    return as_json(resumption, submitted.handle.job_ids, log=None)


def _locally(run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from hpc_elastic.submit import detach

    def work(tell: Callable[[dict[str, Any]], None]) -> None:
        from hpc_elastic.submit import session
        from hpc_elastic.submit.processes import terminated_as_interrupt
        from hpc_elastic.submit.resume import as_json, resume

        with terminated_as_interrupt():
            resumption, submitted = resume(run, overrides)
            with session.let_go_on_failure(submitted.handle):
                log = detach.log_of(resumption.prepared.plan)
                detach.leave_terminal(log)
                tell(as_json(resumption, submitted.handle.job_ids, log=log))
            session.wait(submitted)

    told = detach.in_background(work)
    if "error" in told or not told:
        raise SubmissionError(str(told.get("error", "it ended; its traceback is above")))
    return told
