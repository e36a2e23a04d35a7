"""The probe as a job: an array as that of a run, submitted, looked at and taken away again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_elastic.config import RunSettings, SlurmSettings
from hpc_elastic.doctor.asked import launcher_of
from hpc_elastic.doctor.place import Place, Plan
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.files import write_atomic
from hpc_elastic.rundir import SUBMISSION, ArrayFiles, Submission
from hpc_elastic.slurm.site import SiteClient, time_limit_s
from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.submit import sbatch
from hpc_elastic.submit.prepare import python_path, read_template

MODULE = "hpc_elastic.doctor.probe"
_MINUTES = 10
"""The probe's time limit, where neither the user nor the partition wants a shorter one."""
_END_S = 15.0
_KILL_S = 15.0
_LOG_CHARS = 600


@dataclass(frozen=True)
class ProbeJob:
    """A probe that was submitted.

    Attributes:
        job_id: Of its array.
        num_nodes: Its number of tasks.
        place: Its files.
        client: How to reach Slurm.
    """

    job_id: str
    num_nodes: int
    place: Place
    client: SiteClient

    def task(self, index: int) -> str:
        """Return the name of a task."""
        return f"{self.job_id}_{index}"

    def states(self) -> dict[int, TaskState]:
        """Return Slurm's word on each task; those that it has forgotten are left out.

        Raises:
            SlurmCommandError: Slurm does not answer.
        """
        found = self.client.tasks([self.job_id])
        return {i: found[self.task(i)] for i in range(self.num_nodes) if self.task(i) in found}

    def log(self, index: int) -> str:
        """Return the end of what a task has printed."""
        file = Submission(self.place.path).logs / f"{self.job_id}_{index}.log"
        try:
            return file.read_text(errors="replace").strip()[-_LOG_CHARS:]
        except OSError:
            return ""

    def end(self) -> list[str]:
        """End all tasks, and remove the files; return those that did not end, with their nodes."""
        with contextlib.suppress(OSError):  # a full disk; they are cancelled in any case
            self.place.stop.touch()
        left = self._cancelled()
        shutil.rmtree(self.place.path.parent, ignore_errors=True)
        return left

    def _cancelled(self) -> list[str]:
        name = [self.job_id]
        for attempt, timeout_s in ((self.client.cancel, _END_S), (self.client.kill, _KILL_S)):
            try:
                attempt(name)
                left = self._left(timeout_s)
            except SlurmCommandError as e:
                left = [f"{self.job_id} ({e.stderr.strip()[:200]})"]
            if not left:
                break
        return left

    def _left(self, timeout_s: float) -> list[str]:
        """Wait for the tasks to end; return those that do not."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.client.tasks([self.job_id]).values()
            left = [s for s in states if s.phase is not Phase.ENDED]
            if not left or time.monotonic() > deadline:
                return [f"{s.task} ({s.state} on {s.node or 'no node'})" for s in left]
            time.sleep(0.5)


def submit(
    settings: RunSettings,
    num_nodes: int,
    folder: Path,
    client: SiteClient,
    *,
    longest_s: float | None = None,
) -> ProbeJob:
    """Submit a probe (login node).

    Args:
        settings: What a run would be submitted with.
        num_nodes: How many nodes to look at.
        folder: The directory to try out; the probe's own is made in it.
        client: How to reach Slurm.
        longest_s: Longest time that the partition allows; None without a limit.

    Raises:
        HpcElasticError: sbatch refuses it, or the directory can not be written to.
    """
    from hpc_elastic.submit.executor import SbatchRefusedError, submit_script
    from hpc_elastic.submit.slurm_backend import refusal

    own = Path(tempfile.mkdtemp(dir=folder, prefix="hpc-elastic-doctor-"))
    launcher = replace(launcher_of(settings), time=time_limit(settings, longest_s))
    try:
        script = _lay_out(launcher, own / SUBMISSION, num_nodes)
        jobs = submit_script(script, num_nodes)
    except SbatchRefusedError as e:
        shutil.rmtree(own, ignore_errors=True)
        raise refusal(e.stderr, launcher, client) from e
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    job_id = str(jobs[0].job_id).partition("_")[0]
    return ProbeJob(job_id, num_nodes, Place(own / SUBMISSION), client)


def time_limit(settings: RunSettings, longest_s: float | None) -> str:
    """Return the probe's time limit in minutes: never longer than a run's may be (pure)."""
    asked = launcher_of(settings).time
    wanted = [_MINUTES * 60.0, longest_s, time_limit_s(asked) if asked else None]
    return str(max(1, int(min(s for s in wanted if s is not None) // 60)))


def _lay_out(launcher: SlurmSettings, submission: Path, num_nodes: int) -> Path:
    """Write the probe's files; return its batch script."""
    Submission(submission).logs.mkdir(parents=True)
    limit_s = 60.0 * int(launcher.time or _MINUTES)
    plan = Plan(
        num_nodes=num_nodes,
        token=secrets.token_hex(16),
        interface=launcher.interface,
        in_container=launcher.container.runtime is not None,
        lifetime_s=limit_s - 10,
    )
    Place(submission).write_plan(plan)
    if plan.in_container:
        launcher = replace(launcher, setup=[*launcher.setup, _ask_outside(Place(submission))])
    script = ArrayFiles.of(Place(submission).array_file).script
    write_atomic(script, render(launcher, submission, num_tasks=num_nodes, module=MODULE))
    return script


def _ask_outside(place: Place) -> str:
    """Return a shell line that asks Slurm before the container is entered, and never fails."""
    file = shlex.quote(str(place.outside(""))) + "$SLURM_ARRAY_TASK_ID"
    asks = 'squeue -h -j "$SLURM_JOB_ID" && scontrol show config'
    return f"{{ {asks}; }} > /dev/null 2> {file} || true"


def render(
    launcher: SlurmSettings, submission: Path, *, num_tasks: int, module: str = sbatch.TASK_MODULE
) -> str:
    """Return the batch script that a run with these settings would have.

    Args:
        launcher: ``launcher.*``.
        submission: The folder ``.hpc_elastic`` that it names.
        num_tasks: Nodes.
        module: What its tasks run.

    Raises:
        HpcElasticError: a setting can not be written into it.
    """
    script = sbatch.Script(
        settings=replace(launcher, array_parallelism=None),
        job_name=launcher.job_name or "hpc-elastic-doctor",
        num_tasks=num_tasks,
        submission=submission,
        array=0,
        python=sys.executable,
        cwd=Path.cwd(),
        python_path=python_path(os.environ),
        module=module,
    )
    return sbatch.render(script, read_template(launcher.template))
