"""The invariants of every schedule.

Entries    Each index is created once, or again once it was removed, which decides nothing (see
           `storage`), and the indices follow each other. Within a term all
           entries are its leader's; a term starts with a claim, which changes nothing but the
           leader. So at most one leader closes rounds in a term; a fenced one changes nothing.
Rounds     Between min and max members, each task once. Only the leader that created a round's
           entry announces it, once. An agent that accepts a place in it is a member,
           with the ranks that follow from their order, and no rank is taken twice. An agent accepts
           no round before its workers of the last one have ended, and never an older one. No
           entry fences the workers of a round that goes on.
The end    No entry follows the end of the run, and no agent receives another end. It is a
           success only if the function of every rank of the last round has returned.
Restarts   Never more than ``max_restarts``, nor than workers that failed on their own.
Failures   A leader that has failed decides nothing after it has recorded that. Each failed term in
           the log has a planted error, and only `FAILED_TERMS` of them in a row end the run.
Change     A round that is broken at a checkpoint has made no step beyond it.
Agreement  When a step is confirmed, no rank has passed it. Each rank saves there, and none saves as
           agreed at a step that was not confirmed. In the calm no rank waits at a proposed step
           for longer than `_LONGEST_WAIT_S`.
Departure  In a quiet schedule, a node with enough grace leaves at a checkpoint, and the others form
           another round within `Scenario.forms_again_s`.
Blame      At least min nodes of the run's hosts are not excluded. No leader clears the hold of a
           waiting task that the run itself has requeued.
Files      Entries and leases: see `storage`. Files that leaders share: `storage.SharedMonitor`.
Progress   See `Scenario.bound_s`; checked by `simulator`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpc_elastic.rendezvous.effects import Announce
from hpc_elastic.rendezvous.failure_policy import FAILED_TERMS
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry
from hpc_elastic.rendezvous.messages import RoundInfo
from hpc_elastic.rendezvous.round_state import RoundPhase, RunState
from hpc_elastic.slurm.job_state import Phase
from hpc_elastic.step_agreement import VOTE_WITHIN_S
from hpc_elastic.worker.shared_page import CheckpointRequest
from simulation.scenario import Scenario
from simulation.world import World

_AT_BOUNDARY = re.compile(r"at the checkpoint of step (\d+)")
_LONGEST_WAIT_S = VOTE_WITHIN_S + 3.0
"""Includes the leader's tick and the delay of the answer."""


@dataclass(frozen=True)
class RankAt:
    """The position of a rank, and the request on its page."""

    agent: Agent
    at: int
    """The last step that it has polled."""
    may_wait: bool
    """Whether it has not passed that step yet."""
    request: CheckpointRequest | None


class InvariantError(AssertionError):
    """An invariant does not hold."""


class Monitor:
    """Checks the invariants, and raises `InvariantError` at once."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.num_checks = 0
        self.checkpoint = 0
        """The last step that all ranks of a round have saved."""
        self.own_failures = 0
        """Workers that have failed on their own."""
        self._failed_leaders = 0
        self.rounds = 0
        self.elections = 0
        self.fenced = 0
        self.silent = 0
        self.is_published = False
        """Whether the result was published."""
        self.growths = 0
        self.agreements = 0
        self.departures = 0
        self._scenario = scenario
        self._rules = scenario.rules
        self._min_members = scenario.rules.min_nodes
        self._world = world
        self._num_changes = 0
        self._departed: set[int] = set()
        self._confirmed: dict[int, dict[int, bool]] = {}
        """Entry of a round -> its confirmed steps -> whether the ranks stay there."""
        self._by_number: dict[int, LogEntry] = {}
        self._announced: set[int] = set()
        self._taken: dict[int, set[int]] = {}
        self._accepted: dict[Agent, int] = {}
        self._at_work: dict[Agent, int] = {}
        self._returned: dict[Agent, int] = {}
        """Agent whose worker's function has returned -> the entry of that round."""
        self._round_entry = 0
        self._broken: set[int] = set()
        """The entries of the rounds that their leaders have broken."""

    def check(self, holds: bool, what: str, *facts: object) -> None:
        """Raise `InvariantError` with these facts unless an invariant holds."""
        self.num_checks += 1
        if not holds:
            raise InvariantError(f"{what}: {', '.join(map(str, facts))}")

    # ---- entries ------------------------------------------------------------------------

    def entry_created(self, entries: Sequence[LogEntry], entry: LogEntry) -> None:
        """Check an entry that is created after (or, with a planted bug, among) these."""
        number = entry.index
        self.check(number not in self._by_number, "an entry was created twice", number)
        self.check(number == len(entries) + 1, "an entry's number was left out", number)
        self._by_number[number] = entry
        before = entries[-1] if entries else None
        if before is None:
            self.check(entry.term == 1 and entry.round == 0, "the first entry claims", entry)
            self.elections += 1
            return
        self.check(before.ending is None, "an entry follows the end", before, entry)
        self._check_failed_terms(before, entry)
        self.check(entry.term >= before.term, "a term went backwards", before, entry)
        if entry.term == before.term:
            self._check_decision(before, entry)
            return
        self.elections += 1
        self.check(entry.term == before.term + 1, "a term was left out", before, entry)
        state = replace(
            before, index=entry.index, term=entry.term, leader=entry.leader,
            lost=entry.lost, possibly_alive=entry.possibly_alive, claimed=entry.claimed,
            gave_up=False,
        )  # fmt: skip
        self.check(entry == state, "a claim changed the run's state", before, entry)

    def _check_decision(self, before: LogEntry, entry: LogEntry) -> None:
        self.check(
            entry.leader == before.leader, "a fenced leader changed something", before, entry
        )
        self.check(entry.round - before.round in (0, 1), "a round was left out", before, entry)
        self.check(
            before.restarts <= entry.restarts <= min(self._rules.max_restarts, self.own_failures),
            f"restarts: {self.own_failures} workers failed", before.restarts, entry.restarts,
        )  # fmt: skip
        if entry.round == before.round:
            self._check_members(before, entry)
        else:
            self.rounds += 1
            tasks = {m.task for m in entry.members}
            self.check(len(tasks) == len(entry.members), "a task twice in a round", entry)
            is_size = self._min_members <= len(tasks) <= self._rules.max_nodes
            is_whole = self._rules.usable_nodes(len(tasks)) == len(tasks)
            self.check(is_size and is_whole, "a round's size", entry)
            self._round_entry = entry.index
        if entry.ending is not None and entry.ending.status == "succeeded":
            early = [a for a in entry.members if not self._has_returned(a, entry)]
            self.check(not early, "a success before its function had returned", entry, early)

    def _check_failed_terms(self, before: LogEntry, entry: LogEntry) -> None:
        failed, is_end = entry.counters.failed_terms, entry.ending is not None
        goes_on = entry.term == before.term and before.gave_up
        self.check(not goes_on, "a leader that has failed decides", before, entry)
        enough = self._failed_leaders >= len(failed)
        self.check(enough, "failed terms without an error", self._failed_leaders, entry)
        is_last = len(failed) >= FAILED_TERMS
        self.check(is_end or not is_last, "terms fail without end", entry)
        failure = entry.ending.failure if entry.ending is not None else None
        by_leaders = failure is not None and failure.phase == "lead"
        self.check(is_last or not by_leaders, "too few terms have failed for an end", entry)

    def _has_returned(self, agent: Agent, entry: LogEntry) -> bool:
        return self._returned.get(agent) == self._round_entry

    def returned(self, agent: Agent, number: int) -> None:
        """The function of an agent's worker has returned, in the round of an entry."""
        self._returned[agent] = number

    def _check_members(self, before: LogEntry, entry: LogEntry) -> None:
        self.check(entry.members == before.members, "members without a round", entry)

    def appends(self, entry: LogEntry, run: RunState) -> None:
        """A leader appends an entry; ``run`` is the state that it follows from."""
        formed = self._by_number.get(self._round_entry)
        is_last = entry.ending is not None or entry.gave_up
        goes_on = run.phase is RoundPhase.RUNNING and not is_last
        same = formed is not None and formed.round == entry.round and formed.lost == entry.lost
        same = same and self._round_entry not in self._broken
        self.check(not (goes_on and same), "an entry fences a round that goes on", formed, entry)

    # ---- leaders and agents -------------------------------------------------------------

    def leader_failed(self) -> None:
        """A leader fails by an error of its own."""
        self._failed_leaders += 1

    def announced(self, leader: Endpoint, announce: Announce) -> None:
        """A leader announces a round."""
        number = announce.entry.index
        entry = self._by_number.get(number)
        self.check(entry is not None, "announced what was not recorded", leader, number)
        assert entry is not None
        self.check(entry.leader == leader, "announced another leader's entry", leader, entry)
        self.check(number not in self._announced, "a round was announced twice", number)
        self._announced.add(number)
        same = announce.entry == entry
        self.check(same, "announced another round than recorded", announce.entry, entry)

    def published(self, entry: LogEntry) -> None:
        """A leader, or an agent that has read the entry, publishes the result of the run."""
        recorded = self._by_number.get(entry.index)
        self.check(
            entry is recorded and entry.ending is not None,
            "published an end that was not recorded", entry, recorded,
        )  # fmt: skip
        self.is_published = True

    def accepted(self, agent: Agent, place: RoundInfo) -> LogEntry:
        """An agent receives its place in a round; return the round's entry."""
        number = place.index
        entry = self._by_number.get(number)
        self.check(entry is not None, "a place in a round that was not recorded", agent, place)
        assert entry is not None
        last = self._accepted.get(agent, 0)
        self.check(number > last, "an older round was accepted", agent, last, number)
        at_work = self._at_work.get(agent)
        self.check(at_work is None, "an agent is in two rounds", agent, at_work, number)
        self._accepted[agent] = self._at_work[agent] = number
        self.check(agent in entry.members, "a place for an agent that is no member", agent, entry)
        self._check_ranks(agent, place, entry)
        return entry

    def _check_ranks(self, agent: Agent, place: RoundInfo, entry: LogEntry) -> None:
        members, rank = entry.members, place.group_rank
        is_own = 0 <= rank < len(members) and members[rank] == agent
        self.check(is_own, "another's rank", agent, place)
        sizes = (len(members), sum(m.nproc for m in members[:rank]), sum(m.nproc for m in members))
        agree = (*sizes, entry.round) == (
            place.group_size, place.first_rank, place.world_size, place.number
        )  # fmt: skip
        self.check(agree, "members disagree on their round", agent, place, entry)
        taken = self._taken.setdefault(entry.index, set())
        self.check(rank not in taken, "a rank was given twice", agent, rank)
        taken.add(rank)

    def stopped(self, agent: Agent) -> None:
        """An agent's workers have ended."""
        self._at_work.pop(agent, None)

    def received_end(self, agent: Agent, status: str, entries: Sequence[LogEntry]) -> None:
        """An agent receives that the run has ended."""
        ending = entries[-1].ending if entries else None
        self.check(
            ending is not None and ending.status == status, "an end that is not", agent, status
        )

    def round_stopped(
        self, reason: str, number: int, steps: int, staying: Callable[[], Sequence[Agent]]
    ) -> None:
        """A round is broken.

        Args:
            reason: The reason that its members receive.
            number: The entry of the round.
            steps: The last step that all members have made.
            staying: Returns the members that live, and have not left.
        """
        self._broken.add(number)
        at = _AT_BOUNDARY.search(reason)
        if " leaves (" in reason and number not in self._departed:
            self._departed.add(number)
            self.departures += 1
            if self._scenario.is_quiet:
                args = (number, staying, self.rounds, self._num_changes)
                self._world.after(self._scenario.forms_again_s, None, self._check_new_round, *args)
        if at is not None:
            self.growths += 1
            self.check(steps <= int(at[1]), "a step was lost to a change", reason, steps)

    # ---- agreement ----------------------------------------------------------------------

    def confirmed(self, number: int, request: CheckpointRequest, ranks: Sequence[RankAt]) -> None:
        """A leader confirms a request in a round to all members, one after the other."""
        step, steps = request.step, self._confirmed.setdefault(number, {})
        if step is None or step in steps:
            return
        self.agreements += 1
        steps[step] = request.pause
        for rank in ranks:
            is_seen = rank.request is not None and rank.request.number == request.number
            is_ahead = rank.at < step or rank.may_wait
            self.check(
                is_seen and is_ahead,
                "a step was confirmed that a rank has passed", rank.agent, rank.at, step,
            )  # fmt: skip

    def step_passed(self, number: int, agent: Agent, steps: range, pauses: bool | None) -> None:
        """A rank polls the last of ``steps``; it saves and pauses there, or only saves, or neither.

        Args:
            number: The entry of the rank's round.
            agent: The rank's agent.
            steps: The steps since its last poll.
            pauses: Whether it pauses after it has saved; None if it does not save.
        """
        confirmed = self._confirmed.get(number, {})
        agreed = next((confirmed[step] for step in steps if step in confirmed), None)
        what = "passes a confirmed step" if pauses is None else "saves at a step not confirmed so"
        self.check(agreed == pauses, f"a rank {what}", agent, steps[-1])

    def rank_waits(self, agent: Agent, at: int, waits: Callable[[], bool]) -> None:
        """A rank starts to wait at a proposed step; ``waits`` returns whether it still does."""

        def check() -> None:
            self.check(not waits(), "a rank waits at a proposed step for ever", agent, at)

        if self._world.now >= self._scenario.calm_after_s or self._scenario.is_quiet:
            self._world.after(_LONGEST_WAIT_S, None, check)

    # ---- departures ---------------------------------------------------------------------

    def _check_new_round(
        self, number: int, staying: Callable[[], Sequence[Agent]], rounds: int, num_changes: int
    ) -> None:
        """Check that the members that stay have another round.

        Not if another node has received a notice since then, because it may not find the new
        leader in time, nor if a task has started, because the leader waits for it.
        """
        if self._num_changes > num_changes:
            return
        stay = staying()
        again = len(stay) < self._rules.min_nodes or self.rounds > rounds
        self.check(again, "released members hold up the next round", number, stay)

    def nodes_changed(self) -> None:
        """A node receives a notice, or a task starts."""
        self._num_changes += 1

    def leaves_too_late(self, agent: Agent, grace_s: float) -> None:
        """An agent leaves because its grace is over, not because its round was stopped."""
        enough = self._scenario.is_quiet and grace_s >= self._scenario.enough_grace_s
        self.check(not enough, "an announced departure loses steps", agent, grace_s)

    def excluded(self, host: str, num_left: int) -> None:
        """A leader excludes a host; ``num_left`` others remain."""
        enough = num_left >= self._rules.min_nodes
        self.check(enough, "too many hosts are excluded", host, num_left)

    def restarted(self, tasks: Sequence[str], run: RunState) -> None:
        """A leader restarts tasks that Slurm holds."""
        states = run.participants.task_states or {}
        waiting = [t for t in tasks if t not in states or states[t].phase is not Phase.ENDED]
        lost, requeued = run.participants.lost, run.backoff.requeued
        too_early = [t for t in waiting if requeued.get(t, -1) >= lost.get(t, 0)]
        self.check(not too_early, "a task was restarted that the run had requeued", too_early)
