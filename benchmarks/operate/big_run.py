"""The directory of a run of days with many faults, as its tasks would have left it.

Half of the faults are preemptions that save, a quarter are nodes that die, a quarter workers that
fail. A node that was lost comes back two minutes later. Each round leaves a file of output for each
rank; the rest is what agents and leaders write: decisions, events, progress, status, result.
"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.rendezvous.decision_log import DecisionLog
from hpc_elastic.rendezvous.effects import RemoveEntries
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, RoundRules, claim
from hpc_elastic.rendezvous.run_status import spacing_s
from hpc_elastic.run import registry
from hpc_elastic.run.directory import Entry, PoolTerms, RunDir, RunSpec
from hpc_elastic.run.log_index import IndexWriter

DAY_S = 86_400.0
STEPS_PER_S = 2.0
SAVED_EVERY = 200
AWAY_S = 120.0
START_S = 4.0
LINES = 20
JOB = "4711"

Event = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    num_nodes: int = 16
    days: float = 3.0
    num_faults: int = 200
    nproc: int = 1


@dataclass(frozen=True)
class Round:
    number: int
    time: float
    members: dict[int, int]


class History:
    """Makes up a run: its events, and its rounds."""

    def __init__(self, plan: Plan, start: float) -> None:
        self.events: list[Event] = []
        self.rounds: list[Round] = []
        self.end = start + plan.days * DAY_S
        self.restarts = 0
        self._plan, self._start = plan, start
        self._attempts = dict.fromkeys(range(plan.num_nodes), 0)
        self._random = random.Random(0)
        self._write()

    def step_at(self, time: float) -> int:
        """Return how far the training is, lost steps aside."""
        return int((time - self._start) * STEPS_PER_S)

    def _write(self) -> None:
        for slot in self._attempts:
            self._node(self._start, slot)
            self._event(self._start + 0.8, "joined", slot, host=f"node{slot}")
        self._event(self._start + 0.5, "leader", 0, term=1)
        self._form(self._start + 1, set(self._attempts), 0)
        spacing = (self.end - self._start) / (self._plan.num_faults + 1)
        for number in range(1, self._plan.num_faults + 1):
            self._fault(number, self._start + number * spacing)
        spent = {"rounds": len(self.rounds), "restarts": self.restarts}
        self._event(self.end, "end", 0, status="succeeded", **spent)

    def _fault(self, number: int, time: float) -> None:
        slot = self._random.randrange(1, self._plan.num_nodes)
        everybody, step = set(self._attempts), self.step_at(time)
        saved = step - step % SAVED_EVERY
        if number % 4 == 3:
            failure = f"rank {slot} on node{slot}: RuntimeError: made up"
            self._stop(time, "failed", step, everybody)
            self.restarts += 1
            spent = {"restarts": self.restarts, "host": f"node{slot}", "failure": failure}
            self._event(time + 0.1, "restart", 0, **spent)
            self._form(time + START_S, everybody, saved)
            return
        if number % 4 == 1:
            self._event(time, "node_lost", slot, host=f"node{slot}", why="its connection broke")
            self._stop(time, "node_lost", step, everybody - {slot})
            resumed = saved
        else:
            notice = {"reason": "signal", "signal": "SIGTERM", "given_s": 30.0, "left_s": 29.0}
            self._event(time, "preemption_notice", slot, **notice)
            self._stop(time + 1, "regroup", step, everybody, saves=True)
            self._event(time + 2, "task_exited", slot, reason="signal", how="requeue")
            resumed = step
        self._form(time + START_S, everybody - {slot}, resumed)
        back = time + AWAY_S
        self._attempts[slot] += 1
        self._node(back, slot)
        self._event(back + 5, "joined", slot, host=f"node{slot}")
        reached = self.step_at(back + 10)
        self._stop(back + 10, "regroup", reached, everybody - {slot}, saves=True)
        self._form(back + 10 + START_S, everybody, reached)

    def _node(self, time: float, slot: int) -> None:
        self._event(time, "task", slot, attempt=self._attempts[slot], host=f"node{slot}", pid=1)

    def _form(self, time: float, slots: set[int], resumed: int) -> None:
        made = Round(len(self.rounds) + 1, time, {s: self._attempts[s] for s in sorted(slots)})
        self.rounds.append(made)
        nproc = self._plan.nproc
        members = [
            {"task": task(s), "attempt": a, "slot": s, "host": f"node{s}", "nproc": nproc}
            for s, a in made.members.items()
        ]
        self._event(
            time, "round", 0, number=made.number, index=made.number, term=1, nodes=len(members),
            world_size=len(members) * nproc, members=members, restarts=self.restarts,
        )  # fmt: skip
        for slot, attempt in made.members.items():
            first = {"round": made.number, "step": resumed + 1, "restored": resumed}
            self._event(time + 3, "first_step", slot, attempt=attempt, **first)

    def _stop(
        self, time: float, cause: str, step: int, slots: set[int], *, saves: bool = False
    ) -> None:
        number = len(self.rounds)
        hosts = [f"node{slot}" for slot in sorted(slots)]
        at = {"step": step} if saves else {}
        self._event(
            time, "round_stopped", 0, reason=f"because of {cause}", cause=cause, round=number,
            nodes=len(hosts), hosts=hosts, **at,
        )  # fmt: skip
        for slot in sorted(slots):
            last = {"round": number, "step": step, "step_time": time}
            self._event(time + 0.5, "workers_stopped", slot, attempt=self._attempts[slot], **last)

    def _event(self, time: float, kind: str, slot: int, **fields: Any) -> None:
        self.events.append({"v": 1, "time": time, "kind": kind, "task": task(slot), **fields})


def task(slot: int) -> str:
    return f"{JOB}_{slot}"


def write(folder: Path, plan: Plan, now: float, *, output: bool = True) -> RunDir:
    """Write the directory of a run that has ended just now, and put it on the user's list."""
    submission = folder / ".hpc_elastic"
    (submission / "logs").mkdir(parents=True)
    (submission / "array-0.jobid").write_text(f"{JOB}\n")
    slots = [(0, slot) for slot in range(plan.num_nodes)]
    run, entry = RunDir(folder / "run"), Entry("function", "train", module="m")
    settings = RunSettings(NodeRange(1, plan.num_nodes), 1, SlurmSettings(max_restarts=0))
    terms = [PoolTerms(30.0, 30.0, whole_nodes=False)]
    spec = RunSpec("big", str(submission), slots, entry, settings, terms)
    run.create(spec)
    run.complete(spec)
    history = History(plan, now - plan.days * DAY_S)
    _write_events(run, history)
    with run.progress.open("w") as f:
        f.writelines(json.dumps(line) + "\n" for line in progress(history, plan))
    for made in history.rounds if output else ():
        _write_output(run, made, plan)
    _write_log(run, history, RoundRules.of(settings))
    result = {
        "run_id": "big", "status": "succeeded", "started": now - plan.days * DAY_S, "ended": now,
        "rounds": len(history.rounds), "restarts": history.restarts, "failure": None,
    }  # fmt: skip
    run.result.write_text(json.dumps(result))
    registry.add({"big": run.path})
    return run


def progress(history: History, plan: Plan) -> Iterator[Event]:
    """Yield the lines of progress.jsonl, as dense as a leader writes them."""
    start = time = history.end - plan.days * DAY_S
    ahead, formed = list(history.rounds), history.rounds[0]
    while time < history.end:
        while ahead and ahead[0].time <= time:
            formed = ahead.pop(0)
        step, nodes = history.step_at(time), len(formed.members)
        yield {
            "time": time, "phase": "training", "round": formed.number, "term": 1, "nodes": nodes,
            "world_size": nodes, "step": step, "total_steps": None, "samples": step * 64,
            "loss": 1.0 / (1 + step), "blocked_s": 0.1, "steps_per_s": STEPS_PER_S,
            "checkpoint": step - step % SAVED_EVERY, "samples_per_s": 64 * STEPS_PER_S,
        }  # fmt: skip
        time += spacing_s(time - start)


def _write_events(run: RunDir, history: History) -> None:
    lines: dict[str, list[str]] = {}
    for event in history.events:
        lines.setdefault(event["task"], []).append(json.dumps(event) + "\n")
    for name, of_task in lines.items():
        run.events(name).write_text("".join(of_task))


def _write_log(run: RunDir, history: History, rules: RoundRules) -> None:
    """Append the decisions of rounds that have another leader each, which remove old ones."""
    log, entry, endpoint = DecisionLog(run.rdzv, b"secret"), None, Endpoint("10.0.0.1", 1, "", 0)
    for made in history.rounds:
        entry = claim(2 * made.number - 1, entry, endpoint, made.time)
        leader = LeaderState(entry, rules, HeartbeatConfig(1.0, 3.0), made.time, random.Random(0))
        log.create(entry)
        log.make_lease(entry.term).renew()
        members = tuple(Agent(task(s), a, s, f"node{s}", 8) for s, a in made.members.items())
        leader.at = replace(entry, index=entry.index + 1, round=made.number, members=members)
        log.create(entry := leader.at)
        for effect in (*leader.tick(made.time + 1.0), *leader.tick(made.time + 3.0)):
            if isinstance(effect, RemoveEntries):
                log.remove_old(effect.index, effect.term)


def _write_output(run: RunDir, made: Round, plan: Plan) -> None:
    workers = (member for member in made.members.items() for _ in range(plan.nproc))
    for rank, (slot, attempt) in enumerate(workers):
        folder = run.attempt(task(slot), attempt)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"round-{made.number}.rank-{rank}.out"
        file.write_text("".join(f"step {n} loss 0.5 rank {rank}\n" for n in range(LINES)))
        index = IndexWriter(file)
        index.append(file.stat().st_size, made.time + 10)
        index.close()
        os.utime(file, (made.time + 10, made.time + 10))
