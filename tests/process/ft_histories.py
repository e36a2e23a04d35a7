"""Random models with random histories: each committed step is that of one process, and of DDP.

    python tests/process/ft_histories.py 0:100        the histories of these seeds

Replicas are real processes that join, leave, are killed, fail in a step and heal, one may be a
spare. Each writes its state before each step, its samples, its part in the mean, and its state
after the step. So each step can be repeated by itself: by one process that has the samples of all
participants, and by torch's DDP over gloo with as many ranks. All states have to be within
`TOLERANCE`, and those of the replicas the same bits. For `LocalSGD` and `DiLoCo` the same holds for
each synchronisation.
"""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn

from hpc_elastic.ft import (
    DiLoCo,
    DistributedDataParallel,
    LocalSGD,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    PureDistributedDataParallel,
)
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.ft.manager import WorldSizeMode

TOLERANCE = 1e-9
"""In float64. Adam divides a gradient that is zero but for rounding (1e-17) by no more than its
eps, 1e-8: the sums' order is seen in a bias before a batch normalization as 1e-10."""
PATIENCE_S = 90.0
TIMEOUT = timedelta(seconds=20)
NUM_SLOTS = 4
SYNC_EVERY = 2
WRAPPERS = {"ddp": DistributedDataParallel, "pure": PureDistributedDataParallel}


class Net(nn.Module):
    """A random model: some layers in a chain, several outputs, a shared, a frozen, an unused."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3) if chance.random() < 0.5 else nn.LayerNorm(3)
        self.chain = nn.ModuleList(nn.Linear(3, 3) for _ in range(chance.randint(1, 2)))
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(chance.randint(1, 3)))
        if chance.random() < 0.5:
            self.heads.append(self.chain[0])
        self.frozen, self.unused = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, used: list[int]) -> list[torch.Tensor]:
        """Return some outputs."""
        for layer in self.chain:
            x = self.norm(self.frozen(torch.tanh(layer(x))))
        return [x, *(self.heads[i](x) for i in used)]


@dataclass(frozen=True)
class Event:
    """What happens to a slot, once the training has come to a step: join, leave, die, fail."""

    step: int
    slot: int
    kind: str
    place: str = ""


@dataclass
class Plan:
    """A training and what happens to it, by its seed."""

    seed: int
    kind: str = ""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.kind = ("ddp", "pure", "ddp", "pure", "local_sgd", "diloco")[self.seed % 6]
        self.adam, self.clips = chance.random() < 0.5, chance.random() < 0.5
        self.num_micro = chance.choice((1, 1, 2))
        self.skips_sync = self.kind == "ddp" and chance.random() < 0.5
        self.has_spares = self.kind in WRAPPERS and chance.random() < 0.3
        self.is_async = self.kind != "diloco" and chance.random() < 0.6
        self.catches_up = chance.random() < 0.3
        self.heal_s = chance.choice((0.0, 0.0, 0.3))
        self.heal_fails = chance.random() < 0.3
        self.first = chance.choice((2, 3, 3))
        alive, step = set(range(self.first)), 2
        for _ in range(chance.randint(2, 5)):
            out = sorted(set(range(NUM_SLOTS)) - alive)
            kinds = ["join"] * bool(out) * 2 + ["leave", "die"] * (len(alive) > 2) + ["fail"]
            kind = chance.choice(kinds)
            slot = chance.choice(out if kind == "join" else sorted(alive))
            place = chance.choice(("forward", "backward", "committed"))
            self.events.append(Event(step, slot, kind, place))
            alive = alive | {slot} if kind == "join" else alive - {slot}
            if kind == "fail":
                alive |= {slot}
            step += chance.randint(1, 3)

    def parts(self) -> tuple[Net, torch.optim.Optimizer]:
        """Return a new model and its optimizer."""
        torch.manual_seed(self.seed)
        net = Net(random.Random(self.seed))
        if self.adam:
            return net, torch.optim.AdamW(net.parameters(), lr=0.01)
        return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def backward(self, model: nn.Module, draw: list[int], micro: int) -> None:
        """Make the forward and the backward pass of a micro-batch."""
        key = f"{self.seed} {draw} {micro}"
        chance = random.Random(key)
        numbers = torch.Generator().manual_seed(chance.getrandbits(40))
        net = getattr(model, "module", model)
        used = [i for i in range(len(net.heads)) if chance.random() < 0.5]
        outputs = model(torch.randn(4, 3, generator=numbers), used)
        sum(y.square().mean() for y in outputs).backward()  # type: ignore[union-attr]

    def accumulate(self, model: nn.Module, draw: list[int]) -> None:
        """Make those of a step."""
        for micro in range(self.num_micro):
            skips = self.skips_sync and micro + 1 < self.num_micro and hasattr(model, "no_sync")
            if skips:
                with model.no_sync():
                    self.backward(model, draw, micro)
            else:
                self.backward(model, draw, micro)

    def clip(self, net: nn.Module) -> None:
        """Clip the gradients, perhaps."""
        if self.clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)


def read(net: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Return all numbers of a state."""
    found = {f"net.{name}": t for name, t in net.state_dict().items()}
    for at, optimizer in enumerate(optimizers):
        for number, kept in optimizer.state_dict()["state"].items():
            found |= {f"{at}.{number}.{n}": t for n, t in kept.items() if t is not None}
    return {name: t.detach().reshape(-1).tolist() for name, t in found.items()}


def write(values: dict[str, list[float]], net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set a state to what `read` has returned."""
    for name, t in net.state_dict().items():
        t.copy_(torch.tensor(values[f"net.{name}"]).view_as(t))
    whole = optimizer.state_dict()
    whole["state"] = {}
    for name, numbers in values.items():
        at, number, *rest = name.split(".")
        if at == "0":
            p = optimizer.param_groups[0]["params"][int(number)]
            t = torch.tensor(numbers, dtype=p.dtype)
            whole["state"].setdefault(int(number), {})[rest[0]] = (
                t[0] if rest == ["step"] else t.view_as(p)
            )
    optimizer.load_state_dict(whole)


# ---- a replica


class Replica:
    """One life of a slot."""

    def __init__(
        self, plan: Plan, slot: int, life: int, events: list[Event], lighthouse: str, folder: str
    ) -> None:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        self.plan, self.slot, self.life, self.folder = plan, slot, life, Path(folder)
        self.events, self.num_draws, self.num_saves = list(events), 0, 0
        self.log = (self.folder / f"{slot}.{life}").open("w")
        self.net, self.optimizer = plan.parts()
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(0.1 * life + 0.01 * slot)  # as drawn without a seed
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(TIMEOUT), load_state_dict=self.load, state_dict=self.save,
            min_replica_size=2 if plan.has_spares else 1, timeout=TIMEOUT, quorum_timeout=TIMEOUT,
            rank=0, world_size=1, store_addr="127.0.0.1", store_port=self.store.port,
            lighthouse_addr=lighthouse, replica_id=f"s{slot}", use_async_quorum=plan.is_async,
            catch_up_bytes=0 if plan.catches_up else None,
            world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if plan.has_spares
            else WorldSizeMode.DYNAMIC,
        )  # fmt: skip

    def save(self) -> dict[str, Any]:
        """Return the state, perhaps late, or not at the first time."""
        self.num_saves += 1
        if self.manager.current_step() and self.plan.kind not in WRAPPERS:
            time.sleep(self.plan.heal_s)
            if self.plan.heal_fails and self.num_saves % 5 == 3:
                raise RuntimeError("out of memory")
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Load a peer's state."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def note(self, **values: Any) -> None:
        """Write a line."""
        at = {"slot": self.slot, "life": self.life, "step": self.manager.current_step()}
        self.log.write(json.dumps(at | values) + "\n")
        self.log.flush()

    def meets(self, place: str) -> None:
        """Do what is due now: fail, or die."""
        event = self.events[0] if self.events else None
        if event is None or self.manager.current_step() < event.step or event.kind == "leave":
            return
        if event.place == place and event.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if event.place == place and event.kind == "fail":
            self.events.pop(0)
            self.manager.report_error(ValueError("a bad batch"))

    def is_over(self) -> bool:
        """Return whether this replica leaves now."""
        step, stop = self.manager.current_step(), self.folder / "stop"
        leaves = self.events and self.events[0].kind == "leave" and step >= self.events[0].step
        return bool(leaves) or (stop.exists() and step >= int(stop.read_text() or 10**9))

    def part(self) -> dict[str, Any]:
        """Return what a step of this replica counts for."""
        manager = self.manager
        return {
            "quorum": manager.quorum_id(),
            "rank": manager.participating_rank(),
            "size": manager.num_participants(),
        }

    def train(self) -> None:
        """Make steps until all end."""
        if self.plan.kind in WRAPPERS:
            model = WRAPPERS[self.plan.kind](self.manager, self.net)
            optimizer = Optimizer(self.manager, self.optimizer)
            while not self.is_over():
                self.step(model, optimizer)
        else:
            with self.averaged():
                while not self.is_over():
                    self.local_step()
        self.manager.shutdown()
        self.note(left=True)

    def step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make one step with a wrapper."""
        time.sleep(0.02)
        optimizer.zero_grad()
        before, draw = read(self.net, self.optimizer), [self.slot, self.life, self.num_draws]
        self.num_draws += 1
        self.meets("forward")
        self.plan.accumulate(model, draw)
        part = self.part()
        base = self.manager.current_step()
        self.note(**part, base=base, draw=draw, before=before)
        self.meets("backward")
        self.plan.clip(self.net)
        optimizer.step()
        is_whole = not self.manager._quorum.is_damaged  # else it is of no step: it catches up
        if is_whole and self.manager.errored() is None and self.manager.current_step() > base:
            self.note(**part, base=base, after=read(self.net, self.optimizer))
        self.meets("committed")

    def averaged(self) -> LocalSGD | DiLoCo:
        """Return the context; what is sent in a synchronisation is noted."""
        manager, net = self.manager, self.net
        if self.plan.kind == "diloco":
            self.outer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5, nesterov=True)
            made = DiLoCo(manager, [net], self.optimizer, self.outer, sync_every=SYNC_EVERY)
        else:
            made = LocalSGD(manager, net, self.optimizer, sync_every=SYNC_EVERY)
        allreduce, self.sent = manager.allreduce, []

        def noted(tensor: torch.Tensor, **options: Any) -> Any:
            if not self.sent and self.plan.kind == "diloco":
                self.before = self.outer_state(made)
            self.sent.append(tensor.reshape(-1).tolist())
            return allreduce(tensor, **options)

        manager.allreduce = noted  # type: ignore[method-assign]
        commit = manager.should_commit

        def should_commit() -> bool:
            part, base = self.part(), manager.current_step()
            before = self.before if self.plan.kind == "diloco" else None
            self.note(**part, base=base, sent=self.sent, before=before)
            self.meets("backward")
            committed = commit()
            self.done = part | {"base": base} if committed else None
            return committed

        manager.should_commit = should_commit  # type: ignore[method-assign]
        self.made = made
        return made

    def outer_state(self, made: Any) -> dict[str, list[float]]:
        """Return the global parameters and what the outer optimizer keeps."""
        kept = made._fragments[0].original_parameters
        state = self.outer.state_dict()["state"]
        found = {f"global.{name}": t.reshape(-1).tolist() for name, t in kept.items()}
        for number, values in state.items():
            buffer = values["momentum_buffer"]
            if buffer is not None:
                found[f"outer.{number}"] = buffer.reshape(-1).tolist()
        return found

    def local_step(self) -> None:
        """Make one inner step, which may synchronise."""
        time.sleep(0.02)
        self.sent, self.done = [], None
        self.optimizer.zero_grad()
        self.meets("forward")
        self.plan.accumulate(self.net, [self.slot, self.life, self.num_draws])
        self.num_draws += 1
        self.optimizer.step()
        if self.done is not None:
            params = {f"net.{n}": p.reshape(-1).tolist() for n, p in self.net.named_parameters()}
            outer = self.outer_state(self.made) if self.plan.kind == "diloco" else {}
            self.note(**self.done, after=params | outer)
        self.meets("committed")


def live(
    plan: Plan, slot: int, life: int, events: list[Event], lighthouse: str, folder: str
) -> None:
    """Be one life of a slot, in a process of its own."""
    try:
        Replica(plan, slot, life, events, lighthouse, folder).train()
    except BaseException:
        (Path(folder) / f"{slot}.{life}.error").write_text(traceback.format_exc())
        raise


# ---- a history


_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "hpc_elastic.ft.manager", "gloo_ranks"])


class History:
    """Plays a plan; the notes of all replicas are its outcome."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self.plan, self.folder = plan, Path(folder)
        self.alive: dict[int, Any] = {}
        self.lives = [0] * NUM_SLOTS
        self.offsets: dict[Path, int] = {}
        self.seen: list[dict[str, Any]] = []

    def play(self) -> list[dict[str, Any]]:
        """Return the notes.

        Raises:
            TimeoutError: The training does not go on.
        """
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
        self.address = lighthouse.address()
        try:
            for slot in range(self.plan.first):
                self.start(slot, 0)
            for at, event in enumerate(self.plan.events):
                self.wait(lambda step=event.step: self.top() >= step, f"{event}")
                if event.kind in ("leave", "die"):
                    self.alive.pop(event.slot).join(PATIENCE_S)
                elif event.kind == "join":
                    self.start(event.slot, at + 1)
            last = self.top() + 3
            self.wait(lambda: self.num_at(last) == len(self.alive), f"all at {last}")
            self.end()
        finally:
            for process in self.alive.values():
                process.kill()
            lighthouse.shutdown()
        return self.notes()

    def start(self, slot: int, at: int) -> None:
        """Start a life; ``at`` is the number of the first event that can be its own."""
        own = []
        for event in (e for e in self.plan.events[at:] if e.slot == slot):
            if event.kind == "join":
                break
            own.append(event)
        arguments = self.plan, slot, self.lives[slot], own, self.address, str(self.folder)
        process = _context.Process(target=live, args=arguments)
        process.start()
        self.alive[slot] = process
        self.lives[slot] += 1

    def end(self) -> None:
        """Let all end at the same step."""
        staged = self.folder / "staged"
        staged.write_text(str(self.top() + 8))
        staged.rename(self.folder / "stop")
        for process in self.alive.values():
            process.join(PATIENCE_S)
        assert [p.exitcode for p in self.alive.values()] == [0] * len(self.alive), self.errors()

    def wait(self, is_so: Any, what: str) -> None:
        """Wait until something is so; a life that is refused a state is started again."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            for slot, process in self.alive.items():
                if process.exitcode and (name := f"{slot}.{self.lives[slot] - 1}.error"):
                    assert "UnusableStateError" in (self.folder / name).read_text(), self.errors()
                    (self.folder / name).unlink()
                    self.start(slot, len(self.plan.events))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: {self.errors()}")
            time.sleep(0.03)

    def errors(self) -> str:
        """Return what the replicas have raised."""
        return "\n".join(path.read_text() for path in self.folder.glob("*.error"))

    def notes(self) -> list[dict[str, Any]]:
        """Return what all have written so far."""
        for path in self.folder.glob("[0-9].*[0-9]"):
            with path.open() as file:
                file.seek(self.offsets.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self.seen.append(json.loads(line))
                    self.offsets[path] = file.tell()
        return self.seen

    def top(self) -> int:
        """Return the newest step."""
        return max((n["step"] for n in self.notes()), default=0)

    def num_at(self, step: int) -> int:
        """Return how many of the present lives have come to a step."""
        present = {(slot, self.lives[slot] - 1) for slot in self.alive}
        found = {(n["slot"], n["life"]) for n in self.notes() if "after" in n and n["step"] >= step}
        return len(present & found)


# ---- the truth


@dataclass
class Step:
    """One committed step: its participants' notes by rank, and the states of all after it."""

    base: int
    size: int
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    after: list[dict[str, list[float]]] = field(default_factory=list)


def committed_steps(notes: list[dict[str, Any]]) -> Iterator[Step]:
    """Yield each step that a replica has committed."""
    steps: dict[int, dict[tuple[int, int], Step]] = {}
    for n in notes:
        if "quorum" not in n:
            continue
        # a replica that heals knows the step of the others only when it has come
        step = steps.setdefault(n["quorum"], {}).setdefault(
            n["step"] if "after" in n else n["base"] + 1, Step(n["base"], n["size"])
        )
        if "after" in n:
            step.after.append(n["after"])
        elif n["rank"] is not None:
            step.base, step.size = n["base"], n["size"]
            step.parts[n["rank"]] = n
    for by_number in steps.values():
        yield from (step for step in by_number.values() if step.after)


def one_process(plan: Plan, step: Step) -> dict[str, list[float]]:
    """Return the state after a step that one process makes with the samples of all."""
    net, optimizer = plan.parts()
    sums: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for rank in range(step.size):
        write(step.parts[0]["before"], net, optimizer)
        net.zero_grad()
        plan.accumulate(net, step.parts[rank]["draw"])
        for name, p in net.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad / step.size
        buffers = buffers or {name: b.clone() for name, b in net.named_buffers()}
    for name, p in net.named_parameters():
        p.grad = sums.get(name)
    for name, b in net.named_buffers():
        b.copy_(buffers[name])
    plan.clip(net)
    optimizer.step()
    return read(net, optimizer)


def mean_of(plan: Plan, step: Step) -> dict[str, list[float]]:
    """Return the parameters after a synchronisation."""
    net, _ = plan.parts()
    names = [name for name, _ in net.named_parameters()]
    sent = [[*chain(*step.parts[rank]["sent"])] for rank in range(step.size)]
    sizes = [p.numel() for p in net.parameters()]
    means = torch.split(torch.tensor(sent).sum(0) / step.size, sizes)
    if plan.kind == "local_sgd":
        return {f"net.{n}": m.tolist() for n, m in zip(names, means, strict=True)}
    before = step.parts[0]["before"]
    found = {}
    for number, (name, gradient) in enumerate(zip(names, means, strict=True)):
        old = before.get(f"outer.{number}")
        momentum = gradient if old is None else 0.5 * torch.tensor(old) + gradient
        new = torch.tensor(before[f"global.{name}"]) - 0.3 * (gradient + 0.5 * momentum)
        found |= {f"net.{name}": new.tolist(), f"global.{name}": new.tolist()}
        found[f"outer.{number}"] = momentum.tolist()
    return found


def by_torch(rank: int, plans: list[Plan], steps: list[list[Step]]) -> list[list[Any]]:
    """Return the states after all steps as torch's DDP makes them over gloo."""
    torch.set_default_dtype(torch.float64)
    groups = {size: dist.new_group(range(size)) for size in range(1, NUM_SLOTS + 1)}
    dist.barrier()  # all are connected: a rank with no step here ends first, which is no crash
    found: list[list[Any]] = []
    for plan, own in zip(plans, steps, strict=True):
        found.append([])
        for step in own:
            if rank >= step.size:
                found[-1].append(None)
                continue
            net, optimizer = plan.parts()
            write(step.parts[0]["before"], net, optimizer)
            model = nn.parallel.DistributedDataParallel(
                net, process_group=groups[step.size], find_unused_parameters=True
            )
            plan.accumulate(model, step.parts[rank]["draw"])
            plan.clip(net)
            optimizer.step()
            found[-1].append(read(net, optimizer))
    return found


def distance(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    """Return the largest difference of two states; infinity if they have different parts."""
    if a.keys() != b.keys():
        return math.inf
    return max(abs(x - y) for name in a for x, y in zip(a[name], b[name], strict=True))


def without_buffers(state: dict[str, list[float]] | None) -> dict[str, list[float]]:
    """Return a state without running means: a step that failed leaves each replica its own."""
    return {n: v for n, v in (state or {}).items() if "running" not in n and "batches" not in n}


def judge(plan: Plan, steps: list[Step]) -> list[str]:
    """Return what is wrong in a history."""
    torch.set_default_dtype(torch.float64)
    problems = []
    try:
        for step in steps:
            at = f"seed {plan.seed} ({plan.kind}), step {step.base + 1}"
            if sorted(step.parts) != list(range(step.size)):
                problems.append(f"{at}: participants {sorted(step.parts)} of {step.size}")
                continue
            befores = [without_buffers(step.parts[rank]["before"]) for rank in range(step.size)]
            if any(before != befores[0] for before in befores):
                problems.append(f"{at}: the participants differ before it")
            if any(after != step.after[0] for after in step.after):
                problems.append(f"{at}: the replicas differ after it")
            truth = one_process(plan, step) if plan.kind in WRAPPERS else mean_of(plan, step)
            off = distance(truth, step.after[0])
            if not off <= TOLERANCE:
                problems.append(f"{at}: {off} from one process")
    finally:
        torch.set_default_dtype(torch.float32)
    return problems


def find_problems(seeds: range) -> list[str]:
    """Play the histories of some seeds; return what is wrong."""
    problems: list[str] = []
    plans, steps = [], []
    for seed in seeds:
        plan = Plan(seed)
        with tempfile.TemporaryDirectory() as folder:
            try:
                made = [*committed_steps(History(plan, folder).play())]
            except (AssertionError, TimeoutError) as e:
                problems.append(f"seed {seed} ({plan.kind}): {e!r}")
                continue
        found = judge(plan, made)
        problems += found or [f"seed {seed}: {len(made)} steps"] * (len(made) < 5)
        if plan.kind in WRAPPERS and not found:
            plans.append(plan)
            steps.append(made)
    truths = run_ranks(by_torch, NUM_SLOTS, plans, steps) if plans else []
    for number, (plan, own) in enumerate(zip(plans, steps, strict=True)):
        offs = [distance(truths[0][number][i], s.after[0]) for i, s in enumerate(own)]
        if not max(offs) <= TOLERANCE:
            problems.append(f"seed {plan.seed} ({plan.kind}): {max(offs)} from torch's DDP")
    return problems


if __name__ == "__main__":
    begin, _, end = sys.argv[1].partition(":")
    for at in range(int(begin), int(end), 10):
        started = time.monotonic()
        for problem in find_problems(range(at, min(at + 10, int(end)))):
            print(problem, flush=True)
        print(f"up to {at + 10}: {time.monotonic() - started:.0f} s", flush=True)
