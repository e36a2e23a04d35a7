"""Random scripts with random histories: each ends right, is refused, or has a finding of the audit.

    python tests/process/histories.py 0:1000              the histories of these seeds
    python tests/process/histories.py 17:18 --trace       one of them, with what happened
    python tests/process/histories.py 0:60 --plant no_weight          with a mistake in the package

A script trains a small model with an ElasticSampler and a Checkpointer as users do: plain loops and
the long form, subclasses of DataLoader, wrappers that draw ahead, `break` and `zip`, gradient
accumulation, own counts of steps, keys forgotten in the state, a seed for each rank, a directory of
another run, arguments that change at a restart. A history kills its workers anywhere and starts
them again in groups of other sizes.

The truth is computed without the package: whole batches in one process, in the order of
`epoch_plan`. A run that ends elsewhere while its audit has no problem is *silent*: a fault.

Workers are forked from this process, which has imported torch and never used it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hpc_elastic
from hpc_elastic import Checkpointer, ElasticSampler
from hpc_elastic.checkpoint import checkpointer, owner
from hpc_elastic.checkpoint.checkpointer import CheckpointOptions
from hpc_elastic.data import plain_loop
from hpc_elastic.data.audit import audit
from hpc_elastic.data.batch import BatchDivision
from hpc_elastic.data.epoch_plan import EpochPlan
from hpc_elastic.data.plain_loop import PlainLoop, TrainedModels
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RUN_DIR_VARIABLE, Entry, RunDir
from hpc_elastic.worker import reporting

sys.path.insert(0, str(Path(__file__).parents[1]))
from specs import spec_of, started_run

TOLERANCE = 1e-9
"""Of the relative difference of the parameters: the world size changes the order of sums."""
_PACKAGE = str(Path(hpc_elastic.__file__).parent)
_KILLED, _GONE_S = 9, 0.3


@dataclass(frozen=True)
class Script:
    """A user's script; the defaults are those of the README's loop."""

    length: int = 24
    batch: int = 6
    num_epochs: int = 2
    seed: int = 0
    loop: str = "plain"
    """plain, long, zip, accumulate"""
    loader: str = "torch"
    """torch, subclass, own_iter, ahead"""
    model: str = "plain"
    """plain, loss_and_logits, chain"""
    optimizer: str = "sgd"
    """sgd, adam"""
    breaks_after: int | None = None
    """Items after which a loop breaks, at its top."""
    other_length: int = 24
    """Of the second data set of a zip."""
    other_batch: int = 6
    save_every: int = 3
    saves_before_step: bool = False
    counts_itself: bool = False
    forgotten: str | None = None
    """A key that is left out of the state."""
    seed_by_rank: bool = False
    has_schedule: bool = False
    lr: float = 0.05


@dataclass(frozen=True)
class Attempt:
    """One group of workers.

    Attributes:
        world_size: Number of workers.
        killed_at: The step at which it is killed; None: it ends by itself.
        place: Where in the step: drawn, backward, stepped, saving, saved.
        script: What it runs.
    """

    world_size: int
    killed_at: int | None
    place: str
    script: Script


@dataclass(frozen=True)
class History:
    """What happens to a run."""

    attempts: list[Attempt]
    strangers: bool = False
    """Whether another run has saved to the directory before."""


@dataclass
class Outcome:
    """How a history ended: right, refused, found, or silent."""

    kind: str
    detail: str = ""
    events: list[str] = field(default_factory=list)


def make_history(seed: int) -> History:
    """Return a random history."""
    chance = random.Random(seed)
    script = _make_script(chance)
    attempts = []
    for _ in range(chance.randint(0, 3)):
        place = chance.choice(["drawn", "backward", "stepped", "saving", "saved", "saved"])
        attempts.append(Attempt(chance.randint(1, 3), chance.randint(1, 9), place, script))
    if attempts and chance.random() < 0.12:
        script = replace(script, **chance.choice([{"seed": 9}, {"length": script.length + 1}]))
    attempts.append(Attempt(chance.randint(1, 3), None, "", script))
    return History(attempts, strangers=chance.random() < 0.08)


def _make_script(chance: random.Random) -> Script:
    def often(usual: Any, *others: Any, share: float = 0.4) -> Any:
        return chance.choice(others) if chance.random() < share else usual

    batch = chance.randint(3, 7)
    length = batch * chance.randint(2, 5) + often(0, *range(batch), share=0.6)
    return Script(
        length=length,
        batch=batch,
        num_epochs=chance.randint(1, 3),
        seed=chance.randint(0, 5),
        loop=often("plain", "long", "zip", "accumulate", share=0.45),
        loader=often("torch", "subclass", "own_iter", "ahead", share=0.35),
        model=often("plain", "loss_and_logits", "chain", share=0.5),
        optimizer=often("sgd", "adam"),
        breaks_after=often(None, 1, 2, 3, share=0.3),
        other_length=often(length, batch * chance.randint(1, 5), length + 1),
        other_batch=often(batch, batch + 1, share=0.2),
        save_every=chance.randint(1, 4),
        saves_before_step=chance.random() < 0.15,
        counts_itself=chance.random() < 0.3,
        forgotten=often(None, "net", "optimizer", "sampler", "schedule", share=0.2),
        seed_by_rank=chance.random() < 0.07,
        has_schedule=chance.random() < 0.3,
    )


# ---- the truth


def truth(script: Script) -> torch.Tensor:
    """Return the parameters after the training, computed without sampler and checkpoint."""
    models, optimizer, schedule = _make_models(script)
    others = _batches(script.other_length, script.other_batch, script.seed + 1)
    ones = _batches(script.length, script.batch, script.seed)
    num_steps = script.num_epochs * -(-script.length // script.batch)
    for step in range(1, num_steps + 1):
        loss = _loss(script, models, next(ones))
        if script.loop == "zip":
            loss = loss + _loss(script, models, next(others))
        loss.backward()
        if script.loop != "accumulate" or step % 3 == 0 or step == num_steps:
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
    return _parameters(models)


def _batches(length: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    plan = EpochPlan(length, seed, True, "keep", BatchDivision(batch, None, 0, 1))
    for epoch in range(1000):
        order = plan.samples(epoch)(np.arange(length))
        for begin in range(0, length, batch):
            yield torch.as_tensor(order[begin : begin + batch])


def _sample(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([(indices * k + k).double().sin() for k in (1, 2, 3)], dim=1)
    return x, (indices.double() / 7).cos().unsqueeze(1) * 2


class _LossAndLogits(nn.Module):
    """A model that returns its loss and what that was computed from."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": mse_loss(logits, y), "logits": logits}


def _make_models(script: Script) -> tuple[list[nn.Module], torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    if script.model == "chain":
        models: list[nn.Module] = [
            nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
            nn.Linear(4, 1),
        ]
    else:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        models = [_LossAndLogits(net) if script.model == "loss_and_logits" else net]
    models = [model.double() for model in models]
    parameters = [p for model in models for p in model.parameters()]
    optimizer: torch.optim.Optimizer
    if script.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, script.lr, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(parameters, script.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7) if script.has_schedule else None
    return models, optimizer, schedule


def _loss(script: Script, models: list[Any], indices: torch.Tensor) -> torch.Tensor:
    x, y = _sample(indices)
    if script.model == "loss_and_logits":
        return models[0](x, y)["loss"]
    for model in models:
        x = model(x)
    return mse_loss(x, y)


def _parameters(models: list[Any]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


# ---- the script of a worker


class _Subclass(DataLoader):
    """As PyTorch Geometric's and MONAI's: torch's own iteration."""


class _OwnIter(DataLoader):
    """As accelerate's: it draws one item ahead."""

    def __iter__(self) -> Iterator[Any]:
        return _ahead(super().__iter__())


def _ahead(items: Any) -> Iterator[Any]:
    """As a prefetcher to a GPU: the next item is drawn before this one is given."""
    iterator = iter(items)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held
        held = following


def run_script(attempt: Attempt, directory: Path, result: Path) -> None:
    """Train in this worker, as the script does; it is killed where the attempt says so."""
    script, rank = attempt.script, dist.get_rank()
    models, optimizer, schedule = _make_models(script)
    seed = script.seed + (rank if script.seed_by_rank else 0)
    sampler = ElasticSampler(script.length, script.batch, seed=seed)
    loader = _loader(script, script.length, sampler)
    state: dict[str, Any] = {
        "net": nn.ModuleList(models), "optimizer": optimizer, "sampler": sampler,
    }  # fmt: skip
    if schedule is not None:
        state["schedule"] = schedule
    if script.loop == "zip":
        other = ElasticSampler(script.other_length, script.other_batch, seed=seed + 1, name="other")
        state["other"] = other
        other_loader = _loader(script, script.other_length, other)
    state.pop(script.forgotten or "", None)
    options = CheckpointOptions(timeout_s=10)
    checkpointer = Checkpointer(state, directory, options=options)
    step = checkpointer.load_latest() or 0
    wrapped = [sampler.scale_gradients(DistributedDataParallel(model)) for model in models]
    if script.loop == "zip":
        wrapped = [other.scale_gradients(model) for model in wrapped]

    def die(place: str) -> None:
        if attempt.killed_at == step and attempt.place == place:
            os._exit(_KILLED)

    def save() -> None:
        number = step if script.counts_itself else sampler.step
        if number and step % script.save_every == 0:
            checkpointer.save(number)
            die("saving")
            checkpointer.wait()
            die("saved")

    def make_step() -> None:
        if script.saves_before_step:
            save()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        die("stepped")
        if not script.saves_before_step:
            save()

    num_steps = script.num_epochs * -(-script.length // script.batch)
    for _ in sampler.epochs(script.num_epochs):
        if script.loop == "long":
            for batch in sampler.batches(loader):
                step += 1
                for (indices,), weight in batch.micro_batches(*wrapped):
                    die("drawn")
                    (weight * _loss(script, wrapped, indices)).backward()
                die("backward")
                make_step()
            continue
        items: Any = _ahead(loader) if script.loader == "ahead" else loader
        if script.loop == "zip":
            items = zip(items, other_loader, strict=False)
        for number, item in enumerate(items):
            if number == script.breaks_after:
                break
            step += 1
            die("drawn")
            if script.loop == "zip":
                loss = sum(_loss(script, wrapped, indices) for (indices,) in item)
            else:
                loss = _loss(script, wrapped, item[0])
            loss.backward()
            die("backward")
            if script.loop != "accumulate" or step % 3 == 0 or step == num_steps:
                make_step()
            elif not script.counts_itself:
                save()
    checkpointer.save(step if script.counts_itself else sampler.step)
    checkpointer.close()
    if rank == 0:
        torch.save(_parameters(models), result)
    reporting.function_returned()


def _loader(script: Script, length: int, sampler: ElasticSampler) -> DataLoader[Any]:
    kinds = {"subclass": _Subclass, "own_iter": _OwnIter}
    data = TensorDataset(torch.arange(length))
    return kinds.get(script.loader, DataLoader)(data, batch_sampler=sampler)


# ---- groups of workers


class Run:
    """A run directory, whose groups are forked one after the other."""

    def __init__(self, path: Path, checkpoints: Path) -> None:
        self.path, self.checkpoints = path, checkpoints
        self.result = path / "parameters.pt"
        self._num_groups = 0
        path.mkdir()
        entry = Entry("function", "train", module="user")
        started_run(RunDir(path), spec_of(path.name, 1, 3, 1, 0, entry, str(path), [(0, 0)]))

    def attempt(self, attempt: Attempt, plant: Callable[[], None] | None) -> list[str]:
        """Run a group; return how each of its workers ended: done, killed, refused, or failed."""
        self._num_groups += 1
        entry = fencing.entry_path(RunDir(self.path).rdzv, self._num_groups)
        entry.parent.mkdir(exist_ok=True)
        entry.write_text("{}")
        store = self.path / f"store-{self._num_groups}"
        pids: list[int] = []
        for rank in range(attempt.world_size):
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(attempt.world_size), LOCAL_RANK=str(rank),
                )  # fmt: skip
                os.environ.update({fencing.VARIABLE: str(entry), RUN_DIR_VARIABLE: str(self.path)})
                self._work(attempt, store, rank, plant)
            pids.append(pid)
        codes = _wait(pids)
        ends = []
        for rank, code in enumerate(codes):
            note = self.path / f"end-{self._num_groups}-{rank}"
            ends.append(note.read_text() if note.exists() else f"killed: {code}")
        return ends

    def _work(
        self, attempt: Attempt, store: Path, rank: int, plant: Callable[[], None] | None
    ) -> None:
        end = "done"
        try:
            os.dup2(os.open(self.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            torch.set_num_threads(1)
            if plant is not None:
                plant()
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=attempt.world_size
            )
            run_script(attempt, self.checkpoints, self.result)
        except Exception as e:
            frames = traceback.extract_tb(e.__traceback__)
            is_ours = any(frame.filename.startswith(_PACKAGE) for frame in frames)
            named = isinstance(e, hpc_elastic.HpcElasticError) or type(e) is RuntimeError
            by_peer = "gloo" in str(e) or "Connection" in str(e) or "process group" in str(e)
            kind = "refused" if is_ours and named and not by_peer else "failed"
            end = f"{kind}: {type(e).__name__}: {e}"
            traceback.print_exc()
        try:
            (self.path / f".end-{rank}").write_text(end)
            (self.path / f".end-{rank}").rename(self.path / f"end-{self._num_groups}-{rank}")
            sys.stderr.flush()
        finally:  # never into the code of the parent
            os._exit(0 if end == "done" else 1)


def _wait(pids: list[int]) -> list[int]:
    """Return the exit codes; once a worker has failed, the others are killed soon."""
    codes: dict[int, int] = {}
    until = time.monotonic() + 60
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] != 0:
                    until = min(until, time.monotonic() + _GONE_S)
        if time.monotonic() > until:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
            until = float("inf")
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def _error(script: Script, run: Run) -> float:
    """Return how far a run ended from the truth, computed in a process of its own."""
    answer = run.path / "error"
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        found, wanted = torch.load(run.result, weights_only=True), truth(script)
        answer.write_text(str(float((found - wanted).norm() / wanted.norm())))
        os._exit(0)
    os.waitpid(pid, 0)
    return float(answer.read_text())


def play(history: History, folder: Path, plant: Callable[[], None] | None = None) -> Outcome:
    """Play a history; return how it ended."""
    checkpoints = folder / "checkpoints"
    events: list[str] = []
    if history.strangers:
        other = replace(history.attempts[-1].script, lr=0.02, num_epochs=1, forgotten=None)
        other = replace(other, loop="long", loader="torch", seed_by_rank=False)
        stranger = Run(folder / "stranger", checkpoints)
        events.append(f"another run: {stranger.attempt(Attempt(1, None, '', other), plant)}")
    run = Run(folder / "run", checkpoints)
    for attempt in history.attempts:
        ends = run.attempt(attempt, plant)
        events.append(f"{attempt.world_size} workers, {attempt.killed_at} {attempt.place}: {ends}")
        if refused := [end for end in ends if end.startswith("refused")]:
            return Outcome("refused", refused[0], events)
        was_killed = any(end.startswith("killed") for end in ends)
        failed = [end for end in ends if end.startswith("failed")]
        if failed and not was_killed:
            return Outcome("failed", failed[0], events)
    if any(end != "done" for end in ends):
        return Outcome("failed", str(ends), events)
    RunDir(run.path).result.write_text('{"status": "succeeded"}')
    error = min(_error(script, run) for script in {each.script for each in history.attempts})
    if error <= TOLERANCE:
        return Outcome("right", f"{error:.1e}", events)
    problems = [problem for proof in audit(run.path) for problem in proof.problems]
    if problems:
        return Outcome("found", problems[0], events)
    return Outcome("silent", f"the parameters differ by {error:.1e}", events)


# ---- mistakes that the histories must find


def _no_weight() -> None:
    plain_loop._weighted = lambda tensors, given, weight: given


def _weight_twice() -> None:
    once = plain_loop._weighted
    plain_loop._weighted = lambda tensors, given, weight: once(tensors, given, weight**2)


def _counted_when_drawn() -> None:
    hand_out = PlainLoop.hand_out

    def hand_out_and_count(loop: PlainLoop, begin: Any, weight: float) -> None:
        hand_out(loop, begin, weight)
        loop._count_open(1)

    PlainLoop.hand_out = hand_out_and_count  # type: ignore[method-assign]


def _accumulated_items_count() -> None:
    TrainedModels.wait_for_optimizer = lambda models: False  # type: ignore[method-assign]
    TrainedModels.require_known_state = lambda models: None  # type: ignore[method-assign]


def _left_items_are_drawn_again() -> None:
    TrainedModels.begin_loop = lambda models: None  # type: ignore[method-assign]


def _something_draws_ahead() -> None:
    PlainLoop._is_new = property(lambda loop: False, lambda loop, value: None)  # type: ignore


def _sampler_forgotten() -> None:
    reporting.restored_step = lambda: None


def _optimizer_forgotten() -> None:
    checkpointer.require_complete = lambda *_: None


def _any_owner() -> None:
    owner.judge = lambda *_, **__: owner.OwnerVerdict()
    owner.require = lambda *_: None


PLANTED: dict[str, Callable[[], None]] = {
    plant.__name__.strip("_"): plant
    for plant in (
        _no_weight, _weight_twice, _counted_when_drawn, _accumulated_items_count,
        _left_items_are_drawn_again, _something_draws_ahead, _sampler_forgotten,
        _optimizer_forgotten, _any_owner,
    )
}  # fmt: skip


def main() -> None:
    """Play the histories of some seeds; print a line of JSON for each that is silent or failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--plant", choices=PLANTED, help="end at the first that is not right")
    given = parser.parse_args()
    first, _, stop = given.seeds.partition(":")
    plant = PLANTED[given.plant] if given.plant else None
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # imports what every worker needs
    counts: dict[str, int] = {}
    for seed in range(int(first), int(stop)):
        folder, history = Path(tempfile.mkdtemp(prefix="history-")), make_history(seed)
        try:
            outcome = play(history, folder, plant)
        finally:
            if not given.trace:
                shutil.rmtree(folder)
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        if given.trace or outcome.kind in ("silent", "failed"):
            shown = {"seed": seed, "kind": outcome.kind, "detail": outcome.detail}
            print(json.dumps(shown), flush=True)
        if given.trace:
            print(history, *outcome.events, folder, sep="\n")
        if plant is not None and outcome.kind in ("silent", "failed"):
            break
    print(json.dumps({"counts": counts}), flush=True)


if __name__ == "__main__":
    main()
