"""When a worker is taken for hung, and what its stack says (pure).

The clock of a worker starts anew with every sign of life: another step, a report of whatever, a
boundary, a question whether to save. It stands still while the worker is at a checkpoint of ours,
stays at one for the leader, or waits for his word on one; and while this agent itself did not run.

The limit is `launcher.agent.hang_after_s`, or 10 times the median step and at least a minute. What
comes before the second step (compiling, the first batches) is no measure: there it is ten times the
setting, and at least ten minutes; by default nothing before the first step is a hang at all. Nor is
what comes after the last one, where the script says which that is (``report(total_steps=...)``).
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.progress import Progress

LEAST_S = 60.0
START_S = 600.0
TIMES = 10.0
"""Times the median step; and times the setting, before the second step."""
_REMEMBERED = 101
_ASLEEP_S = 5.0
"""Who looks less often than that was asleep meanwhile."""


class StepClock:
    """One worker's steps; monotonic seconds.

    Args:
        after_s: The setting: None for the default, 0 for never.
        now: When the worker was started.
    """

    def __init__(self, after_s: float | None, now: float) -> None:
        self._after_s = after_s
        self._lived = self._looked = self._asked = now
        self._sign: tuple[object, ...] = ()
        self._step: int | None = None
        self._stepped = now
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._is_over = False

    def look(self, worker: Progress, now: float, *, awaited: bool = False) -> None:
        """Take note of what the worker has published.

        Args:
            worker: That.
            now: The time; to be called several times a second.
            awaited: Whether it waits for its leader's word.
        """
        slept_s = now - self._looked
        self._looked = now
        if slept_s > _ASLEEP_S:
            self._lived += slept_s
            self._asked += slept_s
            self._stepped += slept_s
        step = max((s for s in (worker.step, worker.passed) if s is not None), default=None)
        sign = (step, worker.boundary, worker.samples, worker.pulse)
        if sign != self._sign or worker.busy or worker.held or awaited:
            self._sign, self._lived = sign, now
        self._note_step(step, now)
        self._is_over = _is_over(worker, step)

    def _note_step(self, step: int | None, now: float) -> None:
        if step is None or step == self._step:
            return
        if self._step is not None and step > self._step:
            self._steps_s.append((now - self._stepped) / (step - self._step))
        self._step, self._stepped = step, now

    def asked(self, now: float) -> None:
        """The group has been looked into; if it goes on, the next time is a whole limit away."""
        self._asked = now

    @property
    def limit_s(self) -> float | None:
        """No sign of life for so long is suspect; None: nothing is."""
        if self._after_s == 0 or self._is_over or (self._after_s is None and self._step is None):
            return None
        if not self._steps_s:
            return max(START_S, TIMES * (self._after_s or 0.0))
        if self._after_s is not None:
            return self._after_s
        return max(LEAST_S, TIMES * statistics.median(self._steps_s))

    def is_alive(self, now: float) -> bool:
        """Tell whether it has shown a sign of life of late, but has not made a step.

        Others wait for it then. One that makes steps is no reason to wait for those that do not.
        """
        half_s = (self.limit_s or 0.0) / 2
        return now - self._lived < half_s <= now - self._stepped

    def stalled_s(self, now: float) -> float:
        """Return the seconds since the last sign of life."""
        return now - self._lived

    def is_due(self, now: float) -> bool:
        """Tell whether the group is to be looked into."""
        limit_s = self.limit_s
        return limit_s is not None and now - max(self._lived, self._asked) >= limit_s


def _is_over(worker: Progress, step: int | None) -> bool:
    return worker.total_steps is not None and step is not None and step >= worker.total_steps


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return it as people read it."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


_FAULTHANDLER = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_PY_SPY = re.compile(r"^    (?P<name>.+) \((?P<file>.+?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(r"^(Current thread|Thread) ")


def main_thread(text: str) -> tuple[Frame, ...]:
    """Return the frames of a dump's main thread, the innermost first; () if it has none.

    Args:
        text: As faulthandler writes it, which ends with the main thread (but of more than a hundred
            threads leaves it out; the current one is taken then), or as ``py-spy dump``, where it
            is called MainThread.
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
    named = [frames for head, frames in threads if '"MainThread"' in head or "MainThread" in head]
    cut = any(line.startswith("...") for line in text.splitlines())
    current = [frames for head, frames in threads if head.startswith("Current")]
    last = [frames for _, frames in threads[-1:]]
    candidates = [*last, *(current if cut else []), *named]
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
"""What takes long without a step: saving, loading and compiling."""
_NOT_THE_USERS = re.compile(
    rf"^<|/site-packages/|/dist-packages/|/lib(64)?/python3[^/]*/|^{_OURS}/"
)
_LOOKED_AT = 40


def waits_in(frames: Sequence[Frame]) -> str | None:
    """Return what a stack waits for others in: a collective, a backward pass; None: nothing known.

    DistributedDataParallel waits within the backward pass, where Python shows only that.
    """
    inner = list(frames[:_LOOKED_AT])
    users = next((i for i, f in enumerate(inner) if is_users(f)), len(inner))
    for pattern in (_QUORUM, _COLLECTIVE):
        names = [f.function for f in inner[:users] if pattern.search(f.file)]
        names = [name for name in names if name not in _WRAPPERS]
        if names:
            return names[-1]
    return "backward" if any(_BACKWARD.search(f.file) for f in inner[:users]) else None


def is_at_work(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack shows something that may take long and is no step."""
    return any(_WORK.search(frame.file) for frame in frames[:_LOOKED_AT])


def is_in_quorum(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack waits for other replicas (``ft=true``)."""
    return any(_QUORUM.search(frame.file) for frame in frames[:_LOOKED_AT])


def is_users(frame: Frame) -> bool:
    """Tell whether a frame is of the user's own code."""
    return not _NOT_THE_USERS.search(frame.file)


def place(frames: Sequence[Frame]) -> str:
    """Return where a stack stands: the user's innermost frame, or the innermost of all."""
    users = next((frame for frame in frames if is_users(frame)), None)
    return str(users or (frames[0] if frames else "an unknown place"))


def moves(dumps: Sequence[Sequence[Frame]]) -> bool:
    """Tell whether stacks that were taken one after the other differ."""
    return any(tuple(dump) != tuple(dumps[0]) for dump in dumps[1:])
