"""An episode: one thing that happened to a run, with its cause and its cost (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_elastic.events import Event
from hpc_elastic.story.causes import Cause
from hpc_elastic.story.lives import Life, first_of


@dataclass(frozen=True)
class Cost:
    """What a change of the group has cost.

    Attributes:
        saved_step: The step that all ranks saved for it; None: they could not.
        reached_step: The last step that was made before; None: nobody says.
        resumed_step: The step from which training went on; None: nobody says.
        lost_steps: Steps that are made again because of it; None: it can not be told.
        pause_s: Seconds from the last step before to the first one after it, or, if ``trains`` is
            false, to the forming of the group. None: it is not over, or nobody paused.
        trains: Whether the first step after it is known.
    """

    saved_step: int | None = None
    reached_step: int | None = None
    resumed_step: int | None = None
    lost_steps: int | None = None
    pause_s: float | None = None
    trains: bool = False


@dataclass(frozen=True)
class Episode:
    """One thing that happened.

    Attributes:
        kind: ``started``, ``formed`` (the first group), ``grew``, ``shrank``, ``changed`` (nodes
            left and others came), ``restarted`` (the same nodes), ``stopped`` (no node is left),
            ``resumed`` (after that), ``ended``; and what touches no group: ``left``,
            ``gave up``, ``given back``, ``parked``, ``excluded``, ``strike``, ``crash loop``,
            ``brought back``, ``leader``, ``hang``, ``straggler``, ``preflight``, ``spare lost``,
            ``not saved``, ``saved again``, ``cancel``, ``resume``.
        time: When it began, in Unix seconds.
        causes: What brought it about.
        nodes_before: Size of the group; None: there was none, or it does not matter.
        nodes_after: Size of the group; None: there is none yet.
        workers: World size of the group; None as above.
        round: Number of the round that it led to.
        leader: The host that leads from now on, if another did before.
        cost: What it has cost.
        text: What else there is to say: an error, a reason.
        facts: More, by kind. started: host, task; formed: hosts, ready_s (seconds from the forming
            to the first step; so for new replicas); ended: status, rounds, restarts, lasted_s;
            given back: nodes, hosts, all, delay_s, why; parked: hosts; excluded: host, hosts_left;
            strike: host, strikes; crash loop: attempts, checkpoint; brought back: tasks, hosts,
            avoids; hang, straggler, preflight, spare lost, saved again, cancel, resume: as in the
            event; not saved: step.
        is_open: Whether it goes on still.
        has_replicas: Whether nobody was stopped because of others (``ft=true``).
    """

    kind: str
    time: float
    causes: tuple[Cause, ...] = ()
    nodes_before: int | None = None
    nodes_after: int | None = None
    workers: int | None = None
    round: int | None = None
    leader: str | None = None
    cost: Cost = field(default_factory=Cost)
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False
    has_replicas: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def kind_of(departed: Iterable[object], arrived: Iterable[object]) -> str:
    """Tell what became of a group."""
    left, came = any(True for _ in departed), any(True for _ in arrived)
    return {
        (True, True): "changed", (True, False): "shrank",
        (False, True): "grew", (False, False): "restarted",
    }[left, came]  # fmt: skip


def cost(
    before: Iterable[Event],
    after: Iterable[Event],
    *,
    saved: int | None,
    since: float,
    until: float,
) -> Cost:
    """Return what it cost to stop workers and to start them again.

    Args:
        before: The ``stopped`` events of those who trained before.
        after: The ``trains`` events of those who train after it.
        saved: The step that all ranks saved before.
        since: When training stopped, where no step before is known.
        until: When the group formed, where no step after it is known.
    """
    before, after = list(before), list(after)
    reached = max((int(e["step"]) for e in before if e.get("step") is not None), default=None)
    stood = max((float(e["step_time"]) for e in before if e.get("step_time")), default=since)
    on = min((float(e["time"]) for e in after), default=until)
    resumed = _resumed(after)
    if resumed is None and not after:
        resumed = saved
    lost = None if reached is None or resumed is None else max(0, reached - resumed)
    if lost is None and saved is not None and not after:
        lost = 0
    pause_s = round(max(0.0, on - stood), 1)
    return Cost(saved, reached, resumed, lost, pause_s, trains=bool(after))


def _resumed(after: list[Event]) -> int | None:
    """Return the step from which training went on."""
    restored = first_of(after, "restored")
    if restored is not None:
        return int(restored)
    steps = [int(e["step"]) for e in after if e.get("step") is not None and not e.get("counted")]
    return max(0, min(steps) - 1) if steps else None


def ready_s(lives: Iterable[Life], round_: Event) -> float | None:
    """Return the seconds from a round to the first step of those that it started."""
    number, formed = int(round_["number"]), float(round_["time"])
    times = [float(li.trains[number]["time"]) for li in lives if number in li.trains]
    return round(max(0.0, max(times) - formed), 1) if times else None
