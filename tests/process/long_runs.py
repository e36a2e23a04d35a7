"""A synthetic run of days with hundreds of faults, as the files that a real one leaves.

All events go through the schema of real ones; times, steps and costs are drawn from a seed.
"""

import heapq
import json
import random
from datetime import UTC, datetime
from pathlib import Path

from hpc_elastic.rendezvous.run_status import spacing_s
from hpc_elastic.run.directory import Entry, RunDir
from hpc_elastic.run.events import LossReason, problems
from specs import spec_of, started_run

JOB = "4711"
STEPS_PER_S = 0.11
"""Of a node."""
CHECKPOINT_EVERY_S = 600.0
BLOCKED_S = 1.5
BEGIN = 1_790_000_000.0
FAULTS = ("preempted", "preempted", "lost", "failed", "time_limit")


class LongRun:
    """What happens to it, in order of time.

    Args:
        nodes: How many it has when all are there.
        days: How long it lasts.
        faults: How many befall it.
        seed: Of all that is random.
        begin: When it begins, in Unix seconds.
    """

    def __init__(
        self, nodes: int = 16, days: float = 3.0, faults: int = 200, seed: int = 6,
        begin: float = BEGIN,
    ):  # fmt: skip
        self.begin = begin
        self.random = random.Random(seed)
        self.events: list[dict] = []
        self.points: list[dict] = []
        self.now = begin + 40.0
        self.until = begin + 86400 * days
        self.nodes, self.num_faults = nodes, faults
        self.step = self.saved = self.round = self.restarts = self.term = 0
        self.saved_at = self.now
        self.blocked_s = 0.0
        self.attempt = dict.fromkeys(range(nodes), 0)
        self.members: list[int] = []
        self.leader = -1
        self.back: list[tuple[float, int]] = []
        self._live()

    # ---- what happens -----------------------------------------------------------------

    def _live(self) -> None:
        for slot in range(self.nodes):
            self._starts(slot, self.now + 0.2 * slot)
        self.now += 15
        self._form(list(range(self.nodes)))
        for k in range(self.num_faults):
            share = (k + self.random.random()) / self.num_faults
            self._train_with_growth(self.begin + 300 + (self.until - self.begin - 900) * share)
            self._fault(self.random.choice(FAULTS))
        self._train_with_growth(self.until)
        self._tell("end", self.leader, status="succeeded", rounds=self.round,
                   restarts=self.restarts, failure=None)  # fmt: skip

    def _fault(self, kind: str) -> None:
        slot = self.random.choice(self.members)
        if kind == "failed":
            self.restarts += 1
            self._stop("failed", "a worker failed", [*self.members])
            self._tell("restart", self.leader, restarts=self.restarts, host=host(slot),
                       failure=f"rank {slot} on {host(slot)}: CUDA error")  # fmt: skip
            self._form(self.members)
            return None
        if len(self.members) <= self.nodes // 2:
            return self._fault("failed")
        stay = [s for s in self.members if s != slot]
        if kind == "lost":
            self.now += 3
            self._tell("node_lost", slot, host=host(slot), why=LossReason.CONNECTION_CLOSED)
            self._stop("node_lost", f"{host(slot)} was lost", stay)
        else:
            reason = "signal" if kind == "preempted" else kind
            self._tell("preemption_notice", slot, reason=reason, left_s=55.0, given_s=60.0,
                       **({"signal": "SIGTERM"} if kind == "preempted" else {}))  # fmt: skip
            self._train(self.now + 4)
            self._save()
            self._stop("regroup", f"{host(slot)} is to be left", [*self.members], self.saved)
            means = {"means": "preempted"} if reason == "signal" else {}
            self._tell("task_exited", slot, reason=reason, how="requeue", **means)
        heapq.heappush(self.back, (self.now + self.random.uniform(240, 3000), slot))
        self._form(stay)
        return None

    def _train_with_growth(self, until: float) -> None:
        while self.back and self.back[0][0] + 60 < until:
            time, slot = heapq.heappop(self.back)
            self._train(max(self.now, time))
            self.attempt[slot] += 1
            self._starts(slot, self.now)
            self._train(self.now + 45)
            self._save()
            self._stop("regroup", "nodes wait to join", [*self.members], self.saved)
            self._form(sorted([*self.members, slot]))
        self._train(until)

    # ---- what the parts write ---------------------------------------------------------

    def _starts(self, slot: int, time: float) -> None:
        self._tell("task", slot, time, attempt=self.attempt[slot], host=host(slot), pid=100 + slot,
                   started=time - 6)  # fmt: skip
        self._tell("joined", slot, time + 8, host=host(slot))

    def _form(self, members: list[int]) -> None:
        if self.leader not in members:
            self.leader = members[0]
            self.term += 1
            self._tell("leader", self.leader, term=self.term)
        self.now += self.random.uniform(1, 4)
        self.round += 1
        self.members = list(members)
        named = [{"task": f"{JOB}_{s}", "attempt": self.attempt[s], "slot": s, "host": host(s),
                  "nproc": 8} for s in members]  # fmt: skip
        self._tell("round", self.leader, number=self.round, index=self.round, term=self.term,
                   nodes=len(members), world_size=8 * len(members), members=named,
                   restarts=self.restarts)  # fmt: skip
        self.step, self.blocked_s = self.saved, 0.0
        restore_s = self.random.uniform(3, 9)
        self.now += 12 + restore_s
        self.saved_at = self.now
        for slot in members:
            self._tell("first_step", slot, attempt=self.attempt[slot], round=self.round,
                       step=self.saved + 1, restored=self.saved or None, restore_s=restore_s,
                       start_s=12 + restore_s)  # fmt: skip

    def _stop(self, cause: str, reason: str, who: list[int], step: int | None = None) -> None:
        at = {} if step is None else {"step": step}
        self._tell("round_stopped", self.leader, reason=reason, cause=cause, round=self.round,
                   nodes=len(who), hosts=[host(s) for s in who], **at)  # fmt: skip
        for slot in who:
            self._tell("workers_stopped", slot, attempt=self.attempt[slot], round=self.round,
                       step=self.step, step_time=self.now)  # fmt: skip
        self.points.append({
            "time": self.now + 1, "phase": "waiting", "round": self.round, "term": self.term,
            "nodes": 0, "world_size": 0, "checkpoint": self.saved or None,
        })  # fmt: skip
        self.now += 2

    def _train(self, until: float) -> None:
        while self.now < until:
            dt = min(spacing_s(self.now - self.begin), until - self.now)
            self.now += dt
            self.step += max(1, round(STEPS_PER_S * len(self.members) * dt))
            if self.now - self.saved_at > CHECKPOINT_EVERY_S:
                self._save()
            self._point()

    def _save(self) -> None:
        self.saved, self.saved_at = self.step, self.now
        self.blocked_s += BLOCKED_S
        self._point()

    def _point(self) -> None:
        size = len(self.members)
        noise = self.random.gauss(0, 0.03)
        self.points.append({
            "time": self.now, "phase": "training", "round": self.round, "term": self.term,
            "nodes": size, "world_size": 8 * size, "step": self.step, "total_steps": 450_000,
            "samples": 4096 * self.step, "loss": 1.8 + 9 / (1 + self.step / 4000) + noise,
            "blocked_s": self.blocked_s, "checkpoint": self.saved or None,
            "steps_per_s": STEPS_PER_S * size, "samples_per_s": 4096 * STEPS_PER_S * size,
        })  # fmt: skip

    def _tell(self, kind: str, slot: int, time: float | None = None, **fields: object) -> None:
        time = self.now if time is None else time
        event = {"v": 1, "time": time, "kind": kind, "task": f"{JOB}_{slot}", **fields}
        assert problems(event) == []
        self.events.append(event)


def host(slot: int) -> str:
    """The node of a slot."""
    return f"node{slot + 1:02}"


def write(run: LongRun, folder: Path, *, env: dict[str, str] | None = None) -> Path:
    """Write what a run has left; return its directory."""
    files, submission = RunDir(folder / "0"), folder / ".hpc_elastic"
    submission.mkdir(parents=True)
    (submission / "array-0.jobid").write_text(JOB)
    spec = spec_of(
        "gpt-medium-20260921", run.nodes // 2, run.nodes, 8, 100,
        Entry("hydra", "main", "train.py"),
        str(submission), [(0, slot) for slot in range(run.nodes)], env=env or {},
        provenance={"time": datetime.fromtimestamp(run.begin - 80, UTC).isoformat(),
                    "argv": ["train.py", "-m", "lr=0.0006"],
                    "user": "ada", "host": "login1", "git": {"commit": "0f3c2d1"}},
    )  # fmt: skip
    started_run(files, spec)
    files.hydra.mkdir()
    (files.hydra / "overrides.yaml").write_text("[lr=0.0006, model=medium]")
    (files.hydra / "config.yaml").write_text("lr: 0.0006\nmodel: {name: medium, layers: 24}\n")
    by_task: dict[str, list[dict]] = {}
    for event in run.events:
        by_task.setdefault(event["task"], []).append(event)
    for task, events in by_task.items():
        files.events(task).write_text("".join(f"{json.dumps(e)}\n" for e in events))
    files.progress.write_text("".join(f"{json.dumps(p)}\n" for p in run.points))
    result = {"status": "succeeded", "ended": run.now, "restarts": run.restarts}
    files.result.write_text(json.dumps(result))
    return files.path
