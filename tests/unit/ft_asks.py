"""Keepers, and what replica groups say to them, for the tests of the quorum."""

from dataclasses import replace

from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    ConfirmSwitch,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResults,
    ReplicaStatus,
    SwitchVote,
)
from hpc_elastic.ft.quorum import QuorumRules

NO_WAIT = QuorumRules(greet_s=0.0)
ASK = QuorumRequest(
    call=0, step=0, lineage="t", quorum_id=NO_QUORUM, commit_failures=0, min_replicas=1,
    shrink_only=False, store="host:1", metadata=("m",),
)  # fmt: skip


def ask(**changes):
    """An ask of a group of one worker."""
    return replace(ASK, **changes)


class Groups:
    """A keeper, the clock, and the groups that talk to it; every message is kept by receiver."""

    def __init__(self, *names, keeper=None, epoch=0, now=0.0, **rules):
        self.keeper = keeper or LighthouseState(epoch, rules=replace(NO_WAIT, **rules))
        self.now = now
        self.heard = {}
        for name in names:
            self.arrive(name)

    def _deliver(self, sends):
        told = {}
        for send in sends:
            told.setdefault(send.replica, []).append(send.message)
            self.heard.setdefault(send.replica, []).append(send.message)
        return told

    def arrive(self, name):
        """Let a group connect."""
        return self._deliver(self.keeper.arrived(name, self.now))

    def say(self, name, message):
        """What the keeper answers, by receiver."""
        return self._deliver(self.keeper.said(name, message, self.now))

    def leave(self, name, why="its connection is gone"):
        """Let the keeper lose a group."""
        return self._deliver(self.keeper.left(name, why, self.now))

    def wait(self, seconds):
        """Let time pass, and the keeper notice."""
        self.now += seconds
        return self._deliver(self.keeper.tick(self.now))

    def ask(self, *names, **changes):
        """Let groups ask, one after the other; the answers to the last one."""
        for name in names:
            told = self.say(name, ask(store=f"{name}:1", metadata=(f"m-{name}",), **changes))
        return told

    def form(self, *names, **changes):
        """Let these be in a quorum; its id."""
        for name in names:
            if name not in self.keeper._roll.connected:
                self.arrive(name)
        return quorum_of(self.ask(*names, **changes))

    def answer(self, call, *names, ok=True, rate=0.0):
        """Let members answer the proposal that they heard last; the answers to the last one."""
        proposals = {n: last(self.heard[n], ProposeSwitch) for n in names}
        for name, p in proposals.items():
            told = self.say(name, SwitchVote(p.quorum_id, p.number, ok, call, rate))
        return told

    def agree(self, *names, call=3):
        """Let all members agree to a switch; the call, and the confirmations by member."""
        self.answer(call, *names)
        told = self.answer(call, *names)
        return last(self.heard[names[0]], ProposeSwitch).call, {
            n: of(told[n], ConfirmSwitch) for n in names
        }

    def come_back(self, quorum_id, *names, size=None, broken=False):
        """Let members of a quorum come to this keeper; what they are told all together."""
        told = {}
        for rank, name in enumerate(names):
            self.arrive(name)
            here = ReplicaStatus(quorum_id, rank, size or len(names), 3, broken)
            for receiver, messages in self.say(name, here).items():
                told.setdefault(receiver, []).extend(messages)
        return told


def of(messages, type_):
    """The only message of this type."""
    (message,) = [m for m in messages if isinstance(m, type_)]
    return message


def last(messages, type_):
    """The last message of this type."""
    return [m for m in messages if isinstance(m, type_)][-1]


def placements(told):
    """Who was placed in a quorum: the place of the first worker, by group, in rank order."""
    placed = {
        name: of(messages, QuorumResults).ranks[0]
        for name, messages in told.items()
        if any(isinstance(m, QuorumResults) for m in messages)
    }
    return dict(sorted(placed.items(), key=lambda item: item[1].replica_rank))


def quorum_of(told):
    """The id of the quorum that was formed."""
    (quorum_id,) = {p.quorum_id for p in placements(told).values()}
    return quorum_id


def broken(told):
    """Who was told that the quorum is broken, and why, by group."""
    return {
        name: of(messages, QuorumAborted).why
        for name, messages in told.items()
        if any(isinstance(m, QuorumAborted) for m in messages)
    }
