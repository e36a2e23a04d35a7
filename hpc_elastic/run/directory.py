"""The run directory: every path in it, and the frozen description of the run.

Written by the submission (login node), read by every agent, worker and command. It lies on the
shared file system; nothing in it is pickled. A sweep directory holds the run directories and one
folder for the submission itself, ``.hpc_elastic``. What is handed to Slurm in one piece is an
*array* there, number k of the sweep: a job array, one task a node; or one *co-allocated job* of
several nodes. docs/reference/files.md describes each file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hpc_elastic import shared_files
from hpc_elastic.config.parse import restored, restored_settings, time_limit_s
from hpc_elastic.config.schema import Backend, PoolSettings, RunSettings
from hpc_elastic.errors import DamagedFileError, RunDirectoryError
from hpc_elastic.run import task_name

SUBMISSION = ".hpc_elastic"
AGENT_LOG = "agent.log"
STATUS_SELDOM_S = 8.0  # between statuses that differ in numbers only, on a file server
COMMAND_MODULE = "hpc_elastic.agent.command"  # of the function that ``hpc-elastic run`` calls


@dataclass(frozen=True)
class Entry:
    """The user's function, as a new process imports it.

    ``script`` (a file), ``module`` (a dotted name, for ``python -m``) or both are loaded, then
    ``qualname`` is looked up in what was loaded last. A ``hydra`` entry is called with the frozen
    config, and ``args`` are those of the command line; a ``function`` entry is called with
    ``args``. With ``attributes``, the name is that of a class, and an object of it with these is
    called.
    """

    kind: Literal["hydra", "function"]
    qualname: str
    script: str | None = None
    module: str | None = None
    args: list[Any] = field(default_factory=list)  # as of `run.arguments`; so ``attributes``
    attributes: dict[str, Any] | None = None
    cwd: str = "."
    sys_path: list[str] = field(default_factory=list)  # see `launcher.user_code.search_path`
    main_block: bool = False
    """Whether the script, or the module if there is none, was run and not imported: then what
    stands under ``if __name__ == "__main__":`` before the call runs in workers, too."""

    @property
    def is_command(self) -> bool:
        """Whether it runs a command: then an exit code of 0 is its success, as for torchrun."""
        return self.module == COMMAND_MODULE


@dataclass(frozen=True)
class PoolTerms:
    """What the site gives the tasks of a pool, as it was found at the submission."""

    preempt_grace_s: float  # seconds between SIGTERM and SIGKILL when a task is preempted
    kill_wait_s: float  # the same when it is cancelled, or its time limit ends
    whole_nodes: bool  # whether each task requests whole nodes, shared with no other job


@dataclass(frozen=True)
class Pool:
    """Slots of a run whose tasks are requested alike: of one of ``launcher.pools``, or all."""

    slots: range
    launcher: Backend  # the settings of these tasks
    terms: PoolTerms
    throughput: float  # how fast its workers are in relation to those of other pools

    @property
    def time_s(self) -> float | None:
        """Time limit that each task was submitted with; None: none, or not known exactly."""
        return self._limit_s("time")

    @property
    def time_min_s(self) -> float | None:
        """The least time limit of a waiting task (`site.limits`); None: its limit is fixed."""
        return self._limit_s("time_min")

    def _limit_s(self, key: Literal["time", "time_min"]) -> float | None:
        limit = getattr(self.launcher, key, None)  # None with launcher=local
        # a dry run is submitted by hand, perhaps with another time
        return None if limit is None or self.launcher.dry_run else time_limit_s(limit)

    @property
    def restored_limit_s(self) -> float | None:
        """The time limit of a task that returns to the queue; None if its limit is fixed."""
        return None if self.time_min_s is None else self.time_s


VERSION = 3  # version of run.json; that of hpc_elastic 0.2.0 has none


@dataclass(frozen=True)
class RunSpec:
    """A run as it was submitted. A requeued task runs exactly this."""

    run_id: str
    submission: str  # absolute path of the sweep's ``.hpc_elastic``
    tasks: list[tuple[int, int]]  # (array number k, index in it) of each slot of the run
    entry: Entry
    settings: RunSettings
    terms: list[PoolTerms]  # of each of `pools`
    file_env: dict[str, str] = field(default_factory=dict)
    """The variables in ``launcher.env_file``; those in ``launcher.env`` are set after them."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Python, command line, git commit, dirty or not, host, user, time."""
    generation: int = 0  # number of resumptions; tasks of an earlier one do not belong to the run
    hydra: dict[str, list[Any]] = field(default_factory=dict)
    """The files of ``.hydra`` as pieces of text, from which `RunDir.complete` makes them; a number
    is a piece that runs share (`ArrayFiles.texts`). A run that was resumed has none."""

    def task_names(self, job_ids: Mapping[int, str]) -> list[str]:
        """Return the names of the run's tasks by slot, as far as their arrays were submitted."""
        places, together = enumerate(self.tasks), self.settings.num_coallocated
        named = ((slot, job_ids[k], index) for slot, (k, index) in places if k in job_ids)
        return [task_name(job, index, coallocated=slot < together) for slot, job, index in named]

    @property
    def texts(self) -> Path:
        """The file of the pieces of text that its runs share."""
        return Submission(Path(self.submission)).array(self.tasks[0][0] if self.tasks else 0).texts

    @property
    def pools(self) -> list[Pool]:
        """The pools of the run's slots, in their order; one without ``launcher.pools``."""
        given: list[PoolSettings] = getattr(self.settings.launcher, "pools", [])
        throughputs = [pool.throughput for pool in given] or [1.0]
        rows = zip(self.settings.shares, self.terms, throughputs, strict=True)
        return [Pool(slots, own, terms, speed) for (slots, own), terms, speed in rows]

    def pool_of(self, slot: int) -> Pool:
        """Return the pool of a slot."""
        return next(pool for pool in self.pools if slot in pool.slots)

    @property
    def has_whole_nodes(self) -> bool:
        """Whether no task shares its node with other jobs."""
        return all(terms.whole_nodes for terms in self.terms)

    @property
    def all_partitions(self) -> str | None:
        """The partitions of all pools, with commas; None: the default one is among them."""
        names = [getattr(own, "partition", None) for _, own in self.settings.shares]
        return None if None in names else ",".join(dict.fromkeys(filter(None, names)))

    def requeues_left(self, attempt: int | None) -> int | None:
        """Return how often a task may still be requeued; None if without limit."""
        most = self.settings.launcher.max_requeues
        return None if most is None else most - (attempt or 0)

    def to_json(self) -> str:
        """Return the text of run.json, a line for each value."""
        values = {"version": VERSION, **vars(self)}
        texts = {k: json.dumps(v, default=vars) for k, v in values.items() if k != "settings"}
        texts["settings"] = self.settings.as_text
        lines = ",\n".join(f'"{name}": {text}' for name, text in texts.items())
        return f"{{\n{lines}\n}}\n"

    @classmethod
    def from_json(cls, raw: Any, settings: Any = None) -> RunSpec:
        """Return the description of a run from the values of run.json.

        ``settings`` are those of settings.json, for a run of hpc_elastic 0.2.0. Raises ValueError
        if they are no run description, and RunDirectoryError if a newer version has written it.
        """
        try:
            values = dict(raw if "version" in raw else _of_0_2(raw, settings))
            if (version := values.pop("version")) > VERSION:
                remedy = "use the one that submitted the run, or a newer one"
                why = f"a newer hpc_elastic has written its run.json (version {version})"
                raise RunDirectoryError(f"cannot be read: {why}: {remedy}")
            values["settings"] = restored_settings(values["settings"])
            spec: RunSpec = restored(cls, values)
            if len(spec.terms) != len(spec.settings.shares):
                raise ValueError("it has terms of other pools")
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"not a run description: {e}") from e
        return spec


def _of_0_2(raw: Any, settings: Any) -> dict[str, Any]:
    """Return run.json and settings.json of hpc_elastic 0.2.0 as run.json of this version.

    Tasks of a run that was submitted with it read them when they are requeued.
    """
    if settings is None:
        raise ValueError("the directory has no settings.json")
    kept = ("run_id", "submission", "tasks", "entry", "provenance", "generation")
    of_pool = [field.name for field in fields(PoolTerms)]
    return {
        "version": VERSION,
        **{name: raw[name] for name in kept},
        "settings": settings | {"launcher": {"adapt": "off"} | settings["launcher"]},
        "terms": [{name: pool[name] for name in of_pool} for pool in raw["pools"] or [raw]],
        "file_env": raw["env"],
    }


@dataclass(frozen=True)
class Cancellation:
    """The content of ``<run>/cancelled.json``; ``time`` is in Unix seconds, 0 if unknown."""

    user: str = ""
    host: str = ""
    time: float = 0.0

    @property
    def by_whom(self) -> str:
        """Return `` by USER on HOST at TIME``, as far as it is known."""
        parts = [("by", self.user), ("on", self.host)]
        at = time.strftime("%F %T", time.localtime(self.time)) if self.time else ""
        return "".join(f" {word} {value}" for word, value in [*parts, ("at", at)] if value)


class _Below:
    """A path below the folder of its owner: ``spec = _Below("run.json")``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: RunDir | Submission, cls: type[object] | None = None) -> Path:
        return owner.path / self._name


class _Suffixed:
    """One of the files of an array: ``script = _Suffixed(".sbatch")``."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    def __get__(self, owner: ArrayFiles, cls: type[object] | None = None) -> Path:
        return owner.stem.with_suffix(self._suffix)


RUN_DIR_VARIABLE = "HPC_ELASTIC_RUN_DIR"  # of workers: the path of their run's directory


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory, and atomic reads and writes of its files."""

    path: Path

    spec = _Below("run.json")
    hydra = _Below(".hydra")
    settings = _Below("settings.json")
    secret = _Below("secret")
    rdzv = _Below("rdzv")  # the log of decisions, and the leases (`rendezvous.decision_log`)
    first_term = _Below("rdzv/term.0")  # the term folder made with the run (`rendezvous.term`)
    notices = _Below("preempt")  # files named like a task, a host, or ``all``: nodes to be left
    excluded = _Below("excluded_nodes.json")
    given_back = _Below("given_back.json")  # jobs that nodes went back for (`site.neighbours`)
    avoided = _Below("avoided")  # nodes on which lost tasks may still run (`slurm.quarantine`)
    checkpoints = _Below("checkpoints")  # by default; the script may choose another folder
    compiled = _Below("compile")
    own_checkpoints = _Below("own_checkpoints")  # of the script (`worker.own_checkpoints`)
    departing = _Below("departing")  # tasks that leave together (`slurm.combined_requests`)
    saves_to = _Below("saves_to")  # other directories of checkpoints (`checkpoint.store`)
    notified = _Below("notified")  # the messages that were sent, a file each (`run.notify`)
    tasks = _Below("tasks")
    event_logs = _Below("events")
    results = _Below("results")
    status = _Below("status.json")
    progress = _Below("progress.jsonl")
    cancelled = _Below("cancelled.json")  # written before the first task is cancelled
    result = _Below("result.json")  # it exists when the run has ended

    def cancellation(self) -> Cancellation | None:
        """Return who cancelled the run; None if it was not cancelled."""
        try:
            if not shared_files.is_there(self.cancelled):
                return None
            raw = shared_files.read_json(self.cancelled) or {}
            at = float(raw["time"])
            known = at if 0.0 <= at <= shared_files.LATEST_TIME else 0.0
            return Cancellation(str(raw["user"]), str(raw["host"]), known)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return Cancellation()  # cut off by a full disk: the run was cancelled all the same

    @property
    def is_over(self) -> bool:
        """Whether the run has ended or is cancelled: no task of it starts or restarts."""
        ends = (self.result.name, self.cancelled.name)
        return not shared_files.names_in(self.path).isdisjoint(ends)  # opened again, for NFS

    def attempt(self, task: str, attempt: int) -> Path:
        """Return the log folder of one attempt of one task."""
        return self.tasks / task / f"attempt-{attempt}"

    def events(self, task: str) -> Path:
        """Return the event log of one task."""
        return self.event_logs / f"{task}.jsonl"

    def metrics(self, task: str) -> Path:
        """Return the metrics of one task."""
        return self.path / "metrics" / f"{task}.prom"

    def load(self) -> RunSpec:
        """Return the frozen description; RunDirectoryError if missing, or of a newer version."""
        try:
            raw = shared_files.parse_json(shared_files.read_text(self.spec), "the run description")
            is_of_0_2 = isinstance(raw, dict) and "version" not in raw
            settings = shared_files.read_json(self.settings) if is_of_0_2 else None
            return RunSpec.from_json(raw, settings)
        except (FileNotFoundError, NotADirectoryError) as e:
            remedy = "give one that has a run.json, or an id of `hpc-elastic list`"
            what = f"{self.path} is not a run directory: {remedy}"
            raise RunDirectoryError(what, remedy=remedy) from e
        except PermissionError as e:
            why = f"{self.spec}: {e.strerror}: only its owner, and root, may read the run"
            raise RunDirectoryError(why) from e
        except (OSError, ValueError, RecursionError) as e:
            what = "" if type(e) is RunDirectoryError else "is not a run directory: "
            raise RunDirectoryError(f"{self.path} {what}{e}") from e

    def create(self, spec: RunSpec) -> None:
        """Make the directory, its description and a secret; RunDirectoryError if it holds a run."""
        shared_files.make_folder(self.path, parents=True)
        if not shared_files.create_atomic(self.spec, spec.to_json(), mode=0o600):
            raise self.taken_error()
        shared_files.write_atomic(self.secret, os.urandom(32).hex(), mode=0o600)

    def complete(self, spec: RunSpec, *, anew: bool = False) -> None:
        """Make what else a run needs that starts; a run that waits is a folder and two files.

        All tasks of the run may call it at once: they make the same, and ``rdzv`` last. ``anew``
        replaces the files of another run that was there (login node).
        """
        has_log = self.rdzv.name in shared_files.names_in(self.path)
        if has_log and not anew:
            return
        for folder in (self.results, self.notices, self.event_logs):
            shared_files.make_folder(folder)
        put = shared_files.write_atomic if anew else shared_files.create_atomic
        for name in spec.hydra:
            shared_files.make_folder(self.hydra)
            text = self.hydra_text(name, spec)
            put(self.hydra / name, text, mode=0o600)  # launcher.env may hold tokens
        if has_log:
            shared_files.make_folder(self.first_term)
        else:
            self.make_log_folder()

    def make_log_folder(self) -> None:
        """Make ``rdzv`` with its term folder, in one step, unless another process has made it."""
        staged = self.path / f".rdzv.{os.urandom(8).hex()}"
        shared_files.make_folder(staged / self.first_term.name, parents=True)
        try:
            staged.rename(self.rdzv)
        except OSError:
            if self.rdzv.name not in shared_files.names_in(self.path):
                raise
            shutil.rmtree(staged, ignore_errors=True)

    def hydra_text(self, name: str, spec: RunSpec | None) -> str:
        """Return the text of a file of ``.hydra``, which the run has only once it has started."""
        if spec is None or (pieces := spec.hydra.get(name)) is None:
            return shared_files.read_text(self.hydra / name, shared_files.CONFIG_BYTES)
        shared: list[str] = []
        if not all(isinstance(piece, str) for piece in pieces):
            owners = {shared_files.status_of(file).st_uid for file in (spec.texts, self.spec)}
            if len(owners) > 1:
                raise DamagedFileError(f"{self.spec} names a file of another user: {spec.texts}")
            shared = shared_files.parse_json(shared_files.read_text(spec.texts), spec.texts)
        try:
            return "".join(p if isinstance(p, str) else shared[p] for p in pieces)
        except (IndexError, KeyError, TypeError) as e:
            raise DamagedFileError(f"{spec.texts} is damaged: {e}") from e

    def taken_error(self) -> RunDirectoryError:
        """Return the error for a directory that holds a run already."""
        names = "hydra.sweep.dir or hydra.sweep.subdir; run_dir of `launch`"
        remedy = f"choose another one ({names}), or remove it"
        return RunDirectoryError(f"{self.path} holds a run already: {remedy}")


def default_checkpoints() -> Path:
    """Return the folder of a script's checkpoints, unless it names one.

    That of the run; outside of a run, in Hydra's output directory or in the working directory.
    """
    if path := os.environ.get(RUN_DIR_VARIABLE):
        return RunDir(Path(path)).checkpoints
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        return RunDir(Path(hydra.HydraConfig.get().runtime.output_dir)).checkpoints
    return RunDir(Path()).checkpoints


@dataclass(frozen=True)
class ArrayFiles:
    """The files of one array of a submission: ``array-<k>.*``; ``stem`` has no suffix."""

    stem: Path

    tasks = _Suffixed(".json")  # run and slot of each index; the argument of `hpc_elastic.agent`
    script = _Suffixed(".sbatch")
    nodes = _Suffixed(".nodes")
    job_id_file = _Suffixed(".jobid")
    texts = _Suffixed(".texts")  # pieces of ``.hydra`` that its runs share (`RunSpec.hydra`)
    replaced = _Suffixed(".replaced")  # folder of the replacements of its tasks (`slurm.run_tasks`)

    @classmethod
    def of(cls, file: Path) -> ArrayFiles:
        """Return the files of an array by one of them."""
        return cls(file.with_suffix(""))

    @property
    def number(self) -> int:
        """The array's number k in the sweep."""
        return int(self.stem.name.removeprefix("array-"))

    def run_dirs(self) -> list[Path]:
        """Return each task's run directory; RunDirectoryError if the file is missing or damaged."""
        found = shared_files.read_json(self.tasks)
        if found is None:
            raise RunDirectoryError(f"{self.tasks.parent} has no {self.tasks.name}")
        try:
            return [Path(run["dir"]) for run in found["runs"]]
        except (KeyError, TypeError) as e:
            raise RunDirectoryError(f"{self.tasks} is damaged: it names no runs") from e

    @property
    def job_id(self) -> str | None:
        """Return the job id; None before the submission."""
        try:
            return shared_files.read_text(self.job_id_file, errors="replace").strip()
        except FileNotFoundError:
            return None

    def submitted_as(self, job_id: str) -> None:
        """Record the job id of the submission."""
        shared_files.write_atomic(self.job_id_file, job_id + "\n")

    def started_as(self, job_id: str) -> None:
        """Record the job id of a task that starts, unless another is: two were started by hand."""
        shared_files.create_atomic(self.job_id_file, job_id + "\n")

    def withdraw(self) -> None:
        """Remove what was written for an array that is never submitted; its runs are free."""
        runs = [RunDir(path).spec for path in set(self.run_dirs())]
        for file in (*runs, self.script, self.texts):
            file.unlink(missing_ok=True)
        self.tasks.unlink()


@dataclass(frozen=True)
class Submission:
    """Paths below a sweep's ``.hpc_elastic``."""

    path: Path

    logs = _Below("logs")  # folder of the output of tasks that Slurm captures
    local_tasks = _Below("local-tasks.json")  # of a local launcher (`slurm.local_queue`)
    local_requests = _Below("local-requests")  # to a local launcher (`slurm.local_queue`)

    def log(self, task: str) -> Path:
        """Return what Slurm captures of a task; of a co-allocated job, by its id, the script's."""
        return self.logs / f"{task}.log"

    def array(self, number: int) -> ArrayFiles:
        """Return the files of one array."""
        return ArrayFiles(self.path / f"array-{number}")

    def arrays(self) -> list[ArrayFiles]:
        """Return the arrays that were laid out, submitted or not, by number."""
        found = {ArrayFiles.of(file) for file in self.path.glob("array-*.*")}
        numbered = (array for array in found if array.stem.name.removeprefix("array-").isdecimal())
        return sorted(numbered, key=lambda array: array.number)

    def job_ids(self) -> dict[int, str]:
        """Return the job ids of the arrays that were submitted, by number."""
        ids = {array.number: array.job_id for array in self.arrays()}
        return {number: job_id for number, job_id in ids.items() if job_id}
