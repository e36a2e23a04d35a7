"""Why a node left a run, or came (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hpc_elastic.events import Event
from hpc_elastic.story.lives import Chronicle, Life

_COMES_BACK = ("requeue", "requeued", "replace")
_SIGNALLED = "signalled"


@dataclass(frozen=True)
class Cause:
    """What brought a change about.

    Attributes:
        what: ``preempted``, ``time limit``, ``asked``, ``requeued`` (its task was, and it was not
            preempted), ``cancelled``, ``run ended`` (its task was told so), ``signalled`` (SIGTERM,
            and it is not known why), ``given back``, ``excluded``,
            ``gave up``, ``agent ended``, ``lost`` (died, or out of reach),
            ``leader lost``, ``leader changed``, ``out of reach`` (for a while), ``worker failed``,
            ``rejoined``, ``arrived``, ``returned``, ``other``.
        time: Unix seconds at which it was known.
        hosts: Of whom it is true.
        detail: An error, or what was seen.
        signal: What announced it; None: no signal did.
        given_s: The time that was given; None: none, or unknown.
        comes_back: Whether the task has gone back to the queue; None: unknown.
        away_s: How long the node was away before it returned; None: it did not, or unknown.
    """

    what: str
    time: float
    hosts: tuple[str, ...] = ()
    detail: str = ""
    signal: str | None = None
    given_s: float | None = None
    comes_back: bool | None = None
    away_s: float | None = None

    @property
    def is_announced(self) -> bool:
        """Whether there was time to save."""
        return self.what in (
            "preempted", "time limit", "asked", "requeued", "cancelled", "run ended", _SIGNALLED,
            "arrived", "returned",
        )  # fmt: skip


def why_left(
    life: Life,
    excluded: Mapping[str, Event],
    *,
    since: float = 0.0,
    led: bool = False,
    without_it: float = float("inf"),
) -> Cause:
    """Tell why a node is not a member any more.

    Args:
        life: What happened to it.
        excluded: The exclusions of the run, by host.
        since: When the round began that it left, if there was one.
        led: Whether it led the run.
        without_it: When it was given up, or the others went on, if nobody had said why. A notice
            after that is no reason: Slurm ends what it has written off once it can be reached.
    """
    notice = life.notice
    if notice is not None and _time(notice) < without_it:
        return _noticed(life, notice)
    ends = life.ends_after(since)
    if "gone" in ends and _time(ends["gone"]) > without_it:
        del ends["gone"]  # that was another time
    if ends.get("gone", {}).get("why") == "silent":
        ends.pop("given back", None)  # excluded for its silence, it was told so when it was back
    if "given back" in ends and life.host in excluded:
        event = excluded[life.host]
        return Cause("excluded", _time(event), (life.host,), str(event.get("why", "")))
    return _unannounced(life, ends, led=led)


def _noticed(life: Life, notice: Event) -> Cause:
    left = life.ends_after(0.0).get("left", {})
    how, reason = left.get("how"), str(notice["reason"])
    back = None if how in (None, "stay") else how in _COMES_BACK
    what = str(left.get("means") or _SIGNALLED) if reason == "signal" else reason
    return Cause(
        what, _time(notice), (life.host,), str(left.get("node") or ""),
        signal=notice.get("signal"), given_s=notice.get("given_s"), comes_back=back,
    )  # fmt: skip


def _unannounced(life: Life, ends: Mapping[str, Event], *, led: bool) -> Cause:
    where = (life.host,)
    for kind, what, key in (
        ("gave up", "gave up", "why"), ("taken", "agent ended", "signal"),
    ):  # fmt: skip
        if kind in ends:
            event = ends[kind]
            return Cause(what, _time(event), where, str(event.get(key, "")))
    if "given back" in ends:
        event = ends["given back"]
        delay_s = float(event.get("delay_s", 0.0))
        return Cause("given back", _time(event), where, given_s=delay_s, comes_back=True)
    gone = ends.get("gone", {})
    time = _time(gone) if gone else 0.0
    return Cause("leader lost" if led else "lost", time, where, str(gone.get("why", "")))


def why_came(life: Life, run: Chronicle, at: float) -> Cause:
    """Tell where a new member has come from.

    A node that was in the group before came back, whichever of its tasks had it then. It was away
    from when the group lost it until its agent was there again: one that was only cut off, or
    stood still, is there when it is a member.

    Args:
        life: What happened to it.
        run: What happened to all.
        at: When it became a member.
    """
    time = life.started if life.started is not None else at
    left = run.last_left(life.host, at)
    if left is None:
        return Cause("arrived", time, (life.host,))
    back = time if time > left else at
    return Cause("returned", back, (life.host,), away_s=round(back - left, 1))


def together(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return the causes with those that are the same but for the host made one."""
    found: dict[Cause, Cause] = {}
    for cause in causes:
        key = replace(cause, time=0.0, hosts=(), away_s=None)
        same = found.get(key)
        found[key] = cause if same is None else _both(same, cause)
    return tuple(found.values())


def _both(one: Cause, other: Cause) -> Cause:
    times = sorted(s for s in (one.away_s, other.away_s) if s is not None)
    return replace(
        one, time=min(one.time, other.time), hosts=(*one.hosts, *other.hosts),
        away_s=times[-1] if times else None,
    )  # fmt: skip


def _time(event: Event) -> float:
    return float(event["time"])
