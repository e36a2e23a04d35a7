"""Detection of hangs on one node: step clocks and stack samples of its workers.

The leader decides what is a hang (`rendezvous.hang_diagnosis`) and queries all nodes; with
``ft=true`` each agent decides for its own replica. `StepClock` decides when to suspect one.
`StackSampler` takes a second or two, on a thread of its own.

A worker's clock restarts with every sign of life: a step, a report, a checkpoint boundary, a call
of `should_checkpoint`. It stands still while the worker saves, waits at a checkpoint or for the
leader's confirmation of one, and while this agent itself did not run.

The limit is `launcher.agent.hang_timeout_s`, or 10 times the median step and at least a minute, of
a replica `REPLICA_MIN_LIMIT_S`. The time before the second step (compilation, the first batches) is
no measure: there the limit is ten times the setting, and at least ten minutes. The first step has a
limit of its own (`first_step_limit`). Nothing is a hang after the function has returned, or after
the last step, if the script reports it (``report(total_steps=...)``).

All workers of a node are sampled at the same time, and for no longer than `WITHIN_S`: a node that
does not answer the leader counts as hung. Workers that are not sampled by then are left out.
"""

from __future__ import annotations

import logging
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hpc_elastic.agent import stacks
from hpc_elastic.agent.worker_process import WorkerFiles
from hpc_elastic.config.schema import AgentSettings
from hpc_elastic.rendezvous import hang_diagnosis
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.messages import Failed, RankState, Stacks, Stall
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.worker.shared_page import SharedPage, WorkerStatus

_log = logging.getLogger(__name__)

_WRITTEN_WITHIN_S = 2.0
_BUSY_SHARE = 0.5
"""A main thread that uses or wants a CPU for more than this share of the time computes."""
_STOPPED = "T"
_DEBUGGED = "t"


@dataclass(frozen=True)
class WatchedWorker:
    """One worker of this node; ``dump`` is the file of its stacks."""

    page: SharedPage
    files: WorkerFiles
    dump: Path


class HangWatch:
    """The watch over the workers of one round.

    ``longest_start_s`` is that of `first_step_limit`. ``alone`` is the agent, and what writes its
    events, if its workers are a replica: then it decides by itself. ``gpus_fail`` returns whether
    the node's GPUs cannot be measured.
    """

    def __init__(
        self,
        leader: Session,
        workers: Sequence[WatchedWorker],
        settings: AgentSettings,
        longest_start_s: float | None = None,
        *,
        alone: tuple[Agent, Callable[..., None]] | None = None,
        gpus_fail: Callable[[], bool] = lambda: False,
    ) -> None:
        now = time.monotonic()
        self._leader = leader
        self._workers = workers
        self._alone = alone
        self._gpus_fail = gpus_fail
        least_s = MIN_LIMIT_S if alone is None else REPLICA_MIN_LIMIT_S
        after_s = settings.hang_timeout_s
        first = first_step_limit(settings.first_step_timeout_s, after_s, longest_start_s)
        self._clocks = [StepClock(after_s, now, first.limit_s, least_s) for _ in workers]
        self._first_step = first
        self._answered = 0
        self._sampling: threading.Thread | None = None
        self._writing: threading.Thread | None = None

    def update(self, pids: Mapping[int, int], now: float, *, done: bool = False) -> None:
        """Read the workers' pages, and start a diagnosis if due; called several times a second.

        ``pids`` (by local rank) include workers that have returned. The leader may still query once
        all have (``done``).
        """
        request = self._leader.checkpoint_request
        awaited = None if request is None or request.confirmed else request.number
        for worker, clock in zip(self._workers, self._clocks, strict=True):
            published = worker.page.read()
            clock.update(published, now, awaited=published.waiting == awaited)
        if self._sampling is not None and self._sampling.is_alive():
            return
        number, due = self._leader.stacks, [c for c in self._clocks if c.is_due(now)]
        work: Callable[[], None] | None = None
        if number != self._answered and number:
            self._answered = number
            work = partial(self._answer, number, pids)
        elif due and not done:
            stall = Stall(
                due[0].stalled_s(now), due[0].limit_s or 0.0,
                assumed=self._first_step.is_assumed and not due[0].has_begun,
            )  # fmt: skip
            _log.warning("no step for %.0f s (limit %.0f s)", stall.stalled_s, stall.limit_s)
            if self._alone is None:
                self._leader.report(stall)
            else:
                work = partial(self._judge, *self._alone, pids, stall)
        else:
            return
        for clock in self._clocks:
            clock.postpone(now)
        if work is not None:
            self._sampling = threading.Thread(target=work, name="stacks", daemon=True)
            self._sampling.start()

    def _answer(self, number: int, pids: Mapping[int, int]) -> None:
        self._leader.report(Stacks(number, self._sample_workers(pids)))

    def _judge(
        self, me: Agent, write: Callable[..., None], pids: Mapping[int, int], stall: Stall
    ) -> None:
        found = [(me, state) for state in self._sample_workers(pids)]
        finding = hang_diagnosis.diagnose_hang(found, stall)
        if finding is not None:
            note = hang_diagnosis.hang_note(finding, stall.stalled_s)
            write(note.kind, **note.fields)
            round_ = self._workers[0].files.round
            failures = hang_diagnosis.hang_failures(finding, stall.stalled_s, round_)
            self._leader.report(Failed(failures))

    def _sample_workers(self, pids: Mapping[int, int]) -> list[RankState]:
        """Sample all workers, each on a thread of its own, until done or for `WITHIN_S`."""
        samplers = [StackSampler(pids.get(w.files.local_rank), w) for w in self._workers]
        since = time.monotonic()
        loads = {pid: stacks.main_thread_load_s(pid) for pid in pids.values()}
        deadline = since + WITHIN_S
        threads = [
            threading.Thread(target=sampler.sample, args=(deadline,), name="stack", daemon=True)
            for sampler in samplers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        wanted_s = _BUSY_SHARE * (time.monotonic() - since)
        control, places = self._workers[0].dump.parent, [w.files.local_rank for w in self._workers]
        collectives = stacks.take_collectives(control, places)
        found = []
        for sampler, clock in zip(samplers, self._clocks, strict=True):
            pid, worker, computes = sampler.pid, sampler.worker, False
            if pid is not None and (before_s := loads.get(pid)) is not None:
                after_s = stacks.main_thread_load_s(pid)
                computes = after_s is not None and after_s - before_s > wanted_s
                computes = computes and not stacks.has_gpu_open(pid)
            seen = WorkerSample(
                letter=None if pid is None else stacks.process_state(pid),
                dumps=[parse_main_thread(text) for text in list(sampler.texts)],
                published=worker.page.read(),
                computes=computes,
                alive=sampler.was_busy or clock.is_alive(time.monotonic()),
                alone=self._alone is not None,
            )
            state, waits = seen.state, None
            if seen.dumps and state in ("stands", "moves"):
                waits = waiting_collective(seen.dumps[-1])
            found.append(RankState(
                worker.files.rank, worker.files.local_rank, state, seen.place, waits,
                str(worker.files.stack), time.time(),
                collectives.get(worker.files.local_rank, {}), self._gpus_fail(),
            ))  # fmt: skip
        self._write(found, samplers)
        return found

    def _write(self, found: Sequence[RankState], samplers: Sequence[StackSampler]) -> None:
        """Write the stacks to the workers' files; wait briefly, since the file system may hang."""
        if self._writing is not None and self._writing.is_alive():
            _log.warning("the stacks are not written: the last ones are still being written")
            return
        now, host = time.strftime("%Y-%m-%d %H:%M:%S"), self._workers[0].files.place.host
        texts = [
            f"{now} rank {state.rank} on {host}, process {sampler.pid}: {state.state}, "
            f"{state.where}\n{''.join(sampler.texts[-1:])}\n"
            for state, sampler in zip(found, samplers, strict=True)
        ]
        self._writing = threading.Thread(
            target=self._append, args=(texts,), name="stack files", daemon=True
        )
        self._writing.start()
        self._writing.join(_WRITTEN_WITHIN_S)

    def _append(self, texts: Sequence[str]) -> None:
        for worker, text in zip(self._workers, texts, strict=True):
            try:
                with worker.files.stack.open("a") as f:
                    f.write(text)
            except OSError as e:
                _log.warning("%s: not written: %s", worker.files.stack, e)


@dataclass(frozen=True)
class WorkerSample:
    """A sample of one worker; ``dumps`` are stacks of its main thread, in order.

    ``computes``: its main thread uses or wants a CPU nearly always, without a GPU: a thread that
    waits for its GPU spins. ``alive``: it was busy during the sample, or `StepClock.is_alive`.
    ``alone``: it is a replica, which is busy while it waits for others.
    """

    letter: str | None
    dumps: Sequence[tuple[Frame, ...]]
    published: WorkerStatus
    computes: bool = False
    alive: bool = False
    alone: bool = False

    @property
    def state(self) -> str:
        """The state of the rank (see `RankState`)."""
        if self.letter in (None, "Z") or self.published.returned:
            return "done"
        if self.letter == _STOPPED:
            return "stopped"
        last = self.dumps[-1][:_MAX_FRAMES] if self.dumps else ()
        waits = self.alone and any(_QUORUM.search(frame.file) for frame in last)
        if self.published.busy or self.published.paused or self.alive or waits:
            return "busy"
        if self.letter == _DEBUGGED:
            return "moves"
        if not self.dumps:
            return "silent"
        changes = any(dump != self.dumps[0] for dump in self.dumps[1:])
        works = self.computes or changes or any(_WORK.search(frame.file) for frame in last)
        return "moves" if works else "stands"

    @property
    def place(self) -> str:
        """The place in the code, for people (see `RankState`)."""
        match self.state:
            case "stopped":
                return "stopped by a signal (SIGSTOP, or the like)"
            case "silent":
                return f"out of reach: its process is in state {self.letter}, and shows no stack"
            case "done":
                return "done"
            case "busy" if not self.dumps:
                return "work that is no step"
        return describe_place(self.dumps[-1] if self.dumps else ())


MIN_LIMIT_S = 60.0
REPLICA_MIN_LIMIT_S = 150.0
"""A replica that waits in a collective for a slow one is not hung: the collective gives up first,
and then the quorum leaves the slow one out."""
START_LIMIT_S = 600.0
LIMIT_FACTOR = 10.0
"""Factor for the median step, for the setting before the second step, and for measured starts."""
ASSUMED_START_S = 1800.0  # gloo gives up a connection or a collective after this time
_REMEMBERED = 101
_ASLEEP_S = 5.0  # an agent that looks less often was suspended meanwhile


@dataclass(frozen=True)
class FirstStepLimit:
    """The time limit for the first step of a round; None for none.

    ``is_assumed``: it is neither set nor measured. The script may make no steps that can be
    counted, so it applies only if a rank waits in a collective.
    """

    limit_s: float | None
    is_assumed: bool = False


def first_step_limit(
    wanted_s: float | None, hang_s: float | None, longest_start_s: float | None
) -> FirstStepLimit:
    """Return the limit of a round that is about to start (pure).

    ``wanted_s`` and ``hang_s`` are `launcher.agent.first_step_timeout_s` and `hang_timeout_s`: None
    for the default, 0 for never; 0 of the second applies here by default. ``longest_start_s`` is
    the longest time to the first step that the node has measured in this run.
    """
    if wanted_s is not None:
        return FirstStepLimit(wanted_s or None)
    if hang_s == 0:
        return FirstStepLimit(None)
    if hang_s is None and longest_start_s is None:
        return FirstStepLimit(ASSUMED_START_S, is_assumed=True)
    measured_s = LIMIT_FACTOR * max(hang_s or 0.0, longest_start_s or 0.0)
    return FirstStepLimit(max(START_LIMIT_S, measured_s))


class StepClock:
    """The time since one worker's last step; monotonic seconds.

    ``after_s`` is the setting: None for the default, of at least ``least_s``, 0 for never.
    ``first_s`` is the limit before the first step; None for none.
    """

    def __init__(
        self,
        after_s: float | None,
        now: float,
        first_s: float | None = None,
        least_s: float = MIN_LIMIT_S,
    ) -> None:
        self._after_s = after_s
        self._least_s = least_s
        self._first_s = first_s
        self._sign_at = self._updated_at = self._postponed_at = now
        self._sign: tuple[object, ...] = ()
        self._step: int | None = None
        self._step_at = now
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._is_over = False

    def update(self, worker: WorkerStatus, now: float, *, awaited: bool = False) -> None:
        """Update the clock by a worker's page; ``awaited``: the worker waits for the leader."""
        slept_s = now - self._updated_at
        self._updated_at = now
        if slept_s > _ASLEEP_S:
            self._sign_at += slept_s
            self._postponed_at += slept_s
            self._step_at += slept_s
        step = max((s for s in (worker.step, worker.passed) if s is not None), default=None)
        sign = (step, worker.boundary, worker.samples, worker.pulse)
        if sign != self._sign or worker.busy or worker.paused or awaited:
            self._sign, self._sign_at = sign, now
        if step is not None and step != self._step:
            if self._step is not None and step > self._step:
                self._steps_s.append((now - self._step_at) / (step - self._step))
            self._step, self._step_at = step, now
        total = worker.total_steps
        is_last = total is not None and step is not None and step >= total
        self._is_over = is_last or worker.returned

    @property
    def has_begun(self) -> bool:
        """Whether the worker has made a step."""
        return self._step is not None

    def postpone(self, now: float) -> None:
        """Record a diagnosis; the next one is due after a whole limit."""
        self._postponed_at = now

    @property
    def limit_s(self) -> float | None:
        """Longest time without a sign of life; None for no limit."""
        if self._is_over:
            return None
        if not self.has_begun:
            return self._first_s
        if self._after_s == 0:
            return None
        if not self._steps_s:
            return max(START_LIMIT_S, LIMIT_FACTOR * (self._after_s or 0.0))
        if self._after_s is not None:
            return self._after_s
        return max(self._least_s, LIMIT_FACTOR * statistics.median(self._steps_s))

    def is_alive(self, now: float) -> bool:
        """Return whether it shows signs of life without a step: other ranks may wait for it."""
        half_s = (self.limit_s or 0.0) / 2
        return now - self._sign_at < half_s <= now - self._step_at

    def stalled_s(self, now: float) -> float:
        """Return the seconds since the last sign of life."""
        return now - self._sign_at

    def is_due(self, now: float) -> bool:
        """Return whether a diagnosis is due."""
        limit_s = self.limit_s
        return limit_s is not None and now - max(self._sign_at, self._postponed_at) >= limit_s


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


_FAULTHANDLER = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_PY_SPY = re.compile(r"^    (?P<name>.+) \((?P<file>.+?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(r"^(Current thread|Thread) ")


def parse_main_thread(text: str) -> tuple[Frame, ...]:
    """Return the frames of a dump's main thread, the innermost first; () if it has none.

    The dump of faulthandler ends with the main thread (unless there are more than a hundred
    threads; then the current one is taken); that of ``py-spy dump`` calls it MainThread.
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads and (found := _FAULTHANDLER.match(line) or _PY_SPY.match(line)):
            number = found["line"] or "0"
            at = int(number) if number.isdigit() else 0
            function = found["name"].rpartition(".")[2]  # py-spy: decorate.<locals>.wrapper
            threads[-1][1].append(Frame(found["file"], at, function))
    named = [frames for head, frames in threads if "MainThread" in head]
    current = [frames for head, frames in threads if head.startswith("Current")]
    is_cut = any(line.startswith("...") for line in text.splitlines())
    candidates = [*(frames for _, frames in threads[-1:]), *(current if is_cut else []), *named]
    return tuple(candidates[-1]) if candidates else ()


_COLLECTIVE = re.compile(r"/torch/distributed/")
_WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context", "__call__", "_call_impl")
_BACKWARD = re.compile(r"/torch/autograd/")
_OURS = re.escape(str(Path(__file__).parents[1]))
_QUORUM = re.compile(rf"^{_OURS}/ft/")
_WORK = re.compile(
    r"/torch/(serialization\.py|distributed/checkpoint/|_dynamo/convert_frame"
    r"|_inductor/(compile_fx|graph|codecache|async_compile))|/triton/compiler/|/safetensors/"
    rf"|^{_OURS}/checkpoint/"
)
"""Work that takes long without a step: saving, loading and compiling."""
_NOT_THE_USERS = re.compile(
    rf"^<|/site-packages/|/dist-packages/|/lib(64)?/python3[^/]*/|^{_OURS}/"
)
_MAX_FRAMES = 40


def waiting_collective(frames: Sequence[Frame]) -> str | None:
    """Return the collective in which a stack waits for other ranks; None if there is none.

    DistributedDataParallel waits within the backward pass, and Python shows only ``backward``.
    """
    inner = list(frames[:_MAX_FRAMES])
    users = next((i for i, f in enumerate(inner) if is_user_frame(f)), len(inner))
    for pattern in (_QUORUM, _COLLECTIVE):
        names = [f.function for f in inner[:users] if pattern.search(f.file)]
        names = [name for name in names if name not in _WRAPPERS]
        if names:
            return names[-1]
    return "backward" if any(_BACKWARD.search(f.file) for f in inner[:users]) else None


def is_user_frame(frame: Frame) -> bool:
    """Return whether a frame is of the user's own code."""
    return not _NOT_THE_USERS.search(frame.file)


def describe_place(frames: Sequence[Frame]) -> str:
    """Return the place of a stack: the user's innermost frame, or else the innermost."""
    users = next((frame for frame in frames if is_user_frame(frame)), None)
    return str(users or (frames[0] if frames else "an unknown place"))


WITHIN_S = 10.0  # below `rendezvous.hang_diagnosis.ANSWER_S`, with time for a failure of py-spy
_PAUSES_S = (0.3, 0.5, 0.8)  # pauses between the samples of a stack


@dataclass
class StackSampler:
    """Samples the stacks of one worker, in order; its process id is None if it has ended."""

    pid: int | None
    worker: WatchedWorker
    texts: list[str] = field(default_factory=list)
    was_busy: bool = False  # with long work, which ends the samples

    def sample(self, deadline: float) -> None:
        """Take samples until the deadline; monotonic seconds."""
        for pause_s in (0.0, *_PAUSES_S):
            time.sleep(pause_s)
            published = self.worker.page.read()
            self.was_busy = bool(published.busy or published.paused)
            if self.was_busy or time.monotonic() > deadline:
                return
            if self.pid is not None and stacks.process_state(self.pid) not in ("T", "Z", None):
                text = stacks.take_stacks(self.pid, self.worker.dump)
                self.texts += [text] if text else []
