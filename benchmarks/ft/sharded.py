"""Part k: a fresh replica with a sharded model joins one that trains; are both equal afterwards?

Each replica has two ranks, over which its model is sharded. The fresh one has other weights, and no
state of the optimizer. Thirty steps of both later, all parameters, optimizer states and schedules
are compared bit by bit, for every step that both have committed since.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ft.crew import Crew, Member, crew
from ft.libraries import OURS, PEER, Lighthouse, free_port, lighthouse
from ft.report import Row, Settings

MODELS = ("fsdp", "fsdp x tp", "cpu offload")
STEPS = 30
FEWEST_COMMON = 25
"""Steps of both, at least: the first ones may be those in which the fresh replica heals."""
PATIENCE_S = 60.0
Commits = list[tuple[int, str, int]]


@dataclass
class Outcome:
    """What became of both replicas.

    `is_equal`: after each step of both; False also if they did not come to train together.
    `failed`: steps of the replica that trained which were not committed, the worst rank's. `error`:
    what a rank ended with, or what did not come in time; empty if all went well.
    """

    is_equal: bool
    failed: int
    error: str


def measure(settings: Settings) -> Iterator[Row]:
    """Yield two rows for each model and mode; both libraries take turns."""
    repeats = 1 if settings.quick else settings.repeats
    for model in MODELS[:1] if settings.quick else MODELS:
        for sync in (True, False):
            found: dict[str, list[Outcome]] = {OURS: [], PEER: []}
            for library in settings.libraries * repeats:
                found[library].append(heal(library, model, sync=sync))
            yield from rows(f"{model}, {'sync' if sync else 'async'}", found)


def rows(name: str, found: dict[str, list[Outcome]]) -> Iterator[Row]:
    """Return what the samples say: all of them count; the first error of each library is a note."""
    notes, equal, failed = [], {}, {}
    for library, outcomes in found.items():
        errors = [o.error for o in outcomes if o.error]
        steps = [float(o.failed) for o in outcomes if not o.error]
        num_equal, num = sum(o.is_equal for o in outcomes), len(outcomes)
        equal[library] = [num_equal / num] if num else []
        failed[library] = [max(steps, default=math.nan)] if num else []
        if num:
            notes.append(f"{library} {num_equal} of {num}" + "".join(f": {e}" for e in errors[:1]))
    yield Row(
        "k sharded", f"{name}: equal bit by bit after {STEPS} steps", "share", equal[OURS],
        equal[PEER], limit=1.0, more_is_better=True, note="; ".join(notes),
    )  # fmt: skip
    yield Row(
        "k sharded", f"{name}: the most failed steps of the survivor", "steps", failed[OURS],
        failed[PEER], limit=1.0, note="where it trained on with the fresh one",
    )  # fmt: skip


def heal(library: str, model: str, *, sync: bool) -> Outcome:
    with crew("ft.sharded_worker") as people, lighthouse(library) as light:
        survivor = _start(people, light, 0, model, sync)
        error = _train(people, survivor, 1, 3)
        everybody = survivor
        if not error:
            fresh = _start(people, light, 1, model, sync)
            everybody = [*survivor, *fresh]
            error = _train(people, everybody, 2, STEPS)
        failed = max(sum("failed" in event for event in m.events) for m in survivor)
        if error:
            return Outcome(False, failed, error)
        pairs = zip(survivor, fresh, strict=True)
        return Outcome(all(_are_equal(old, new) for old, new in pairs), failed, "")


def _start(people: Crew, light: Lighthouse, slot: int, model: str, sync: bool) -> list[Member]:
    port = free_port()
    return [
        people.start(
            light.library, "train", lighthouse=light.address, slot=slot, rank=rank, port=port,
            model=model, sync=sync,
        )
        for rank in (0, 1)
    ]  # fmt: skip


def _train(people: Crew, members: list[Member], participants: int, steps: int) -> str:
    """Wait for steps of a number of replicas; return what is wrong, empty if nothing is."""

    def num_steps(member: Member) -> int:
        return sum(c[2] == participants for c in _commits(member))

    def is_done() -> bool:
        return any(m.gone for m in members) or all(num_steps(m) >= steps for m in members)

    if not people.wait(is_done, PATIENCE_S):
        made = min(num_steps(m) for m in members)
        failures = [e["failed"][1] for m in members for e in m.events if "failed" in e]
        last = f"; the last failed step: {_short(failures[-1])}" if failures else ""
        return f"{made} of {steps} steps of {participants} within {PATIENCE_S:g} s{last}"
    people.listen(0.5 if any(m.gone for m in members) else 0.0)  # the first cause may come late
    ended = [
        f"{'the survivor' if index < 2 else 'the fresh replica'} ended: "
        f"{_short(member.error or 'without an error')}"
        for index, member in enumerate(members)
        if member.gone
    ]
    return min(ended, key=lambda error: "gloo" in error, default="")  # not that of a lost peer


def _short(error: str) -> str:
    return error.splitlines()[0][:160]


def _commits(member: Member) -> Commits:
    return [e["commit"] for e in member.events if "commit" in e]


def _are_equal(old: Member, new: Member) -> bool:
    states = {step: state for step, state, _ in _commits(old)}
    common = [(state, states[step]) for step, state, _ in _commits(new) if step in states]
    return len(common) >= FEWEST_COMMON and all(a == b for a, b in common)
