"""Worker channel: carries checkpoint requests and reports between a leader and one node's workers.

From the workers' pages to the leader go complete checkpoints and the wish for one. From the leader
to the pages goes its checkpoint request (`hpc_elastic.worker.shared_page` has the theory), and the
node votes on it.

A request is voted on once it has been on every page for `SEEN_AFTER_S`: then a worker that has
published an earlier step will see it in time, and one that is at the step either waits there, or
has passed it. The node votes once more when all workers have passed the step of a confirmed
request, since the next request would replace it on the page of one that has not come to it. It also
votes again on a request without a step, once a worker polls steps after all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hpc_elastic._util import ThroughputMeter
from hpc_elastic.rendezvous.group_change import STRAGGLE_S
from hpc_elastic.rendezvous.messages import CheckpointAnnounced, CheckpointWanted, Vote
from hpc_elastic.rendezvous.session import Session
from hpc_elastic.worker.shared_page import CheckpointRequest, SharedPage, WorkerStatus

Rule = Callable[[CheckpointRequest, WorkerStatus], bool | None]

SEEN_AFTER_S = 0.005  # a store into a page is visible to every core long before

_PACE_S = 3.0  # the pace of the workers is measured over this long
_SHORTEST_S = 1.0  # over less it would be a matter of chance


def can_save_at(request: CheckpointRequest, worker: WorkerStatus) -> bool | None:
    """Return whether a worker will save at the step of a request if it is confirmed (pure).

    Step 0 asks which workers poll steps at all: True for those that do not. None if the worker has
    come to that step, and does not wait there: it has passed it, or is about to wait.
    """
    if worker.passed is None or worker.passed < (request.step or 0):
        return True
    if not request.step:
        return False
    if worker.waiting == request.number:
        return True
    return None if worker.passed == request.step else False


class WorkerChannel:
    """What one node's workers and their leader exchange in one round.

    The simulator's ``sleep``, until a store into a page is visible, does nothing, and it breaks the
    rule of votes, ``can_save_at``, on purpose.
    """

    def __init__(
        self,
        leader: Session,
        pages: Sequence[SharedPage],
        *,
        sleep: Callable[[float], None] = time.sleep,
        can_save_at: Rule = can_save_at,
    ) -> None:
        self._leader = leader
        self._pages = pages
        self._sleep = sleep
        self._can_save_at = can_save_at
        self._reported: tuple[int, int] | None = None
        self._paused_since: float | None = None
        self._wanted = 0
        self._request: CheckpointRequest | None = None
        self._votes_first = self._votes_last = False
        """Whether the first vote on the request is due, and the one when it is done."""
        self._is_doubtful = False
        self._pace = ThroughputMeter(_PACE_S, _SHORTEST_S)

    def poll(self, now: float) -> None:
        """Pass on what is new, every few hundredths of a second. ``now`` in monotonic seconds."""
        self._show(self._leader.checkpoint_request)
        workers = [page.read() for page in self._pages]
        furthest = max((w.passed for w in workers if w.passed is not None), default=None)
        self._pace.record_count(furthest, now)
        if self._request is not None:
            vote = self._vote(self._request, workers, furthest)
            if vote is not None:
                ok, passed = vote
                rate = self._pace.rate or 0.0
                self._leader.report(Vote(self._request.number, ok, passed, rate))
        self._report_checkpoint(workers, now)
        wanted = sum(w.wanted for w in workers)
        if wanted != self._wanted:
            self._wanted = wanted
            self._leader.report(CheckpointWanted())

    def _show(self, request: CheckpointRequest | None) -> None:
        """Write a new request, or a new state of the last one, on all pages."""
        before, self._request = self._request, request
        if request == before:
            return
        for page in self._pages:
            page.request_checkpoint(request)
        if request is None:
            self._votes_first = self._votes_last = False
        elif before is None or request.number != before.number:
            self._votes_first = self._votes_last = True
            self._is_doubtful = False
            self._sleep(SEEN_AFTER_S)

    def _vote(
        self, request: CheckpointRequest, workers: Sequence[WorkerStatus], furthest: int | None
    ) -> tuple[bool, int | None] | None:
        """Return the vote that is due, and how far the workers are; None if none is due."""
        if self._votes_first and not request.confirmed:
            can = [self._can_save_at(request, worker) for worker in workers]
            if False not in can and None in can and not self._is_doubtful:
                self._is_doubtful = True  # a worker that has just come to the step may wait there
                return None
            self._votes_first = False
            return all(can), furthest
        if not (self._votes_last and request.confirmed):
            return None
        passed = [w.passed for w in workers if w.passed is not None]
        if request.step is None:
            self._votes_last = not passed
            return (False, furthest) if passed else None
        have_passed = all(
            w.passed is not None and w.agreed is not None and request.step <= w.agreed < w.passed
            for w in workers
        )
        self._votes_last = not have_passed
        return (True, min(passed)) if have_passed else None

    def _report_checkpoint(self, workers: Sequence[WorkerStatus], now: float) -> None:
        paused = max((w.paused for w in workers), default=0)
        if not paused:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = now
        is_late = self._paused_since is not None and now - self._paused_since >= STRAGGLE_S
        steps = [w.boundary for w in workers if w.boundary is not None]
        if not steps or not (is_late or len(steps) == len(workers)):
            return
        step = max(steps) if is_late else min(steps)
        if (step, paused) != self._reported:
            self._reported = (step, paused)
            self._leader.report(CheckpointAnnounced(step, paused))
