"""What the queue lets a run do: the one port through which a leader sees the cluster.

`QueuePolicy` puts together what `limits`, `siblings` and `neighbours` do for a run. All of it is
optional: a run trains without. So an unexpected answer of Slurm, or an unreadable file of a
sibling, is no advice, whatever error it causes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.site.limits import TimeSlots
from hpc_elastic.site.neighbours import Neighbours, NodeReturn
from hpc_elastic.site.nodes import list_drained, query_reserved
from hpc_elastic.site.siblings import Note, SweepQueue
from hpc_elastic.slurm.client import SlurmClient

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class OptionalCalls:
    """Calls that a run can do without: a failure is logged once, until the call succeeds again."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def answer(self, without: str, call: Callable[[], _T]) -> _T | None:
        """Return the answer of a call; None if it fails (``without``: what that means)."""
        try:
            answer = call()
        except Exception as e:
            if without not in self._failing:
                is_expected = isinstance(e, (HpcElasticError, OSError))
                _log.warning("%s: %s", without, e, exc_info=not is_expected)
            self._failing.add(without)
            return None
        self._failing.discard(without)
        return answer


@dataclass(frozen=True)
class QueueQuestion:
    """The state of a run, as far as the policy depends on it.

    ``lost`` tasks have their attempts: Slurm detects a loss late. ``is_short``: it waits for nodes
    to its minimum, and is to know whether they may come. While it ``trains``, siblings may start;
    if it ``grows``, its other tasks too. ``returnable`` are tasks that may leave their nodes for a
    job of somebody else, each with its host, in the order in which they are to.
    """

    lost: Mapping[str, int] = field(default_factory=dict)
    is_short: bool = False
    trains: bool = False
    grows: bool = True
    returnable: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class QueueAdvice:
    """What the queue lets a run do; without a value there is no advice.

    ``blocked_why``: why the run cannot get its minimum at present. ``max_nodes``: the size up to
    which it grows beside its siblings, infinite without a limit. ``drained``: those of its nodes
    that are drained, each with Slurm's state; ``reserved``: those that a reservation takes soon,
    each with its start. ``returns``: what it gives back, each for one job.
    """

    blocked_why: str | None = None
    max_nodes: float | None = None
    drained: Mapping[str, str] = field(default_factory=dict)
    reserved: Mapping[str, str] = field(default_factory=dict)
    returns: Sequence[NodeReturn] = ()


class QueuePolicy:
    """The policy of one run in Slurm's queue. Calls block for as long as Slurm does.

    No method raises (`OptionalCalls`). ``partition`` counts if the submission named none, and no
    task waits. ``note`` writes an event.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        partition: str | None,
        client: SlurmClient,
        *,
        note: Note = lambda kind, **fields: None,
    ) -> None:
        self._client = client
        self._spec = spec
        self._time_slots = [
            TimeSlots([(spec, pool)], partition, client, leads=True)
            for pool in spec.pools
            if pool.restored_limit_s is not None
        ]
        gives_way = getattr(spec.settings.launcher, "give_way", "off") != "off"
        self._neighbours = Neighbours(run, spec, client) if gives_way else None
        listed = self._neighbours.listed if self._neighbours else lambda: None
        self._siblings = SweepQueue(run, spec, partition, client, note, listed)
        self._lock = threading.Lock()
        self._calls = OptionalCalls()

    def tick(self, question: QueueQuestion, hosts: Collection[str] = ()) -> QueueAdvice:
        """Let siblings start, and fit time limits, as far as due; ``hosts``: the run's nodes."""
        answer, client, siblings = self._calls.answer, self._client, self._siblings
        why = largest = drained = reserved = returns = None
        with self._lock:
            if question.is_short:
                what = "the other runs of the user cannot be listed"
                why = answer(what, partial(siblings.why_blocked, question.lost))
            if question.trains:
                what = "other runs of the user may start late"
                let_start = partial(siblings.let_others_start, grows=question.grows)
                largest = answer(what, partial(let_start, question.lost))
            if largest is not None and hosts:  # Slurm was queried now
                what = "whether nodes are drained is not known"
                drained = answer(what, partial(list_drained, client, hosts))
                what = "reservations ahead are not known"
                reserved = answer(what, partial(query_reserved, client, self._spec))
            self._fit(lambda slots: slots.fit_if_due())
            if self._neighbours is not None:
                what = "jobs of others may wait for nodes of this run"
                check = partial(self._neighbours.check, question.returnable, siblings.job_ids)
                returns = answer(what, check)
        return QueueAdvice(why, largest, drained or {}, reserved or {}, returns or ())

    def leave_run(self) -> None:
        """Fit the time limits once more, if this process has: it leaves the run to another."""
        self._fit(lambda slots: slots.fit() if slots.has_fitted else None)

    def end_run(self) -> None:
        """Let siblings start in the place of the run, which has ended."""
        what = "other runs of the user may start minutes later"
        with self._lock:
            self._calls.answer(what, lambda: self._siblings.let_others_start(ends=True))

    def _fit(self, fit: Callable[[TimeSlots], object]) -> None:
        what = "waiting tasks of the run may start late"
        self._calls.answer(what, lambda: [fit(slots) for slots in self._time_slots])
