"""The effects of the rendezvous: the actions that its pure state machines return (pure).

`round_state` and `replica_state` return effects, and `leader_state` delays those that stand behind
an `Append`. `term` hands them to `leader`, which carries them out. `follower_state` returns effects
for `session`. The simulator carries out the same effects in virtual time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hpc_elastic.data.batch import encode_throughputs
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.messages import Join, Probe, RoundInfo, RunMessage
from hpc_elastic.site import QueueQuestion
from hpc_elastic.slurm import nodelist
from hpc_elastic.transport.messages import Json


class Effect:
    """An action of a state machine, which its driver carries out."""


# ---- messages and connections


@dataclass(frozen=True)
class Send(Effect):
    """Send a message to connected agents; None: to all of them."""

    agents: Collection[Agent] | None
    message: RunMessage


@dataclass(frozen=True)
class SendToLeader(Effect):
    """Send a message to the leader."""

    message: RunMessage


@dataclass(frozen=True)
class Connect(Effect):
    """Connect to this entry's leader; report `FollowerState.connected` or `not_connected`."""

    entry: LogEntry


@dataclass(frozen=True)
class Disconnect(Effect):
    """Abandon the connection to an agent; None: the one to the leader, or the attempt at it."""

    agent: Agent | None = None


@dataclass(frozen=True)
class Deliver(Effect):
    """Pass the agent's own thread a message of the leader, or one about this node."""

    message: RunMessage


@dataclass(frozen=True)
class ProbePeers(Effect):
    """Connect to ports of other agents; send the leader `Probed` with those out of reach."""

    probe: Probe


# ---- the log, and the files of the run


@dataclass(frozen=True)
class Append(Effect):
    """Append this entry; report `LeaderState.appended`, or `refused` if its index is taken."""

    entry: LogEntry
    needs_store: bool = False
    """Whether it closes a round whose members meet in one store, which is started before."""


@dataclass(frozen=True)
class ReadLog(Effect):
    """Read the last entry and its lease; report `FollowerState.log_read` or `log_unreadable`."""


@dataclass(frozen=True)
class Claim(Effect):
    """Try to append entry ``number`` as the next leader; report `FollowerState.claimed`."""

    number: int
    before: LogEntry | None
    possibly_alive: bool  # whether the leader before is out of reach, and its end was not observed


@dataclass(frozen=True)
class Lead(Effect):
    """Lead: the claim was appended."""

    entry: LogEntry


@dataclass(frozen=True)
class Announce(Effect):
    """Send each member its place in the round that an entry has closed."""

    entry: LogEntry
    requests: Mapping[Agent, Join]
    """What this answers: an agent may have joined again since, and request another round."""
    replicas: Mapping[int, Sequence[Agent]] | None = None
    """Those that they form, by number; None: all members of the entry are one group."""


@dataclass(frozen=True)
class PublishResult(Effect):
    """Write the result of a run that has ended, and cancel its pending tasks.

    The leader does so, and any agent that finds the end in the log: the leader may have died.
    """

    entry: LogEntry


@dataclass(frozen=True)
class RenewLease(Effect):
    """Show on the shared file system that the leader of this term is alive."""


@dataclass(frozen=True)
class RemoveEntries(Effect):
    """Remove the log entries before an index, never the last one, and the leases before a term."""

    index: int
    term: int


@dataclass(frozen=True)
class Show(Effect):
    """Replace the run's status, and append lines to its progress."""

    status: Json
    lines: tuple[Json, ...]


@dataclass(frozen=True)
class RemoveNotice(Effect):
    """Remove a claimed notice, which is confirmed, or matches no agent of the run."""

    name: str
    matches_no_agent: bool = False


@dataclass(frozen=True)
class Note(Effect):
    """Write an event into the event log; `hpc_elastic.run.events` has the kinds."""

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True)
class StepDown(Effect):
    """Disconnect from all agents: another agent leads."""


# ---- Slurm


@dataclass(frozen=True)
class QueryTasks(Effect):
    """Query the states of the run's tasks; report `LeaderState.slurm_answered`."""


@dataclass(frozen=True)
class QuerySlurm(Effect):
    """Query whether the leader's task runs; report `FollowerState.slurm_answered`."""

    task: str


@dataclass(frozen=True)
class QueryQueue(Effect):
    """Let siblings start, fit time limits, query the queue; report `LeaderState.advised`."""

    question: QueueQuestion


@dataclass(frozen=True)
class Postpone(Effect):
    """Let no queued task of the run start for a while."""

    delay_s: float


@dataclass(frozen=True)
class Exclude(Effect):
    """Let no queued task of the run start on these hosts until a time (Unix seconds)."""

    hosts: tuple[str, ...]
    why: str
    until: float


@dataclass(frozen=True)
class ClearHolds(Effect):
    """Let these tasks, which Slurm holds after a requeue or has ended, start soon."""

    tasks: tuple[str, ...]
    possibly_alive: Mapping[str, str] = field(default_factory=dict)
    """Those whose end was not observed, each with the node where it may still run."""
    failed_on: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Those that failed before they joined, each with the hosts of these attempts."""


@dataclass(frozen=True)
class Readmit(Effect):
    """Let these lost tasks start again on the nodes that they avoid, if those nodes are back."""

    tasks: tuple[str, ...]


def hosts_of(agents: Collection[Agent]) -> list[str]:
    """Return the first 20 hosts, for an event: a line stays short with thousands of nodes."""
    return [agent.host for agent in agents][:20]


def places(
    announce: Announce, store: tuple[str, int] = ("", 0)
) -> Iterator[tuple[Agent, RoundInfo]]:
    """Yield the place of each member that is sent one; ``store``: of a group of all members."""
    entry, requests = announce.entry, announce.requests
    groups = {0: entry.members} if announce.replicas is None else announce.replicas
    for replica, members in groups.items():
        if announce.replicas is not None:
            store = requests[members[0]].store
        *first_ranks, world_size = accumulate((m.nproc for m in members), initial=0)
        throughputs = encode_throughputs(m.throughput for m in members for _ in range(m.nproc))
        hosts = nodelist.compress_in_order(m.host for m in members)
        workers = nodelist.repeat_counts(m.nproc for m in members)
        for rank, (agent, first_rank) in enumerate(zip(members, first_ranks, strict=True)):
            yield agent, RoundInfo(
                requests[agent].request, entry.round, entry.index, entry.restarts, rank,
                len(members), first_rank, world_size, store, replica, throughputs, hosts, workers,
            )  # fmt: skip
