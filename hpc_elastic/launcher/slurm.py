"""launcher=slurm: queries of the cluster before a submission, sbatch, and the submitted jobs.

Arrays are submitted by an executor of submitit (`ArrayExecutor`). submitit's own Slurm executor
pickles a closure for each task, renders a script of its own, and sleeps between submissions. Here
the payload of a task is the command that the batch script runs, and `SlurmClient.sbatch` submits
the script.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import submitit
from submitit.core.core import Executor
from submitit.core.utils import DelayedSubmission

from hpc_elastic._util import counted, duration
from hpc_elastic.config.parse import time_limit_s
from hpc_elastic.config.schema import Nproc, RunSettings, SlurmSettings
from hpc_elastic.errors import (
    ConfigError,
    HpcElasticError,
    SlurmCommandError,
    SlurmError,
    SubmissionError,
)
from hpc_elastic.launcher import batch_script
from hpc_elastic.launcher.batch_script import gpus_asked, has_whole_nodes
from hpc_elastic.launcher.plan import Plan, RunRequest, by_settings
from hpc_elastic.run import job_of
from hpc_elastic.run.directory import SUBMISSION, ArrayFiles, RunDir, Submission
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.shared_files import write_atomic
from hpc_elastic.site import TimeSlots, choose_terms, time_slots_of
from hpc_elastic.slurm import run_tasks
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.parsing import (
    NodeKind,
    Partition,
    Preemption,
    could_not_start,
    has_submitted_nothing,
)

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's default, for a machine without Slurm on which a script is only rendered."""


# ---- submit


@dataclass(frozen=True)
class SlurmJobs:
    """Submitted arrays, which outlive this process; ``time_slots`` is for runs without a leader."""

    job_ids: Sequence[str]
    sweep: Path
    client: SlurmClient
    time_slots: Sequence[TimeSlots] = ()
    result_job: str | None = None

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return all tasks of all runs from one call of squeue; replacements count as the task."""
        if not self.job_ids:
            return {}
        own = [Submission(self.sweep / SUBMISSION)]
        listed = run_tasks.list_followed(self.client, own, self.job_ids)
        for slots in self.time_slots:
            slots.fit_if_due()
        return listed

    def cancel(self) -> None:
        """Cancel the arrays, running tasks and replacements included."""
        if self.job_ids:
            replacements = run_tasks.followed([Submission(self.sweep / SUBMISSION)]).values()
            self.client.cancel([*self.job_ids, *replacements])

    def release(self) -> str:
        """Return how to come back to the runs, which continue."""
        jobs = f"job{'s' if len(self.job_ids) > 1 else ''} {' '.join(self.job_ids)}"
        sweep = shlex.quote(str(self.sweep))
        return (
            f"The runs are in Slurm, as {jobs}, and continue without this command.\n"
            f"  wait:   hpc-elastic wait {sweep}\n"
            f"  cancel: hpc-elastic cancel RUN, for each run below {sweep}"
        )

    def close(self) -> None:
        """Do nothing: tasks that are left cancel themselves when their run has ended."""


def submit(plan: Plan, client: SlurmClient | None = None) -> SlurmJobs:
    """Submit the batch script of every array of a plan.

    Where the answer of sbatch was lost, its job is looked for by the script, and adopted. Raises
    ConfigError if sbatch refused a setting, and SubmissionError if it failed for another reason. In
    both cases, and at an interrupt, the arrays that were submitted before are cancelled; where one
    may be in the queue all the same, the runs are marked as cancelled.
    """
    client = client or SlurmClient(env=dict(os.environ))
    sweep = plan.submission.parent
    ids: dict[int, str] = {}
    result_job: str | None = None
    for array, script in zip(plan.arrays, plan.scripts, strict=True):
        assert isinstance(array.launcher, SlurmSettings)
        flags = [] if array.after is None else [f"--dependency=after:{ids[array.after]}"]
        try:
            ids[array.number] = submit_script(script, len(array.tasks), client, flags)
            if array is plan.arrays[-1] and array.launcher.result_job:
                script, after = _write_result_job(plan), ":".join(ids.values())
                result_job = client.sbatch(script, [f"--dependency=afterany:{after}"])
                told = f"their result is job {result_job}: sbatch --dependency=afterok:{result_job}"
                print(told, file=sys.stderr)
        except BaseException as e:
            left = _take_back(plan, ids, script, client, is_certain=has_submitted_nothing(e))
            if isinstance(e, KeyboardInterrupt):
                what = left or f"no run was started, and {sweep} can be removed"
                raise KeyboardInterrupt(f"interrupted during the submission: {what}") from e
            if left:
                raise SubmissionError(f"{e}; {left}") from e
            if isinstance(e, SlurmCommandError):
                raise refusal(e, array.launcher, client) from e
            if isinstance(e, OSError):
                raise SubmissionError(f"{e}: its job was cancelled, and no run was started") from e
            raise
    shares = [(run.dir, share) for run in plan.runs for _, share in run.settings.shares]
    fitted = dict.fromkeys(path for path, share in shares if getattr(share, "time_min", None))
    time_slots = time_slots_of([RunDir(path).load() for path in fitted], client)
    try:
        for slots in time_slots:
            slots.fit()  # also for a command that does not wait
    except SlurmError as e:
        print(f"the tasks may start late: {e}", file=sys.stderr)
    return SlurmJobs(list(ids.values()), sweep, client, time_slots, result_job)


def _write_result_job(plan: Plan) -> Path:
    settings, number = plan.arrays[0].launcher, plan.arrays[0].number
    assert isinstance(settings, SlurmSettings)
    script = plan.submission / f"result-{number}.sbatch"
    content = batch_script.Script(
        settings=settings, job_name=f"{settings.job_name or 'hpc-elastic'}-result", num_tasks=1,
        submission=plan.submission, array=number, python=sys.executable, cwd=Path.cwd(),
        python_path=batch_script.python_path(os.environ),
    )  # fmt: skip
    write_atomic(script, batch_script.render_result_job(content))
    return script


def _take_back(
    plan: Plan, ids: Mapping[int, str], script: Path, client: SlurmClient, *, is_certain: bool
) -> str:
    """Cancel what was submitted of a plan; return what may be left, empty if nothing.

    ``is_certain``: the script that failed has submitted nothing. Else a task that starts exits,
    because its run is marked.
    """

    def mark_runs() -> None:
        for run in plan.runs:
            mark_cancelled(RunDir(run.dir), lambda text: print(text, file=sys.stderr))

    if not is_certain:
        mark_runs()
    ends = "the runs are marked as cancelled, so that a task of theirs that starts ends at once"
    try:
        lost = None if is_certain else client.find_job(script)
        started = {} if is_certain else Submission(plan.submission).job_ids()
        jobs = dict.fromkeys([*ids.values(), *started.values(), *([lost] if lost else [])])
        SlurmJobs(list(jobs), plan.submission.parent, client).cancel()
    except (SlurmCommandError, KeyboardInterrupt) as e:  # also a second Ctrl-C
        mark_runs()
        own = [] if is_certain else [f"a job of {script}"]
        what = f"{' and '.join([*ids.values(), *own])} could not be cancelled"
        return f"{what} ({str(e) or 'interrupted'}): {ends}; end one that runs with scancel"
    if is_certain or lost is not None:
        return ""
    return f"Slurm lists no job of {script} now; {ends}. Submit again in another directory"


def submit_script(
    script: Path, num_tasks: int, client: SlurmClient, flags: Sequence[str] = ()
) -> str:
    """Submit one array or co-allocated job; write its job id beside the script, and return it.

    Raises SlurmCommandError if sbatch refused the script, is not installed, or did not answer and
    Slurm lists no job of the script, or OSError if the job id could not be written.
    """
    files = ArrayFiles.of(script)
    argv = [sys.executable, "-P", "-m", batch_script.TASK_MODULE, str(files.tasks)]
    task = submitit.helpers.CommandFunction(argv)
    try:
        jobs = ArrayExecutor(script, client, flags).submit_array([task] * num_tasks)
        job_id = job_of(jobs[0].job_id)
    except SlurmCommandError as e:
        if has_submitted_nothing(e) or (found := look_for(files, client)) is None:
            raise
        print(f"the answer of sbatch was lost ({e}): its job is {found}", file=sys.stderr)
        job_id = found
    files.submitted_as(job_id)
    return job_id


_LOOKS_S = (1.0, 4.0, 15.0)
"""Pauses before Slurm is queried for a job; a busy controller takes a while to list it."""


def look_for(files: ArrayFiles, client: SlurmClient) -> str | None:
    """Return the queued job of an array whose submission was not answered; None without one."""
    for pause_s in _LOOKS_S:
        time.sleep(pause_s)
        with suppress(SlurmCommandError):
            if job := files.job_id or client.find_job(files.script):  # a task has written its id
                return job
    return None


class ArrayExecutor(Executor):
    """Executor of submitit that submits one batch script as one job array (`submit_script`)."""

    job_class = submitit.SlurmJob

    def __init__(self, script: Path, client: SlurmClient, flags: Sequence[str] = ()) -> None:
        super().__init__(script.parent / "submitit")
        self._script = script
        self._client = client
        self._flags = flags

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.core.core.Job[Any]]:
        """Submit the script (the one method that submitit requires of an executor)."""
        job_id = self._client.sbatch(self._script, self._flags)
        names = (f"{job_id}_{index}" for index in range(len(delayed_submissions)))
        return [submitit.SlurmJob(folder=self.folder, job_id=name) for name in names]


def refusal(
    error: SlurmCommandError, settings: SlurmSettings, client: SlurmClient
) -> HpcElasticError:
    """Return the error to raise for a failed sbatch, with what the cluster has."""
    if error.exit_code is None:
        remedy = "submit from a login node, or use launcher=local on this machine"
        return SubmissionError(f"{error} ({remedy})")
    partitions: list[str] = []
    nodes: list[NodeKind] = []
    with suppress(HpcElasticError):
        partitions = client.partitions()
    with suppress(HpcElasticError):  # sinfo may fail for a partition that does not exist
        nodes = client.node_kinds(settings.partition)
    return batch_script.explain(error.stderr, settings, partitions, nodes)


# ---- the shell's options of sbatch

_OF_SHELL = {
    **{f"SBATCH_{name.upper()}": name for name in ("partition", "account", "qos", "constraint")},
    "SBATCH_TIMELIMIT": "time",
}
_FLAGS_OF_SHELL = {"SBATCH_RESERVATION": "reservation", "SBATCH_WCKEY": "wckey"}
_HARMLESS = frozenset(["SBATCH_DEBUG", "SBATCH_IGNORE_PBS", "SBATCH_WAIT", "SBATCH_JOB_NAME"])


def with_shell_defaults(launcher: SlurmSettings, environ: Mapping[str, str]) -> SlurmSettings:
    """Return settings with the shell's options of sbatch for those not typed (pure).

    These options name an account or a place; sites and users set them once for all jobs. As
    settings they are in run.json, and hold for each later submission of the run's tasks.
    """
    given = {key: environ.get(name) for name, key in _OF_SHELL.items()}
    own: dict[str, Any] = {k: v for k, v in given.items() if v and getattr(launcher, k) is None}
    flags = {flag: environ[name] for name, flag in _FLAGS_OF_SHELL.items() if environ.get(name)}
    return replace(launcher, sbatch={**flags, **launcher.sbatch}, **own)


def adopt_shell(requests: Sequence[RunRequest], environ: Mapping[str, str]) -> list[RunRequest]:
    """Return runs with the shell's defaults; name its other options, which have no effect, once."""
    known = _HARMLESS.union(_OF_SHELL, _FLAGS_OF_SHELL)
    if others := sorted(k for k in environ if k.startswith("SBATCH_") and k not in known):
        remedy = "settings take their place (launcher.*, launcher.sbatch)"
        print(f"{', '.join(others)} of this shell: no effect; {remedy}", file=sys.stderr)

    def adopted(settings: RunSettings) -> RunSettings:
        assert isinstance(settings.launcher, SlurmSettings)
        return replace(settings, launcher=with_shell_defaults(settings.launcher, environ))

    found = by_settings(requests, adopted)
    return [replace(request, settings=own) for request, own in zip(requests, found, strict=True)]


# ---- query the cluster before a submission


def max_array_size(*, dry_run: bool, client: SlurmClient | None = None) -> int:
    """Return MaxArraySize, in a dry run without Slurm its default; or SubmissionError."""
    try:
        if size := (client or SlurmClient()).max_array_size():
            return size
        why = "the site permits no job arrays, and each node of a run is an element of one"
        raise SubmissionError(f"MaxArraySize=0 (`scontrol show config`): {why}; ask for them")
    except SlurmCommandError as e:
        if dry_run:
            note = f"Slurm does not answer here: MaxArraySize={DEFAULT_MAX_ARRAY_SIZE} is assumed"
            print(note, file=sys.stderr)
            return DEFAULT_MAX_ARRAY_SIZE
        remedy = "launcher=slurm needs Slurm; launcher=local runs on this machine"
        if not could_not_start(e):
            remedy = "Slurm is here and does not answer: `scontrol ping` shows the controller"
        raise SubmissionError(f"{e} ({remedy})") from e


def query_partitions(
    runs: Sequence[RunRequest], client: SlurmClient | None = None
) -> list[list[Preemption]]:
    """Return how tasks of each run's pools are preempted; ConfigError if they cannot hold the run.

    Slurm is queried once per partition, at the submission: the grace time of a preemption is too
    short for it, and all nodes of a partition would query at once. If Slurm does not answer, its
    defaults are assumed.
    """

    @cache
    def query(partition: str | None, qos: str | None) -> Preemption:
        return (client or SlurmClient()).preemption(partition, qos)

    @cache
    def has_gpus(partition: str | None) -> bool:
        return any(kind.gpus for kind in (client or SlurmClient()).node_kinds(partition))

    notes: dict[str, None] = {}

    def preemptions(settings: RunSettings) -> list[Preemption]:
        notes.update(dict.fromkeys(without_effect(settings)))
        known: list[Preemption] = []
        partitions: dict[str, Partition] = {}
        for _, launcher in settings.shares:
            assert isinstance(launcher, SlurmSettings)
            known.append(query(launcher.partition, launcher.qos))
            partitions |= {partition.name: partition for partition in known[-1].partitions}
            late = _time_note(launcher, known[-1].partitions)
            without_gpus = _gpu_note(launcher, settings.nproc_per_node, has_gpus)
            notes.update(dict.fromkeys(filter(None, (late, without_gpus))))
        _require_nodes(settings, list(partitions.values()))
        return known

    found = by_settings(runs, preemptions)
    for note in notes:
        print(note, file=sys.stderr)
    return found


def choose_harvest(
    requests: Sequence[RunRequest], client: SlurmClient | None = None
) -> list[RunRequest]:
    """Choose what ``launcher.harvest=auto`` is here, and print it; a resumed run keeps its own."""
    distinct = {id(request.settings): request.settings for request in requests}
    settings, notes = choose_terms(list(distinct.values()), client)
    for note in notes:
        print(note, file=sys.stderr)
    chosen = dict(zip(distinct, settings, strict=True))
    return [replace(request, settings=chosen[id(request.settings)]) for request in requests]


def without_effect(settings: RunSettings) -> list[str]:
    """Return a note if settings concern the nodes of one job, and each node is one (pure)."""
    found: list[str] = []
    for _, launcher in settings.shares:
        assert isinstance(launcher, SlurmSettings)
        flags = {f"launcher.sbatch.{name}": value for name, value in launcher.sbatch.items()}
        for key, value in {"launcher.constraint": launcher.constraint, **flags}.items():
            is_one_of = key.endswith(".constraint") and "[" in str(value)
            is_near = key.endswith((".contiguous", ".switches")) and value not in (None, False)
            found += [f"{key}={value}"] if is_one_of or is_near else []
    if not found or settings.nodes.max == 1 or settings.num_coallocated:
        return []
    what = "has no effect between nodes, each is a job of its own"
    return [f"{', '.join(dict.fromkeys(found))} {what}: launcher.coallocate_min=true makes one job"]


# ---- checks


def _require_nodes(settings: RunSettings, partitions: Sequence[Partition]) -> None:
    """Refuse a minimum that sbatch accepts but no partition has: the run would never train."""
    least, total = settings.nodes.min, sum(partition.num_nodes for partition in partitions)
    if not total or least <= total or not has_whole_nodes(settings.launcher):
        return
    names = ", ".join(partition.name for partition in partitions)
    what = f"the minimum is {least}, and partition {names} has {counted(total, 'node')} in all"
    remedy = f"give a minimum of {total} or less, or name another one (launcher.partition)"
    raise ConfigError("nodes", least, f"{what}: {remedy}")


def _gpu_note(
    settings: SlurmSettings, nproc: Nproc, has_gpus: Callable[[str | None], bool]
) -> str | None:
    """Return a note if it is unknown whether workers get the GPUs that they may need; else None.

    Raises ConfigError if each worker needs a GPU, no node of the partition has one, and others
    have: each of its nodes would be tried.
    """
    without = not has_whole_nodes(settings) and gpus_asked(settings) is None
    try:
        if nproc == "auto" and without and has_gpus(settings.partition):
            remedy = "set launcher.gpus_per_node, or nproc_per_node=1 to train on CPUs"
            return f"nodes of the partition have GPUs, and the run requests none: {remedy}"
        if nproc != "gpu" or has_gpus(settings.partition):
            return None
        if not has_gpus(None):
            return "nproc_per_node=gpu: Slurm lists no GPU on any node; one without a GPU is left"
    except SlurmCommandError:  # as for other queries: Slurm's defaults are assumed
        return None
    where = f"partition {settings.partition}" if settings.partition else "the default partition"
    remedy = "name another one (launcher.partition), or give a number or cpu"
    raise ConfigError("nproc_per_node", "gpu", f"the nodes of {where} have no GPU: {remedy}")


def _time_note(settings: SlurmSettings, partitions: Sequence[Partition]) -> str | None:
    """Return a note on a limit that Slurm accepts but never starts without a QOS; else None."""
    limits = [partition.max_time_s for partition in partitions]
    if settings.time is None or not limits or None in limits:
        return None
    longest = max(limit for limit in limits if limit is not None)
    wanted_s = time_limit_s(settings.time)
    if wanted_s is not None and wanted_s <= longest:
        return None
    names = ", ".join(partition.name for partition in partitions)
    what = f"partition {names} allows {duration(longest)} at most"
    then = "unless a QOS permits more, no task will start (PartitionTimeLimit)"
    remedy = f"give launcher.time={longest // 60:.0f} or less, in minutes"
    return f"launcher.time={settings.time}: {what}; {then}: {remedy}"
