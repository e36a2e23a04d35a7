"""Client of Slurm: the only caller of its commands.

No accounting is needed: squeue and scontrol list a job until MinJobAge (300 s by default) after its
end. A job that Slurm has purged is no error here; it is missing from the answers.

Slurm sends its signals to every process of a step, hence also to a squeue by which an agent queries
the meaning of that signal. So all commands ignore them.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpc_elastic import _util
from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run import index_of, job_of, queue_name
from hpc_elastic.slurm import environment, parsing
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.nodelist import compress, compress_indices

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

RELEASE_DELAY_S = 2
_IDS_A_CALL = 100
_SLOW_S = 10.0
"""After this time a command counts as slow; it is the default of Slurm's MessageTimeout."""
_HISTORY_S = 5.0
"""For sacct: a forecast does without."""
_REPLY_S = 5.0
"""A command that gives up after MessageTimeout prints that itself."""


class SlurmClient:
    """Runs Slurm's commands as the present user (login node and agents).

    Every method raises `SlurmCommandError` if the command is not installed, fails or does not
    answer in time; it holds the command line and Slurm's message. The default of ``timeout_s`` is
    10 s, or more than the site's MessageTimeout if that is longer.
    """

    def __init__(
        self, timeout_s: float | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        given = os.environ if env is None else env
        message_s = environment.message_timeout_s(given) or 0.0
        usual_s = _SLOW_S if message_s <= _SLOW_S else message_s + _REPLY_S
        self.timeout_s = usual_s if timeout_s is None else timeout_s
        self._env = environment.for_commands(given)
        self._given = env
        self._purged: set[str] = set()

    def tasks(self, job_ids: Iterable[str], *, once: bool = False) -> dict[str, TaskState]:
        """Return all tasks of these jobs by name, in one call of squeue.

        A site's squeue may be a cache that is older than a job, so the controller is queried for
        what it does not list, once for each job that Slurm has purged; with ``once``, for none of
        several jobs alone. Array elements, also pending ones, are named as ``40_3``. A task that
        has ended is listed until Slurm purges it.
        """
        ids = [job for job in dict.fromkeys(job_ids) if job not in self._purged]
        if not ids:
            return {}
        has_others = len(ids) > 1
        found: dict[str, TaskState] = {}
        try:
            found = self._squeue(ids)
        except SlurmCommandError as e:
            has_no_row = e.exit_code == 0 and has_others and not once
            if not has_no_row and not parsing.is_forgotten(e):
                raise
            for job in ids if has_others and not once else ():
                found |= self.tasks([job])
        unlisted = sorted(set(ids).difference(map(job_of, found), self._purged))
        for job in () if has_others and once else unlisted:
            records = self._records(job)
            if not records:
                self._purged.add(job)
            found |= {state.task: state for record in records for state in record.states}
        return found

    def _squeue(self, ids: Sequence[str]) -> dict[str, TaskState]:
        """List each element by itself; without -r too, if squeue may have lost one by it."""
        found: dict[str, TaskState] = {}
        mine = ["--me"] if len(ids) > 1 else []  # else the controller sends all users' jobs
        for options in ["-r"], []:
            named = [*mine, "-O", parsing.SQUEUE_FORMAT, "-j", ",".join(ids)]
            argv = ["squeue", "-h", *options, "-t", "all", *named]
            output = self._run(argv)
            listed = partial(parsing.parse_squeue, now=time.time())
            found = {**_parsed(argv, output, listed), **found}
            if parsing.lists_all(output):
                break
        return found

    def batch_scripts(self) -> list[Path]:
        """Return the batch scripts of the user's jobs that wait or run, each of them once."""
        output = self._run(["squeue", "-h", "--me", "-o", parsing.SCRIPTS_FORMAT])
        return list(dict.fromkeys(Path(script) for _, _, script in parsing.parse_scripts(output)))

    def identities(self, job_ids: Iterable[str]) -> dict[str, parsing.JobIdentity]:
        """Return what identifies jobs that wait or run, of any user, by one call of squeue."""
        ids = ",".join(dict.fromkeys(job_ids))
        argv = ["squeue", "-h", "-O", parsing.JOBS_FORMAT, "-j", ids]
        return parsing.parse_jobs(self._run_for_known(argv) if ids else "")

    def find_job(
        self, script: Path, index: int | None = None, *, besides: Collection[str] = ()
    ) -> str | None:
        """Return the newest job of the user with a script that has not ended; None if none."""
        states = ["-t", "PENDING,RUNNING,SUSPENDED"]
        output = self._run(["squeue", "-h", "--me", *states, "-o", parsing.SCRIPTS_FORMAT])
        found = {
            job
            for job, element, path in parsing.parse_scripts(output)
            if path == str(script) and (index is None or element == str(index))
        }
        newest_first = sorted(found.difference(besides), key=int, reverse=True)
        return next((job for job in newest_first if self._is_alive(job, index)), None)

    def _is_alive(self, job: str, index: int | None) -> bool:
        """Query the controller: a site's squeue may be a cache that lists ended jobs."""
        return any(
            TaskState(job, record.state).phase in (Phase.PENDING, Phase.RUNNING)
            for record in self._records(job)
            if index is None or f"{job}_{index}" in record.tasks
        )

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Cancel tasks; those that have ended are no error.

        ``pending_only`` leaves alone tasks that have a node. squeue is called first: with
        ``--state``, scancel cancels *every* pending element of an array if one is named (Slurm
        22.05). A task that Slurm starts in between is cancelled nevertheless.
        """
        if pending_only:
            named = set(map(queue_name, tasks))
            tasks = [
                name
                for name, state in self.tasks(map(job_of, tasks)).items()
                if state.phase is Phase.PENDING and (name in named or job_of(name) in named)
            ]
        ids = list(_compact(tasks))
        for at in range(0, len(ids), _IDS_A_CALL):
            self._run_unless(parsing.ENDED, "scancel", *ids[at : at + _IDS_A_CALL])

    def kill_steps(self, task: str) -> None:
        """Send SIGKILL to the steps of a task; its batch script ends with the exit code of srun.

        The task is FAILED then. A signal to the whole task would cancel it (22.05).
        """
        listed = self._run(["squeue", "-h", "-s", "-j", task, "-o", "%i"])
        if steps := re.findall(r"^\s*(\d[\d_+]*\.\d+)\s*$", listed, re.MULTILINE):
            self._run(["scancel", "--signal=KILL", *steps])

    def max_array_size(self) -> int:
        """Return the cluster's MaxArraySize: the highest index of an array is one less."""
        size = self.config().get("MaxArraySize", "")
        if not size.isdecimal():
            argv = ["scontrol", "show", "config"]
            raise SlurmCommandError(argv, 0, "no MaxArraySize in its output")
        return int(size)

    def config(self) -> dict[str, str]:
        """Return the cluster's settings by name, as in slurm.conf."""
        return parsing.parse_config(self._run(["scontrol", "show", "config"]))

    def partitions(self) -> list[str]:
        """Return the names of the cluster's partitions, those hidden from the user included."""
        output = self._run(["sinfo", "-h", "-a", "-o", "%R"])
        return list(dict.fromkeys(re.findall(r"^\s*(\w\S*)\s*$", output, re.MULTILINE)))

    def pending_partitions(self, job_ids: Iterable[str]) -> str | None:
        """Return where jobs wait now, since a site may move them; None if none waits."""
        jobs = ",".join(dict.fromkeys(job_ids))
        argv = ["squeue", "-h", "-t", "PENDING", "-o", "%F|%P", "-j", jobs]
        output = self._run_for_known(argv) if jobs else ""
        rows = re.findall(r"^\s*\d+\|(\S+)", output, re.MULTILINE)
        return ",".join(sorted({name for row in rows for name in row.split(",")})) or None

    def each_node(
        self, partition: str | None, hosts: Iterable[str] | None = None
    ) -> dict[str, str]:
        """Return each node's state in sinfo's words; ``hosts`` may be in hidden partitions."""
        where = [] if partition is None else ["-p", partition]
        where += [] if hosts is None else ["-a", "-n", ",".join(hosts)]
        argv = ["sinfo", "-h", "-N", *where, "-o", parsing.EACH_NODE_FORMAT]
        return parsing.parse_each_node(self._run(argv))

    def queue(self, *, only_waiting: bool = False) -> list[parsing.QueuedJob]:
        """Return the jobs that the user may see, of all partitions, and the reservations."""
        states = ["-t", "PENDING"] if only_waiting else []
        argv = ["squeue", "-h", "-a", *states, "-O", parsing.QUEUE_FORMAT]
        return _parsed(argv, self._run(argv), parsing.parse_queue) + self.reservations()

    def reservations(self) -> list[parsing.QueuedJob]:
        """Return the reservations that the user may see."""
        argv = ["scontrol", "-a", "-o", "show", "reservation"]
        return _parsed(argv, self._run(argv), parsing.parse_reservations)

    def jobs_with_needs(self) -> list[parsing.QueuedJob]:
        """Return the jobs that the user may see, of all partitions, and what they need."""
        argv = ["scontrol", "-a", "-o", "show", "job"]
        return _parsed(argv, self._run(argv), parsing.parse_needs)

    def nodes(self) -> dict[str, parsing.NodeKind]:
        """Return what each node of the cluster has."""
        argv = ["sinfo", "-h", "-a", "-N", "-o", parsing.NODES_FORMAT]
        return parsing.parse_nodes(self._run(argv))

    def node_kinds(self, partition: str | None) -> list[parsing.NodeKind]:
        """Return the kinds of nodes of partitions (several with commas; None: all visible ones)."""
        where = [] if partition is None else ["-p", partition]
        argv = ["sinfo", "-h", "-e", *where, "-o", parsing.NODE_KINDS_FORMAT]
        return parsing.parse_node_kinds(self._run(argv))

    def node(self, node: str) -> parsing.NodeRecord:
        """Return the address and the state of a node."""
        argv = ["scontrol", "show", "node", node]
        return parsing.parse_node(self._run_for_known(argv, parsing.is_unknown_node))

    def requeue(self, task: str) -> None:
        """Send a task back to the queue: Slurm kills it, and starts it again when it can.

        A task that is being requeued already is no error: the agents of a job of several nodes
        requeue it at the same time. A cancelled task comes back, so check first
        (`exit_action.decide`). A task that was submitted with ``--no-requeue`` is made requeueable
        first, which its owner may do while it runs; `parsing.is_refused` detects the error where
        that does not help.
        """
        name = queue_name(task)
        try:
            self._run_unless(parsing.REQUEUED, "scontrol", "requeue", name)
        except SlurmCommandError as e:
            if not parsing.is_refused(e):
                raise
            try:
                self._run(["scontrol", "update", f"jobid={name}", "requeue=1"])
            except SlurmCommandError as denied:
                if not parsing.is_denied(denied):
                    raise
                raise e from denied  # a refused requeue: another task can take its place
            self._run_unless(parsing.REQUEUED, "scontrol", "requeue", name)

    def requeue_all(self, tasks: Sequence[str]) -> None:
        """Requeue by one command; after an error some may be requeued: `requeue` each then."""
        self._run_unless(parsing.REQUEUED, "scontrol", "requeue", ",".join(_compact(tasks)))

    def release(self, task: str) -> None:
        """Let a requeued task start soon, without Slurm's delay of two minutes.

        Only for a task whose last process has ended; else `postpone`. Not at once: a node refuses a
        credential of the second in which the task's earlier attempt was ended ("Job credential
        revoked"), and Slurm then ends the task as FAILED, although it is to be requeued (22.05).
        """
        begin = f"starttime=now+{RELEASE_DELAY_S}"
        self._run(["scontrol", "update", f"jobid={queue_name(task)}", begin])

    def end_hold(self, task: str) -> None:
        """Let a task start again that a node could not start; its owner may do that (22.05)."""
        self._run(["scontrol", "release", queue_name(task)])

    def refused_by(self, task: str) -> str | None:
        """Return the node that could not start a task which Slurm has requeued and holds for that.

        Slurm reports it nowhere. It is the node that was busy last in the second of the requeue;
        None if unknown, since there is no such node, or several.
        """
        name = queue_name(task)
        for record in self._records(name):
            if name in record.tasks and record.submitted:
                nodes = self._run(["scontrol", "-o", "show", "node"])
                return parsing.parse_last_busy(nodes, record)
        return None

    def set_time_limit(self, tasks: Sequence[str], limit_s: float) -> None:
        """Set the time limit of pending tasks of one node; others are left alone.

        ``limit_s`` is at most the partition's limit; it is rounded up to whole minutes.
        """
        # NumTasks is refused for a task that has started meanwhile, whose limit would be lowered
        self._update_waiting(tasks, "NumTasks=1", f"TimeLimit={math.ceil(limit_s / 60)}")

    def postpone(
        self, tasks: Sequence[str], delay_s: float, *, time_limit_s: float | None = None
    ) -> None:
        """Delay the start of pending tasks, by whole seconds; others are left alone.

        It replaces an earlier delay. A task counts as pending from its `requeue` on. Slurm keeps a
        record for each array element that was updated, so do not update ten thousand of them at a
        time. ``tasks`` may be whole arrays. ``time_limit_s`` is that of the next attempt; None
        leaves it as it is.
        """
        start = f"starttime=now+{math.ceil(delay_s)}"
        limit = [] if time_limit_s is None else [f"TimeLimit={math.ceil(time_limit_s / 60)}"]
        self._update_waiting(tasks, start, *limit)

    def set_nice(self, tasks: Sequence[str], nice: int) -> None:
        """Let the scheduler try tasks after other jobs, those that run once they are requeued."""
        self._update_waiting(tasks, f"nice={nice}")

    def exclude(
        self, tasks: Sequence[str], hosts: Iterable[str], *, but: Iterable[str] = ()
    ) -> None:
        """Let pending tasks avoid nodes, beside those that they avoid already.

        Tasks that do not wait are left alone; one that is being requeued counts as waiting. They
        may start again on the nodes ``but``; see `readmit`.
        """
        added, ended = set(hosts), set(but)
        if not added | ended:
            return
        named = set(map(queue_name, tasks))
        waiting: dict[tuple[str, ...], list[str]] = {}
        for job in dict.fromkeys(map(job_of, tasks)):
            for record in self._records(job):
                names = [name for name in record.tasks if name in named and record.may_wait]
                waiting.setdefault(record.excluded, []).extend(names)
        for avoided, names in waiting.items():
            nodes = set(avoided) - ended | added
            if nodes != set(avoided):
                self._update_waiting(names, f"ExcNodeList={compress(sorted(nodes))}")

    def excluded(self, task: str) -> tuple[str, ...] | None:
        """Return the nodes that a pending task avoids; None if it does not wait."""
        name = queue_name(task)
        records = (r for r in self._records(name) if name in r.tasks and r.may_wait)
        return next((record.excluded for record in records), None)

    def readmit(self, task: str, host: str) -> bool:
        """Let a pending task start on a node that it avoids; return False if it does not wait.

        This also ends the hold of a task that had no other node (``BadConstraints``).
        """
        avoided = self.excluded(task)
        if avoided is None:
            return False
        if host in avoided:
            rest = f"ExcNodeList={compress(sorted(set(avoided) - {host}))}"
            update = "scontrol", "update", f"jobid={queue_name(task)}", rest
            self._run_unless(parsing.NOT_WAITING, *update)
        return True

    def _records(self, job: str) -> list[parsing.JobRecord]:
        argv = ["scontrol", "-o", "show", "job", job]
        return _parsed(argv, self._run_for_known(argv), parsing.parse_records)

    def sbatch(
        self,
        script: Path,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Submit a batch script, and return the job id.

        ``flags`` go beside those in the script. The job inherits ``env``; None: this process's,
        without the variables of a job around it and without options (`environment.for_sbatch`).
        After ``timeout_s`` sbatch is killed; it may have submitted its job. Raises
        SlurmCommandError also if it printed no job id; the job may be in the queue.
        """
        if env is None:
            env = environment.for_sbatch(os.environ if self._given is None else self._given)
        argv = ["sbatch", "--parsable", *flags, str(script)]
        done = _call(argv, env, timeout_s)
        if words := done.stderr.strip():
            print(words, file=sys.stderr)  # of the site's job_submit plugin
        if (job_id := parsing.parse_job_id(done.stdout)) is None:
            what = "not one job id is in what sbatch printed; is its job in the queue?"
            raise SlurmCommandError(argv, None, f"{what} {done.stdout!r}")
        return job_id

    def resubmit(
        self,
        script: Path,
        index: int | None,
        *,
        exclude: Collection[str] = (),
        known: Collection[str] = (),
    ) -> str:
        """Submit a script once more, for one element of its array; return the new job id.

        The job does not start before `release`; without one it starts after ten minutes. An earlier
        submission may have done it whose answer was lost: then its job is returned. ``index`` is
        None for a co-allocated job; ``known`` are the jobs that the element has had. The nodes to
        ``exclude`` replace those that the script names.
        """
        if (lost := self.find_job(script, index, besides=known)) is not None:
            return lost
        flags = ["--begin=now+600", "--mail-type=NONE"]  # the array's mail is once for all tasks
        flags += [] if index is None else [f"--array={index}"]
        flags += [f"--exclude={compress(sorted(exclude))}"] if exclude else []
        env = {**self._outside(), environment.REPLACEMENT: "1"}
        return self.sbatch(script, flags, env=env, timeout_s=self.timeout_s)

    # ---- the cluster as a whole

    def version(self, command: str) -> str:
        """Return the version of one of Slurm's commands, such as ``22.05.8``."""
        output = self._run([command, "--version"])
        found = re.search(r"^slurm\S* (\S+)\s*$", output, re.MULTILINE)
        return found[1] if found else output.strip().rpartition(" ")[2]

    def ping(self) -> str:
        """Return which controllers answer, in the words of scontrol, on one line."""
        return " ".join(self._run(["scontrol", "ping"]).split())

    def all_partitions(self) -> list[parsing.Partition]:
        """Return the partitions, those hidden from the user included."""
        argv = ["scontrol", "-a", "-o", "show", "partition"]
        return parsing.parse_partitions(self._run(argv))

    def accounting_answers(self) -> None:
        """Call sacct for no jobs; it fails where there is no accounting."""
        self._run(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"])

    def job_runs(self) -> tuple[list[parsing.JobRun], str]:
        """Return how long jobs of all users have run, and the command that printed it.

        It is sacct for the last day. Where that fails or takes long, it is squeue, which lists a
        job until MinJobAge after its end. Nothing is returned if both fail.
        """
        sacct = ["sacct", "-a", "-X", "-n", "-P", "-S", "now-1days", "-o", parsing.RUNS_FIELDS]
        squeue = ["squeue", "-h", "-a", "-t", "all", "-o", parsing.RUNS_FORMAT]
        for argv in (sacct, squeue):
            with suppress(SlurmCommandError):
                if found := parsing.parse_runs(self._run(argv, timeout_s=_HISTORY_S)):
                    return found, argv[0]
        return [], squeue[0]

    def preemption(self, partition: str | None, qos: str | None = None) -> parsing.Preemption:
        """Return how a task in these partitions is preempted (login node).

        If Slurm does not answer this is Slurm's default, with a warning in the log. The arguments
        are as given to sbatch. Where QOS preempt each other, the grace of ``qos`` counts, if it is
        known.
        """
        try:
            config = self._run(["scontrol", "show", "config"])
            partitions = self._run(["scontrol", "-a", "-o", "show", "partition"])
        except SlurmCommandError as e:
            what = "how tasks are preempted is unknown (%s): no grace time is assumed"
            _log.warning(what, e)
            return parsing.Preemption()
        found = parsing.parse_preemption(config, partitions, partition)
        if parsing.parse_config(config).get("PreemptType") != "preempt/qos":
            return found
        try:
            listed = [] if qos is None else self.all_qos()
        except SlurmCommandError as e:
            _log.warning("the grace of QOS %s is unknown (%s): none is assumed", qos, e)
            listed = []
        grace_s = next((each.grace_s for each in listed if each.name == qos), 0.0)
        return replace(found, grace_s=int(grace_s))

    def all_qos(self) -> list[parsing.Qos]:
        """Return every QOS of the accounting."""
        argv = ["sacctmgr", "-n", "-P", "show", "qos", f"format={parsing.QOS_FORMAT}"]
        return parsing.parse_qos(self._run(argv))

    def offered_qos(
        self, user: str, cluster: str | None = None, account: str | None = None
    ) -> frozenset[str]:
        """Return the names of the QOS that a user's associations name, on one cluster if given."""
        names = {"user": user, "cluster": cluster, "account": account}
        which = [f"{key}={value}" for key, value in names.items() if value]
        argv = ["sacctmgr", "-n", "-P", "show", "assoc", *which, "format=qos"]
        return parsing.parse_offered_qos(self._run(argv))

    def test_only(self, script: str, flags: Sequence[str] = ()) -> str:
        """Return when and where sbatch would start a script; an error has sbatch's reason."""
        done = _call(["sbatch", "--test-only", *flags, script], self._outside(), self.timeout_s)
        words = done.stderr.strip() or done.stdout
        return re.sub(r"\A(sbatch: )?(Job \d+ )?", "", words.strip())

    def signal(self, task: str, name: str) -> None:
        """Send a signal, such as ``USR2``, to every process of a task's steps."""
        self._run(["scancel", f"--signal={name}", task])

    def kill(self, tasks: Sequence[str]) -> None:
        """Send SIGKILL to all processes of tasks, batch scripts too; ended tasks are no error."""
        self._run_unless(parsing.ENDED, "scancel", "--full", "--signal=KILL", *tasks)

    # ---- calls of commands

    def _update_waiting(self, tasks: Iterable[str], *what: str) -> None:
        """Update waiting tasks; those that no longer wait are no error."""
        for task in _compact(tasks):
            self._run_unless(parsing.NOT_WAITING, "scontrol", "update", f"jobid={task}", *what)

    def _outside(self) -> dict[str, str]:
        """Return the environment for a submission by a task: without that of its own job."""
        given = environment.of_this_process() if self._given is None else self._given
        return environment.for_submission(given)

    def _run(self, argv: Sequence[str], timeout_s: float = math.inf) -> str:
        """Return a command's standard output; squeue and sacct print times in Unix seconds.

        A local time is ambiguous in the hour in which daylight saving ends.
        """
        unix = {"SLURM_TIME_FORMAT": "%s"} if argv[0] in ("squeue", "sacct") else {}
        limit_s = min(timeout_s, self.timeout_s)
        return _call(argv, {**self._env, **unix}, limit_s).stdout

    def _run_for_known(
        self,
        argv: Sequence[str],
        is_unknown: Callable[[SlurmCommandError], bool] = parsing.is_forgotten,
    ) -> str:
        """Return the output of a command; empty if it fails since Slurm knows no such job."""
        try:
            return self._run(argv)
        except SlurmCommandError as e:
            if not is_unknown(e):
                raise
            return ""

    def _run_unless(self, phrases: Sequence[str], *argv: str) -> None:
        """Run a command whose failure is none if it prints only lines with these phrases."""
        try:
            self._run(argv)
        except SlurmCommandError as e:
            if not parsing.has_only_lines_with(phrases, e):
                raise


def _parsed(argv: Sequence[str], output: str, parse: Callable[[str], _T]) -> _T:
    """Return what a command printed, parsed; SlurmCommandError if it is malformed."""
    try:
        return parse(output)
    except ValueError as e:
        raise SlurmCommandError(argv, 0, str(e)) from e


def _compact(tasks: Iterable[str]) -> Iterator[str]:
    """Yield ``123_[1-5,7]`` for the elements of an array, and other names as they are."""
    elements = dict[str, list[int]]()
    for task in dict.fromkeys(map(queue_name, tasks)):
        index = index_of(task)
        if index is None:
            yield task
        else:
            elements.setdefault(job_of(task), []).append(index)
    for job, indices in elements.items():
        yield f"{job}_[{compress_indices(indices)}]"


# ---- one call of a command


_IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_IGNORING = ["/bin/sh", "-c", 'trap "" TERM USR1 USR2; exec "$@"', "sh"]
_TRIES = 3


def _call(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float | None
) -> subprocess.CompletedProcess[str]:
    """Return a command that has succeeded, or raise SlurmCommandError; ``env`` has PATH."""
    try:
        if shutil.which(argv[0], path=env.get("PATH", os.defpath)) is None:
            raise FileNotFoundError(errno.ENOENT, "not found")
        for _ in range(_TRIES):
            with _said_if_slow(argv, timeout_s):
                done = _util.run([*_IGNORING, *argv], env=env, timeout_s=timeout_s)
            if -done.returncode not in _IGNORED:
                break  # else the shell got the signal before its trap: the command did not start
    except subprocess.TimeoutExpired as e:
        raise SlurmCommandError(argv, None, f"no answer within {e.timeout:g} s") from e
    except OSError as e:
        why = f"{e.strerror or e}; is Slurm installed here, and on PATH?"
        raise SlurmCommandError(argv, None, why) from e
    if done.returncode != 0:
        raise SlurmCommandError(argv, done.returncode, done.stderr.strip() or done.stdout)
    return done


@contextmanager
def _said_if_slow(argv: Sequence[str], timeout_s: float | None) -> Iterator[None]:
    """Log it once if a command takes long, and is waited for longer."""
    rest = "" if timeout_s is None else f", and is waited for up to {timeout_s:g} s"
    what = f"`{argv[0]}` has not answered for {_SLOW_S:g} s{rest}: the controller is slow"
    timer = threading.Timer(_SLOW_S, _log.warning, [what])
    timer.daemon = True
    if timeout_s is None or timeout_s > _SLOW_S:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
