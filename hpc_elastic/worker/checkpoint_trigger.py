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
for costs less than a microsecond. Outside a run it works for one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc_elastic.worker.reporting import own_page
from hpc_elastic.worker.shared_page import CheckpointPoll, SharedPage

_FIRST_AFTER_S = 30.0
"""With an overhead, what a checkpoint costs is not known before the first one."""
_DEFAULT_OVERHEAD = 0.02
_ASK_AGAIN_S = 10.0
_SMOOTHING = 0.1


@dataclass(frozen=True)
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
        """Return the seconds between two checkpoints; None where time does not count.

        Args:
            cost_s: For how long the training stood still for the last one; None before the first.
        """
        if self.every_steps is not None or self.every_s is not None:
            return self.every_s
        overhead = self.overhead or _DEFAULT_OVERHEAD
        return _FIRST_AFTER_S if cost_s is None else cost_s / overhead


class Clock:
    """Measures steps and checkpoints, and decides when the next one is due (pure).

    Times are monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.cost_s: float | None = None
        """For how long the training stood still for the last checkpoint."""
        self._saved_at = self._called_at = now
        self._saving = False
        self._step_s: float | None = None

    def called(self, now: float) -> None:
        """A step is done; if a checkpoint was made before it, the rest of the time is its cost."""
        took_s, self._called_at = now - self._called_at, now
        if self._saving:
            self._saving = False
            self.cost_s = max(0.0, took_s - (self._step_s or 0.0))
        elif self._step_s is None:
            self._step_s = took_s
        else:
            self._step_s += _SMOOTHING * (took_s - self._step_s)

    def saves(self, now: float) -> None:
        """A checkpoint is made now."""
        self._saving, self._saved_at, self._called_at = True, now, now

    def is_due(self, period: Period, now: float) -> bool:
        """Return whether it is time for the next checkpoint."""
        interval_s = period.interval_s(self.cost_s)
        return interval_s is not None and now - self._saved_at >= interval_s


class PeriodDecision:
    """The answers of one process, from its control page and its clock."""

    def __init__(self, page: SharedPage | None, rank: int, world_size: int, now: float) -> None:
        self._page = page
        self._is_first = rank == 0
        self._world_size = world_size
        self._clock = Clock(now)
        self._asked_at: float | None = None

    def at(self, step: int, period: Period, now: float) -> bool:
        """Decide whether to save after this step; every rank decides the same."""
        self._clock.called(now)
        if self._page is None:
            if self._world_size > 1 and period.every_steps is None:
                raise ValueError(
                    "outside a run of hpc_elastic several workers cannot agree by the clock: "
                    "give every_steps, or start the script with launcher=slurm or launcher=local"
                )
            yes = period.is_due(step) or self._clock.is_due(period, now)
        else:
            polled = self._page.poll_checkpoint(step)
            yes = polled is not CheckpointPoll.NONE or period.is_due(step)
            waits = self._asked_at is not None and now - self._asked_at < _ASK_AGAIN_S
            if not yes and self._is_first and not waits and self._clock.is_due(period, now):
                self._asked_at = now  # once, and again if nothing comes of it
                self._page.want_checkpoint()
        if yes:
            self._asked_at = None
            self._clock.saves(time.monotonic() if self._page else now)
        return yes


class _Own:
    """This process's decision, made on first use."""

    decision: PeriodDecision | None = None
    period: Period | None = None
    rule: Callable[[int, bool, bool], bool] | None = None
    clock = Clock(0.0)
    """Of the rule."""


def set_checkpoint_policy(rule: Callable[[int, bool, bool], bool] | None) -> None:
    """Replace the rule of `should_checkpoint` in this process (for `hpc_elastic.ft.Manager`).

    A replica group of a run with ``ft=true`` saves for all: whether it is this one, and whether all
    its ranks decide the same, is up to its Manager.

    Args:
        rule: Returns whether to save, from the step, whether a checkpoint is due by the count of
            steps, and whether one is due by this process's clock. None: ask the control page again.
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
    """Return whether to save now; call it on every rank, once after every optimizer step.

    True on all ranks at the same step. Where a node is about to leave or to join, the checkpoint
    must be complete on this rank before the training goes on: `Checkpointer.save` sees to that, and
    then stays until the group is formed anew; a script that saves by itself calls
    `mark_checkpoint` afterwards.

    Args:
        step: Optimizer steps done, at least 0, and less than 2**40. Steps of gradient accumulation
            do not count.
        every_steps: Save each time this many steps are done.
        every_s: Save when this many seconds have passed since the last checkpoint.
        overhead: Save as often as this share of the time allows, measured by the last checkpoint;
            0.02 is two percent, the default if none of the three is given.

    Raises:
        ValueError: more than one of the three is given, or one is out of range; or there are
            several workers outside a run, and not ``every_steps``.
        HpcElasticError: the agent is silent; the group is lost.
    """
    now = time.monotonic()
    if _Own.rule is not None:
        given, clock = Period(every_steps, every_s, overhead), _Own.clock
        clock.called(now)
        yes = _Own.rule(step, given.is_due(step), clock.is_due(given, now))
        if yes:
            clock.saves(time.monotonic())
        return yes
    decision, period = _Own.decision, _Own.period
    if decision is None or period is None:
        period = _Own.period = Period(every_steps, every_s, overhead)
        rank = int(os.environ.get("RANK", 0))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        decision = _Own.decision = PeriodDecision(own_page(), rank, world_size, now)
    elif (period.every_steps, period.every_s, period.overhead) != (every_steps, every_s, overhead):
        period = _Own.period = Period(every_steps, every_s, overhead)
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
