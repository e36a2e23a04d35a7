"""Submissions to a Slurm whose every answer may be lost, late or an error.

The code under test is real: `launcher.submit` with its files, `launcher.slurm`, `SlurmClient`,
`run_tasks.resubmit`, and what a task looks up first (`agent.task`). Only the commands are
simulated (`_util.run`). At each call the effect is carried out, is not, or comes later; the answer
is true, an error, lost or old; the calling process may die, or get Ctrl-C. The user acts on the
text. After an error that leaves the directory free, the submission is repeated there, else in
another one.

Promises:
    - an array of a submission that was accepted has one job, which its record names;
    - after an error nothing of the submission trains, except jobs that the text names with what to
      do; without "marked as cancelled" in it nothing waits either;
    - what trains after a submitting process has died is named by its record;
    - a task has one replacement at most, and a record names it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hpc_elastic import _util
from hpc_elastic.agent.task import find_task
from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import HpcElasticError, SlurmCommandError
from hpc_elastic.launcher import slurm, submit
from hpc_elastic.launcher.plan import Plan, RunRequest, make_plan
from hpc_elastic.run.directory import ArrayFiles, Entry, RunDir, Submission
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.slurm import client as client_module
from hpc_elastic.slurm import run_tasks
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import REPLACEMENT, SlurmEnvironment, as_array_task
from simulation.campaign import Tally
from simulation.world import World

PENDING, RUNNING, ENDED = "PENDING", "RUNNING", "ENDED"
_WHOLE = -1
"""The element of a job that is no array."""
_LOST = (
    "Socket timed out on send/recv operation",
    "Zero Bytes were transmitted or received",
    "Unable to contact slurm controller (receive failure)",
)
_DOWN = "Unable to contact slurm controller (connect failure)"
_BANNER = "*** Maintenance on 24.12. ***\n"
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_FATES = ("down", "done", "not done", "late", "old", "words", "dies", "died", "^C", "after ^C")
MARKED = "marked as cancelled"


class PromiseError(AssertionError):
    """A promise of this module does not hold."""


class _DeadError(BaseException):
    """Ends the thread of a dead process, once the schedule is over."""


@dataclass
class Job:
    """One job or array."""

    attempt: int
    """Which of the user's submissions it is of."""
    script: Path
    held: bool
    elements: dict[int, str]
    replaces: bool = False


@dataclass
class Outcome(Tally):
    """The counts of one schedule."""

    texts: Counter[str] = field(default_factory=Counter)


class _Process:
    """A process of the user or of an agent: a thread that runs alone, until its end or death."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._settled, self._released = threading.Event(), threading.Event()
        self.died = False
        self.error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except _DeadError:
                pass
            except BaseException as e:
                self.error = e
            self._settled.set()

        self._thread = threading.Thread(target=run, daemon=True)

    def run(self) -> None:
        """Let it run until its end or death."""
        self._thread.start()
        self._settled.wait()

    def die(self) -> None:
        """Do nothing more (called in its thread)."""
        if self.died:
            raise _DeadError
        self.died = True
        self._settled.set()
        self._released.wait()
        raise _DeadError

    def bury(self) -> None:
        """End the thread."""
        self._released.set()
        self._thread.join()


class SubmissionSimulator:
    """One random schedule.

    Args:
        seed: It determines the schedule.
        whole_trace: Keep all of the trace.
    """

    def __init__(self, seed: int, whole_trace: bool = False) -> None:
        self.seed = seed
        self.world = World(seed, whole_trace)
        rng = self.world.rng
        self.kind = rng.choice(["one", "sweep", "two arrays", "coallocated"])
        self.rate = rng.choice([0.05, 0.2, 0.5])
        self.jobs: dict[int, Job] = {}
        self._late: list[Callable[[], object]] = []
        self._shown: list[str] = [""]
        self._processes: list[_Process] = []
        self._running: list[_Process] = []
        self._beside: Callable[[], None] | None = None
        self._is_calm = False
        self._attempt = 0
        self._counts = Outcome(schedules=1)

    @property
    def scenario(self) -> object:
        """The parameters, shown with a failure."""
        return {"kind": self.kind, "rate": self.rate}

    def outcome(self) -> Outcome:
        """Return the counts so far."""
        return self._counts

    def run(self) -> None:
        """Run the schedule.

        Raises:
            PromiseError: A promise does not hold.
        """
        folder = Path(tempfile.mkdtemp(prefix="submissions-", dir=_MEMORY))
        try:
            with _simulated(self):
                self._submit_until_accepted(folder)
        finally:
            for process in self._processes:
                process.bury()
            shutil.rmtree(folder, ignore_errors=True)

    # ---- the user

    def _submit_until_accepted(self, folder: Path) -> None:
        sweep, ends = folder / "0", list[tuple[Plan, str | None]]()
        for number in range(1, 4):
            self._attempt = number
            plan = self._plan(sweep)
            text = self._submit(plan)
            self.world.log_event("user", "reads", text)
            self._counts.texts[_kind_of(text)] += 1
            ends.append((plan, text))
            if text == "":
                self._replace(plan)
                break
            if text is not None and "can be removed" in text:
                shutil.rmtree(sweep)
            elif text is None or MARKED in text or (sweep / "0/run.json").exists():
                sweep = folder / str(number)
        self._settle()
        for self._attempt, (plan, text) in enumerate(ends, 1):
            self._check(plan, text)

    def _plan(self, sweep: Path) -> Plan:
        number = {"one": 1, "sweep": 2, "two arrays": 2, "coallocated": 1}[self.kind]
        runs = []
        for run in range(number):
            partition = str(run) if self.kind == "two arrays" else None
            own = SlurmSettings(
                partition=partition, time="10", coallocate_min=self.kind == "coallocated"
            )
            settings = RunSettings(NodeRange(1, 2), 1, own)
            runs.append(RunRequest(sweep / str(run), settings, Entry("function", "f", "f.py")))
        return make_plan(runs, sweep / ".hpc_elastic", max_array_size=99)

    def _submit(self, plan: Plan) -> str | None:
        """Return the text that the user reads: "" if accepted, None if the process has died."""

        def work() -> None:
            submit.write(plan, "train")
            with submit.withdrawn_if_refused(plan):
                slurm.submit(plan, SlurmClient(10, env={"PATH": "/bin"}))

        process = self._start(work)
        if process.died:
            return None
        match process.error:
            case None:
                return ""
            case KeyboardInterrupt() as e:
                return str(e) or "interrupted: nothing was submitted"
            case HpcElasticError() as e:
                return str(e)
            case e:
                raise e

    # ---- the agents

    def _replace(self, plan: Plan) -> None:
        """Let some tasks of an accepted submission not come back, and peers replace them."""
        rng = self.world.rng
        self._start_jobs(1.0)
        run = RunDir(plan.runs[0].dir)
        spec = run.load()
        for place in rng.sample(run_tasks.places(spec), rng.choice([0, 1, 2])):
            job = run_tasks.all_jobs(spec)[place][-1]
            elements = self.jobs[int(job)].elements
            elements[_WHOLE if place.index is None else place.index] = ENDED
            task = place.queue_name(job)

            def peer(task: str = task) -> None:
                for _ in range(3):
                    with contextlib.suppress(SlurmCommandError):
                        run_tasks.resubmit(run, task, SlurmClient(10, env={"PATH": "/bin"}))
                        return

            for _ in range(rng.choice([1, 1, 2])):
                if rng.random() < 0.3:
                    self._beside = peer if rng.random() < 0.7 else lambda: self._cancel(run)
                self._start(peer)
                self._beside = None
            calm, self._is_calm = self._is_calm, True
            self._start(peer)  # the leader finds the task still gone
            self._is_calm = calm

    def _cancel(self, run: RunDir) -> None:
        """Let the user cancel the run, with a Slurm that answers."""
        mark_cancelled(run, print)
        for jobs in run_tasks.all_jobs(run.load()).values():
            for job in jobs:
                self._cancel_job(job)

    # ---- processes and Slurm

    def _start(self, work: Callable[[], None]) -> _Process:
        process = _Process(work)
        self._processes.append(process)
        self._running.append(process)
        process.run()
        self._running.pop()
        return process

    def call(
        self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        """Do one command of Slurm's, in the place of `_util.run`."""
        argv = argv[argv.index("sh") + 1 :]
        process = self._running[-1]
        rng, world = self.world.rng, self.world
        world.now += 1
        if not self._is_calm:
            self._pass_time()
        if self._beside is not None and rng.random() < 0.3:
            beside, self._beside = self._beside, None
            self._start(beside)
        fate = rng.choice(_FATES) if not self._is_calm and rng.random() < self.rate else "ok"
        world.log_event(" ".join(argv[:1]), fate, " ".join(argv[1:])[-90:])
        self._counts.events += 1
        self._counts.faults[fate] += 1
        return self._answer(argv, env, fate, process)

    def _answer(
        self, argv: Sequence[str], env: Mapping[str, str], fate: str, process: _Process
    ) -> subprocess.CompletedProcess[str]:
        rng = self.world.rng
        if fate == "dies":
            process.die()
        if fate == "^C":
            raise KeyboardInterrupt
        if fate == "down":
            return _failure(argv, _DOWN)
        if fate == "late":
            attempt = self._attempt
            self._late.append(lambda: self._carry_out(argv, env, attempt))
        output = ""
        if fate not in ("not done", "late"):
            output = self._carry_out(argv, env, self._attempt)
        if argv[0] == "squeue":
            self._shown.append(output)
        if fate == "died":
            process.die()
        if fate == "after ^C":
            raise KeyboardInterrupt
        if fate in ("done", "not done", "late"):
            how = rng.choice([*_LOST, "killed", "silent"])
            if how == "silent":
                raise subprocess.TimeoutExpired(list(argv), 10)
            return _failure(argv, how)
        if fate == "old" and argv[0] == "squeue":
            output = rng.choice(self._shown[-3:])
        if fate == "words":
            output = _BANNER if argv[0] == "sbatch" else _BANNER + output
        return subprocess.CompletedProcess(argv, 0, output, "")

    def _carry_out(self, argv: Sequence[str], env: Mapping[str, str], attempt: int) -> str:
        match argv[0]:
            case "sbatch":
                return self._add_job(argv, attempt, REPLACEMENT in env)
            case "squeue":
                return "".join(self._rows())
            case "scancel":
                for name in argv[1:]:
                    self._cancel_job(name)
            case "scontrol" if "show" in argv:
                return "".join(self._records(int(argv[-1])))
            case "scontrol":
                name = next(word for word in argv if word.startswith("jobid="))[6:]
                self.jobs[int(name.partition("_")[0])].held = False
        return ""

    def _add_job(self, argv: Sequence[str], attempt: int, replaces: bool) -> str:
        script = Path(argv[-1])
        flags = dict(flag.partition("=")[::2] for flag in argv[1:-1])
        if "--array" in flags:
            elements = [int(flags["--array"])]
        elif script.read_text() == _ARRAY:
            elements = list(range(len(ArrayFiles.of(script).run_dirs())))
        else:
            elements = [_WHOLE]
        job = 100 + 10 * len(self.jobs)
        is_held = "--begin" in flags
        self.jobs[job] = Job(attempt, script, is_held, dict.fromkeys(elements, PENDING), replaces)
        return f"{job}\n"

    def _rows(self) -> Iterator[str]:
        for number, job in self.jobs.items():
            alive = [element for element, state in job.elements.items() if state != ENDED]
            for element in alive:
                name = "N/A" if element == _WHOLE else element
                yield f"{number}|{name}|{job.script}\n"

    def _records(self, number: int) -> Iterator[str]:
        for element, state in self.jobs[number].elements.items():
            array = f"ArrayJobId={number} ArrayTaskId={element} " if element != _WHOLE else ""
            shown = "CANCELLED" if state == ENDED else state
            yield f"JobId={number} {array}JobState={shown}\n"

    def _cancel_job(self, name: str) -> None:
        number, _, element = name.partition("_")
        elements = self.jobs[int(number)].elements
        for own in [int(element.strip("[]"))] if element else list(elements):
            elements[own] = ENDED

    def _pass_time(self) -> None:
        """Start jobs, and carry out what is late."""
        if self._late and self.world.rng.random() < 0.3:
            self._late.pop(0)()
        self._start_jobs(0.3)

    def _start_jobs(self, share: float, *, held: bool = False) -> None:
        for number, job in list(self.jobs.items()):
            if job.held and not held:
                continue
            for element, state in list(job.elements.items()):
                if state == PENDING and self.world.rng.random() < share:
                    job.elements[element] = self._start_task(number, job, element)
                    self.world.log_event(f"{number}_{element}", job.elements[element])

    def _start_task(self, number: int, job: Job, element: int) -> str:
        """Return the state of a task after its agent has looked up its run."""
        variables = as_array_task(number, max(element, 0), node_name="n", cpus=1)
        if element == _WHOLE:
            variables = {k: v for k, v in variables.items() if "_ARRAY_" not in k}
            variables["SLURM_JOB_ID"] = str(number)
        if job.replaces:
            variables[REPLACEMENT] = "1"
        try:
            task = find_task(ArrayFiles.of(job.script).tasks, SlurmEnvironment.from_env(variables))
        except HpcElasticError:
            return ENDED
        return ENDED if task.superseded or task.run.is_over else RUNNING

    def _settle(self) -> None:
        """Carry out all that is late, and start all that waits, held jobs too."""
        self._is_calm = True
        while self._late:
            self._late.pop(0)()
        self._start_jobs(1.0, held=True)

    # ---- promises

    def _check(self, plan: Plan, text: str | None) -> None:
        self._counts.checks += 1
        own = {n: job for n, job in self.jobs.items() if job.attempt == self._attempt}
        alive = {n: [*job.elements.values()] for n, job in own.items()}
        trained = [n for n, states in alive.items() if RUNNING in states]
        if text:
            return self._check_refused(text, own, alive)
        named = self._named(plan)
        for number in trained:
            _require(str(number) in named, f"job {number} trains, and no record names it")
        places = Counter[tuple[Path, int]](
            (job.script, element)
            for job in own.values()
            for element, state in job.elements.items()
            if state != ENDED
        )
        for (script, element), count in places.items():
            _require(count < 2, f"{count} jobs of element {element} of {script.name}")
        if text == "" and not any(RunDir(run.dir).is_over for run in plan.runs):
            scripts = {own[n].script for n in trained}
            for array in Submission(plan.submission).arrays():
                _require(array.script in scripts, f"{array.script.name} was accepted and is lost")
        return None

    def _check_refused(
        self, text: str, own: Mapping[int, Job], alive: Mapping[int, Sequence[str]]
    ) -> None:
        for number, states in alive.items():
            said = "scancel" in text and (str(number) in text or str(own[number].script) in text)
            is_alive = not all(state == ENDED for state in states)
            _require(not is_alive or said, f"job {number} is alive after {text!r}")

    def _named(self, plan: Plan) -> set[str]:
        """Return the job ids that records of a submission name."""
        submission = Submission(plan.submission)
        later = [run_tasks.replacements(array).values() for array in submission.arrays()]
        return {
            *submission.job_ids().values(),
            *(job for places in later for jobs in places for job in jobs),
        }


_ARRAY, _JOB = "#SBATCH --array", "#SBATCH --nodes"


def _scripts(plan: Plan, name: str) -> dict[int, str]:
    """Return batch scripts that have only what is simulated: to render one takes long."""
    return {array.number: _JOB if array.coallocated else _ARRAY for array in plan.arrays}


def _kind_of(text: str | None) -> str:
    if not text:
        return "accepted" if text == "" else "died"
    return "marked" if MARKED in text else "refused"


def _failure(argv: Sequence[str], how: str) -> subprocess.CompletedProcess[str]:
    if how == "killed":
        return subprocess.CompletedProcess(argv, 137, "", "")
    words = {
        "sbatch": f"sbatch: error: Batch job submission failed: {how}",
        "scancel": f"scancel: error: Kill job error: {how}",
    }
    return subprocess.CompletedProcess(
        argv, 1, "", words.get(argv[0], f"slurm_load_jobs error: {how}")
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PromiseError(what)


@contextlib.contextmanager
def _simulated(simulator: SubmissionSimulator) -> Iterator[None]:
    """Put a simulator in the place of Slurm's commands; pauses take no time."""
    pauses: Any = SimpleNamespace(sleep=lambda seconds: None, time=lambda: 0.0)
    with (
        mock.patch.object(_util, "run", simulator.call),
        mock.patch.object(shutil, "which", lambda name, path=None: name),
        mock.patch.object(client_module, "_said_if_slow", lambda *_: contextlib.nullcontext()),
        mock.patch.object(slurm, "time", pauses),
        mock.patch.object(submit, "_require_links", lambda path: None),
        mock.patch.object(submit, "render_scripts", _scripts),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield
