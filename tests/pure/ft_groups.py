"""A lighthouse's state, and the messages of replica groups to it, for the tests of the quorum."""

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

NO_WAIT = QuorumRules(startup_wait_s=0.0)
REQUEST = QuorumRequest(
    quorum_step=0, step=0, state_version="t", quorum_id=NO_QUORUM, commit_failures=0,
    min_replicas=1, shrink_only=False, store="host:1", metadata=("m",),
)  # fmt: skip


def request(**changes):
    """The request of a group of one worker."""
    return replace(REQUEST, **changes)


class Groups:
    """A lighthouse's state, the clock, and the groups; every message is kept by receiver."""

    def __init__(self, *names, state=None, term=0, now=0.0, **rules):
        self.state = state or LighthouseState(term, rules=replace(NO_WAIT, **rules))
        self.now = now
        self.received = {}
        self._connected = set()
        for name in names:
            self.connect(name)

    def _deliver(self, sends):
        sent = {}
        for send in sends:
            sent.setdefault(send.replica, []).append(send.message)
            self.received.setdefault(send.replica, []).append(send.message)
        return sent

    def connect(self, name):
        """Let a group connect."""
        self._connected.add(name)
        return self._deliver(self.state.on_connect(name, self.now))

    def send(self, name, message):
        """Send a message; return the lighthouse's, by receiver."""
        return self._deliver(self.state.on_message(name, message, self.now))

    def disconnect(self, name, reason="its connection is lost"):
        """Let the lighthouse lose a group."""
        return self._deliver(self.state.on_disconnect(name, reason, self.now))

    def wait(self, seconds):
        """Let time pass."""
        self.now += seconds
        return self._deliver(self.state.on_tick(self.now))

    def request(self, *names, **changes):
        """Let groups request a quorum, one after the other; return what follows the last one."""
        for name in names:
            sent = self.send(name, request(store=f"{name}:1", metadata=(f"m-{name}",), **changes))
        return sent

    def form(self, *names, **changes):
        """Bring groups into a quorum; return its id."""
        for name in names:
            if name not in self._connected:
                self.connect(name)
        return quorum_of(self.request(*names, **changes))

    def vote(self, quorum_step, *names, ok=True, rate=0.0):
        """Let members answer their last proposal; return what follows the last answer."""
        proposals = {n: last(self.received[n], ProposeSwitch) for n in names}
        for name, p in proposals.items():
            sent = self.send(name, SwitchVote(p.quorum_id, p.number, ok, quorum_step, rate))
        return sent

    def agree(self, *names, quorum_step=3):
        """Let all members agree to a switch; return its step, and the confirmations by member."""
        self.vote(quorum_step, *names)
        sent = self.vote(quorum_step, *names)
        return last(self.received[names[0]], ProposeSwitch).quorum_step, {
            n: of(sent[n], ConfirmSwitch) for n in names
        }

    def reconnect(self, quorum_id, *names, size=None, is_aborted=False):
        """Let members of an earlier lighthouse's quorum connect; return all that is sent."""
        sent = {}
        for rank, name in enumerate(names):
            self.connect(name)
            status = ReplicaStatus(quorum_id, rank, size or len(names), 3, is_aborted)
            for receiver, messages in self.send(name, status).items():
                sent.setdefault(receiver, []).extend(messages)
        return sent


def formed(*names, **changes):
    """Bring groups into a first quorum; return the lighthouse with them, and the quorum's id."""
    groups = Groups()
    return groups, groups.form(*names, **changes)


def with_newcomer():
    """Bring a and b into a quorum that c requests to join; return what `formed` does."""
    groups, first = formed("a", "b")
    groups.connect("c")
    groups.request("c")
    return groups, first


def of(messages, type_):
    """The only message of this type."""
    (message,) = [m for m in messages if isinstance(m, type_)]
    return message


def last(messages, type_):
    """The last message of this type."""
    return [m for m in messages if isinstance(m, type_)][-1]


def results(sent):
    """The result of each group's first worker in a new quorum, in rank order."""
    by_group = {
        name: of(messages, QuorumResults).ranks[0]
        for name, messages in sent.items()
        if any(isinstance(m, QuorumResults) for m in messages)
    }
    return dict(sorted(by_group.items(), key=lambda item: item[1].replica_rank))


def quorum_of(sent):
    """The id of the quorum that was formed."""
    (quorum_id,) = {r.quorum_id for r in results(sent).values()}
    return quorum_id


def aborted(sent):
    """The reasons of the abort, by notified group."""
    return {
        name: of(messages, QuorumAborted).reason
        for name, messages in sent.items()
        if any(isinstance(m, QuorumAborted) for m in messages)
    }
