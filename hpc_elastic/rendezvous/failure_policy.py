"""What a broken round costs the run, and which nodes are to blame (pure).

A round is judged once all of its members have settled.

Restarts     If a round broke for another reason than a worker's failure, or if a member was lost or
             left meanwhile, the failures of workers in it are consequences and cost nothing.
             Otherwise they cost one of the run's ``max_restarts``. Without one left, the run fails
             with that failure. It fails at once if another try would not change it: the user's
             script cannot be imported, or the like, in the first round; or a training was refused,
             or a setting wants no other try. A worker whose port of gloo strangers have flooded has
             failed because of them, which costs nothing either.

Crash loops  ``max_failed_rounds`` such rounds in a row without a checkpoint beyond the last known
             one end the run with the first failure among them, even if restarts are left. Rounds
             that broke for another reason neither count nor reset the count.

Lost nodes   A loss that the node or Slurm has announced costs nothing. Another one is judged once
             a later attempt of its task joins: if the same attempt joins, it was not lost. After
             ``max_failed_rounds`` rounds in a row that such losses broke, without a new checkpoint
             or a step beyond all before, each further one costs a restart. Without one left, the
             run fails. If more than one in `_TOGETHER` members are lost in a round, but not all,
             the script is not to blame, unless Slurm reports OUT_OF_MEMORY. Nor is it for nodes
             that the run itself has requeued.

Failed terms A leader that fails by an error of its own records that, and another agent leads, on
             another node if there is one (`follower_state`). After `FAILED_TERMS` such terms in a
             row, without a new checkpoint or a step beyond all before, the run fails with the last
             error.

Bad nodes    Failures that follow a node are *strikes* against its host: an error of a worker that
             hardware causes, or an agent whose heartbeats stop and that does not come back. The
             latter does not count if many agents stop at the same time, since the network is to
             blame then. Nor does it count if all but the leader's stop: the leader's own node may
             be cut off. Two strikes, or one failure that leaves no doubt, exclude the host: the
             run's queued tasks do not start there, and the node, if it is alive, is requeued. At
             least min nodes of the run's present hosts are never excluded. A failure whose host was
             excluded for it costs nothing.

Bad starts   A task that fails before its agent joins is one strike against its node, and two if
             Slurm reports that the node could not start it. The run avoids at most ``max_nodes``
             nodes because of these. In a run that has trained, the task is tried for about an hour
             more (`task_recovery`).

Limits       Strikes fade after `STRIKE_S`. If several hosts have strikes within `_TOGETHER_S`, the
             cause is common to them, such as an outage of the file system, and strikes that leave
             doubt are dropped. An exclusion ends after 12 minutes, and after up to 48 if the host
             has more strikes by then. Times are Unix seconds of the leader, so that the next leader
             continues from those in the log.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hpc_elastic.rendezvous import task_recovery
from hpc_elastic.rendezvous.effects import Effect, Exclude, Note
from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Failure,
    FailureCounters,
    LogEntry,
    LostNode,
    RoundRules,
    RunEnding,
    first_failure,
    is_secondary,
)
from hpc_elastic.rendezvous.task_recovery import FailedStart
from hpc_elastic.slurm.job_state import Phase, TaskState

FAILED_TERMS = 4  # after this number of failed terms in a row the run fails
STRIKES = 2  # this number of strikes excludes a host
STRIKE_S = 6 * 3600.0  # a strike fades after this time
_EXCLUDED_S, LONGEST_EXCLUDED_S = 720.0, 2880.0
"""Duration of an exclusion after two strikes; it doubles with each further one, up to a limit."""
_TOGETHER = 8
"""If more than one in this many members stop at the same time, the network is to blame."""
_TOGETHER_S = 600.0
_DOUBTLESS = re.compile(
    r"uncorrectable (\S+ )?(ECC|memory|NVLink) error|ECC error|cudaErrorECCUncorrectable"
    r"|\bXid\b|fallen off the bus|cudaErrorNvlinkUncorrectable|NVLink error"
    r"|hardware stack error|cudaErrorHardwareStackError|cudaErrorContained",
    re.IGNORECASE,
)
_DOUBTFUL = re.compile(
    r"CUDA (driver )?error|CUDA-capable device|CUDA initialization|cudaErrorDevicesUnavailable"
    r"|cuda[A-Za-z]*Error|HIP error|NVML|no NVIDIA driver|cuDNN error|CUBLAS_STATUS"
    r"|nvidia-smi fails|Input/output error|Stale file handle",
    re.IGNORECASE,
)
_SCRIPTS_FAULT = re.compile(
    r"out of memory|device-side assert|illegal memory access|misaligned address"
    r"|invalid (argument|configuration|device ordinal|value)|no kernel image|launch failure",
    re.IGNORECASE,
)
"""Errors of the script, which it makes on any node."""

_FLOODED = re.compile(r"accept: Too many open files")
"""gloo aborts its worker so if strangers hold thousands of connections to its port."""


def strikes_of(failure: Failure) -> int:
    """Return the number of strikes of a failure against its host: 0, 1 or 2."""
    text = f"{failure.exception or ''} {failure.message}"
    if _SCRIPTS_FAULT.search(text):
        return 0
    if _DOUBTLESS.search(text):
        return STRIKES
    if failure.signal == "SIGBUS":
        return 1
    return int(bool(_DOUBTFUL.search(text)) and not is_secondary(failure))


class FailurePolicy(FailureCounters):
    """Restarts, failures and bad hosts of a run so far, over all terms."""

    gone: dict[str, LostNode]
    strikes: dict[str, tuple[float, ...]]
    exclusions: dict[str, float]

    def __init__(self, rules: RoundRules, counters: FailureCounters | None = None) -> None:
        known = vars(counters or FailureCounters())
        super().__init__(**{name: copy(value) for name, value in known.items()})
        self.rules = rules
        self.restarts = 0
        self.not_counted = False
        """Whether failures in the broken round are consequences of what broke it."""
        self.failures: list[Failure] = []  # of the broken round
        self.now = 0.0  # Unix time of the last event
        self._loss_round = 0  # the last round that lost a node
        self._num_lost = 0  # how many nodes that round has lost
        self._has_progressed = False
        """Whether the round has announced a checkpoint beyond the last one known."""
        self._silent = set[str]()  # hosts whose agents stopped in the round that is to be judged

    @classmethod
    def resume(cls, entry: LogEntry, rules: RoundRules) -> FailurePolicy:
        """Return the policy of the next leader; the last leader may have died with its round."""
        policy = cls(rules, entry.counters)
        policy.restarts, policy.not_counted, policy.now = entry.restarts, True, entry.claimed
        return policy

    def counters(self) -> FailureCounters:
        """Return the counters for the next log entry."""
        names = (field.name for field in fields(FailureCounters))
        return FailureCounters(**{name: copy(getattr(self, name)) for name in names})

    @property
    def excluded(self) -> tuple[str, ...]:
        """The hosts on which no task of the run may start."""
        return tuple(self.exclusions)

    def advance(self, now: float) -> None:
        """Take in the Unix time: strikes fade, and exclusions end."""
        self.now = now
        recent = {h: tuple(t for t in at if now - t < STRIKE_S) for h, at in self.strikes.items()}
        self.strikes = {host: at for host, at in recent.items() if at}
        self.exclusions = {host: until for host, until in self.exclusions.items() if until > now}

    def new_round(self) -> None:
        """A round has closed; it has made no checkpoint yet."""
        self._has_progressed = False

    def record_checkpoint(self, step: int) -> None:
        """Record a complete checkpoint of this step."""
        if self.progress is None or step > self.progress:
            self.progress, self.failures_without_progress, self.first_of_series = step, 0, None
            self._has_progressed, self.losses, self.failed_terms = True, 0, ()

    def record_step(self, step: int) -> None:
        """Record a step of the training."""
        if self.reached is None or step > self.reached:
            self.reached, self.losses, self.failed_terms = step, 0, ()

    def record_silence(self, host: str) -> None:
        """Record that the heartbeats of a member stopped, though its connection did not end."""
        self._silent.add(host)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to judge."""
        return bool(self.failures or self._silent)

    def judge(self, number: int, hosts: Collection[str]) -> tuple[list[Effect], RunEnding | None]:
        """Judge a round; return the effects, and the end of the run if it does not go on.

        ``hosts`` are those of members and of nodes that wait.
        """
        silent, self._silent = self._silent, set()
        failures, self.failures = self.failures, []
        num_alive = len(set(hosts) - silent)  # the leader's own host among them
        if num_alive > 1 and 0 < len(silent) <= max(1, len(hosts) // _TOGETHER):
            for task, lost in self.gone.items():
                if lost.host in silent:
                    self.gone[task] = replace(lost, is_suspect=True)
        struck = self._strike(_hardware_failures(failures, self.not_counted), hosts)
        if any(isinstance(effect, Exclude) for effect in struck):
            self.not_counted = True
        spent, ending = self._spend(number, failures) if failures else ([], None)
        return [*struck, *spent], ending

    def record_loss(self, agent: Agent, why: str, round_: int, num_members: int) -> None:
        """Record the loss of an agent at work, which nothing has announced."""
        self._num_lost = 1 if round_ != self._loss_round else self._num_lost + 1
        self._loss_round = round_
        is_first = self._num_lost in (1, num_members) and not self._is_blamed(round_)
        self.gone[agent.task] = LostNode(agent.host, why, round_, is_first)
        if self._num_lost == max(1, num_members // _TOGETHER) + 1 < num_members:
            for task, lost in self.gone.items():
                self.gone[task] = replace(lost, is_first=lost.is_first and lost.round != round_)

    def _is_blamed(self, round_: int) -> bool:
        """Return whether one recorded loss counts already for all losses of a round."""
        return any(lost.is_first and lost.round == round_ for lost in self.gone.values())

    def explain_loss(self, state: TaskState) -> None:
        """Take in Slurm's state of an attempt that was lost."""
        lost = self.gone.get(state.task)
        if lost is None or state.phase is not Phase.ENDED:
            return
        if state.state in ("PREEMPTED", "TIMEOUT"):
            del self.gone[state.task]
            return
        why = f"Slurm: {task_recovery.describe(state)}"
        is_killed = state.state == "OUT_OF_MEMORY" and not self._is_blamed(lost.round)
        self.gone[state.task] = replace(lost, why=why, is_first=lost.is_first or is_killed)

    def judge_loss(
        self, agent: Agent, last: int, hosts: Callable[[], Collection[str]]
    ) -> tuple[list[Effect], RunEnding | None]:
        """Judge the last loss of a task, the attempt ``last``, whose next agent joins."""
        lost = self.gone.pop(agent.task, None)
        if lost is None or agent.attempt <= last:
            return [], None
        suspect = {lost.host: (1, "fell silent")}
        effects = self._strike(suspect, hosts()) if lost.is_suspect else []
        if lost.is_first:
            self.losses += 1
        if not lost.is_first or self.losses <= self.rules.max_failed_rounds:
            return effects, None
        step = "no step" if self.reached is None else f"step {self.reached} as the last one"
        message = (
            f"its node or agent was lost ({lost.why}), as in each of the last {self.losses} broken "
            f"rounds, without a new checkpoint or step in between; the run has reached {step}"
        )
        failure = Failure(agent.task, lost.host, 0, 0, 0.0, message, phase="start")
        if self.restarts >= self.rules.max_restarts:
            return effects, RunEnding("failed", failure)
        return [*effects, self._restart(lost.round, failure)], None

    def term_failed(self, failure: Failure) -> tuple[Note, RunEnding | None]:
        """Record the failure of the present leader; return its event, and the end of the run."""
        text = failure.message.partition("\n")[0]  # the traceback has the others
        failure = replace(failure, message=text)
        self.failed_terms = (*self.failed_terms, replace(failure, traceback=None))
        num_failed, hosts = len(self.failed_terms), {f.host for f in self.failed_terms}
        is_last = num_failed >= FAILED_TERMS
        note = Note("leader_failed", {
            "host": failure.host, "why": f"{failure.exception}: {text}",
            "traceback": failure.traceback, "terms": num_failed, "again": not is_last,
        })  # fmt: skip
        if not is_last:
            return note, None
        remedy = "several nodes failed as leaders: look for what they share"
        if len(hosts) == 1:
            remedy = f"no node but {failure.host} was there to lead: look for a fault of this node"
        message = f"{text} ({num_failed} terms in a row failed, on {', '.join(sorted(hosts))})"
        remedy += (
            ", such as the versions of Python and torch, the limits of open files and processes, "
            "and the space on its disks; then go on with `hpc-elastic resume`"
        )
        return note, RunEnding("failed", replace(failure, message=message, remedy=remedy))

    def start_failed(self, start: FailedStart, num_hosts: int) -> list[Effect]:
        """Judge an attempt of a task that ended before its agent joined."""
        state = start.state
        note = {
            "task": state.task, "host": state.node, "state": state.state, "reason": state.reason,
            "hosts": list(start.hosts), "again": not start.is_last,
        }  # fmt: skip
        effects: list[Effect] = [Note("start_failed", note)]
        host, strikes = state.node, STRIKES if task_recovery.was_not_launched(state) else 1
        if not host:
            return effects
        is_bad = self._add_strikes(host, strikes, self.rules.max_nodes, in_doubt=True)
        if is_bad and host not in self.excluded and len(self.excluded) < self.rules.max_nodes:
            why = f"a task failed there before it joined (Slurm: {task_recovery.describe(state)})"
            effects += self._exclude(host, why, num_hosts)
        return effects

    def _spend(
        self, number: int, failures: Sequence[Failure]
    ) -> tuple[list[Effect], RunEnding | None]:
        first, secondary = first_failure(failures)
        is_flooded = first.signal == "SIGABRT" and _FLOODED.search(first.traceback or "")
        if self.not_counted or is_flooded:
            return [Note("secondary_failures", {"workers": len(failures)})], None
        is_hopeless = first.phase == "final" or (first.phase == "import" and number == 1)
        if is_hopeless or self.restarts >= self.rules.max_restarts:
            return [], RunEnding("failed", first, tuple(secondary))
        if not self._has_progressed:
            self.failures_without_progress += 1
            self.first_of_series = self.first_of_series or first
        if self.failures_without_progress >= self.rules.max_failed_rounds:
            counted = {"attempts": self.failures_without_progress, "checkpoint": self.progress}
            others = tuple(f for f in (first, *secondary) if f is not self.first_of_series)
            return [Note("crash_loop", counted)], RunEnding("failed", self.first_of_series, others)
        return [self._restart(number, first)], None

    def _restart(self, number: int, first: Failure) -> Note:
        self.restarts += 1
        return Note("restart", {
            "restarts": self.restarts, "host": first.host, "failure": first.summary(),
            "rank": first.rank, "round": number, "traceback": first.traceback, "log": first.log,
        })  # fmt: skip

    def _strike(
        self, blamed: Mapping[str, tuple[int, str]], hosts: Collection[str]
    ) -> list[Effect]:
        """Count strikes against hosts, each with its reason; exclude hosts that reach the limit."""
        effects: list[Effect] = []
        for host, (strikes, why) in blamed.items():
            self._add_strikes(host, strikes, len(hosts), in_doubt=strikes < STRIKES)
            note = {"host": host, "strikes": len(self.strikes.get(host, ())), "why": why}
            effects.append(Note("host_failure", note))
            num_left = len(set(hosts) - {*self.excluded, host})
            if self._is_excludable(host, num_left):
                effects += self._exclude(host, why, num_left)
        return effects

    def _add_strikes(self, host: str, strikes: int, num_hosts: int, *, in_doubt: bool) -> bool:
        """Add strikes, unless many hosts have some at the same time; return whether they exclude.

        A host keeps as many as the longest exclusion depends on.
        """
        self.strikes[host] = (*self.strikes.get(host, ()), *[self.now] * strikes)[-2 * STRIKES :]
        since = self.now - _TOGETHER_S
        recent = {host for host, at in self.strikes.items() if at[-1] > since}
        if in_doubt and len(recent) > max(2, num_hosts // _TOGETHER):
            older = {h: tuple(t for t in at if t <= since) for h, at in self.strikes.items()}
            self.strikes = {h: at for h, at in older.items() if at}
            return False
        return len(self.strikes[host]) >= STRIKES

    def _exclude(self, host: str, why: str, num_left: int) -> list[Effect]:
        for_s = _EXCLUDED_S * 2.0 ** (len(self.strikes[host]) - STRIKES)
        self.exclusions[host] = until = self.now + min(LONGEST_EXCLUDED_S, for_s)
        note = {"host": host, "why": why, "hosts_left": num_left}
        return [Note("excluded", note), Exclude((host,), why, until)]

    def _is_excludable(self, host: str, num_left: int) -> bool:
        """Return whether to exclude a host; ``num_left`` hosts remain without it."""
        enough = len(self.strikes.get(host, ())) >= STRIKES
        return enough and host not in self.excluded and num_left >= self.rules.min_nodes


def _hardware_failures(
    failures: Sequence[Failure], not_counted: bool
) -> dict[str, tuple[int, str]]:
    """Return the strikes of each host to blame for failures, with the reason.

    A failure that leaves no doubt always counts, another only as the first cause of the round.
    """
    first = first_failure(failures)[0] if failures and not not_counted else None
    blamed: dict[str, tuple[int, str]] = {}
    for failure in failures:
        strikes = strikes_of(failure)
        counts = strikes >= STRIKES or (strikes and failure is first)
        if counts and strikes > blamed.get(failure.host, (0, ""))[0]:
            blamed[failure.host] = (strikes, failure.summary())
    return blamed


RATIO = 1.3
IN_A_ROW = 3
_SHARE = 0.05
_MAX_RANKS = 10_000  # larger groups are not compared: every rank costs a median


@dataclass
class _Rank:
    load_s: float
    slow: int = 0  # slow windows in a row; negative: windows in a row that were not slow
    ratio: float = 1.0
    is_straggler: bool = False


@dataclass
class Stragglers:
    """The loads of the ranks of one round.

    In synchronous training all ranks make the same number of steps a second, since they wait for
    the slowest. So each node measures its ranks' own share of a step, the *load*, over windows of
    some seconds (`agent.metrics` has the method and its limits), and sends the loads with its
    heartbeats.

    A rank is slow in a window if its load is above 1.3 times the median (of two ranks, the load of
    the other), and by more than a twentieth of a step, so that it matters. It is a *straggler*
    after `IN_A_ROW` slow windows, until it has that many windows in a row that are not slow.
    """

    _round: int = 0
    _seen: dict[Agent, int] = field(default_factory=dict)  # the last window of each agent
    _ranks: dict[tuple[Agent, int], _Rank] = field(default_factory=dict)
    """By agent too, since the ranks of each replica begin at 0 (``ft=true``)."""

    def record_loads(self, agent: Agent, loads: Sequence[Any], round_: int) -> list[Effect]:
        """Record the loads of an agent's ranks; return the events of new and former stragglers.

        ``loads`` are the number of its window, and (rank, load in seconds, step) of each rank.
        """
        if round_ != self._round:
            self._round, self._seen, self._ranks = round_, {}, {}
        number, ranks = int(loads[0]), loads[1]
        if self._seen.get(agent) == number or len(self._ranks) > _MAX_RANKS:
            return []
        self._seen[agent] = number
        for rank, load_s, _ in ranks:
            self._ranks.setdefault((agent, int(rank)), _Rank(load_s)).load_s = float(load_s)
        judged = (self._judge(agent, int(rank), float(step_s)) for rank, _, step_s in ranks)
        return [note for note in judged if note is not None]

    @property
    def current(self) -> list[dict[str, Any]]:
        """The present stragglers, as in status.json."""
        ranks = sorted(self._ranks.items(), key=lambda item: (item[0][1], item[0][0].slot))
        return [
            {"rank": number, "host": agent.host, "ratio": round(rank.ratio, 2)}
            for (agent, number), rank in ranks
            if rank.is_straggler
        ]

    def _judge(self, agent: Agent, number: int, step_s: float) -> Note | None:
        key, rank = (agent, number), self._ranks[agent, number]
        loads = [r.load_s for k, r in self._ranks.items() if k != key or len(self._ranks) > 2]
        median_s = statistics.median(loads) if loads else 0.0
        if median_s <= 0.0:
            return None
        rank.ratio = rank.load_s / median_s
        slow = rank.ratio > RATIO and rank.load_s - median_s > _SHARE * step_s
        rank.slow = max(rank.slow, 0) + 1 if slow else min(rank.slow, 0) - 1
        if rank.is_straggler == slow or abs(rank.slow) < IN_A_ROW:
            return None
        rank.is_straggler = slow
        fields = {"rank": number, "host": agent.host, "task": agent.task}
        return Note("straggler", {**fields, "ratio": round(rank.ratio, 2), "slow": slow})
