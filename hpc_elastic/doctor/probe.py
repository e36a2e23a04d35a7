"""What runs on each node of the probe: ``python -m hpc_elastic.doctor.probe <array-0.json>``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from hpc_elastic.doctor import hello, node, peers
from hpc_elastic.doctor.hello import Hello
from hpc_elastic.doctor.patient import AGENT, Recorder, start_worker
from hpc_elastic.doctor.peers import Meeting
from hpc_elastic.doctor.place import POLL_S, Place, Plan, await_json
from hpc_elastic.slurm.environment import SlurmEnvironment

_PEER_S = 30.0


def main(array_file: str) -> int:
    """Measure all, then wait for signals until the probe is over; return the exit code."""
    slurm = SlurmEnvironment.from_env(os.environ)
    place, index = Place.of(array_file), slurm.array_task_id or 0
    attempt = slurm.restart_count
    if attempt:
        place.write(place.back(index), {"node": slurm.node_name, "restarts": attempt})
        return 0
    plan = place.read_plan()
    end = time.monotonic() + plan.lifetime_s
    recorder = Recorder(place, AGENT, index, attempt)
    worker = start_worker(array_file, index, attempt)
    try:
        place.write(place.node(index), _measure(place, plan, index, slurm))
        while time.monotonic() < end and not place.is_over:
            recorder.beat()
            time.sleep(POLL_S)
    finally:
        worker.kill()
        worker.wait()
    return 0


def _measure(place: Place, plan: Plan, index: int, slurm: SlurmEnvironment) -> dict[str, Any]:
    """Return all that this task finds out, as `evidence` reads it."""
    facts = node.look(place, slurm, plan.interface)
    server = peers.Server(place, plan.token, v6=":" in facts.address)
    own = peers.publish(place, index, server.port, facts)
    members = await_json(place.go, plan.lifetime_s, lambda: place.is_over)
    if not members or index not in members:
        return {"facts": facts.to_json(), "meeting": Meeting().to_json(), "hello": None}
    known = {index: own, **_find(place, [number for number in members if number != index])}
    absent = [number for number in members if number not in known]
    meeting = peers.meet(place, index, plan.token, known, absent)
    if lost := [s.host for s in meeting.sights if s.problem] + list(map(str, meeting.absent)):
        said = _import_only(own, ", ".join(lost))
    else:
        said = _say_hello(members, index, known, facts.interface)
    return {
        "facts": facts.to_json(),
        "meeting": meeting.to_json(),
        "hello": said.to_json(),
    }


def _find(place: Place, others: list[int]) -> dict[int, dict[str, Any]]:
    """Wait for what others publish, and return it by index."""
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + _PEER_S + place.late_s
    for number in others:
        left = max(POLL_S, deadline - time.monotonic())
        peer = await_json(place.peer(number), left, lambda: place.is_over)
        if peer is not None:
            found[number] = peer
    return found


def _say_hello(
    members: list[int], index: int, known: dict[int, dict[str, Any]], interface: str
) -> Hello:
    first = known.get(members[0])
    if not first or not first.get("address"):
        return Hello(problems={"torch": f"task {members[0]} was not found"})
    return hello.say(
        members.index(index), len(members), first["address"], first["store_port"], interface
    )


def _import_only(own: dict[str, Any], lost: str) -> Hello:
    """Try torch on this node alone: a group with a node that can not be reached takes minutes."""
    said = hello.say(0, 1, "127.0.0.1", own.get("store_port", 0), "")
    problems = {**said.problems, "gloo": f"not tried: {lost} can not be reached"}
    return replace(said, bandwidths={}, problems=problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
