"""State of a lighthouse: its decisions about the quorum, given what the replica groups send (pure).

Its driver passes events in and sends the messages that are returned, in order. `messages` has the
theory, `quorum` the rules of membership and healing; here are the consequences of each message.

Abort
-----
The quorum is *aborted*, and all its members are notified at once, when a member is lost (its
connection is gone, its workers are dead or stopped, or it has not connected to a new lighthouse in
time), reports it, or requests another quorum outside of a switch: its step failed, and the others
would wait for it in their collectives for ever.

A member that is done (`Shutdown`) ends the quorum after its last step: others may still be
receiving its last bytes, and complete that step; only what they have started after it is aborted.
They are notified again later, in case its node was lost before its connections were closed.

Switch
------
The members agree on its quorum step by `hpc_elastic.step_agreement`. Votes have a time-out, steps
have none: they may take an hour, and a confirmed switch is valid until the quorum ends. Numbers of
proposals rise over all switches and lighthouses. A member that is confirmed to leave gets its
`LeaveGranted` at the switch step, once all have reached it, so that no collective is cut off.

Leaving
-------
A group under notice leaves at a switch. Outside of an active quorum it leaves when it requests one;
but the lighthouse first waits for the live previous members, to see whether one of them has the
same state. If no group that stays has it, the leaving group becomes a member once more, so that the
others heal from it, and leaves at the switch after that. That takes time: with less than
`ENOUGH_TO_HEAL_S` left it leaves at once. No member catches up beside one under notice: all wait
until the others have healed.

If the newest state leaves with members of a quorum, they learn it one step before (``last``).
Outside of a quorum, the first group that has it makes one more step, in which it saves, and then
requests again. The lighthouse waits for it as for every live member, so no other group starts from
scratch.

A new lighthouse
----------------
It knows only which groups are dead for certain. Its ids start with its term. Members report the
quorum they are in (`ReplicaStatus`), and it continues as if it had formed that: the newest, if they
differ. A proposal of the lighthouse before may have been confirmed to some members and not to
others. So none is withdrawn before all members have connected and answered a question, or had the
time to: a member with a confirmation names its step, or requests there. Then the others are asked
to do so at the same step; only if one is past it the quorum is aborted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpc_elastic.ft import messages, quorum
from hpc_elastic.ft.quorum import ActiveQuorum, QuorumRules, ReplicaRegistry, list_some
from hpc_elastic.step_agreement import (
    LONGEST_PAUSE_S,
    AgreementState,
    Confirmation,
    Proposal,
    StepAgreement,
    StepVote,
)

ENOUGH_TO_HEAL_S = 5.0
_LOST_AFTER_S = 0.3
"""Wait before members that have not connected are taken for the dead ones: the dead may have left
before, and live members may be on their way."""
_LAST_BYTES_S = 2.0
_FIRST_REPORT_S, _REPORT_EVERY_S = 0.2, 1.0
_AHEAD_S = 0.02
"""Distance of a proposed switch from the furthest member: members differ by a step at most."""


@dataclass(frozen=True)
class ReplicaMessage:
    """A message to a replica group."""

    replica: str
    message: messages.Message


class LighthouseState:
    """Decides about the quorum of one run. No call blocks, and none reads a clock.

    ``now`` is in seconds of a monotonic clock, the same one for all calls. Each event returns the
    messages to send, in order.
    """

    _assign_results = staticmethod(quorum.assign_results)

    def __init__(
        self,
        term: int,
        rules: QuorumRules = QuorumRules(),  # noqa: B008 - immutable
        *,
        lost_members: Iterable[str] = (),
    ) -> None:
        """Start a term without a quorum.

        ``term`` is higher than that of every earlier lighthouse of this run, at least 0.
        ``lost_members`` are known to be dead (such as the leader before) and not waited for.
        """
        self._registry = ReplicaRegistry(rules, lost_members)
        self._outbox: list[ReplicaMessage] = []
        """What the present event has to send so far."""
        self._next_id = (term << messages.TERM_SHIFT) + 1
        self._switch = StepAgreement[str](_AHEAD_S, term << messages.TERM_SHIFT)
        self._leavers: frozenset[str] = frozenset()
        """Members that are confirmed to leave at the switch."""
        self._answered: dict[str, messages.QuorumRequest] = {}
        self._results: dict[str, messages.QuorumResults] = {}
        self._is_complete = True
        """All members have connected to this lighthouse."""
        self._is_probing = False
        """Asks all members for their steps, to find what an earlier lighthouse has confirmed."""
        self._waits_for = ""
        self._reported_at = -math.inf

    # ---- events --------------------------------------------------------------------------

    def on_connect(self, replica: str, now: float) -> list[ReplicaMessage]:
        """Handle the (new) connection of a group; its status and its request follow."""
        if self._registry.started_at is None:
            self._registry.started_at = now
        self._registry.add_connection(replica)
        return []

    def on_message(
        self, replica: str, message: messages.Message, now: float
    ) -> list[ReplicaMessage]:
        """Handle a message of a connected group; ignore those that are not for a lighthouse."""
        registry, self._outbox = self._registry, []
        if replica not in registry.connected:
            return []
        match message:
            case messages.ReplicaStatus():
                self._on_status(replica, message, now)
            case messages.QuorumRequest():
                self._on_request(replica, message, now)
            case messages.CancelRequest():
                registry.remove_request(replica)
            case messages.QuorumAborted():
                self._on_abort_report(replica, message)
            case messages.SwitchVote():
                self._on_switch_vote(replica, message, now)
            case messages.SwitchRequest():
                if registry.is_member(replica) and message.quorum_id == self._quorum.quorum_id:
                    self._quorum.needs_switch = True
            case messages.LeaveNotice():
                if replica not in registry.leave_deadlines:
                    self._switch.hurry()
                registry.leave_deadlines[replica] = now + message.left_s
            case messages.WorkersLost():
                if registry.is_member(replica):
                    self._abort_quorum(f"{replica}: {message.reason}")
                registry.drop_replica(replica)
            case messages.Shutdown():
                self._on_shutdown(replica, message, now)
            case _:
                return []
        self._advance(now)
        return self._outbox

    def on_disconnect(self, replica: str, reason: str, now: float) -> list[ReplicaMessage]:
        """Handle the loss of a group, also of one that is known to be dead and never connected."""
        self._outbox = []
        was_member = self._registry.is_member(replica)
        self._registry.remove_connection(replica)
        if was_member:
            self._abort_quorum(f"{replica}: {reason}")
        self._advance(now)
        return self._outbox

    def on_tick(self, now: float) -> list[ReplicaMessage]:
        """Handle time-outs; to be called every 20 to 100 ms. Nothing else depends on it."""
        self._outbox = []
        if self._registry.started_at is None:
            self._registry.started_at = now
        self._abort_if_missing(now)
        if self._quorum.first_shutdown is not None:
            replica, since = self._quorum.first_shutdown
            if now - since >= _LAST_BYTES_S:
                self._abort_quorum(f"{replica} is done")
        self._complete_adoption(now)
        self._expire_switch(now)
        self._advance(now)
        self._report_waiting(now)
        return self._outbox

    def _send(self, replica: str, message: messages.Message) -> None:
        self._outbox.append(ReplicaMessage(replica, message))

    # ---- messages of groups --------------------------------------------------------------

    def _on_status(self, replica: str, status: messages.ReplicaStatus, now: float) -> None:
        if status.quorum_id == messages.NO_QUORUM:
            return
        self._adopt(status, now)
        active = self._quorum
        if status.quorum_id != active.quorum_id:
            reason = f"quorum {active.quorum_id} has been formed without {replica}"
            self._send(replica, messages.QuorumAborted(status.quorum_id, reason))
            return
        active.add_reconnected(replica, status.replica_rank)
        self._registry.idle.pop(replica, None)
        if active.is_active and status.is_aborted:
            self._abort_quorum(f"{replica} reconnected without it", replica)
        elif active.is_active:
            self._resume_member(replica, now)
        elif not status.is_aborted:
            reason = active.end_reason or ""
            self._send(replica, messages.QuorumAborted(status.quorum_id, reason))

    def _on_request(self, replica: str, request: messages.QuorumRequest, now: float) -> None:
        registry, active = self._registry, self._quorum
        self._next_id = max(self._next_id, request.quorum_id + 1)
        if not active.is_active or not registry.is_member(replica):
            registry.add_request(replica, request, now)
            return
        if request == self._answered.get(replica):  # repeated before the result had arrived
            self._send(replica, self._results[replica])
            return
        registry.add_request(replica, request, now)
        is_confirmed = self._switch.state is AgreementState.CONFIRMED
        if is_confirmed and request.quorum_step == self._switch.step:
            return
        if not active.is_adopted or request.commit_failures or is_confirmed:
            self._abort_quorum(f"{replica} requests another, after a step that failed")
        elif request.quorum_id != active.quorum_id:  # each member has reported its quorum
            self._abort_quorum(f"another process has started as {replica}")
        elif self._is_complete:
            self._follow_request(now)

    def _follow_request(self, now: float, confirmed_step: int = 0) -> None:
        """Switch where members request, or will: an earlier lighthouse has confirmed that step."""
        active, switch = self._quorum, self._switch
        requests = self._registry.requests
        steps = {q.quorum_step for r, q in requests.items() if r in active.members}
        steps |= {confirmed_step} if confirmed_step else set()
        if len(steps) > 1 or (switch.is_fixed and switch.step not in steps):
            self._abort_quorum(f"members request at different steps: {sorted(steps)}")
        elif switch.is_fixed:
            self._send_switch(switch.retain(active.not_requesting, now), now)
        else:
            self._send_switch(switch.begin_at(steps.pop(), active.not_requesting, now), now)

    def _on_abort_report(self, replica: str, aborted: messages.QuorumAborted) -> None:
        if aborted.quorum_id == self._quorum.quorum_id and self._registry.is_member(replica):
            self._abort_quorum(f"{replica}: {aborted.reason}", replica)

    def _on_switch_vote(self, replica: str, vote: messages.SwitchVote, now: float) -> None:
        active, switch = self._quorum, self._switch
        if not active.is_active or vote.quorum_id != active.quorum_id:
            return
        if replica not in active.not_requesting:  # the proposal reached it after its request
            return
        if vote.confirmed_step and switch.state is not AgreementState.CONFIRMED:
            self._follow_request(now, vote.confirmed_step)
            return
        is_answer = switch.state is AgreementState.ASKING and vote.number == switch.number
        if is_answer and switch.is_fixed and not vote.ok:
            reason = f"some members request at step {switch.step}, {replica} is past it"
            self._abort_quorum(reason)
            return
        step_vote = StepVote(vote.number, vote.ok, vote.quorum_step, vote.rate)
        self._send_switch(switch.vote(replica, step_vote, now), now)

    def _on_shutdown(self, replica: str, done: messages.Shutdown, now: float) -> None:
        active = self._quorum
        was_member = self._registry.is_member(replica)
        self._registry.drop_replica(replica)
        if not was_member or not active.is_active:
            return
        if not active.members and not active.num_unconnected:
            active.end_reason = "all its members are done"
            return
        active.end_reason = f"{replica} is done"
        active.first_shutdown = replica, now
        step = done.quorum_step if done.quorum_id == active.quorum_id else -1
        for member in active.members:
            self._send(member, messages.QuorumAborted(active.quorum_id, active.end_reason, step))

    # ---- the life of a quorum ------------------------------------------------------------

    @property
    def _quorum(self) -> ActiveQuorum:
        return self._registry.quorum

    def _advance(self, now: float) -> None:
        active = self._quorum
        if not active.is_active:
            self._grant_leaves(now)
        elif self._switch.state is not AgreementState.CONFIRMED:
            self._consider_switch(active, now)
            return
        else:
            first = active.first_request_at
            if active.not_requesting and not self._registry.is_live_timeout_over(now, first):
                return
            self._carry_out_switch(active, now)
        self._form_quorum(now)

    def _abort_quorum(self, reason: str, reporter: str = "") -> None:
        """End the active quorum and notify all members but the reporter, once.

        Members that already request the next one are notified too: the result that brought them
        into this one may still have been under way when they requested. A quorum that has ended
        after the last step of one that is done is aborted as well.
        """
        active = self._quorum
        if active.is_active:
            active.end_reason = reason
        elif active.first_shutdown is None:
            return
        active.first_shutdown = None
        for member in active.members:
            if member != reporter:
                self._send(member, messages.QuorumAborted(active.quorum_id, reason))

    def _form_quorum(self, now: float) -> None:
        members = self._registry.next_members(now)
        if isinstance(members, str):
            self._waits_for = members
            return
        requests = self._answered = {m: self._registry.requests[m] for m in members}
        if not self._registry.leave_deadlines.keys().isdisjoint(members):
            requests = {m: replace(q, catch_up=False) for m, q in requests.items()}
        self._results = self._assign_results(self._next_id, members, requests)
        self._registry.set_quorum(self._next_id, members, now)
        self._switch = StepAgreement(_AHEAD_S, self._switch.number)
        if self._registry.admitted(now):  # excluded by shrink_only: do not switch again at once
            self._switch.pause(LONGEST_PAUSE_S, now)
        self._leavers = frozenset()
        self._is_complete, self._is_probing = True, False
        self._next_id += 1
        for member, results in self._results.items():
            self._send(member, results)

    # ---- switches ------------------------------------------------------------------------

    def _consider_switch(self, active: ActiveQuorum, now: float) -> None:
        """Start a switch if a group joins or leaves, and withdraw it if none does any more."""
        registry, switch = self._registry, self._switch
        if switch.is_fixed:
            return
        self._grant_leaves(now)
        self._waits_for = f"the next switch of quorum {active.quorum_id}"
        if not self._is_complete:
            return
        self._is_probing &= switch.state is AgreementState.ASKING and not switch.step
        leaves = not registry.leave_deadlines.keys().isdisjoint(active.members)
        is_needed = self._is_probing or active.needs_switch or leaves or registry.has_newcomers(now)
        if not is_needed:
            self._send_switch(switch.withdraw(now), now)
        elif switch.state is AgreementState.IDLE:
            self._send_switch(switch.begin_agreement(active.members, now), now)

    def _send_switch(self, step: Proposal | Confirmation | None, now: float) -> None:
        """Send a step of the agreement to the members that do not request yet."""
        if step is None:
            return
        active, message = self._quorum, self._switch_message(step)
        receivers = [r for r in active.members if r in active.not_requesting]
        by_replica = dict.fromkeys(receivers, message)
        if isinstance(message, messages.ConfirmSwitch):
            deadlines = self._registry.leave_deadlines
            leavers = frozenset(r for r in active.members if r in deadlines)
            last = len(leavers) == len(active.members)
            newcomers = [r for r in self._registry.requests if r not in active.members]
            if last and newcomers and all(self._has_time(r, now) for r in leavers):
                leavers, last = frozenset(), False  # a newcomer joins first
            self._leavers = leavers
            leave = replace(message, leaves=True, last=last)
            by_replica |= dict.fromkeys((r for r in receivers if r in leavers), leave)
        for replica, its_message in by_replica.items():
            self._send(replica, its_message)

    def _switch_message(
        self, step: Proposal | Confirmation
    ) -> messages.ProposeSwitch | messages.ConfirmSwitch:
        quorum_id = self._quorum.quorum_id
        if isinstance(step, Confirmation):
            return messages.ConfirmSwitch(quorum_id, step.number)
        return messages.ProposeSwitch(quorum_id, step.number, step.step)

    def _carry_out_switch(self, active: ActiveQuorum, now: float) -> None:
        """End the quorum at its switch, where all members request the next one; some leave."""
        active.end_reason = "its members request the next one"
        dropped = messages.QuorumAborted(active.quorum_id, "did not request the next one in time")
        for replica in active.not_requesting:
            self._send(replica, dropped)
        requests = self._registry.requests
        leavers = [r for r in active.members if r in self._leavers and r in requests]
        if self._is_state_unsaved(leavers):
            self._grant_leaves(now)
            return
        for replica in leavers:
            self._send(replica, messages.LeaveGranted(requests[replica].number))
            self._registry.drop_replica(replica)

    def _is_state_unsaved(self, leavers: list[str]) -> bool:
        """Return whether the newest state would leave with members that do not know it.

        They came to the switch of an earlier lighthouse, and all others have left since.
        """
        requests = self._registry.requests
        kept = [q for r, q in requests.items() if q.is_saved or r not in leavers]
        newest = max((requests[r] for r in leavers), key=lambda q: q.step, default=None)
        return newest is not None and newest.step > 0 and not _is_held(newest, kept)

    def _grant_leaves(self, now: float) -> None:
        """Let groups leave that are under notice, request, and are in no active quorum."""
        registry, active = self._registry, self._quorum
        deadlines, requests = registry.leave_deadlines, registry.requests
        if not deadlines:
            return
        members = active.members if active.is_active else {}
        leavers = [r for r in requests if r in deadlines and r not in members]
        if not leavers:
            return
        silent = active.not_requesting
        staying = [q for r, q in requests.items() if r not in deadlines]
        saved = [q for q in requests.values() if q.is_saved]
        newest = max(leavers, key=lambda r: requests[r].step)
        must_save = requests[newest].step > 0 and not _is_held(requests[newest], saved)
        must_save = must_save and all(r in deadlines for r in silent)
        others_may_heal = bool(silent or registry.num_unconnected or staying)
        for replica in leavers:
            # of an adopted quorum it may be the member that is missing, and has its state alone
            others_go_on = active.is_active and self._is_complete
            number = requests[replica].number
            is_free = others_go_on or _is_held(requests[replica], staying)
            if not is_free and others_may_heal and self._has_time(replica, now):
                continue
            if must_save and replica == newest and not is_free:
                # it requests again once it has saved, and is waited for
                self._send(replica, messages.CheckpointBeforeLeave(number))
                registry.remove_request(replica)
            else:
                self._send(replica, messages.LeaveGranted(number))
                registry.drop_replica(replica)

    def _has_time(self, replica: str, now: float) -> bool:
        return self._registry.leave_deadlines[replica] - now >= ENOUGH_TO_HEAL_S

    # ---- the quorum of an earlier lighthouse ---------------------------------------------

    def _adopt(self, status: messages.ReplicaStatus, now: float) -> None:
        """Continue the newest quorum that an earlier lighthouse has formed."""
        active = self._quorum
        self._next_id = max(self._next_id, status.quorum_id + 1)
        is_own = not active.is_adopted and active.quorum_id != messages.NO_QUORUM
        if is_own or status.quorum_id <= active.quorum_id:
            return
        self._abort_quorum(f"quorum {status.quorum_id} has been formed since")
        self._registry.quorum = ActiveQuorum.adopt(status.quorum_id, status.replica_world_size, now)
        self._switch = StepAgreement(_AHEAD_S, self._switch.number)
        self._is_complete, self._answered = False, {}

    def _resume_member(self, replica: str, now: float) -> None:
        """Repeat what a member may have missed that has reconnected."""
        if not self._is_complete:
            return
        switch, quorum_id = self._switch, self._quorum.quorum_id
        if switch.state is AgreementState.CONFIRMED:
            leaves = replica in self._leavers
            last = leaves and len(self._leavers) == len(self._quorum.members)
            self._send(replica, messages.ConfirmSwitch(quorum_id, switch.number, leaves, last))
        elif switch.is_fixed or self._is_probing:
            self._send(replica, self._switch_message(switch.proposal))
        elif (withdrawn := switch.withdraw(now)) is not None:
            self._send_switch(withdrawn, now)
        else:
            self._send(replica, messages.ProposeSwitch(quorum_id, 0, 0))

    def _complete_adoption(self, now: float) -> None:
        """Once all members have connected, ask for their steps, or follow a request.

        A proposal of the earlier lighthouse is void once all have answered, or had the time to.
        """
        active = self._quorum
        if self._is_complete or active.num_unconnected:
            return
        self._is_complete = True
        if not active.is_active:
            return
        if len(active.not_requesting) < len(active.members):
            self._follow_request(now)
            return
        self._is_probing = True
        self._send_switch(self._switch.begin_agreement(active.members, now), now)

    # ---- time-outs -----------------------------------------------------------------------

    def _abort_if_missing(self, now: float) -> None:
        """Abort the quorum if a member has not connected to this lighthouse, and will not."""
        registry, active = self._registry, self._quorum
        if not active.num_unconnected:
            return
        if registry.is_reconnect_timeout_over(now):
            num, active.num_unconnected = active.num_unconnected, 0
            self._abort_quorum(f"{num} members have not reconnected to the lighthouse")
        elif not registry.num_unconnected and now - active.formed_at >= _LOST_AFTER_S:
            self._abort_quorum(f"{list_some(sorted(registry.lost))}: lost with the lighthouse")

    def _expire_switch(self, now: float) -> None:
        switch, active = self._switch, self._quorum
        if not active.is_active or not switch.is_late(now):
            return
        awaited = list_some(sorted(switch.awaited))
        if switch.is_fixed and len(active.not_requesting) < len(active.members):
            self._abort_quorum(f"no answer from {awaited}")
            return
        self._waits_for = f"an answer from {awaited}"
        if switch.is_fixed:
            self._send_switch(switch.begin_at(switch.step, active.members, now), now)
        else:
            self._send_switch(switch.withdraw(now), now)

    def _report_waiting(self, now: float) -> None:
        """Report what the quorum waits for; not often, since the waiting groups may be many."""
        registry = self._registry
        is_early = now - registry.first_request_at < _FIRST_REPORT_S
        if not registry.requests or is_early or now - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = now
        misfits = registry.misfit_reasons(now)
        for replica in registry.requests:
            self._send(replica, messages.QuorumWaiting(misfits.get(replica, self._waits_for)))


def _is_held(request: messages.QuorumRequest, by: list[messages.QuorumRequest]) -> bool:
    """Return whether others have this state, or a newer one."""
    same = (request.step, request.state_version)
    return any(q.step > request.step or (q.step, q.state_version) == same for q in by)
