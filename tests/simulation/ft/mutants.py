"""Planted bugs: each breaks one rule of the quorum, and the simulator must find it."""

# ruff: noqa: D102  (the methods override documented ones)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_elastic.ft import quorum
from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.ft.manager_state import ManagerState
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    LeaveGranted,
    ProposeSwitch,
    QuorumRequest,
    QuorumResults,
    ReplicaStatus,
    SwitchVote,
    WorkersLost,
)
from hpc_elastic.ft.quorum import ActiveQuorum
from hpc_elastic.ft.state_check import Mismatch
from hpc_elastic.rendezvous.term import Gate
from hpc_elastic.step_agreement import AgreementState, Confirmation, Proposal
from simulation.ft.cluster import Components


class StaysOpen(Gate):
    """Lets a keeper's leader continue its duties although its term is over."""

    @property
    def is_over(self) -> bool:
        return False


class WaitsForNoGroup(LighthouseState):
    """Forms a quorum of the replicas that have requested one, without waiting for others."""

    def _on_request(self, replica: str, request: QuorumRequest, now: float) -> list[ReplicaMessage]:
        sends = super()._on_request(replica, request, now)
        standing = self._registry.quorum
        if not standing.is_active:
            standing.not_requesting.clear()
        return sends


class InformsNoGroup(LighthouseState):
    """Detects that a member is lost, and sends no abort."""

    def _on_workers_lost(self, replica: str, lost: WorkersLost, now: float) -> list[ReplicaMessage]:
        super()._on_workers_lost(replica, lost, now)
        return []


class IgnoresFailures(LighthouseState):
    """Does not abort a quorum when the step of a member fails."""

    def _abort_quorum(self, reason: str, reporter: str = "") -> list[ReplicaMessage]:
        sends = super()._abort_quorum(reason, reporter)
        return [] if "step that failed" in reason else sends

    def _on_abort_report(self, replica: str, aborted: Any, now: float) -> list[ReplicaMessage]:
        return []


class ConfirmsTooEarly(LighthouseState):
    """Confirms a call as soon as one member has agreed to it."""

    def _on_switch_vote(self, replica: str, vote: SwitchVote, now: float) -> list[ReplicaMessage]:
        if vote.ok and vote.number == self._switch.number and self._switch.step:
            self._switch.awaited.intersection_update({replica})
        return super()._on_switch_vote(replica, vote, now)


class GrantsLeaveAtOnce(LighthouseState):
    """Lets a member leave before the others have reached the call."""

    def _on_request(self, replica: str, request: QuorumRequest, now: float) -> list[ReplicaMessage]:
        if replica in self._leavers and self._registry.is_member(replica):
            self._registry.drop_replica(replica)
            return [ReplicaMessage(replica, LeaveGranted())]
        return super()._on_request(replica, request, now)


class ForgetsTheLast(LighthouseState):
    """Ignores that a leaving member has the newest state."""

    def _is_state_unsaved(self, departing: list[str]) -> bool:
        return False

    def _send_switch(
        self, step: Proposal | Confirmation | None, now: float
    ) -> list[ReplicaMessage]:
        return [
            replace(s, message=replace(s.message, last=False))
            if isinstance(s.message, ConfirmSwitch)
            else s
            for s in super()._send_switch(step, now)
        ]


class LetsTheLastGo(LighthouseState):
    """Lets a member leave that must save first."""

    def _advance(self, now: float) -> list[ReplicaMessage]:
        return [
            replace(s, message=LeaveGranted())
            if isinstance(s.message, CheckpointBeforeLeave)
            else s
            for s in super()._advance(now)
        ]


class TakesBackAtOnce(LighthouseState):
    """Ignores, as a new keeper, that some members may have a confirmed call."""

    def _on_status(self, replica: str, status: ReplicaStatus, now: float) -> list[ReplicaMessage]:
        sends = super()._on_status(replica, status, now)
        return [*sends, ReplicaMessage(replica, ProposeSwitch(status.quorum_id, 0, 0))]

    def _follow_request(self, now: float) -> list[ReplicaMessage]:
        return self._abort_quorum("a member requests another, after a step that failed")


class GreetsNoGroup(LighthouseState):
    """Admits new replicas before members of the last quorum have reconnected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "rules": replace(kwargs["rules"], startup_wait_s=0.0)})


class BlamesTheDead(LighthouseState):
    """Counts a dead leader as a member, although it had left before."""

    def _adopt(self, status: ReplicaStatus, now: float) -> list[ReplicaMessage]:
        sends = super()._adopt(status, now)
        if self._registry.lost:
            self._quorum.end_reason = "the leader is dead"
        return sends


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


class AdoptsAnything(LighthouseState):
    """Continues with an older quorum that another member reports."""

    def _adopt(self, status: ReplicaStatus, now: float) -> list[ReplicaMessage]:
        standing = self._registry.quorum
        if status.quorum_id != standing.quorum_id != NO_QUORUM:
            adopted = ActiveQuorum.adopt(status.quorum_id, status.replica_world_size, now)
            self._registry.quorum = adopted
            self._switch.state = AgreementState.IDLE
            return []
        return super()._adopt(status, now)


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
    "informs no group": (Components(InformsNoGroup), "not all make steps|for ever"),
    "ignores failures": (Components(IgnoresFailures), "not all make steps"),
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
    "runs past": (Components(steps=RunsPast), "costs a step|not all make steps"),
    "adopts anything": (Components(AdoptsAnything), "minority|came again|not all make"),
    "trusts the first": (Components(conclude=_trust_the_first), "a check blames others"),
}  # fmt: skip
"""Name -> the parts with the bug, and a pattern for the message of the simulator."""
