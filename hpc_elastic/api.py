"""Elastic runs from a program: `launch` waits for one, `Run` and `ElasticExecutor` do not.

    from hpc_elastic import ElasticExecutor, launch

    def train(lr):
        ...
        return accuracy

    if __name__ == "__main__":
        results = launch(train, 0.1, nodes="1:4", nproc_per_node=2)
        print(results[0])

        run = launch(train, 0.1, nodes="1:4", wait=False)  # a Run
        print(run.status(), run.result()[0])

        with ElasticExecutor(launcher="slurm", nodes="1:4") as executor:
            print(list(executor.map(train, [0.1, 0.01])))  # one job array

Nothing is pickled: the function, or the class of an object that is called, is at module level, and
its arguments, its attributes and its return value are JSON.

A `Run` is a run directory and nothing else: its methods read the run's files and query the
scheduler, whichever process has submitted it. Runs of ``launcher="local"`` need a process that
starts their tasks, which is the one that has submitted or resumed them here; a thread of it follows
each submission, completes its futures, and ends with the process, and so do these runs. Runs in
Slurm continue without it.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
)
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from hpc_elastic.config.schema import TOP_LEVEL, Nproc
from hpc_elastic.errors import ConfigError
from hpc_elastic.run import arguments
from hpc_elastic.run.directory import Entry, RunDir

if TYPE_CHECKING:
    import pandas

    from hpc_elastic.launcher.run_handle import RunHandle
    from hpc_elastic.report.run_view import RunEnd

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_NUM_CANCELLING = 16
"""Runs that an executor cancels at a time."""


@dataclass(frozen=True)
class LaunchResult(Mapping[int, Any]):
    """Result of a run: a mapping from global rank to return value.

    Attributes:
        by_rank: The return values by global rank; empty after a dry run.
        run_dir: The run directory, with all logs.
        restarts: Number of restarts spent on workers' failures.
    """

    by_rank: dict[int, Any]
    run_dir: Path
    restarts: int = 0

    def __getitem__(self, rank: int) -> Any:
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_rank)

    def __len__(self) -> int:
        return len(self.by_rank)


class Run:
    """A submitted run, of this process or another one.

    Attributes:
        run_dir: The run directory, as an absolute path.

    Args:
        run_dir: The same.

    Raises:
        RunDirectoryError: It is no run directory.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir: Path = Path(run_dir).absolute()
        self._paths.load()

    def __repr__(self) -> str:
        """Return the expression that makes it."""
        return f"Run({str(self.run_dir)!r})"

    @property
    def _paths(self) -> RunDir:
        return RunDir(self.run_dir)

    def status(self) -> str:
        """Return what the run is doing; the scheduler is queried if it has no result.

        Returns:
            ``queued``, ``starting``, ``waiting`` (below its minimum of nodes), ``training``,
            ``requeued``, ``not submitted`` (after a dry run), or ``unknown`` (the scheduler does
            not answer); or how it ended: ``succeeded``, ``failed``, ``cancelled``, or ``lost`` (its
            tasks have ended without a result).
        """
        from hpc_elastic.report.run_view import read_view

        return read_view(self.run_dir).phase

    def result(self, timeout: float | None = None) -> LaunchResult:
        """Wait until the run has ended, and return the return values of its workers.

        Args:
            timeout: Most seconds to wait, at least 0; None: no limit.

        Raises:
            TimeoutError: It has no result yet; names the run and its state. It is not changed.
            WorkerGroupError: It failed, or is lost.
            concurrent.futures.CancelledError: It was cancelled.
            RunDirectoryError: It was never submitted, or its files are damaged.
        """
        from hpc_elastic.launcher.run_handle import find_submission, read_handles
        from hpc_elastic.launcher.wait import Progress, Waiter
        from hpc_elastic.report.run_view import CANCELLED

        deadline = math.inf if timeout is None else time.monotonic() + timeout
        (handle,) = read_handles(find_submission(self.run_dir), self.run_dir)
        poll_interval_s = self._paths.load().settings.launcher.poll_interval_s
        waiter = Waiter([handle], Progress(None), poll_interval_s=poll_interval_s)
        *_, (view,) = waiter.polls(deadline)
        end = view.ended
        if end is None:
            state = self.status()
            if state != CANCELLED:
                raise self._timeout_error(timeout, state)
            end = handle.lost({})  # the waiter allows for results that appear late
        if end.status == CANCELLED:
            raise CancelledError(str(end.error))
        if end.error is not None:
            raise end.error
        return LaunchResult(dict(end.values), self.run_dir, end.restarts)

    def cancel(self) -> bool:
        """Cancel the run, and wait until its tasks are gone; it saves a checkpoint first.

        The wait takes seconds, and at most 30 s more than the tasks may take to end.

        Returns:
            Whether it is cancelled. False if it has ended by itself, or tasks are left.

        Raises:
            RunDirectoryError: The run belongs to another user.
            SlurmError: Slurm refuses, or does not answer.
        """
        from hpc_elastic.launcher import control
        from hpc_elastic.report.run_view import CANCELLED, end_limit_s

        target = control.CancelTarget.read(self.run_dir)
        if control.nothing_to_do(target) is None:
            control.cancel(target, wait_s=end_limit_s(target.spec), warn=_log.warning)
        return self.status() == CANCELLED

    def resume(self, *overrides: str) -> None:
        """Restart the run, which has stopped, in the same directory, from its last checkpoint.

        It returns when the new tasks are submitted. With ``launcher="local"`` they belong to this
        process from now on.

        Args:
            *overrides: ``nodes=...``, ``nproc_per_node=...`` or ``launcher.KEY=...``, as for
                `hpc-elastic resume`; all other settings stay as they were.

        Raises:
            RunDirectoryError: It has tasks, or has succeeded; cancel the first, resubmit the other.
            ConfigError: An override cannot work, or would change the run itself.
            SubmissionError: Another process is resuming it, or Slurm refuses.
            SlurmError: Slurm does not answer.
        """
        from hpc_elastic.launcher.control import CancelTarget, resume
        from hpc_elastic.report.run_view import end_limit_s

        target = CancelTarget.read(self.run_dir)
        deadline = time.monotonic() + end_limit_s(target.spec)
        while target.left and target.result == "failed" and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # its tasks are ending
            target = CancelTarget.read(self.run_dir)
        resumption, handle = resume(self.run_dir, overrides)
        if resumption.spec.settings.backend == "local":
            _follow([handle], resumption.spec.settings.launcher.poll_interval_s)

    def progress(self) -> pandas.DataFrame:
        """Return the progress of the run so far, for plots and tables.

        Returns:
            A row for each line of progress.jsonl and one for the present state, by ``time`` (UTC).
            Columns: those of a line, such as ``nodes``, ``step``, ``loss`` and ``steps_per_s``, and
            the script's own metrics; NaN for unknown values.

        Raises:
            ReportLibraryError: pandas is not installed.
        """
        from hpc_elastic.notebook import progress

        return progress(self.run_dir)

    def watch(self, every_s: float = 2.0) -> None:
        """Show the run in a notebook, updated in place until it has ended or is interrupted.

        Args:
            every_s: Seconds between two updates, above 0. Of a long run they are further apart.

        Raises:
            ReportLibraryError: This is no notebook; `hpc-elastic status --watch` needs none.
        """
        from hpc_elastic.notebook import watch

        watch(self.run_dir, every_s)

    def _repr_html_(self) -> str:
        """Return the run as a card; notebooks show it as the value of a cell."""
        from hpc_elastic.notebook import card

        return card(self.run_dir)

    def _timeout_error(self, timeout: float | None, state: str) -> TimeoutError:
        return TimeoutError(f"{self.run_dir} has no result after {timeout:g} s: it is {state}")


class RunFuture(Future[Any]):
    """Return value of rank 0 of a run; what `ElasticExecutor.submit` returns.

    It is a `concurrent.futures.Future`, for `concurrent.futures.wait` and `as_completed` too. The
    values of all ranks are ``future.run.result()``, and so are those of a run that is resumed: a
    future completes once, at the first end of its run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._ending = threading.RLock()

    @property
    def run(self) -> Run:
        """The run.

        Raises:
            RuntimeError: It is part of an `ElasticExecutor.batch` that was not submitted.
        """
        if self._run is None:
            raise RuntimeError("a run is submitted at the end of its batch: use it after the block")
        return self._run

    def running(self) -> bool:
        """Return whether a task of the run has started and the run has not ended."""
        if self._run is None or self.done():
            return False
        return self._run.status() not in ("queued", "requeued", "unknown")

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the return value of rank 0; see `Run.result` for the arguments and errors."""
        try:
            return super().result(timeout)
        except TimeoutError:
            if self._run is None:
                raise TimeoutError("a run is submitted at the end of its batch") from None
            raise self._run._timeout_error(timeout, self._run.status()) from None

    def cancel(self) -> bool:
        """Cancel the run, also while it trains; see `Run.cancel`.

        Returns:
            Whether it is cancelled. False if it has ended by itself, or tasks are left.
        """
        with self._ending:
            if self._run is None:  # it is not submitted, or at this moment: see `_set_run`
                self._set_cancelled()
        if not self.done() and self._run is not None and self._run.cancel():
            self._set_cancelled()
        return self.cancelled()

    def _set_run(self, run: Run) -> None:
        """Record the run; cancel it if this future was cancelled meanwhile."""
        with self._ending:
            self._run = run
        if self.cancelled():
            run.cancel()

    def _set_cancelled(self) -> None:
        with self._ending:
            if not self.done():
                super().cancel()
                self.set_running_or_notify_cancel()

    def _set_end(self, end: RunEnd) -> None:
        """Complete the future, unless it is."""
        if end.status == "cancelled":
            self._set_cancelled()
        with self._ending:
            if self.done():
                return
            if end.error is not None:
                self.set_exception(end.error)
            else:
                self.set_result(end.value)


class ElasticExecutor(Executor):
    """Submits functions as elastic runs, and returns futures of their results.

    Each call of `submit` is one submission, with a thread that follows it. Many runs are better
    submitted together, by `map`, `map_array` or within `batch`: they are one job array, and are
    followed by one query of Slurm.

    As a context manager, it waits at the end of the block until all runs have ended. When the
    process ends, its runs in Slurm continue (`Run` returns to them), and local runs are ended.

    Args:
        folder: Where each submission makes a directory.
        **settings: ``nodes``, ``nproc_per_node``, ``launcher``, ``ft`` and others, as of `launch`.
            With ``launcher="local"``, ``max_agents`` holds for each submission.

    Raises:
        ConfigError: A setting cannot work; names the remedy.
    """

    def __init__(self, folder: str | Path = "runs", **settings: Any) -> None:
        from hpc_elastic.config.resolve import resolve

        self._folder = Path(folder).absolute()
        self._settings = resolve(_config(**{**settings, "wait": True}), overrides=_TYPED)
        if self._settings.launcher.dry_run:
            remedy = "an executor has no dry run: use launch(..., dry_run=True)"
            raise ConfigError("launcher.dry_run", True, remedy)
        self._lock = threading.RLock()
        self._batch: list[tuple[RunFuture, Entry]] | None = None
        self._open: set[RunFuture] = set()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RunFuture:
        """Submit a call of a function as a run; every worker of it makes the call.

        Args:
            fn: As of `launch`.
            *args: As of `launch`.
            **kwargs: The same, of parameters that have a position.

        Returns:
            The future of rank 0's return value.

        Raises:
            ConfigError: The function or an argument cannot work; names the remedy.
            RunDirectoryError: The folder cannot be written.
            SubmissionError: Slurm refused the job, or does not answer.
            RuntimeError: The executor was shut down.
        """
        from hpc_elastic.launcher.user_code import entry_of

        entry = entry_of(fn, "function", _json_arguments(fn, args, kwargs))
        future = RunFuture()
        with self._lock:
            self._require_open()
            if self._batch is not None:
                self._batch.append((future, entry))
                return future
        self._submit([(future, entry)])
        return future

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Collect the calls of `submit`; at the end of the block, submit them as one job array.

        An array has at most MaxArraySize tasks, and several are submitted beyond that. Results are
        available after the block. If the block raises, nothing is submitted, and the futures are
        cancelled; a batch within another one is part of that.

        Raises:
            HpcElasticError: As of `submit`; nothing was submitted, and the futures are cancelled.
        """
        with self._lock:
            is_inner = self._batch is not None
            calls = self._batch = [] if self._batch is None else self._batch
        if is_inner:
            yield
            return
        try:
            yield
        except BaseException:
            self._batch = None
            for future, _ in calls:
                future.cancel()
            raise
        self._batch = None
        left = [(future, entry) for future, entry in calls if not future.cancelled()]
        if left:
            self._submit(left)

    def map_array(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> list[RunFuture]:
        """Submit a run for each set of arguments, in one `batch`; return their futures in order."""
        with self.batch():
            return [self.submit(fn, *args) for args in zip(*iterables, strict=False)]

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[Any]:
        """Submit as `map_array` does, and iterate over the results in order.

        A run that failed raises when its result is due; the others continue.

        Args:
            fn: As of `submit`.
            *iterables: Its arguments; the shortest decides.
            timeout: Most seconds from this call to each result; None: no limit.
            chunksize: Has no effect.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        futures = self.map_array(fn, *iterables)

        def left_s() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        return (future.result(left_s()) for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further calls.

        Args:
            wait: Wait until all runs have ended.
            cancel_futures: Cancel all runs that have not ended, also those that train.
        """
        with self._lock:
            self._is_shut_down = True
            remaining = list(self._open)
        if cancel_futures:
            with ThreadPoolExecutor(_NUM_CANCELLING) as pool:
                list(pool.map(RunFuture.cancel, remaining))
        if wait:
            wait_for_futures(remaining)

    def _require_open(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the executor was shut down: make another one")

    def _submit(self, calls: Sequence[tuple[RunFuture, Entry]]) -> None:
        """Submit calls; from its beginning on, `shutdown` waits for their futures."""
        from hpc_elastic.launcher import submit
        from hpc_elastic.launcher.plan import RunRequest

        futures = [future for future, _ in calls]
        try:
            with self._lock:
                self._require_open()
                self._open.update(futures)
            for future in futures:
                future.add_done_callback(self._open.discard)
            name = calls[0][1].qualname.rpartition(".")[2]
            sweep = self._folder / submit.make_run_id(name)
            submit.open_sweep(sweep)
            dirs = [sweep / str(n) for n in range(len(calls))] if len(calls) > 1 else [sweep]
            requests = [
                RunRequest(path, self._settings, entry)
                for path, (_, entry) in zip(dirs, calls, strict=True)
            ]
            runs = submit.submit(requests, sweep=sweep, name=name)
            with submit.released_on_failure(runs[0].jobs):
                for future, run in zip(futures, runs, strict=True):
                    future._set_run(Run(run.dir))
                _follow(runs, self._settings.launcher.poll_interval_s, futures)
        except BaseException:
            for future in futures:
                if future._run is None:
                    future.cancel()
            raise


@overload
def launch(fn: Callable[..., Any], *args: Any, wait: Literal[False], **settings: Any) -> Run: ...


@overload
def launch(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int | str = 1,
    nproc_per_node: Nproc = "auto",
    launcher: Literal["local", "slurm"] = "local",
    ft: bool = False,
    run_dir: str | Path | None = None,
    wait: Literal[True] = True,
    **settings: Any,
) -> LaunchResult: ...


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int | str = 1,
    nproc_per_node: Nproc = "auto",
    launcher: Literal["local", "slurm"] = "local",
    ft: bool = False,
    run_dir: str | Path | None = None,
    wait: bool = True,
    **settings: Any,
) -> LaunchResult | Run:
    """Run a function as an elastic worker group, and wait for it.

    Args:
        fn: Called with ``args`` in every worker; at module level of a script or module. Or an
            object of a class there whose ``__call__`` is called, such as ``Trainer(args)``: workers
            make it with the same attributes, without its ``__init__``.
        *args: JSON values, tuples, sets, paths, and namespaces of argparse.
        nodes: Number of nodes, such as ``4``, or a range, such as ``"1:4"``; at least 1.
        nproc_per_node: Workers of each node: a number of at least 1, ``"gpu"`` (one per GPU),
            ``"cpu"`` or ``"auto"``.
        launcher: Processes on this machine, or a Slurm job array.
        ft: Each node is a replica group of its own, whose workers outlive those of the other nodes;
            for functions that train with `hpc_elastic.ft`.
        run_dir: An empty or new folder on the shared file system; None makes one in ``runs/``.
        wait: False returns once the run is submitted. With ``launcher="local"`` it is ended when
            this process exits; a signal that kills this process leaves its tasks running, and
            `hpc-elastic cancel` ends them.
        **settings: ``launcher.*`` as in the config: ``partition="gpu"``, ``max_restarts=0``,
            ``rendezvous={"join_timeout_s": 3600}``.

    Returns:
        The return values by global rank, none with ``dry_run=True``; or the `Run` with
        ``wait=False``.

    Raises:
        ConfigError: A setting, the function or an argument cannot work; names the remedy.
        RunDirectoryError: ``run_dir`` cannot be written, or holds another run.
        SubmissionError: Slurm refused the job, or does not answer.
        WorkerGroupError: The training failed; holds the first failure.
        SystemExit: Ctrl-C or SIGTERM; what has become of the run was printed.
    """
    from hpc_elastic.launcher.user_code import entry_of

    # a thread of this process waits for a local run
    settings |= {"launcher": launcher, "wait": wait or launcher == "local"}
    config = _config(nodes=nodes, nproc_per_node=nproc_per_node, ft=ft, **settings)
    encoded = _json_arguments(fn, args, {})
    return launch_entry(
        lambda: entry_of(fn, "function", encoded),
        getattr(fn, "__name__", type(fn).__name__),
        config,
        run_dir,
        in_background=not wait,
    )


_TYPED = ("nodes=",)


def launch_entry(
    make_entry: Callable[[], Entry],
    name: str,
    config: Mapping[str, Any],
    run_dir: str | Path | None = None,
    typed: Sequence[str] = _TYPED,
    *,
    in_background: bool = False,
) -> LaunchResult | Run:
    """Run what workers import and call, and wait for it; see `launch`.

    ``make_entry`` is called once the settings are checked. ``name`` is the function's or the
    script's. ``config`` has ``nodes``, ``nproc_per_node``, ``ft``, and the settings of the
    launcher. ``typed`` are the keys, each with ``=`` behind it, whose values YAML has not read.
    ``in_background`` returns the `Run` once it is submitted; with ``launcher.wait=false``, a run in
    Slurm is not waited for either.
    """
    from hpc_elastic.config.resolve import resolve
    from hpc_elastic.launcher import submit
    from hpc_elastic.launcher.plan import RunRequest
    from hpc_elastic.launcher.wait import wait

    checked = resolve(config, overrides=typed)
    entry = make_entry()
    path = Path(run_dir or f"runs/{submit.make_run_id(name)}").absolute()
    submit.open_sweep(path)
    is_awaited = submit.is_awaited(checked.launcher)
    with submit.ended_by_interrupt():
        runs = submit.submit([RunRequest(path, checked, entry)], sweep=path, name=name)
        if in_background:
            if is_awaited:
                _follow(runs, checked.launcher.poll_interval_s)
            return Run(path)
        if not is_awaited:
            return LaunchResult({}, path)
        (end,) = wait(runs, poll_interval_s=checked.launcher.poll_interval_s)
    if end.error is not None:
        raise end.error
    return LaunchResult(dict(end.values), path, end.restarts)


# ---- parts


def _config(*, launcher: str = "local", **settings: Any) -> dict[str, Any]:
    top = {key: settings.pop(key) for key in TOP_LEVEL if key in settings}
    return {**top, "launcher": {**settings, "backend": launcher}}


def _json_arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments of a call by position, as workers read them.

    Raises ConfigError if one cannot be written (`run.arguments`), or can only be given by name,
    and TypeError if the function does not have these parameters.
    """
    if kwargs:
        call = inspect.signature(fn).bind(*args, **kwargs)
        call.apply_defaults()
        if call.kwargs:
            remedy = "workers call the function by position: give these parameters a position"
            raise ConfigError("kwargs", call.kwargs, remedy)
        args = call.args
    return [arguments.encode(value, f"args/{i}") for i, value in enumerate(args)]


def _follow(
    runs: Sequence[RunHandle], poll_interval_s: float, futures: Sequence[RunFuture] = ()
) -> None:
    """Follow the runs of one submission, and complete their futures, in a thread."""
    from hpc_elastic.launcher.wait import Progress, Waiter

    jobs, owner = runs[0].jobs, os.getpid()

    def end_with_process() -> None:
        if os.getpid() != owner:  # a fork
            return
        if all(run.paths.is_over for run in runs):
            jobs.close()
        else:
            print(jobs.release(), file=sys.stderr)

    def follow() -> None:
        try:
            waiter = Waiter(runs, Progress(None), poll_interval_s=poll_interval_s)
            for views in waiter.polls():
                for future, view in zip(futures, views, strict=False):
                    if view.ended is not None:
                        future._set_end(view.ended)
                if futures and all(future.done() for future in futures):  # the rest is cancelled
                    break
            jobs.close()
            atexit.unregister(end_with_process)
        except BaseException as e:
            for future in futures:
                with suppress(InvalidStateError):
                    future.set_exception(e)
            raise

    atexit.register(end_with_process)
    threading.Thread(target=follow, name="hpc_elastic-follow", daemon=True).start()
