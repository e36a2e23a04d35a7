"""Planted bugs: each breaks one rule of the quorum, and the simulator must find it."""

# ruff: noqa: D102  (the methods override documented ones)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_elastic.ft import quorum
from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.ft.manager_state import (
    CommitVotes,
    ManagerState,
    NodeConnection,
    RemoteNodes,
    RemoteWorker,
    Worker,
)
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CheckpointBeforeLeave,
    CommitDecision,
    ConfirmSwitch,
    LeaveGranted,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResult,
    QuorumResults,
    ReplicaStatus,
    SwitchRequest,
    SwitchVote,
    WorkersLost,
)
from hpc_elastic.ft.quorum import ActiveQuorum
from hpc_elastic.ft.state_check import Mismatch
from hpc_elastic.rendezvous.term import Gate
from hpc_elastic.step_agreement import AgreementState
from simulation.ft.cluster import Components


class StaysOpen(Gate):
    """Lets a keeper's leader continue its duties although its term is over."""

    @property
    def is_over(self) -> bool:
        return False


class WaitsForNoGroup(LighthouseState):
    """Forms a quorum of the replicas that have requested one, without waiting for others."""

    def _on_request(self, replica: str, request: QuorumRequest, now: float) -> None:
        super()._on_request(replica, request, now)
        standing = self._registry.quorum
        if not standing.is_active:
            standing.not_requesting.clear()


class InformsNoGroup(LighthouseState):
    """Detects that a member is lost, and sends no abort."""

    def on_message(self, replica: str, message: Message, now: float) -> list[ReplicaMessage]:
        sends = super().on_message(replica, message, now)
        if isinstance(message, WorkersLost):
            return [s for s in sends if not isinstance(s.message, QuorumAborted)]
        return sends


class IgnoresFailures(LighthouseState):
    """Does not abort a quorum when the step of a member fails."""

    def _abort_quorum(self, reason: str, reporter: str = "") -> None:
        num_sent = len(self._outbox)
        super()._abort_quorum(reason, reporter)
        if "step that failed" in reason:
            del self._outbox[num_sent:]

    def _on_abort_report(self, replica: str, aborted: QuorumAborted) -> None:
        pass


class ConfirmsTooEarly(LighthouseState):
    """Confirms a call as soon as one member has agreed to it."""

    def _on_switch_vote(self, replica: str, vote: SwitchVote, now: float) -> None:
        if vote.ok and vote.number == self._switch.number and self._switch.step:
            self._switch.awaited.intersection_update({replica})
        super()._on_switch_vote(replica, vote, now)


class GrantsLeaveAtOnce(LighthouseState):
    """Lets a member leave before the others have reached the call."""

    def _on_request(self, replica: str, request: QuorumRequest, now: float) -> None:
        if replica in self._leavers and self._registry.is_member(replica):
            self._registry.drop_replica(replica)
            self._send(replica, LeaveGranted(request.number))
        else:
            super()._on_request(replica, request, now)


class ForgetsTheLast(LighthouseState):
    """Ignores that a leaving member has the newest state."""

    def _is_state_unsaved(self, departing: list[str]) -> bool:
        return False

    def _send(self, replica: str, message: Message) -> None:
        if isinstance(message, ConfirmSwitch):
            message = replace(message, last=False)
        super()._send(replica, message)


class LetsTheLastGo(LighthouseState):
    """Lets a member leave that must save first."""

    def _send(self, replica: str, message: Message) -> None:
        if isinstance(message, CheckpointBeforeLeave):
            message = LeaveGranted(message.number)
        super()._send(replica, message)


class TakesBackAtOnce(LighthouseState):
    """Ignores, as a new keeper, that some members may have a confirmed call."""

    def _on_status(self, replica: str, status: ReplicaStatus, now: float) -> None:
        super()._on_status(replica, status, now)
        self._send(replica, ProposeSwitch(status.quorum_id, 0, 0))

    def _follow_request(self, now: float, confirmed_step: int = 0) -> None:
        self._abort_quorum("a member requests another, after a step that failed")


class GreetsNoGroup(LighthouseState):
    """Admits new replicas before members of the last quorum have reconnected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "rules": replace(kwargs["rules"], startup_wait_s=0.0)})


class BlamesTheDead(LighthouseState):
    """Counts a dead leader as a member, although it had left before."""

    def _adopt(self, status: ReplicaStatus, now: float) -> None:
        super()._adopt(status, now)
        if self._registry.lost:
            self._quorum.end_reason = "the leader is dead"


def _any_token(
    quorum_id: int, members: Sequence[str], requests: Mapping[str, QuorumRequest]
) -> dict[str, QuorumResults]:
    """Treat equal steps as equal states."""
    alike = {m: replace(a, state_version="?") for m, a in requests.items()}
    placed = quorum.assign_results(quorum_id, members, alike)
    return {
        m: replace(
            p, ranks=tuple(replace(r, state_version=requests[m].state_version) for r in p.ranks)
        )
        for m, p in placed.items()
    }


class CountsSteps(LighthouseState):
    """Treats members at the same step as equal, whatever their histories are."""

    _assign_results = staticmethod(_any_token)


def _all_count(
    quorum_id: int, members: Sequence[str], requests: Mapping[str, QuorumRequest]
) -> dict[str, QuorumResults]:
    """Count all members in the mean, those that heal as well."""
    placed = quorum.assign_results(quorum_id, members, requests)
    return {
        m: replace(p, ranks=tuple(replace(r, cohort_size=r.replica_world_size) for r in p.ranks))
        for m, p in placed.items()
    }


class CountsAll(LighthouseState):
    """Reports that all members contribute while some heal."""

    _assign_results = staticmethod(_all_count)


class AgreesToAll(QuorumSteps):
    """Votes ok on a call that it has begun."""

    def on_proposal(self, proposal: ProposeSwitch, now: float) -> SwitchVote | None:
        at = super().on_proposal(proposal, now)
        return replace(at, ok=True) if at is not None else None


class HidesItsConfirmation(QuorumSteps):
    """Does not name the step that is confirmed to it to a new keeper."""

    def on_proposal(self, proposal: ProposeSwitch, now: float) -> SwitchVote | None:
        at = super().on_proposal(proposal, now)
        return None if at is not None and at.confirmed_step else at


class RunsPast(QuorumSteps):
    """Does not wait at a proposed call."""

    @property
    def is_undecided(self) -> bool:
        return False

    def settle_step(self, quorum_step: int) -> None:
        pass


def _trust_the_first(table: Sequence[Sequence[int]], paths: Sequence[str]) -> Mismatch:
    """Conclude that all are wrong that differ from the first member."""
    own = [tuple(row[-len(paths) :]) for row in table]
    suspects = tuple(rank for rank, digests in enumerate(own) if digests != own[0])
    return replace(Mismatch.of(table, paths), suspects=suspects, is_certain=True)


class ReportsNoQuorum(ManagerState):
    """Does not report its quorum to a new keeper."""

    def on_connect(self) -> None:
        result, self._result = self._result, None
        super().on_connect()
        self._result = result


# ---- groups of several nodes


class _CountsMost(CommitVotes):
    def decide(self, group_world_size: int, *, all_live: bool) -> CommitDecision | None:
        return super().decide(max(1, group_world_size - 1), all_live=all_live)


class CountsMostVotes(ManagerState):
    """Commits a step before the last rank has voted."""

    def _reset(self) -> None:
        super()._reset()
        self._commit_votes = _CountsMost()


class CommitsWithoutTheDead(ManagerState):
    """Ignores, when it counts the votes, that a rank is lost."""

    def _decide_commit(self) -> None:
        decision = self._commit_votes.decide(len(self._workers), all_live=True)
        if decision is not None:
            self._send_down(self._workers, decision)


class DecidesForItsNode(ManagerState):
    """Sends decisions to the workers of its own node only."""

    def _decide_commit(self) -> None:
        decision = self._commit_votes.decide(
            self._size or 1, all_live=self._is_complete(self._workers)
        )
        if decision is not None:
            own = [r for r, w in self._workers.items() if not isinstance(w, RemoteWorker)]
            self._send_down(own, decision)


class AbortsForItsNode(ManagerState):
    """Forwards aborts to the workers of its own node only."""

    def _abort_quorum(self, aborted: QuorumAborted) -> bool:
        workers = self._workers
        self._workers = {r: w for r, w in workers.items() if not isinstance(w, RemoteWorker)}
        try:
            return super()._abort_quorum(aborted)
        finally:
            self._workers = workers


class TakesTornForWhole(ManagerState):
    """Requests with the state of its first rank, though the others have another one."""

    def _request_if_complete(self) -> None:
        requests = self._requests
        if self._is_complete(requests):
            step, version = requests[0].step, requests[0].state_version
            self._requests = {
                rank: replace(q, step=step, state_version=version) for rank, q in requests.items()
            }
        super()._request_if_complete()


class _KeptNotices(dict[Any, float]):
    def clear(self) -> None:
        pass

    def pop(self, *args: Any) -> None:  # type: ignore[override]
        pass


class KeepsOldNotices(ManagerState):
    """Announces to each keeper a notice that was for the group before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leave_deadlines = _KeptNotices()


class HidesLostWorkers(ManagerState):
    """Does not report, as a relay, that a worker of its node is dead or stopped."""

    def on_worker_disconnect(self, worker: Worker, reason: str) -> None:
        if self._relay is None:
            super().on_worker_disconnect(worker, reason)

    def check_workers(self) -> None:
        if self._relay is None:
            super().check_workers()


class KeepsItsWorkers(ManagerState):
    """Keeps its workers, as a relay, although they have lost the server."""

    def on_relay_end(self, reason: str) -> None:
        pass


class ForgetsEarlyFrames(RemoteNodes):
    """Drops what a relay sends before its group is expected."""

    def on_message(self, connection: NodeConnection, message: dict[str, Any]) -> None:
        super().on_message(connection, message)
        self._nodes[connection].early.clear()


class IgnoresStoppedWorkers(RemoteNodes):
    """Ignores what a relay reports about stopped workers."""

    def on_message(self, connection: NodeConnection, message: dict[str, Any]) -> None:
        if message["type"] != "stopped":
            super().on_message(connection, message)


class WaitsForNoSwitch(QuorumSteps):
    """Waits at a proposed call of a quorum that is aborted."""

    def on_abort(self, aborted: QuorumAborted) -> bool:
        proposal = self.proposal
        is_news = super().on_abort(aborted)
        if aborted.quorum_id == self.quorum_id:
            self.proposal = proposal
        return is_news


class RequestsAlone(QuorumSteps):
    """Requests another quorum at once, though the other ranks of its group may be ahead."""

    def __init__(self, *, is_single: bool) -> None:
        super().__init__(is_single=True)


class GoesOnInParts(quorum.CommittedProgress):
    """Trains on though some ranks have healed and others not."""

    def is_part_of(self, result: QuorumResult) -> bool:
        return True


# ---- replicas that catch up


class KeepsNewcomersApart(LighthouseState):
    """Starts no switch for a member that has caught up."""

    def on_message(self, replica: str, message: Message, now: float) -> list[ReplicaMessage]:
        return (
            [] if isinstance(message, SwitchRequest) else super().on_message(replica, message, now)
        )


class AbortsForAMember(LighthouseState):
    """Aborts the quorum for a member that has caught up, rather than switch."""

    def on_message(self, replica: str, message: Message, now: float) -> list[ReplicaMessage]:
        super().on_message(replica, message, now)
        if isinstance(message, SwitchRequest) and self._registry.is_member(replica):
            self._abort_quorum(f"{replica} has caught up")
        return self._outbox


# ---- states with a flipped bit


def _blame_most(table: Sequence[Sequence[int]], paths: Sequence[str]) -> Mismatch:
    """Conclude that the members with the state of most others are wrong."""
    found = Mismatch.of(table, paths)
    others = tuple(rank for rank in range(len(table)) if rank not in found.suspects)
    return replace(found, suspects=others) if found.is_certain else found


def _doubt_all(table: Sequence[Sequence[int]], paths: Sequence[str]) -> Mismatch:
    """Conclude nothing for certain."""
    return replace(Mismatch.of(table, paths), is_certain=False)


def _blame_one(table: Sequence[Sequence[int]], paths: Sequence[str]) -> Mismatch:
    """Conclude that only the first suspect is wrong, also of two members that differ."""
    found = Mismatch.of(table, paths)
    return replace(found, suspects=found.suspects[:1], is_certain=True)


class AdoptsAnything(LighthouseState):
    """Continues with an older quorum that another member reports."""

    def _adopt(self, status: ReplicaStatus, now: float) -> None:
        standing = self._registry.quorum
        if status.quorum_id != standing.quorum_id != NO_QUORUM:
            adopted = ActiveQuorum.adopt(status.quorum_id, status.replica_world_size, now)
            self._registry.quorum = adopted
            self._switch.state = AgreementState.IDLE
        else:
            super()._adopt(status, now)


class _AtItsOwnPace(quorum.ReplicaRegistry):
    def is_live_timeout_over(self, now: float, since: float | None) -> bool:
        own = max(self.rules.live_timeout_s, 2 * self.quorum.step_s)
        return since is not None and now - since >= own


class WaitsLongerThanMembers(LighthouseState):
    """Waits for a slow replica for as long as it likes, whatever the others' limits are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registry = _AtItsOwnPace(self._registry.rules, self._registry.lost)


class _OpenToAll(quorum.ReplicaRegistry):
    def admitted(self, now: float) -> dict[str, QuorumRequest]:
        return self.requests


class KeepsNoneOut(LighthouseState):
    """Lets a newcomer in at once, however often it has broken a quorum."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registry = _OpenToAll(self._registry.rules, self._registry.lost)


class _ClosedForGood(quorum.ReplicaRegistry):
    def admitted(self, now: float) -> dict[str, QuorumRequest]:
        return {r: q for r, q in self.requests.items() if r not in self.kept_out_until}


class KeepsOutForGood(LighthouseState):
    """Never lets a newcomer in again whose healing has failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registry = _ClosedForGood(self._registry.rules, self._registry.lost)


LASTING_MUTANTS: Mapping[str, tuple[Components, str]] = {
    "a run's workers give up": (Components(waits_in_runs=False), "gives up waiting"),
    "waits longer than members": (Components(WaitsLongerThanMembers), "gives up waiting"),
    "keeps none out": (Components(KeepsNoneOut), "a failed heal again"),
    "counts no failed heals": (Components(counts_failed_heals=False), "a failed heal again"),
    "keeps out for good": (Components(KeepsOutForGood), "not all make steps|gives up waiting"),
}
"""The same for `LastingSimulator`."""

MUTANTS: Mapping[str, tuple[Components, str]] = {
    "terms do not rise": (
        Components(terms_rise=False), "a quorum id came again|the status went back",
    ),
    "groups do not report their quorum": (
        Components(manager=ReportsNoQuorum), "costs a step|not all make",
    ),
    "continues its duties": (Components(gate=StaysOpen), "acts though its term is over"),
    "renames are not fenced": (Components(fenced_files=False), "the status went back|a notice was"),
    "waits for no group": (Components(WaitsForNoGroup), "a minority"),
    "keeps newcomers apart": (Components(KeepsNewcomersApart), "not all make steps"),
    "aborts for a member": (Components(AbortsForAMember), "costs a step|not all make"),
    "informs no group": (Components(InformsNoGroup), "not all make steps|for ever"),
    "ignores failures": (Components(IgnoresFailures), "not all make steps|holds up others"),
    "confirms too early": (Components(ConfirmsTooEarly), "costs a step|not all make steps"),
    "grants a leave at once": (Components(GrantsLeaveAtOnce), "costs a step|leaves unnoticed"),
    "forgets the last": (Components(ForgetsTheLast), "leaves unnoticed"),
    "lets the last go": (Components(LetsTheLastGo), "leaves unnoticed"),
    "takes back at once": (
        Components(TakesBackAtOnce), "costs a step|not all make steps|a minority",
    ),
    "greets no group": (Components(GreetsNoGroup), "costs a step"),
    "blames the dead": (Components(BlamesTheDead), "costs a step|not all make steps"),
    "counts steps": (Components(CountsSteps), "different states|another state|two histories"),
    "counts all": (Components(CountsAll), "the mean counts others|cohort"),
    "agrees to all": (Components(steps=AgreesToAll), "costs a step|not all make steps"),
    "hides its confirmation": (Components(steps=HidesItsConfirmation), "costs a step"),
    "runs past": (Components(steps=RunsPast), "costs a step|not all make steps"),
    "adopts anything": (Components(AdoptsAnything), "minority|came again|not all make"),
    "counts most votes": (Components(manager=CountsMostVotes), "without the votes of all ranks"),
    "commits without the dead": (
        Components(manager=CommitsWithoutTheDead), "without the votes of all ranks",
    ),
    "decides for its node": (Components(manager=DecidesForItsNode), "costs a step|not all make"),
    "aborts for its node": (
        Components(manager=AbortsForItsNode), "holds up others|not all make|ranks of a group part",
    ),
    "takes torn for whole": (
        Components(manager=TakesTornForWhole), "different states|two histories|another state",
    ),
    "keeps old notices": (Components(manager=KeepsOldNotices), "leaves without a notice"),
    "hides lost workers": (Components(manager=HidesLostWorkers), "holds up others|not all make"),
    "keeps its workers": (Components(manager=KeepsItsWorkers), "not all make|holds up others"),
    "forgets early frames": (Components(relays=ForgetsEarlyFrames), "not all make"),
    "ignores stopped workers": (Components(relays=IgnoresStoppedWorkers), "holds up others"),
    "waits for no switch": (Components(steps=WaitsForNoSwitch), "for ever|not all make"),
    "requests alone": (
        Components(steps=RequestsAlone), "ranks of a group part|not all make|costs a step",
    ),
    "goes on in parts": (
        Components(progress=GoesOnInParts), "two commits|another state|two histories",
    ),
    "blames most": (Components(conclude=_blame_most), "a check blames others"),
    "is never certain": (Components(conclude=_doubt_all), "a check is not certain"),
    "blames one of two": (Components(conclude=_blame_one), "blames|certain without a majority"),
    "does not mark the corrupted": (
        Components(marks_corrupted=False), "a corrupted state goes on",
    ),
    "trusts the first": (
        Components(conclude=_trust_the_first), "a check blames others|certain without",
    ),
}  # fmt: skip
"""Name -> the parts with the bug, and a pattern for the message of the simulator."""
