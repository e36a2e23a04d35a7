"""Planted bugs: each breaks one rule of the protocol, and the simulator must find it.

They show that the simulator detects the violation of each rule.
"""

# ruff: noqa: D102  (the methods override documented ones)

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    Effect,
    Note,
    RemoveEntries,
    RemoveNotice,
    RenewLease,
    Send,
    StepDown,
    places,
)
from hpc_elastic.rendezvous.failure_policy import FailurePolicy
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.group_change import CheckpointBarrier, GroupChange
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, LogFiles, LogSteps
from hpc_elastic.rendezvous.messages import Probed, RoundInfo, RunMessage, Stop
from hpc_elastic.rendezvous.reachability import Endpoints, Reachability
from hpc_elastic.rendezvous.round_state import RoundState
from hpc_elastic.rendezvous.term import Term, TermFolder
from hpc_elastic.shared_files import Steps, create_once
from hpc_elastic.step_agreement import (
    AgreementState,
    Confirmation,
    Proposal,
    StepAgreement,
    StepVote,
)
from hpc_elastic.worker.shared_page import CheckpointRequest, WorkerStatus
from simulation.cluster import Components
from simulation.scenario import Scenario, draw, draw_quiet, fresh
from simulation.storage import NodeRegister


class ContinuesDuties(Term):
    """Disconnects all agents when another leads, but continues its duties."""

    @property
    def is_over(self) -> bool:
        return False


class RemovesOnceSent(LeaderState):
    """Removes a notice when it was sent, although it may not have arrived."""

    def notices_claimed(self, claimed: Mapping[str, float]) -> list[Effect]:
        effects = super().notices_claimed(claimed)
        is_sent = any(isinstance(e, Send) for e in effects)
        return [*effects, *map(RemoveNotice, claimed)] if is_sent else effects


class InheritsNoNotices(TermFolder):
    """Forwards only the notices that it has claimed itself."""

    def claim_notices(self) -> Steps[Mapping[str, float]]:
        yield from self.enter()
        names = yield self._files.new_notices
        claimed = yield from super().claim_notices()
        self._own = {*getattr(self, "_own", ()), *names}
        return {name: left_s for name, left_s in claimed.items() if name in self._own}


class SkipsTheTermCheck(LeaderState):
    """Uses the next index when its own is taken, instead of stepping down."""

    def refused(self) -> list[Effect]:
        assert self._pending is not None
        self._pending = replace(self._pending, index=self._pending.index + 1)
        return [Append(self._pending)]


class DecidesWithoutEntry(LeaderState):
    """Carries a decision out before it is in the log."""

    def _do(self, effects: list[Effect]) -> list[Effect]:
        done = super()._do(effects)
        decides = any(type(e) is Append for e in done)
        return [*done, *super().appended()] if decides else done

    def appended(self) -> list[Effect]:
        return []


class DecidesAfterItsFailure(LeaderState):
    """Records its failure, and does not step down."""

    def failed(self, failure: Failure, drops_append: bool) -> list[Effect]:
        effects = super().failed(failure, drops_append)
        self._queue = [e for e in self._queue if type(e) is not StepDown]
        return effects


class AlwaysRenewsItsLease(LeaderState):
    """Keeps renewing its lease although no agent reaches it."""

    def tick(self, now: float) -> list[Effect]:
        effects = super().tick(now)
        return effects if self.fenced else [*effects, RenewLease()]


def _with_change(change: type[GroupChange]) -> type[LeaderState]:
    """Return a leader whose rounds follow these rules of change."""

    class Rules(RoundState):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.change = change(self.run.rules)

    class Leader(LeaderState):
        round_rules = Rules

    return Leader


def _with_reach(reach: type[Reachability]) -> type[LeaderState]:
    """Return a leader that judges the connections of its agents so."""

    class Rules(RoundState):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.run.reach = reach()

    class Leader(LeaderState):
        round_rules = Rules

    return Leader


class SendsNoProbes(Reachability):
    """Lets a round close with agents that do not reach each other."""

    def add(self, agent: Agent, endpoints: Endpoints) -> None:
        pass


class TrustsOneDirection(Reachability):
    """Takes a connection in one direction for one in both."""

    def answered(self, agent: Agent, answer: Probed) -> None:
        failed = [t for t in answer.failed if int(t.rpartition("_")[2]) > agent.slot]
        super().answered(agent, replace(answer, failed=failed))


class _NeverForgets(CheckpointBarrier):
    def new_round(self) -> None:
        pass


class BreaksAtOldBoundaries(GroupChange):
    """Keeps the checkpoints of the last round's members in a new round."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.barrier = _NeverForgets()


class ForgetsToPause(GroupChange):
    """Lets all ranks save at a step, but does not request them to stay there."""

    def announced(self, agent: Agent, step: int, paused: int, now: float) -> None:
        paused = self._pause.number if self._pause is not None else 0
        super().announced(agent, step, paused, now)

    def _send(self, request: CheckpointRequest | None) -> list[Effect]:
        return super()._send(None if request is None else replace(request, pause=False))


class _ReleasesSilently(RoundState):
    def _release(self) -> list[Effect]:
        entry = self.run.entry
        effects = super()._release()
        self.run.entry = entry
        return [e for e in effects if isinstance(e, Note)]


class ReleasesWithoutEntry(LeaderState):
    """Releases members without an entry that a new leader could read."""

    round_rules = _ReleasesSilently


class _Hasty(StepAgreement[Agent]):
    def vote(self, member: Agent, vote: StepVote, now: float) -> Proposal | Confirmation | None:
        if vote.ok and self.step and self.state is AgreementState.ASKING:
            self.awaited = {member}
        return super().vote(member, vote, now)


class _Restless(StepAgreement[Agent]):
    def begin_agreement(self, members: Collection[Agent], now: float) -> Proposal | None:
        if self.state is AgreementState.CONFIRMED:
            self.state = AgreementState.IDLE
        return super().begin_agreement(members, now)


class ConfirmsTooEarly(GroupChange):
    """Confirms a step as soon as one member has voted ok."""

    agreements = _Hasty


class ProposesTooSoon(GroupChange):
    """Makes a proposal before all ranks have passed the step that was confirmed before it."""

    agreements = _Restless


class _Strict(FailurePolicy):
    def _is_excludable(self, host: str, num_left: int) -> bool:
        return host not in self.excluded


class ExcludesEverybody(LeaderState):
    """Excludes every host that has had a failure."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run.policy = _Strict.resume(self.at, self.run.rules)


def _ok_when_undecided(request: CheckpointRequest, worker: WorkerStatus) -> bool:
    return worker.passed is None or worker.passed <= (request.step or 0)


class StaysUnderNotice(FollowerState):
    """Requests another place when its round is stopped, although its node is preempted."""

    def _on_round_stopped(self) -> list[Effect]:
        self._in_round = False
        return []


class JoinsTooEarly(FollowerState):
    """Requests the next round before the workers of the last one have ended."""

    def received(self, message: RunMessage, now: float) -> list[Effect]:
        effects = super().received(message, now)
        return [*effects, *self.join()] if isinstance(message, Stop) else effects


class TakesAnyAnswer(FollowerState):
    """Accepts a place that answers an earlier request of its own."""

    def received(self, message: RunMessage, now: float) -> list[Effect]:
        if isinstance(message, RoundInfo):
            message = replace(message, request=self._num_requests)
        return super().received(message, now)


class ClaimsAfterTheEnd(FollowerState):
    """Ignores the end of the run in the log."""

    def log_read(
        self, number: int, entry: LogEntry | None, lease: int | None, now: float
    ) -> list[Effect]:
        seen = replace(entry, ending=None) if entry is not None else None
        return super().log_read(number, seen, lease, now)


class _NodeSteps(LogSteps):
    """Has access to the simulated files of its node."""

    def __init__(self, files: NodeRegister) -> None:
        super().__init__(files)
        self._node = files


class PollsThePath(_NodeSteps):
    """Looks for the entry after the last known one by its path."""

    _known = 0

    def last_index(self) -> Steps[int]:
        known = self._known
        while (yield partial(self._node.exists, known + 1)):
            known += 1
        self._known = max(known, self._known)
        return self._known


class _ChecksItsFile(_NodeSteps):
    """Checks after a failed link by its own file whether the link was created."""

    def _is_its_own(self, number: int) -> bool:
        raise NotImplementedError

    def create(self, entry: LogEntry) -> Steps[bool]:
        is_made = True
        try:
            yield partial(self._files.put, entry)
        except OSError:
            if entry.index not in (yield self._files.indices):
                raise
            is_made = bool((yield partial(self._is_its_own, entry.index)))
        return is_made and (yield from self.last_index()) <= entry.index


class TrustsTheCountOfLinks(_ChecksItsFile):
    """Trusts ``st_nlink`` of its own file, which a client caches."""

    def _is_its_own(self, number: int) -> bool:
        staged = self._node.staged
        return staged is not None and self._node.mount.num_links(staged) == 2


class TrustsInodes(_ChecksItsFile):
    """Compares the inode numbers of its own file and of the entry's."""

    def _is_its_own(self, number: int) -> bool:
        mount, staged = self._node.mount, self._node.staged
        found = mount.open(self._node.rdzv, ("entry", number))
        return staged is not None and mount.inode(staged) == mount.inode(found)


class WaitsForRemovals(_NodeSteps):
    """Removes its own file before it returns that the entry was created."""

    def create(self, entry: LogEntry) -> Steps[bool]:
        created = yield from super().create(entry)
        with contextlib.suppress(OSError):
            yield self._node.remove_staged
        return created


class ListsFromCache(_NodeSteps):
    """Trusts an earlier listing if the folder's time is the same."""

    def __init__(self, files: NodeRegister) -> None:
        super().__init__(files)
        indices = partial(files.indices, anew=False)
        others = {"read": files.read, "put": files.put, "lease": files.lease}
        self._files = cast(LogFiles, SimpleNamespace(indices=indices, **others))


class ListsNothingBehind(LogSteps):
    """Takes an entry for the decision as soon as it exists."""

    def create(self, entry: LogEntry) -> Steps[bool]:
        put, read = partial(self._files.put, entry), partial(self._files.read, entry.index)
        return (yield from create_once(put, self._files.indices, entry.index, read, entry))


class TakesRemovedForDamaged(LogSteps):
    """Does not list again when it cannot read the last entry."""

    def last(self) -> Steps[tuple[int, LogEntry | None]]:
        last = yield from self.last_index()
        for index in range(last, 0, -1):
            entry: LogEntry | None = yield partial(self._files.read, index)
            if entry is not None:
                return last, entry
        return last, None


class RemovesTooEarly(LeaderState):
    """Removes all entries before the one that it is about to append."""

    def _remove_entries(self, now: float) -> list[Effect]:
        newest = self.at if self._pending is None else self._pending
        return [RemoveEntries(newest.index, newest.term)]


class RemovesAtOnce(LeaderState):
    """Removes entries while late listings may lack all later ones."""

    def _remove_entries(self, now: float) -> list[Effect]:
        return [RemoveEntries(self.at.index - self.num_kept, 0)]


class TakesLeasesForFresh(FollowerState):
    """Ignores that a fresh read may be stale."""

    def __init__(self, me: Agent, heartbeat: HeartbeatConfig, now: float, **kwargs: Any) -> None:
        super().__init__(me, replace(heartbeat, stale_s=0.0), now, **kwargs)


def _late(rng: random.Random) -> Scenario:
    scenario = draw(rng)
    return replace(scenario, heartbeat=replace(scenario.heartbeat, stale_s=3.0))


def _by_time(rng: random.Random) -> Scenario:
    return replace(fresh(draw(rng)), detects_by_time=True)


class TakesUnreadForSilent(FollowerState):
    """Dates the first read of a lease back to the loss of the connection."""

    def _may_claim(self, number: int, entry: LogEntry | None, now: float) -> bool:
        self._watch.lease_since = self._watch.since
        return super()._may_claim(number, entry, now)


class EntersOnce(TermFolder):
    """Lists the folder before its first status only, and uses its name after that."""

    _has_entered = False

    def enter(self) -> Steps[None]:
        if not self._has_entered:
            yield from super().enter()
            self._has_entered = True


def _same_rank_twice(announce: Announce) -> Iterator[tuple[Agent, RoundInfo]]:
    for agent, place in places(announce):
        yield agent, replace(place, group_rank=min(1, place.group_rank))


def exits_with_0(exit_code: int, _: WorkerStatus) -> bool:
    """Return whether the exit code is 0, whether the function has returned or not."""
    return exit_code == 0


MUTANTS: Mapping[str, tuple[Components, str]] = {
    "create is not exclusive": (Components(exclusive_create=False), "created twice"),
    "no term check": (
        Components(leader_state=SkipsTheTermCheck), "a fenced leader|a term went|follows the end",
    ),
    "announces what is not recorded": (
        Components(leader_state=DecidesWithoutEntry), "not recorded",
    ),
    "ranks given twice": (Components(places=_same_rank_twice), "another's rank"),
    "joins too early": (Components(following=JoinsTooEarly), "an agent is in two rounds"),
    "takes an answer to an earlier question": (
        Components(following=TakesAnyAnswer), "no round stands",
    ),
    "always renews its lease": (
        Components(leader_state=AlwaysRenewsItsLease), "no round stands|a notice was lost",
    ),
    "breaks at old boundaries": (
        Components(leader_state=_with_change(BreaksAtOldBoundaries)), "lost to a change",
    ),
    "confirms too early": (
        Components(leader_state=_with_change(ConfirmsTooEarly)), "rank has passed|not confirmed",
    ),
    "proposes too soon": (
        Components(leader_state=_with_change(ProposesTooSoon)), "passes a confirmed step",
    ),
    "ok when undecided": (Components(can_save_at=_ok_when_undecided), "that a rank has passed"),
    "forgets to pause": (
        Components(leader_state=_with_change(ForgetsToPause)), "lost to a change",
    ),
    "releases without an entry": (
        Components(leader_state=ReleasesWithoutEntry, draw=draw_quiet), "released members hold up",
    ),
    "stays under notice": (
        Components(following=StaysUnderNotice, draw=draw_quiet), "departure loses steps|released",
    ),
    "excludes everybody": (Components(leader_state=ExcludesEverybody), "too many hosts"),
    "continues its duties": (Components(term=ContinuesDuties), "acts though its term is over"),
    "renames are not fenced": (Components(fenced_files=False), "the status went back|a notice was"),
    "removes a notice once sent": (Components(leader_state=RemovesOnceSent), "a notice was lost"),
    "inherits no notices": (
        Components(folder=InheritsNoNotices), "a round stands, with the notices",
    ),
    "takes exit code 0 for success": (
        Components(has_succeeded=exits_with_0),
        "before its function had returned|restarts: |no round stands",
    ),
    "polls the path": (Components(entries=PollsThePath), "a read has missed an entry"),
    "trusts the count of links": (
        Components(entries=TrustsTheCountOfLinks), "its own entry was denied",
    ),
    "trusts inode numbers": (Components(entries=TrustsInodes), "its own entry was denied"),
    "lists from the cache": (
        Components(entries=ListsFromCache, draw=_by_time), "a read has missed an entry",
    ),
    "lists nothing behind": (
        Components(entries=ListsNothingBehind), "another's entry was taken for its own",
    ),
    "takes removed entries for damaged": (
        Components(entries=TakesRemovedForDamaged), "a removed entry was taken for a damaged one",
    ),
    "removes too early": (
        Components(leader_state=RemovesTooEarly), "a read has missed|a number was left out",
    ),
    "removes at once": (
        Components(leader_state=RemovesAtOnce, draw=_late), "another's entry was taken for its own",
    ),
    "waits for removals": (Components(entries=WaitsForRemovals), "a decision that was made waited"),
    "judges a lease by one read": (
        Components(following=TakesUnreadForSilent), "silent that renews its lease",
    ),
    "takes leases for fresh": (
        Components(following=TakesLeasesForFresh), "silent that renews its lease",
    ),
    "enters the term folder once": (Components(folder=EntersOnce), "the status went back"),
    "sends no probes": (Components(leader_state=_with_reach(SendsNoProbes)), "no round stands"),
    "trusts one direction": (
        Components(leader_state=_with_reach(TrustsOneDirection)), "no round stands",
    ),
    "decides after its failure": (
        Components(leader_state=DecidesAfterItsFailure),
        "a leader that has failed decides|no round stands",
    ),
    "claims after the end": (Components(following=ClaimsAfterTheEnd), "an entry follows the end"),
}  # fmt: skip
"""Name -> the parts with the bug, and a pattern for the message of the simulator."""
