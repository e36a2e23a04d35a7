"""When to save: one answer on all ranks, at the same step, for every reason that there is.

    from hpc_elastic import should_checkpoint

    for step, batch in enumerate(batches, start=first_step + 1):
        train(batch)
        if should_checkpoint(step, every_s=600):
            checkpoints.save(step)

It returns true because a node is about to be taken, because a node waits to join, or because a
periodic checkpoint is due. The ranks agree through their agents and the run's leader on a step
that none of them has passed (`hpc_elastic.worker.shared_page`, `hpc_elastic.step_agreement`):
there is no collective and no synchronisation with a device, and a step at which nothing is asked
for costs less than a microsecond. Outside a run, as under torchrun, the clock of rank 0 decides,
and the ranks learn it by a small broadcast about once a second; every rank has to call it.

It may be asked several times at one step: for a log line, or for the best model beside the main
checkpoint. What the group has agreed on is the answer each time; each caller has a period of its
own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from hpc_elastic.worker import process_group
from hpc_elastic.worker.reporting import own_page
from hpc_elastic.worker.shared_page import SharedPage

_FIRST_AFTER_S = 30.0  # with an overhead, what a checkpoint costs is not known before the first one
_DEFAULT_OVERHEAD = 0.02
_ASK_AGAIN_S = 10.0
_AGREE_EVERY_S = 1.0  # outside a run, the ranks agree about so often, by the clock of rank 0
_SMOOTHING = 0.1
_MOST_PERIODS = 64  # a script whose period changes all the time has no more of them


@dataclass(frozen=True, eq=False)
class Period:
    """How often to save, by the measure that was given; see `should_checkpoint`."""

    every_steps: int | None = None
    every_s: float | None = None
    overhead: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        if len(given) > 1:
            raise ValueError(f"give one of every_steps, every_s and overhead, not {sorted(given)}")
        for name, value in given.items():
            if not value > 0 or (name == "overhead" and value >= 1):
                legal = "between 0 and 1" if name == "overhead" else "above 0"
                raise ValueError(f"{name}={value!r}: must be {legal}")

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due by the count of steps; the same on every rank."""
        return self.every_steps is not None and step % self.every_steps == 0

    def interval_s(self, cost_s: float | None) -> float | None:
        """Return the seconds between saves, by the last one's cost; None: not by time."""
        if self.every_steps is not None or self.every_s is not None:
            return self.every_s
        overhead = self.overhead or _DEFAULT_OVERHEAD
        return _FIRST_AFTER_S if cost_s is None else cost_s / overhead


_period_of = lru_cache(_MOST_PERIODS)(Period)
"""Returns the same object for the same arguments: each caller has a period of its own."""


class Clock:
    """Measures steps and checkpoints, and decides when one is due (pure; monotonic seconds)."""

    def __init__(self, now: float) -> None:
        self.cost_s: float | None = None
        """For how long the training stood still for the last checkpoint."""
        self._saved_at = dict[Period, float]()
        self._last_saved_at = self._called_at = now
        self._at_step: int | None = None
        self._due_now = set[Period]()  # the periods for which a checkpoint is made at this step
        self._saving = False
        self._step_s: float | None = None

    def called(self, step: int, now: float) -> bool:
        """Record that a step is done; return whether it is the first call of this step.

        If a checkpoint was made before it, the rest of the time is the checkpoint's cost. Any other
        call changes nothing.
        """
        if step == self._at_step:
            return False
        self._at_step = step
        if self._due_now:
            self._due_now.clear()
        took_s, self._called_at = now - self._called_at, now
        if self._saving:
            self._saving = False
            self.cost_s = max(0.0, took_s - (self._step_s or 0.0))
        elif self._step_s is None:
            self._step_s = took_s
        else:
            self._step_s += _SMOOTHING * (took_s - self._step_s)
        return True

    def saves(self, period: Period, now: float) -> None:
        """Record that a checkpoint is made now, for the caller with this period."""
        if not self._saving:
            self._saving, self._called_at = True, now
        self._saved_at[period] = self._last_saved_at = now
        self._due_now.add(period)

    def is_due(self, period: Period, now: float) -> bool:
        """Return whether it is time for the next checkpoint of a caller; the same all step long."""
        return self.left_s(period, now) <= 0 or period in self._due_now

    def is_due_now(self, period: Period) -> bool:
        """Return whether a checkpoint of a caller is made at this step."""
        return period in self._due_now

    def left_s(self, period: Period, now: float) -> float:
        """Return the seconds until the next checkpoint of a caller; below 0 once it is time."""
        interval_s = period.interval_s(self.cost_s)
        if interval_s is None:
            return math.inf
        saved_at = self._saved_at.get(period)
        if saved_at is None:
            if len(self._saved_at) == _MOST_PERIODS:
                self._saved_at.clear()
            saved_at = self._saved_at[period] = self._last_saved_at
        return interval_s - (now - saved_at)


class PeriodDecision:
    """The answers of one process, from its control page and its clock."""

    def __init__(self, page: SharedPage | None, rank: int, world_size: int, now: float) -> None:
        self._page = page
        self._is_first = rank == 0
        self._world_size = world_size
        self._clock = Clock(now)
        self._asked_at: float | None = None
        self._agreed = dict[Period, tuple[int, int, float]]()
        """Outside a run: the step at which the ranks agreed last, that at which they do so again,
        and the time."""
        self._is_agreed = False  # whether all ranks save at the present step

    def at(self, step: int, period: Period, now: float) -> bool:
        """Decide whether to save after this step; every rank decides the same."""
        is_new = self._clock.called(step, now)
        if self._page is None:
            yes = period.is_due(step) or self._is_due_outside(step, period, now)
        else:
            if is_new:
                self._is_agreed = self._page.poll_checkpoint(step)
            yes = self._is_agreed or period.is_due(step)
            waits = self._asked_at is not None and now - self._asked_at < _ASK_AGAIN_S
            if not yes and self._is_first and not waits and self._clock.is_due(period, now):
                self._asked_at = now  # once, and again if nothing comes of it
                self._page.want_checkpoint()
        if yes:
            self._asked_at = None
            self._clock.saves(period, time.monotonic() if self._page else now)
        return yes

    def _is_due_outside(self, step: int, period: Period, now: float) -> bool:
        """Return whether a save is due by rank 0's clock, which it broadcasts now and then."""
        size = process_group.size()
        if size is None and self._world_size > 1 and period.every_steps is None:
            raise ValueError(
                "outside a run of hpc_elastic several workers need a process group to agree by the "
                "clock: call torch.distributed.init_process_group() before, or give every_steps"
            )
        if size in (None, 1) or period.every_steps is not None:
            return self._clock.is_due(period, now)
        last_step, next_step, last_at = self._agreed.get(period, (step, step, now))
        if last_step <= step < next_step:
            return self._clock.is_due_now(period)
        wait_s = min(self._clock.left_s(period, now), _AGREE_EVERY_S)
        made = max(1, step - last_step)
        num_steps = min(2 * made, int(wait_s * made / max(now - last_at, 1e-6)))
        mine = [self._clock.is_due(period, now), max(1, num_steps)]
        is_due, num_steps = process_group.broadcast_row(mine)
        if len(self._agreed) == _MOST_PERIODS:
            self._agreed.clear()
        self._agreed[period] = step, step + num_steps, now
        return bool(is_due)


class _Own:
    """This process's decision, made on first use."""

    decision: PeriodDecision | None = None
    rule: Callable[[int, bool, bool], bool] | None = None
    clock = Clock(0.0)  # of the rule


def set_checkpoint_policy(rule: Callable[[int, bool, bool], bool] | None) -> None:
    """Replace the rule of `should_checkpoint` in this process (for `hpc_elastic.ft.Manager`).

    Whether it is its replica group that saves for all, and whether all ranks of the group decide
    the same, is up to a Manager. ``rule`` returns whether to save, from the step, whether a
    checkpoint is due by the count of steps, and whether one is due by this process's clock. It is
    asked for each caller, also several times at one step. None: ask the control page again.
    """
    _Own.rule, _Own.clock = rule, Clock(time.monotonic())


def drop_checkpoint_policy(rule: Callable[[int, bool, bool], bool]) -> None:
    """Undo `set_checkpoint_policy`, unless another rule has replaced this one."""
    if _Own.rule == rule:
        set_checkpoint_policy(None)


def should_checkpoint(
    step: int,
    *,
    every_steps: int | None = None,
    every_s: float | None = None,
    overhead: float | None = None,
) -> bool:
    """Return whether to save now; call it on every rank after every optimizer step.

    True on all ranks at the same step. Where a node is about to leave or to join, the checkpoint
    must be complete on this rank before the training goes on: `Checkpointer.save` sees to that, and
    then stays until the group is formed anew; a script that saves by itself calls
    `mark_checkpoint` afterwards. Another call at the same step gets the same answer; one with
    another period also gets what the group has agreed on.

    Args:
        step: Optimizer steps done, at least 0, and less than 2**40. Steps of gradient accumulation
            do not count.
        every_steps: Save each time this many steps are done.
        every_s: Save when this many seconds have passed since the last checkpoint.
        overhead: Save as often as this share of the time allows, measured by the last checkpoint;
            0.02 is two percent, the default if none of the three is given.

    Raises:
        ValueError: more than one of the three is given, or one is out of range; or there are
            several workers outside a run, without a process group and ``every_steps``.
        HpcElasticError: the agent is silent; the group is lost.
    """
    now, period = time.monotonic(), _period_of(every_steps, every_s, overhead)
    if _Own.rule is not None:
        clock = _Own.clock
        clock.called(step, now)
        yes = _Own.rule(step, period.is_due(step), clock.is_due(period, now))
        if yes:
            clock.saves(period, time.monotonic())
        return yes
    decision = _Own.decision
    if decision is None:
        rank = int(os.environ.get("RANK", 0))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        decision = _Own.decision = PeriodDecision(own_page(), rank, world_size, now)
    return decision.at(step, period, now)


def preemption_deadline() -> float | None:
    """Return when this node is taken, in seconds since the epoch (`time.time`).

    None if no preemption is announced. Scripts rarely need it: `should_checkpoint` decides when to
    save. The deadline may be in the past.
    """
    page = own_page()
    left = page.notice_left_s if page is not None else None
    return None if left is None else time.time() + left


def release_node(*, within_s: float = 600.0) -> None:
    """Release this worker's node, as if Slurm were about to preempt it (any rank).

    The group saves and goes on without the node, and the node's task is requeued. For a script
    that finds its node to be slow or faulty. Outside a run it does nothing.

    Args:
        within_s: Seconds after which the node is released without a checkpoint; above 0.
    """
    if not within_s > 0:
        raise ValueError(f"within_s={within_s!r}: must be above 0")
    page = own_page()
    if page is not None:
        page.release_node(within_s)
