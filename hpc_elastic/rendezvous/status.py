"""The group as its leader sees it: the content of status.json (pure)."""

from __future__ import annotations

from typing import Any

from hpc_elastic.rendezvous.leadership import Leadership
from hpc_elastic.rendezvous.machine import Phase
from hpc_elastic.rendezvous.record import Agent

_PHASES = {
    Phase.FORMING: "waiting",
    Phase.RUNNING: "training",
    Phase.DISBANDED: "given back",
}
NUMBERS = frozenset(["step", "loss", "samples", "blocked_s"])
"""What changes with every step."""


def status_of(leadership: Leadership) -> dict[str, Any]:
    """Return what status.json shows, but for its time."""
    machine = leadership.machine
    formed = machine.phase in (Phase.RUNNING, Phase.ENDED)
    members = machine.members if formed else ()
    phase = machine.end.status if machine.end is not None else _PHASES[machine.phase]
    return {
        "phase": phase, "epoch": leadership.at.epoch, "round": machine.round,
        "nodes": len(members), "world_size": sum(m.nproc for m in members),
        "members": [
            {"task": m.task, "host": m.host, "group_rank": rank, "nproc": m.nproc}
            for rank, m in enumerate(members)
        ],
        "joined": len(machine.joined), "restarts": machine.restarts,
        "max_restarts": machine.rules.max_restarts, "checkpoint": machine.blame.progress,
        **_progress(leadership, members),
        "stragglers": leadership.stragglers.current if members else [],
    }  # fmt: skip


def _progress(leadership: Leadership, members: tuple[Agent, ...]) -> dict[str, Any]:
    reports = [leadership.progress[m] for m in members if m in leadership.progress]
    steps = [r["step"] for r in reports if r.get("step") is not None]
    losses = [r["loss"] for r in reports if r.get("loss") is not None]
    samples = [r["samples"] for r in reports if r.get("samples") is not None]
    return {
        "step": max(steps, default=None),
        "total_steps": leadership.estimate.total,
        "loss": losses[0] if losses else None,
        "samples": max(samples, default=None),
        "blocked_s": max((r.get("blocked_s") or 0.0 for r in reports), default=0.0),
    }
