"""An Optuna study as elastic runs: `run_study`, behind ``hydra/sweeper=elastic_optuna``.

Hydra's launcher interface returns the results of a whole batch, so a sweeper on top of it waits for
the slowest trial of each batch. This one submits trials itself, and always has ``n_jobs`` of them
in flight:

    ask n_jobs -> freeze -> submit as one array
        -> one has ended -> store its result -> ask the next -> submit it -> ...

A trial is a run with the directory ``<sweep>/<number of the trial>``. So it grows, shrinks, is
preempted and continues like any run, and the study has one trial for it.

**Pruning** needs nothing of the script but `hpc_elastic.report`, with step and loss. Optuna
compares trials at equal steps. Values are known at the steps of the polls only, so they are
interpolated at multiples of ``prune_every_steps``. A trial that the pruner rejects becomes PRUNED
in the study and is cancelled, and the next is submitted at once. A loss is minimized whatever the
direction of the objective.

**Started again** with the same sweep directory, the study continues. Its storage names the trials
that were in flight, and each has its run directory in the user attribute `RUN`:

    without run.json          the process was killed before the submission: submitted now
    submitted, or has ended   followed again
    tasks are gone            `launcher=local` ends them with the launcher: resumed
    never known as submitted  it was killed during the submission: closed, and not counted

A lock in the sweep directory keeps a second process out. Trials of other sweep directories in a
shared study are left alone.
"""

from __future__ import annotations

import fcntl
import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from optuna import distributions
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState

from hpc_elastic._util import counted
from hpc_elastic.config.schema import PRUNERS, SAMPLERS, OptunaSettings, RunSettings
from hpc_elastic.errors import (
    ConfigError,
    HpcElasticError,
    RunDirectoryError,
    SlurmError,
    SubmissionError,
)
from hpc_elastic.launcher import control
from hpc_elastic.launcher.run_handle import RunHandle, SubmittedJobs, read_handles
from hpc_elastic.launcher.slurm import SlurmJobs
from hpc_elastic.launcher.submit import ended_by_interrupt, released_on_failure, submit
from hpc_elastic.launcher.sweep import Batch, FrozenJob, Sweep
from hpc_elastic.launcher.wait import Progress, Waiter, console_for, location
from hpc_elastic.report import run_view
from hpc_elastic.report.progress_log import Point, read_points
from hpc_elastic.run import events, job_of, ownership
from hpc_elastic.run.directory import SUBMISSION, RunDir
from hpc_elastic.run.registry import mark_cancelled
from hpc_elastic.shared_files import is_there, write_atomic
from hpc_elastic.slurm.job_state import TaskState

_log = logging.getLogger(__name__)

RUN = "hpc_elastic_run"
"""User attribute of a trial: its run directory."""
NOT_COUNTED = "hpc_elastic_not_submitted"
"""User attribute of a trial that never ran; it is no trial of ``n_trials``."""
PRUNE_EVERY_STEPS = "hpc_elastic_prune_every_steps"
"""User attribute of the study."""
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
LOSS = "loss"
_NUM_REPORTED = 20
"""Values of a trial that the pruner gets by default."""
_PAUSE_S = 0.1
_RETRY_S = 15.0
_GIVE_UP_S = 900.0
"""Slurm's controller may be away for minutes: submissions are tried again for this long."""
_NUM_CANCELLING = 16


def run_study(sweep: Sweep, settings: OptunaSettings, arguments: Sequence[str]) -> None:
    """Run trials until the study has ``n_trials`` that have ended; write optimization_results.yaml.

    Raises HpcElasticError if nothing was submitted, or too many trials have failed and those in
    flight have ended since.
    """
    # a line for each event that this process writes: a cancellation, a resumption
    logging.getLogger(events.__name__).setLevel(logging.WARNING)
    space = SearchSpace.read(settings.params, arguments, sweep.context.config_loader)
    with ended_by_interrupt(), _only_launcher(sweep.dir):
        runner = _StudyRunner(sweep, settings, space)
        runner.run()
    runner.finish()


@contextmanager
def _only_launcher(folder: Path) -> Iterator[None]:
    ownership.claim(folder / SUBMISSION)
    with (folder / SUBMISSION / "sweeper.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            what = f"{folder}: another process runs the study of this sweep directory"
            raise RunDirectoryError(f"{what}; end it first, or use another hydra.sweep.dir") from e
        except OSError as e:
            _log.warning("%s: no locks on this file system (%s)", folder, e.strerror)
        yield


@contextmanager
def _interrupted_at_pauses() -> Iterator[Callable[[float], None]]:
    """Delay SIGINT and SIGTERM until the next pause; a second one interrupts at once (main thread).

    A submission or a write of Optuna is completed first: Optuna's lock of a journal file fails if
    its release is interrupted. The yielded pause raises KeyboardInterrupt if a signal has come.
    """
    come: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        come.append(number)
        if len(come) > 1:
            raise KeyboardInterrupt

    def pause(seconds: float) -> None:
        until = time.monotonic() + seconds
        while not come and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _PAUSE_S))
        if come:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as of a command in the background of a script
            signal.signal(number, on_signal)
    try:
        yield pause
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the search space


@dataclass(frozen=True)
class SearchSpace:
    """What varies between the trials, and what does not.

    ``prefixes`` are what Hydra's grammar has before the key: ``+`` for one that the config lacks.
    """

    distributions: Mapping[str, BaseDistribution]
    prefixes: Mapping[str, str]
    fixed: tuple[str, ...]

    @classmethod
    def read(cls, params: Mapping[str, Any], arguments: Sequence[str], loader: Any) -> SearchSpace:
        """Return the space of ``hydra.sweeper.params`` and the command line, which has precedence.

        Raises ConfigError if an override cannot be parsed, or no parameter varies.
        """
        lines = [*(f"{name}={_text_of(value)}" for name, value in params.items()), *arguments]
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(lines)
        except HydraException as e:
            raise ConfigError("hydra.sweeper.params", dict(params), str(e)) from e
        last = {str(override.key_or_group): override for override in parsed}
        varied = {k: o for k, o in last.items() if o.is_sweep_override()}
        if not varied:
            remedy = "no parameter varies: give one on the command line or here, such as "
            raise ConfigError("hydra.sweeper.params", dict(params), remedy + "'lr=interval(0,1)'")
        return cls(
            {key: distribution_of(override) for key, override in varied.items()},
            {k: o.get_key_element().removesuffix(k) for k, o in varied.items()},
            tuple(str(o.input_line) for k, o in last.items() if k not in varied),
        )

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial with these parameters."""
        varied = [f"{self.prefixes[k]}{k}={_text_of(params[k])}" for k in self.distributions]
        return [*self.fixed, *varied]

    @property
    def first(self) -> dict[str, Any]:
        """Some parameters of the space."""
        return {
            name: each.choices[0]
            if isinstance(each, distributions.CategoricalDistribution)
            else getattr(each, "low", None)
            for name, each in self.distributions.items()
        }


def distribution_of(override: Override) -> BaseDistribution:
    """Return Optuna's distribution of a sweep in Hydra's grammar (pure); or ConfigError.

    ``range`` excludes its end, as in Hydra. ``interval`` includes it, and ``int(interval(1,9))`` is
    one of whole numbers; the tag ``log`` makes it logarithmic.
    """
    value, key = override.value(), str(override.key_or_group)
    text = str(override.input_line).partition("=")[2]
    try:
        if isinstance(value, IntervalSweep):
            low, high, is_log = value.start, value.end, "log" in value.tags
            assert low is not None and high is not None
            if isinstance(low, int) and isinstance(high, int):
                return distributions.IntDistribution(low, high, log=is_log)
            return distributions.FloatDistribution(float(low), float(high), log=is_log)
        if isinstance(value, RangeSweep):
            found = sorted(value.range())
            step = abs(value.step)
            low, high = found[0], found[-1]
            if all(isinstance(each, int) for each in found):
                return distributions.IntDistribution(int(low), int(high), step=int(step))
            return distributions.FloatDistribution(float(low), float(high), step=float(step))

        def written(each: Any) -> Any:  # texts as Hydra's grammar has them, with quotes and escapes
            is_plain = each is None or isinstance(each, bool | int | float)
            return each if is_plain else Override._get_value_element_as_str(each)

        return distributions.CategoricalDistribution([*map(written, override.sweep_iterator())])
    except (ValueError, IndexError, HydraException) as e:
        raise ConfigError(key, text, f"no such search space: {e}") from e


def _text_of(value: Any) -> str:
    """Return a parameter in Hydra's grammar."""
    return "null" if value is None else str(value)


# ---- the study


def open_study(settings: OptunaSettings, folder: Path, name: str) -> optuna.Study:
    """Return the study of a sweep directory, new or continued; ConfigError if it cannot be."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = _component("sampler", settings.sampler, SAMPLERS, optuna.samplers)
    pruner: Any = optuna.pruners.NopPruner()
    if settings.pruner is not None:
        pruner = _component("pruner", settings.pruner, PRUNERS, optuna.pruners)
    storage: Any = settings.storage or str(folder / "optuna.journal")
    try:
        if "://" not in storage:
            from optuna.storages.journal import JournalFileBackend, JournalStorage

            with warnings.catch_warnings():  # it is experimental in Optuna 4
                warnings.simplefilter("ignore")
                storage = JournalStorage(JournalFileBackend(storage))
        study = optuna.create_study(
            study_name=settings.study_name or name, storage=storage, sampler=sampler, pruner=pruner,
            directions=list(settings.direction), load_if_exists=True,
        )  # fmt: skip
    except Exception as e:  # of Optuna, SQLAlchemy or a database's driver
        why = f"the storage of the study cannot be opened: {e}"
        raise ConfigError("hydra.sweeper.storage", str(settings.storage), why) from e
    found = [direction.name.lower() for direction in study.directions]
    if found != list(settings.direction):
        remedy = f"the study {study.study_name!r} has {found}; give it another study_name"
        raise ConfigError("hydra.sweeper.direction", settings.direction, remedy)
    return study


def _component(key: str, given: Any, names: Mapping[str, str], module: Any) -> Any:
    from hydra.utils import instantiate

    try:
        if isinstance(given, str):
            return getattr(module, names[given])()
        made = instantiate(given)
    except Exception as e:  # of anyone's class
        raise ConfigError(f"hydra.sweeper.{key}", given, f"cannot be made: {e}") from e
    base = optuna.samplers.BaseSampler if key == "sampler" else optuna.pruners.BasePruner
    if not isinstance(made, base):
        remedy = f"is no {base.__name__} of Optuna, but a {type(made).__name__}"
        raise ConfigError(f"hydra.sweeper.{key}", given, remedy)
    return made


def values_of(value: Any, num_objectives: int) -> list[float]:
    """Return the objectives of rank 0's value (pure); raise ValueError for any other value."""
    listed = value if num_objectives > 1 and isinstance(value, list) else [value]
    numbers = [v for v in listed if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) != num_objectives or len(listed) != num_objectives:
        form = "a number" if num_objectives == 1 else f"a list of {num_objectives} numbers"
        raise ValueError(f"the function must return {form}, and has returned {value!r}")
    if any(map(math.isnan, numbers)):
        raise ValueError(f"the function has returned {value!r}")
    return [float(number) for number in numbers]


@dataclass
class Curve:
    """Values of a trial at multiples of a number of steps; ``before`` is the last point."""

    step: int = 0
    before: tuple[int, float] | None = None

    def add(self, step: int, value: float, every_steps: int) -> list[tuple[int, float]]:
        """Return the multiples that this point passes, each with its interpolated value.

        The first point gives only the last multiple. A step that was reported before, since the run
        has restarted from a checkpoint, passes none.
        """
        before, last = self.before, step - step % every_steps
        if before is not None and step <= before[0]:
            return []
        if last <= self.step:
            self.before = (step, value)
            return []
        first = self.step + every_steps
        passed = range(first if before is not None else last, last + 1, every_steps)
        start, start_value = before or (step, value)
        slope = (value - start_value) / max(1, step - start)
        self.step, self.before = last, (step, value)
        return [(s, start_value + slope * (s - start)) for s in passed]


# ---- trials in flight


@dataclass
class _Flight:
    trial: optuna.Trial
    job: FrozenJob
    run: RunHandle
    curve: Curve = field(default_factory=Curve)


class _OpenJobs:
    """All submissions in flight as one, so that one squeue call serves the waiter."""

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep
        self._lock = threading.Lock()
        self._parts: tuple[tuple[SubmittedJobs, frozenset[Path]], ...] = ()
        """Each submission that has runs left, and their directories."""

    result_job = None

    @property
    def job_ids(self) -> Sequence[str]:
        return list(dict.fromkeys(id_ for jobs, _ in self._parts for id_ in jobs.job_ids))

    def add(self, runs: Sequence[RunHandle]) -> list[RunHandle]:
        """Take the runs of one submission in; return them as runs of this one."""
        jobs = runs[0].jobs
        if isinstance(jobs, SlurmJobs):  # of a run that is followed again: all of the sweep's
            ids = dict.fromkeys(job_of(task) for run in runs for task in run.tasks)
            jobs = replace(jobs, job_ids=list(ids))
        with self._lock:
            self._parts = (*self._parts, (jobs, frozenset(run.dir for run in runs)))
        return [replace(run, jobs=self) for run in runs]

    def drop_run(self, run: RunHandle) -> None:
        """Leave out a run that has ended; the last of a submission closes it (any thread)."""
        with self._lock:
            left = [(jobs, dirs - {run.dir}) for jobs, dirs in self._parts]
            self._parts = tuple(part for part in left if part[1])
        for jobs, dirs in left:
            if not dirs:
                jobs.close()

    def list_tasks(self) -> Mapping[str, TaskState]:
        slurm = [jobs for jobs, _ in self._parts if isinstance(jobs, SlurmJobs)]
        if slurm:
            return replace(slurm[0], job_ids=self.job_ids).list_tasks()
        return {name: t for jobs, _ in self._parts for name, t in jobs.list_tasks().items()}

    def cancel(self) -> None:
        for jobs, _ in self._parts:
            jobs.cancel()

    def release(self) -> str:
        slurm = [jobs for jobs, _ in self._parts if isinstance(jobs, SlurmJobs)]
        if slurm:
            lines = [replace(slurm[0], job_ids=self.job_ids).release()]
        else:  # not `release`, which cancels the runs: the study resumes them
            with ThreadPoolExecutor(max(1, len(self._parts))) as pool:
                list(pool.map(lambda part: part[0].cancel(), self._parts))
            lines = ["launcher=local: the trials were ended"]
        again = f"hydra.sweep.dir={self._sweep}"
        return "\n".join([*lines, f"To go on with the study: the same command with {again}"])

    def close(self) -> None:
        for jobs, _ in self._parts:
            jobs.close()


class _StudyRunner:
    def __init__(self, sweep: Sweep, settings: OptunaSettings, space: SearchSpace) -> None:
        self._sweep, self._settings, self._space = sweep, settings, space
        self._batch = Batch(sweep)
        launcher = self._check().launcher
        self._poll_interval_s = launcher.poll_interval_s
        self._study = open_study(settings, sweep.dir, str(sweep.config.hydra.job.name))
        self._every_steps = settings.prune_every_steps
        self._pool = ThreadPoolExecutor(_NUM_CANCELLING, "hpc_elastic-cancel")
        self._jobs = _OpenJobs(sweep.dir)
        self._flights: list[_Flight] = []
        self._unsent: list[optuna.Trial] = []
        """Trials that were asked for, and are not submitted yet."""
        self._errors: dict[int, str] = {}
        """Why trials of this process have failed."""
        self._has_submitted = self._is_exhausted = self._warned_blind = False
        self._retry_at, self._give_up_at = 0.0, math.inf

    def _check(self) -> RunSettings:
        """Freeze a trial before the study is touched; return its settings."""
        raw = OmegaConf.to_container(self._sweep.config.hydra.sweep, resolve=False)
        subdir = str(raw["subdir"])  # type: ignore[index,call-overload]
        if not any(name in subdir for name in ("job.num", "job.id")):
            remedy = "two trials may have the same parameters; make it depend on the number of the "
            raise ConfigError("hydra.sweep.subdir", subdir, remedy + "trial: ${hydra.job.num}")
        (job,) = self._batch.freeze([(0, self._space.overrides(self._space.first))])
        settings = job.request.settings
        if not settings.launcher.wait:
            remedy = "the sweeper submits a trial when another one ends, so its process has to "
            remedy += "stay: leave the setting out, and start the command in tmux or with nohup"
            raise ConfigError("launcher.wait", False, remedy)
        if settings.launcher.dry_run:
            remedy = "the parameters of later trials depend on results; leave it out, or use a "
            raise ConfigError("launcher.dry_run", True, remedy + "plain sweep for a dry run")
        if getattr(settings.launcher, "result_job", False):
            remedy = "each batch of trials would have its own; leave it out, this command's exit "
            raise ConfigError("launcher.result_job", True, remedy + "code is the sweep's result")
        return settings

    def _freeze(self, trials: Iterable[optuna.Trial]) -> list[FrozenJob]:
        lines = ((trial.number, self._space.overrides(trial.params)) for trial in trials)
        return self._batch.freeze(lines)

    def run(self) -> None:
        text = OmegaConf.to_yaml(self._sweep.config)
        write_atomic(self._sweep.dir / "multirun.yaml", text, mode=0o600)
        console = console_for(sys.stdout)
        with (
            self._pool,
            released_on_failure(self._jobs),
            _interrupted_at_pauses() as pause,
            Progress(console) as display,
        ):
            self._display = display
            every_s = self._poll_interval_s
            self._waiter = Waiter([], display, jobs=self._jobs, poll_interval_s=every_s)
            self._follow_again()
            while self._fill() or self._flights:
                pause(0.0 if self._poll() else every_s)

    def finish(self) -> None:
        """Write and print the best trial; HpcElasticError if too many failed."""
        error = None
        if self._is_failing():
            num = self._num(TrialState.FAIL)
            error = f"{num} trials have failed, more than the max_failure_rate of "
            error += f"{self._settings.max_failure_rate:g} allows; no further one was started"
        completed = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if completed:
            self._write_results()
        else:
            error = error or "no trial was completed"
        print(location((), self._sweep.dir))
        if error is not None:
            if self._errors:
                number, why = next(iter(self._errors.items()))
                error += f"; trial {number}: {why}"
            raise HpcElasticError(error)

    def _write_results(self) -> None:
        results: dict[str, Any] = {"name": "optuna"}
        if len(self._study.directions) == 1:
            best = self._study.best_trial
            results |= {"best_params": best.params, "best_value": best.value}
            print(f"best value: {best.value:.6g} of trial {best.number}: {_label(best.params)}")
        else:
            front = [{"params": t.params, "values": t.values} for t in self._study.best_trials]
            results["solutions"] = front
            print(f"{len(front)} Pareto-optimal trials")
        path = self._sweep.dir / "optimization_results.yaml"
        write_atomic(path, OmegaConf.to_yaml(OmegaConf.create(results)))

    # ---- submit

    def _fill(self) -> bool:
        """Submit as many trials as are missing; return whether some have to be later."""
        missing = self._settings.n_trials - self._num(*_ENDED) - len(self._flights)
        if missing <= 0 or self._is_exhausted or self._is_failing():
            return False
        num = min(missing, self._settings.n_jobs - len(self._flights))
        if num > 0 and time.monotonic() >= self._retry_at:
            space, given = dict(self._space.distributions), self._settings.params
            trials, self._unsent = self._unsent, []
            try:
                trials += [self._study.ask(space) for _ in range(num - len(trials))]
            except ValueError as e:  # the study has other choices of a parameter
                why = f"{e}; give the study another study_name"
                raise ConfigError("hydra.sweeper.params", given, why) from e
            self._submit(trials)
        return True

    def _submit(self, trials: Sequence[optuna.Trial]) -> None:
        """Submit trials as one array; try again later if Slurm does not answer."""
        try:
            jobs = self._freeze(trials)
            for trial, job in zip(trials, jobs, strict=True):
                trial.set_user_attr(RUN, str(job.request.dir))
            self._batch.on_job_start(jobs)
            name = str(self._sweep.config.hydra.job.name)
            requests = [job.request for job in jobs]
            runs = self._jobs.add(submit(requests, sweep=self._sweep.dir, name=name))
        except BaseException as e:
            now, is_first = time.monotonic(), self._give_up_at == math.inf
            self._give_up_at = now + _GIVE_UP_S if is_first else self._give_up_at
            is_slurm = isinstance(e, SubmissionError | SlurmError) and self._has_submitted
            is_final = not is_slurm or now >= self._give_up_at
            for trial in trials:
                path = trial.user_attrs.get(RUN)
                if is_final or (path is not None and is_there(RunDir(Path(path)).spec)):
                    self._close_unsubmitted(trial)
                else:
                    self._unsent.append(trial)
            if is_final:
                raise
            self._retry_at = now + _RETRY_S
            if is_first:
                what = f"trials cannot be submitted, tried again every {_RETRY_S:g} s"
                self._display.print_message(f"{what}: {e}")
            return
        self._has_submitted, self._give_up_at = True, math.inf
        self._add([_Flight(*each) for each in zip(trials, jobs, runs, strict=True)])

    def _add(self, flights: Sequence[_Flight]) -> None:
        self._flights += flights
        self._waiter.watch([flight.run for flight in flights])

    def _close_unsubmitted(self, trial: optuna.Trial) -> None:
        """Close a trial that was not submitted; if Slurm has it nevertheless, its tasks end."""
        path = trial.user_attrs.get(RUN)
        if path is not None and is_there(RunDir(Path(path)).spec):
            with suppress(RunDirectoryError):
                mark_cancelled(RunDir(Path(path)), _log.warning)
        trial.set_user_attr(NOT_COUNTED, True)
        self._store(trial, state=TrialState.FAIL)

    def _follow_again(self) -> None:
        """Take up the trials that an earlier process of this sweep directory has left."""
        left = [
            trial
            for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
            if Path(trial.user_attrs.get(RUN, "/")).is_relative_to(self._sweep.dir)
        ]
        for before in left:
            trial = optuna.Trial(self._study, before._trial_id)
            path = Path(before.user_attrs[RUN])
            if not is_there(RunDir(path).spec):
                self._unsent.append(trial)
                continue
            phase = run_view.read_view(path).phase
            if phase == run_view.NOT_SUBMITTED:
                self._close_unsubmitted(trial)
                continue
            try:
                if phase == run_view.LOST:
                    _, handle = control.resume(path, ())
                else:
                    (handle,) = read_handles(self._sweep.dir / SUBMISSION, path)
            except RunDirectoryError as e:
                self._display.print_message(f"trial {trial.number} cannot be followed: {e}")
                self._store(trial, state=TrialState.FAIL)
                continue
            (job,) = self._freeze([trial])
            label = run_view.label_of(path, RunDir(path).load())
            (run,) = self._jobs.add([replace(handle, label=label)])
            flight = _Flight(trial, job, run, Curve(before.last_step or 0))
            for point in read_points(RunDir(path).progress) if self._settings.pruner else ():
                self._report(flight, point)
            self._add([flight])
        if left:
            followed = f"{counted(len(left), 'trial')} of an earlier process"
            self._display.print_message(f"the study goes on with {followed}")

    # ---- results

    def _poll(self) -> bool:
        before = list(self._flights)
        for flight, view in zip(before, self._waiter.poll_runs(), strict=True):
            if view.ended is not None:
                self._end_trial(flight, view.ended)
            elif self._settings.pruner is not None:
                status = view.status or Point(0.0)
                if self._report(flight, status) and flight.trial.should_prune():
                    self._prune(flight)
        return len(self._flights) < len(before)

    def _end_trial(self, flight: _Flight, end: run_view.RunEnd) -> None:
        what, detail = "failed", ""
        if end.status == "cancelled":  # by a user
            self._store(flight.trial, state=TrialState.PRUNED)
            what = "cancelled, which counts as pruned"
        elif end.error is None:
            try:
                values = values_of(end.value, len(self._study.directions))
            except ValueError as e:
                detail = str(e)
            else:
                self._store(flight.trial, values)
                what = ", ".join(f"{value:.6g}" for value in values)
        else:
            detail = str(end.error)
        if detail:
            self._store(flight.trial, state=TrialState.FAIL)
            self._errors[flight.trial.number] = detail
        self._batch.on_job_end(flight.job, end)
        is_blind = self._settings.pruner is not None and flight.curve.before is None
        if is_blind and not detail and not self._warned_blind:
            self._warned_blind = True
            why = f"it has reported no step with {self._settings.prune_on}, or no total_steps"
            remedy = "report them, or give hydra.sweeper.prune_on and prune_every_steps"
            detail = f"trial {flight.trial.number} could not be pruned: {why}; {remedy}"
        self._drop(flight, what, detail)
        self._pool.submit(self._jobs.drop_run, flight.run)

    def _store(self, trial: optuna.Trial, values: Any = None, state: Any = None) -> None:
        try:
            self._study.tell(trial, values, state=state)
        except RuntimeError as e:
            # the sampler has tried all of a finite space, and stops Study.optimize, which is not
            # in use here; the result is stored nevertheless
            if "Study.stop" not in str(e):
                raise
            self._is_exhausted = True

    def _report(self, flight: _Flight, point: Point) -> bool:
        """Report the values that a point shows to Optuna; return whether it shows any."""
        name, is_minimized = self._settings.prune_on, self._settings.direction == ["minimize"]
        value = point.loss if name == LOSS else point.metrics.get(name)
        if self._every_steps is None:
            self._every_steps = self._study.user_attrs.get(PRUNE_EVERY_STEPS)
        if point.step is None or value is None or not (self._every_steps or point.total_steps):
            return False
        if self._every_steps is None:
            self._every_steps = max(1, int(point.total_steps or 0) // _NUM_REPORTED)
            self._study.set_user_attr(PRUNE_EVERY_STEPS, self._every_steps)
        sign = -1.0 if name == LOSS and not is_minimized else 1.0
        values = flight.curve.add(point.step, value, self._every_steps)
        for step, each in values:
            flight.trial.report(sign * each, step)
        return bool(values)

    def _prune(self, flight: _Flight) -> None:
        """Cancel a trial, in the background: its place is free at once."""
        step, (_, value) = flight.curve.step, flight.curve.before or (0, math.nan)
        mark_cancelled(flight.run.paths, _log.warning)  # it has no other result from here on
        self._store(flight.trial, state=TrialState.PRUNED)
        self._batch.on_job_end(flight.job, flight.run.lost({}))
        self._drop(flight, f"pruned at step {step}, {self._settings.prune_on} {value:.4g}")
        self._pool.submit(self._cancel_run, flight.run)

    def _cancel_run(self, run: RunHandle) -> None:
        """Cancel a run, and wait until its tasks are gone (a thread of the pool)."""
        try:
            target = control.CancelTarget.read(run.dir)
            control.cancel(target, wait_s=run_view.end_limit_s(target.spec), warn=_log.warning)
        except (HpcElasticError, OSError) as e:
            _log.warning("%s is pruned, and could not be cancelled: %s", run.dir, e)
        self._jobs.drop_run(run)

    def _drop(self, flight: _Flight, what: str, detail: str = "") -> None:
        """Print how a trial ended, and follow it no longer."""
        self._flights.remove(flight)
        self._waiter.drop(flight.run)
        head = f"[{self._num(*_ENDED)}/{self._settings.n_trials}] trial {flight.trial.number}"
        best = ""
        if len(self._study.directions) == 1:
            with suppress(ValueError):  # none is complete
                found = self._study.best_trial
                best = f"; best: {found.value:.6g} of trial {found.number}"
        line = f"{head} ({_label(flight.trial.params)}): {what}{best}"
        self._display.print_message("\n".join(filter(None, [line, detail])))

    # ---- counts

    def _num(self, *states: TrialState) -> int:
        """Return how many trials of ``n_trials`` are in these states."""
        trials = self._study.get_trials(deepcopy=False, states=states)
        return sum(NOT_COUNTED not in trial.user_attrs for trial in trials)

    def _is_failing(self) -> bool:
        most = self._settings.max_failure_rate * self._settings.n_trials
        return self._num(TrialState.FAIL) > most


def _label(params: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in params.items()
    )
