"""Check of the paths that need GPUs: NCCL, copies from a device, and healing between devices.

    ./scripts/gpu_check                         # on a machine with GPUs, about ten minutes
    ./scripts/gpu_check --gb 5 --directory /scratch/me
    ./scripts/gpu_check --cpu --gb 0.05         # a rehearsal of the same lines: gloo, CPU tensors
    srun --gpus-per-node=4 ./scripts/gpu_check  # on a node of a cluster

Each check runs in processes of its own, one a rank and a GPU, up to four. It ends with the facts
that it has measured, with an error, or at its limit; then the stacks of all threads are in its log.
On a single GPU, two ranks share it if NCCL allows that. Otherwise groups have one rank there, and
replicas average their gradients by gloo. After each check a rank may have a context on its own GPU
alone (nvidia-smi). `hpc-elastic doctor` tests NCCL between nodes.

Exit codes: 0 all checks that could run are well; 1 one has failed; 2 wrong arguments; 3 there is no
GPU here, so nothing was checked. The report has no host names.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from hpc_elastic._util import run
from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions, MemoryTier
from hpc_elastic.data import ElasticSampler
from hpc_elastic.ft import DistributedDataParallel, Manager, Optimizer
from hpc_elastic.ft.checkpointing import HTTPTransport
from hpc_elastic.ft.checkpointing.pg_transport import PGTransport
from hpc_elastic.ft.coordination import LighthouseServer
from hpc_elastic.ft.process_group import ProcessGroup, ProcessGroupGloo, sum_quantized

GB = 1_000_000_000
MB = 1_000_000
HOST = "127.0.0.1"
NO_GPU = 3
CHANGES = 200
_MOST_RANKS = 4
_TIMEOUT = timedelta(seconds=60)
_SHORT_S = 3.0
_SKIPPED = "skipped"
_LOG_LINES = 60
_context = mp.get_context("forkserver")

Facts = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """What a rank of a check knows; it is sent to the process of the rank.

    Attributes:
        rank, size: The rank, and how many there are.
        is_cpu: This is the rehearsal: CPU tensors and gloo.
        has_nccl: The ranks of a group of this size can form one by NCCL.
        num_bytes: Of the large state.
        address: Of a TCPStore, as ``host:port``.
        lighthouse: Address of a lighthouse.
        folder: For checkpoints, on a disk.
        is_fresh: This process replaces one that was killed.
    """

    rank: int = 0
    size: int = 1
    is_cpu: bool = False
    has_nccl: bool = True
    num_bytes: int = GB
    address: str = ""
    lighthouse: str = ""
    folder: str = ""
    is_fresh: bool = False

    @property
    def device(self) -> torch.device:
        """The rank's device."""
        if self.is_cpu:
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    @property
    def is_simulated(self) -> bool:
        """Whether the GPUs are those of tools/simulated_gpu, which compute on the CPU."""
        return not self.is_cpu and "Simulated" in torch.cuda.get_device_name()

    @property
    def group_device(self) -> torch.device:
        """The device of the tensors that its process group takes."""
        return self.device if self.has_nccl else torch.device("cpu")

    def make_group(self) -> ProcessGroup:
        """Return a process group without members."""
        if self.is_cpu or not self.has_nccl:
            return cast(ProcessGroup, ProcessGroupGloo(_TIMEOUT))
        from hpc_elastic.ft.process_group import ProcessGroupNCCL

        return cast(ProcessGroup, ProcessGroupNCCL(_TIMEOUT))

    def configure(self, group: ProcessGroup, quorum: int) -> float:
        """Form the group of a quorum; return the seconds."""
        begin = time.monotonic()
        store = f"{self.address}/check/{quorum}"
        group.configure(store, f"replica_{self.rank}", self.rank, self.size, quorum)
        return time.monotonic() - begin

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_cpu:
            torch.cuda.synchronize(self.device)


class CheckSkippedError(Exception):
    """A check cannot run here, for this reason."""


def require(is_right: object, what: str) -> None:
    """Raise AssertionError unless something is right, also with ``python -O``."""
    if not is_right:
        raise AssertionError(what)


# ---- the checks: each runs on all its ranks, and returns what it has measured


def check_collectives(place: Place) -> Facts:
    """Collectives have the right results; rate of a large allreduce."""
    group = place.make_group()
    configure_s = place.configure(group, 1)
    device, total = place.group_device, sum(range(1, place.size + 1))
    x = torch.full((1000,), float(place.rank + 1), device=device)
    group.allreduce([x]).wait()
    require((x == total).all(), f"allreduce: {x[0]} instead of {total}")
    group.broadcast([x.fill_(place.rank)]).wait()
    require((x == 0).all(), f"broadcast: {x[0]} instead of 0")
    parts = [torch.empty_like(x) for _ in range(place.size)]
    group.allgather([parts], [x.fill_(place.rank)]).wait()
    require(all((p == i).all() for i, p in enumerate(parts)), "allgather")
    values = torch.linspace(-1.0, 1.0, 5000, device=device)
    rounded = values.clone()
    sum_quantized(group, rounded).wait()
    off = (rounded - place.size * values).abs().max().item()
    require(off <= place.size / 127, f"the sum by 8-bit integers is off by {off}")
    group.barrier().wait()
    require(group.errored() is None, f"errored: {group.errored()}")
    shares_gpu = not place.is_cpu and place.size > torch.cuda.device_count()
    num_bytes = min(place.num_bytes, 16 * MB if shares_gpu else GB // 4)
    large, seconds = torch.ones(num_bytes // 4, device=device), []
    for _ in range(6):
        place.synchronize()
        begin = time.monotonic()
        group.allreduce([large]).wait()
        place.synchronize()
        seconds.append(time.monotonic() - begin)
    group.shutdown()
    rate = num_bytes / statistics.median(seconds[1:]) / GB
    return {"configure_s": configure_s, "allreduce_gb_per_s": rate, "allreduce_bytes": num_bytes}


def check_abort(place: Place) -> Facts:
    """An operation that cannot end is aborted, and the same object forms the next group."""
    group, device = place.make_group(), place.group_device
    taken: dict[str, list[float]] = {"configure_s": [], "abort_s": []}
    free = []
    for quorum in range(10):
        taken["configure_s"].append(place.configure(group, quorum))
        x = torch.full((MB,), 1.0, device=device)
        group.allreduce([x]).wait()
        require((x == place.size).all(), f"quorum {quorum}: {x[0]} instead of {place.size}")
        work = group.allreduce([x]) if place.rank == 0 else None  # alone, if there are others
        time.sleep(0.3)
        begin = time.monotonic()
        group.abort(why="a peer was lost")  # type: ignore[call-arg]
        taken["abort_s"].append(time.monotonic() - begin)
        if work is not None and place.size > 1:
            error = _error_of(place, group, work)
            require(error is not None and "a peer was lost" in str(error), f"errored: {error}")
        if not place.is_cpu:
            free.append(torch.cuda.mem_get_info(place.device)[0])
    place.configure(group, 99)
    group.barrier().wait()
    group.shutdown()
    lost = (free[1] - free[-1]) / MB if free else 0.0
    require(lost < 500, f"{lost:.0f} MB of GPU memory were not released by 8 aborts")
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {**medians, "longest_abort_s": max(taken["abort_s"]), "gpu_memory_lost_mb": lost}


def check_changes(place: Place) -> Facts:
    """A process forms 200 groups, one after the other, and keeps nothing of the earlier ones."""
    group, this = place.make_group(), psutil.Process()
    x = torch.ones(MB, device=place.group_device)
    used: list[dict[str, float]] = []
    for quorum in range(1, CHANGES + 1):
        place.configure(group, quorum)
        group.allreduce([x.fill_(1.0)]).wait()
        require((x == place.size).all(), f"quorum {quorum}: {x[0]} instead of {place.size}")
        if quorum in (CHANGES // 2, CHANGES):  # before, pools and caches fill
            gc.collect()
            used.append({"host_mb": this.memory_info().rss / MB, "threads": this.num_threads()})
            used[-1]["files"] = this.num_fds()
            if not place.is_cpu:
                free, total = torch.cuda.mem_get_info(place.device)
                used[-1]["gpu_mb"] = (total - free) / MB
    group.shutdown()
    grown = {f"grown_{name}": value - used[0][name] for name, value in used[1].items()}
    for name, value in grown.items():
        most = 2 if name in ("grown_threads", "grown_files") else 32
        require(value <= most, f"{name} by {value:.0f} in {CHANGES // 2} changes")
    return {"changes": CHANGES, **grown}


def check_timeout(place: Place) -> Facts:
    """An operation that misses its deadline aborts the group, and the error names it."""
    return _fail_alone(place, is_killed=False)


def check_killed(place: Place) -> Facts:
    """The last rank is killed within an operation; the others get an error in time, and go on."""
    return _fail_alone(place, is_killed=True)


def _fail_alone(place: Place, *, is_killed: bool) -> Facts:
    group, device = place.make_group(), place.group_device
    place.configure(group, 1)
    x = torch.ones(MB, device=device)
    group.allreduce([x]).wait()
    place.synchronize()
    if place.rank == place.size - 1:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * _SHORT_S)
        return {}
    group.set_timeout(timedelta(seconds=_SHORT_S))
    begin = time.monotonic()
    error = None
    try:
        error = _error_of(place, group, group.allreduce([x]))
    except RuntimeError as e:
        error = e
    seconds = time.monotonic() - begin
    require(error is not None, "no error of an operation whose peer is missing")
    require(seconds < 5 * _SHORT_S, f"the error came after {seconds:.1f} s")
    if is_killed:
        group.abort()
        group.set_timeout(_TIMEOUT)
        others = replace(place, size=place.size - 1)
        others.configure(group, 2)
        group.allreduce([x.fill_(1.0)]).wait()
        require((x == others.size).all(), f"after it: {x[0]} instead of {others.size}")
    return {"error_after_s": seconds, "error": f"{type(error).__name__}: {error}"[:300]}


def _error_of(place: Place, group: ProcessGroup, work: Any) -> Exception | None:
    """Return the error of an operation; NCCL's is known to the group alone."""
    try:
        work.wait()
        place.synchronize()
    except RuntimeError as e:
        return e
    return group.errored()


def check_transports(place: Place) -> Facts:
    """A state in device memory is fetched from a peer, by each transport; the rates."""
    num_bytes = min(place.num_bytes, 2 * GB)
    elements = num_bytes // 4 // 32
    value = float(place.rank == 0)
    own = {f"layer{i}": torch.full((elements,), value, device=place.device) for i in range(32)}
    state, store = {"user": {"default": own}, "torchft": {"step": 7}}, _store(place)
    group = place.make_group()
    place.configure(group, 1)
    ways: dict[str, Any] = {
        "http": HTTPTransport(_TIMEOUT),
        "http_in_place": HTTPTransport(_TIMEOUT, 0, state_dict=lambda: state, in_place=True),
    }
    if place.group_device == place.device:
        ways["process_group"] = PGTransport(group, _TIMEOUT, place.device, lambda: state)
    facts: Facts = {"bytes": num_bytes}
    for name, transport in ways.items():
        if place.rank == 0:
            store.set(f"{name}/metadata", transport.metadata())
            transport.send_checkpoint([1], 7, state, _TIMEOUT)
            store.get(f"{name}/seconds")
        elif place.rank == 1:
            for tensor in own.values():
                tensor.zero_()
            metadata_of = store.get(f"{name}/metadata").decode()
            begin = time.monotonic()
            got = transport.recv_checkpoint(0, metadata_of, 7, _TIMEOUT)["user"]["default"]
            for key, tensor in own.items():
                if tensor.data_ptr() != got[key].data_ptr():
                    tensor.copy_(got[key])
            place.synchronize()
            store.set(f"{name}/seconds", str(time.monotonic() - begin))
            require(all((t == 1).all() for t in own.values()), f"{name}: another state came")
        facts[f"{name}_gb_per_s"] = num_bytes / float(store.get(f"{name}/seconds")) / GB
        transport.shutdown()
    group.shutdown()
    return facts


def check_training(place: Place) -> Facts:
    """Replicas train; the last one is killed, and comes back with other weights.

    Each ends 20 steps after all take part in a step again.
    """
    torch.manual_seed(100 * place.rank + place.is_fresh)
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(place.device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = _replica(place, local, {"model": model, "adam": adam})
    by_ddp = place.group_device == place.device
    trained = DistributedDataParallel(manager, model) if by_ddp else model
    optimizer = Optimizer(manager, adam)
    is_last, was_complete, had_fewer = place.rank == place.size - 1, False, place.is_fresh
    failed, num_together, ended = 0, 0, [time.monotonic()]
    while num_together < 20:
        before = manager.current_step()
        optimizer.zero_grad()
        trained(torch.randn(64, 512, device=place.device)).square().mean().backward()
        if not by_ddp:
            _average_gradients(place, manager, model)
        optimizer.step()
        if manager.current_step() == before:
            failed += 1
            continue
        ended.append(time.monotonic())
        is_complete = manager.num_participants() == place.size
        if is_last and is_complete and before > 10 and not place.is_fresh:
            os.kill(os.getpid(), signal.SIGKILL)
        had_fewer |= was_complete and not is_complete
        was_complete |= is_complete
        num_together = num_together + 1 if had_fewer and is_complete else 0
    raw = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    facts = {
        "step": manager.current_step(),
        "failed_steps": failed,
        "longest_gap_s": max(b - a for a, b in itertools.pairwise(ended[1:])),
        "state": hashlib.blake2b(raw, digest_size=8).hexdigest(),
    }
    time.sleep(0.5)  # the others complete the last step
    manager.shutdown()
    return facts


def check_joining(place: Place) -> Facts:
    """The last replica joins the others, which have a large state and train on meanwhile."""
    state = _large_state(place)
    large = nn.ParameterDict(state).requires_grad_(False)  # in the same memory
    small = nn.Linear(512, 512).to(place.device)
    sgd = torch.optim.SGD(small.parameters(), lr=1e-3)
    local = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = _replica(place, local, {"large": large, "small": small})
    optimizer = Optimizer(manager, sgd)
    is_newcomer = place.rank == place.size - 1
    _fill(state, 2 if is_newcomer else 1)
    if is_newcomer:
        _store(place).get("they train")
    elif not place.is_cpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    joined_s, num_together, ended = 0.0, 0, [time.monotonic()]
    alone: list[float] = []
    peak = 0
    while num_together < 20:
        before = manager.current_step()
        optimizer.zero_grad()
        small(torch.randn(64, 512, device=place.device)).square().mean().backward()
        _average_gradients(place, manager, small)
        time.sleep(0.1)  # a model of this size does not take less
        optimizer.step()
        if manager.current_step() == before:
            continue
        ended.append(time.monotonic())
        if manager.num_participants() == place.size:
            joined_s = joined_s or ended[-1] - ended[0]
            num_together += 1
        elif not is_newcomer and not alone and len(ended) > 50:
            alone = [b - a for a, b in itertools.pairwise(ended[-30:])]
            if not place.is_cpu:
                peak = torch.cuda.max_memory_allocated(place.device)
            if place.rank == 0:
                _store(place).set("they train", "yes")
    facts: Facts = {}
    if is_newcomer:
        facts = {"joined_s": joined_s, "joined_bytes": sum(t.nbytes for t in state.values())}
        _require_filled(state, 1)
    else:
        waits = [b - a for a, b in itertools.pairwise(ended[50:])]
        facts = {"step_s": statistics.median(alone)}
        facts["held_up_s"] = max(waits) - facts["step_s"]
        require(facts["held_up_s"] < 10, f"a step took {max(waits):.1f} s while it joined")
        if not place.is_cpu:
            facts["extra_gpu_mb"] = (torch.cuda.max_memory_allocated(place.device) - peak) / MB
    time.sleep(0.5)  # the others complete the last step
    manager.shutdown()
    return facts


def _average_gradients(place: Place, manager: Manager, module: nn.Module) -> None:
    """Average a module's gradients over the replicas, by the device that their group takes."""
    for p in module.parameters():
        gradient = p.grad.to(place.group_device)  # type: ignore[union-attr]
        manager.allreduce(gradient).wait()
        p.grad.copy_(gradient)  # type: ignore[union-attr]


def _replica(place: Place, store: TCPStore, parts: dict[str, Any]) -> Manager:
    """Return the Manager of a replica of one rank, whose state is that of these parts."""

    def load(state: Facts) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return Manager(
        pg=place.make_group(), load_state_dict=load, min_replica_size=1, rank=0, world_size=1,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        store_addr=HOST, store_port=store.port, lighthouse_addr=place.lighthouse,
        replica_id=f"replica_{place.rank}", timeout=_TIMEOUT,
    )  # fmt: skip


def check_virtual_ranks(place: Place) -> Facts:
    """A training of all ranks together, and of each alone, with the same bits."""
    _init_group(place, "virtual")
    device = place.group_device
    data = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))

    def train(group: Any) -> tuple[str, float]:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1)]
        net = nn.Sequential(*layers, nn.Linear(256, 64)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        sampler = ElasticSampler(
            data, 32, rank=dist.get_rank(group), world_size=dist.get_world_size(group), name=None,
            virtual_ranks=8,
        )  # fmt: skip
        model = sampler.average_gradients(net, group)
        loss = 0.0
        for _ in sampler.epochs(10):
            for batch in sampler.batches(DataLoader(data, batch_sampler=sampler)):  # type: ignore[arg-type]
                optimizer.zero_grad()
                losses = []
                for x, weight in batch.micro_batches():
                    losses.append((model(x.to(device)) - x.to(device)).square().mean())
                    (weight * losses[-1]).backward()
                optimizer.step()
                loss = batch.mean(losses)
        raw = b"".join(t.detach().cpu().numpy().tobytes() for t in net.state_dict().values())
        return hashlib.blake2b(raw, digest_size=8).hexdigest(), loss

    together = train(None)
    groups = [dist.new_group([rank]) for rank in range(place.size)]
    alone = train(groups[place.rank])
    require(together == alone, f"together {together}, alone {alone}")
    dist.barrier()
    dist.destroy_process_group()
    return {"state": together[0]}


def check_sharded(place: Place) -> Facts:
    """A model that is sharded over all ranks (FSDP2) trains as a whole one, and is restored."""
    _init_group(place, "sharded")
    data = torch.randn(4 * place.size, 256, generator=torch.Generator().manual_seed(1))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(place.group_device)
    whole = copy.deepcopy(net)
    fully_shard(net)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        x = batch.to(place.group_device)
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()

    def distance() -> float:
        pairs = zip(net.parameters(), whole.parameters(), strict=True)
        apart = [(p.full_tensor() - q).abs().max() for p, q in pairs]  # type: ignore[attr-defined]
        return torch.stack(apart).max().item()

    of_whole = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    saver = Checkpointer({"model": net, "optimizer": optimizer}, Path(place.folder, "sharded"))
    for step in range(1, 6):
        train(whole, of_whole, data)
        train(net, optimizer, data[place.rank :: place.size])
        if step == 3:
            saver.save(step)
            saver.wait()
    far = distance()
    require(far < 1e-4, f"after 5 steps it differs from a whole one by {far}")
    require(saver.load_latest() == 3, "its checkpoint was not found")
    saver.close()
    for _ in range(2):
        train(net, optimizer, data[place.rank :: place.size])
    again = distance()
    require(again < 1e-4, f"restored, it differs from a whole one by {again}")
    dist.destroy_process_group()
    return {"differs_by": far, "restored_differs_by": again}


def check_compiled(place: Place) -> Facts:
    """A compiled model (torch.compile) with averaged gradients trains as the plain one."""
    if place.is_simulated:
        raise CheckSkippedError("no compiler for simulated GPUs")
    _init_group(place, "compiled")
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(place.group_device)
    for p in net.parameters():
        dist.broadcast(p.detach(), 0)
    plain = copy.deepcopy(net)
    begin, losses = time.monotonic(), []
    for inner, kept in ((torch.compile(net), net), (plain, plain)):
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
        for step in range(5):
            torch.manual_seed(step * place.size + place.rank)
            x = torch.randn(64, 256, device=place.group_device)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    require(abs(losses[0] - losses[1]) < 1e-3, f"losses, compiled and plain: {losses}")
    dist.destroy_process_group()
    return {"seconds": time.monotonic() - begin, "losses_differ_by": abs(losses[0] - losses[1])}


def check_copies(place: Place) -> Facts:
    """All ranks copy from their devices at once: the rate of one alone, and of each then."""
    num_bytes = min(place.num_bytes, GB)
    state = {"x": torch.empty(num_bytes // 4, device=place.device)}
    alone = 0.0
    if place.rank == 0:
        alone = _pinned_rate(place, state)
    _meet(place, "alone")
    together = _pinned_rate(place, state)
    _meet(place, "together")
    return {"bytes": num_bytes, "alone_gb_per_s": alone, "together_gb_per_s": together}


RUN = """
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist

begun = time.time()
is_cuda = torch.cuda.is_available()
if is_cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if is_cuda else "gloo")
x = torch.ones(1000, device="cuda" if is_cuda else "cpu")
dist.all_reduce(x)
assert (x == dist.get_world_size()).all()
first = pathlib.Path("first")
if dist.get_rank() == 0 and not first.exists():
    first.write_text(str(time.time()))
    sys.exit(3)  # the next group has workers that have imported torch already
if dist.get_rank() == 0:
    pathlib.Path("facts").write_text(json.dumps({
        "workers": dist.get_world_size(),
        "restart_s": begun - float(first.read_text()),
        "async_error_handling": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    }))
dist.destroy_process_group()
"""


def check_run(place: Place) -> Facts:
    """A run of this package: the preflight of the GPUs, a worker for each, and a restart."""
    folder = Path(place.folder, "run")
    folder.mkdir()
    (folder / "train.py").write_text(RUN)
    cpu = ["--nproc-per-node=2"] if place.is_cpu else []
    argv = [sys.executable, "-m", "hpc_elastic", "run", "--launcher=local", *cpu]
    argv = ["env", f"--chdir={folder}", *argv, "--", sys.executable, "train.py"]
    done = run(argv, timeout_s=100.0)
    require(done.returncode == 0, f"{done.stdout}{done.stderr}"[-2000:])
    facts: Facts = json.loads((folder / "facts").read_text())
    wanted = 2 if place.is_cpu else torch.cuda.device_count()
    require(facts["workers"] == wanted, f"{facts['workers']} workers for {wanted} GPUs")
    return facts


def _init_group(place: Place, name: str) -> None:
    """Form torch's own group of all ranks."""
    host, port = place.address.rsplit(":", 1)
    store = PrefixStore(name, TCPStore(host, int(port), is_master=False))
    device = place.group_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, timeout=_TIMEOUT,
        rank=place.rank, world_size=place.size,
    )  # fmt: skip


def _meet(place: Place, name: str) -> None:
    """Wait until all ranks have come here."""
    store = _store(place)
    if store.add(f"{name}/here", 1) == place.size:
        store.set(f"{name}/all", "yes")
    store.get(f"{name}/all")


def check_checkpoint(place: Place) -> Facts:
    """A large state is saved from the device in the background, and restored bit by bit."""
    state = _large_state(place)
    num_bytes = sum(t.nbytes for t in state.values())
    alone = _matmul_s(place, 30)
    saver = Checkpointer({"state": state}, Path(place.folder, "disk"))
    facts: Facts = {"bytes": num_bytes, "host_copy_gb_per_s": _pinned_rate(place, state)}
    for step in (1, 2):  # the second has its buffer already
        _fill(state, step)
        place.synchronize()  # the step has ended
        begin = time.monotonic()
        saver.save(step)
        held = time.monotonic() - begin
        busy = _matmul_s(place, 30)
        saver.wait()
        facts |= {"held_up_s": held, "held_up_gb_per_s": num_bytes / held / GB}
        facts |= {"total_s": time.monotonic() - begin, "step_slower_by": busy / alone - 1.0}
    saver._snapshots.wait_until_warm()
    is_pinned = saver._snapshots.num_pinned >= num_bytes
    facts["buffer_is_pinned"] = is_pinned
    require(is_pinned or place.is_cpu, "the buffer is not pinned: copies are several times slower")
    saver.close()
    facts["restore_s"] = _restore(place, state, 2, Path(place.folder, "disk"), None)
    return facts


def check_memory(place: Place) -> Facts:
    """The same, into the node's memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="gpu-check-") as memory:
        room = shutil.disk_usage(memory).free // 4
        state = _large_state(replace(place, num_bytes=min(place.num_bytes, room)))
        num_bytes = sum(t.nbytes for t in state.values())
        tier = MemoryTier(Path(memory), shared_every=1000, copies=False)
        saver = Checkpointer({"state": state}, Path(place.folder, "shared"), memory_tier=tier)
        for step in (1, 2):  # the first one goes to the directory, too
            _fill(state, step)
            begin = time.monotonic()
            saver.save(step)
            held = time.monotonic() - begin
            saver.wait()
            total = time.monotonic() - begin
        saver.close()
        steps = [path.name for path in Path(place.folder, "shared").glob("step-*")]
        require(len(steps) == 1, f"in the directory are {steps}")
        restore_s = _restore(place, state, 2, Path(place.folder, "shared"), tier)
    return {"bytes": num_bytes, "held_up_s": held, "total_s": total, "restore_s": restore_s}


def _large_state(place: Place) -> dict[str, torch.Tensor]:
    room = psutil.virtual_memory().available // 4
    if not place.is_cpu:
        room = min(room, torch.cuda.mem_get_info(place.device)[0] // 2)
    num_bytes = min(place.num_bytes, room, shutil.disk_usage(place.folder).free // 4)
    elements = max(1, num_bytes // 4 // 64)
    return {f"layer{i}": torch.empty(elements, device=place.device) for i in range(64)}


def _fill(state: dict[str, torch.Tensor], step: int) -> None:
    for i, tensor in enumerate(state.values()):
        seeded = torch.Generator(tensor.device).manual_seed(1000 * step + i)
        tensor.uniform_(generator=seeded)


def _require_filled(state: dict[str, torch.Tensor], step: int) -> None:
    wanted = torch.empty_like(next(iter(state.values())))
    for i, (name, tensor) in enumerate(state.items()):
        wanted.uniform_(generator=torch.Generator(wanted.device).manual_seed(1000 * step + i))
        require(torch.equal(tensor, wanted), f"{name} has other bits than it had")


def _restore(
    place: Place, state: dict[str, torch.Tensor], step: int, folder: Path, tier: MemoryTier | None
) -> float:
    for tensor in state.values():
        tensor.zero_()
    options = CheckpointOptions(rng=False, asynchronous=False, boundary=False)
    begin = time.monotonic()
    with Checkpointer({"state": state}, folder, memory_tier=tier, options=options) as saver:
        found = saver.load_latest()
    place.synchronize()
    seconds = time.monotonic() - begin
    require(found == step, f"step {found} was restored instead of {step}")
    _require_filled(state, step)
    return seconds


def _matmul_s(place: Place, count: int) -> float:
    """Return the median seconds of a step of matrix products, which uses the device alone."""
    size = 256 if place.is_cpu or place.is_simulated else 8192
    a, taken = torch.rand(size, size, device=place.device), []
    for _ in range(count):
        begin = time.monotonic()
        a = (a @ a).clamp_(0.0, 1.0)
        place.synchronize()
        taken.append(time.monotonic() - begin)
    return statistics.median(taken)


def _pinned_rate(place: Place, state: dict[str, torch.Tensor]) -> float:
    """Return the rate of a plain copy into pinned memory, as a floor, in GB/s."""
    source = next(iter(state.values()))
    buffer = torch.empty(source.shape, pin_memory=not place.is_cpu)
    taken = []
    for _ in range(6):
        begin = time.monotonic()
        buffer.copy_(source)
        place.synchronize()
        taken.append(time.monotonic() - begin)
    return source.nbytes / statistics.median(taken[1:]) / GB


def _store(place: Place) -> Any:
    host, port = place.address.split(":")
    return TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)


# ---- how they are run


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        run: What each rank does.
        what: Its line in the report.
        limit_s: After this it has failed.
        fewest: The fewest ranks that it needs; 0: it is one process, however many GPUs there are.
        needs_group: Its ranks need an NCCL group. Where NCCL forms none of several ranks on one
            GPU, it runs on one rank, or is skipped.
        kills: The last rank kills itself.
        restarts: Another process then takes its place.
        hint: For the error at the limit.
    """

    run: Callable[[Place], Facts]
    what: str
    limit_s: float = 120.0
    fewest: int = 1
    needs_group: bool = True
    kills: bool = False
    restarts: bool = False
    hint: str = ""


_LESS = ": a smaller --gb, or another --directory, takes less time"
CHECKS = {
    "collectives": Check(check_collectives, "collectives of the process group"),
    "abort": Check(check_abort, "abort and configure again, ten times"),
    "changes": Check(check_changes, f"{CHANGES} groups, one after the other", 600.0),
    "timeout": Check(check_timeout, "an operation misses its time-out", fewest=2),
    "killed": Check(check_killed, "a peer is killed (SIGKILL)", fewest=2, kills=True),
    "transports": Check(
        check_transports, "a state is fetched from a peer's device", fewest=2, needs_group=False
    ),
    "training": Check(
        check_training, "replicas train, one is killed, comes back and heals", fewest=2,
        needs_group=False, kills=True, restarts=True,
    ),
    "joining": Check(
        check_joining, "a replica with a large state joins", 300.0, fewest=2, needs_group=False,
        hint=_LESS,
    ),
    "virtual_ranks": Check(check_virtual_ranks, "all ranks train, and one alone: the same bits"),
    "sharded": Check(check_sharded, "a sharded model (FSDP2) trains, and is restored"),
    "compiled": Check(check_compiled, "a compiled model trains as the plain one", 300.0),
    "copies": Check(
        check_copies, "all ranks copy from their devices at once", needs_group=False
    ),
    "run": Check(check_run, "a run: preflight, a worker for each GPU, a restart", fewest=0),
    "checkpoint": Check(
        check_checkpoint, "a large state is saved and restored", 300.0, fewest=0, hint=_LESS
    ),
    "memory": Check(check_memory, "the same in the node's memory", 300.0, fewest=0, hint=_LESS),
}  # fmt: skip


@dataclass
class Outcome:
    """What came of a check; ``verdict`` is ok, FAIL or skipped."""

    name: str
    verdict: str
    what: str
    facts: Facts
    error: str = ""
    log: str = ""


class Ranks:
    """The processes of one check."""

    def __init__(self, check: Check, place: Place, folder: Path) -> None:
        self._check, self._folder = check, folder
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._lighthouse = LighthouseServer(bind=f"{HOST}:0", min_replicas=1)
        self._place = replace(
            place, address=f"{HOST}:{self._store.port}", lighthouse=self._lighthouse.address()
        )
        self.is_killed = False
        self._living: dict[Connection, tuple[int, Any]] = {}
        self._answers: dict[int, Facts] = {}

    def run(self) -> dict[int, Facts]:
        """Run all ranks; return their facts.

        Raises:
            RuntimeError: A rank has failed, or the time is over.
        """
        for rank in range(self._place.size):
            self._start(replace(self._place, rank=rank))
        deadline = time.monotonic() + self._check.limit_s
        while self._living:
            ready = wait(list(self._living), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = sorted(rank for rank, _ in self._living.values())
                text = f"no end of ranks {ranks} within {self._check.limit_s:g} s"
                raise RuntimeError(f"{text}{self._check.hint}")
            for pipe in ready:
                self._receive(pipe)  # type: ignore[arg-type]
        return self._answers

    def close(self) -> None:
        """End everything; a process that still runs writes its stacks first."""
        for _, process in self._living.values():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, signal.SIGABRT)
            process.join(5.0)
            process.kill()
            process.join()
        self._lighthouse.shutdown()

    def _start(self, place: Place) -> None:
        ours, theirs = _context.Pipe()
        log = str(self._folder / f"rank{place.rank}.log")
        process = _context.Process(target=_serve, args=(self._check.run, place, log, theirs))
        process.start()
        theirs.close()
        self._living[ours] = place.rank, process

    def _receive(self, pipe: Connection) -> None:
        rank, process = self._living[pipe]
        answer: tuple[str, Facts] | None = None
        with contextlib.suppress(EOFError, OSError):
            answer = pipe.recv()
        process.join(10.0)
        del self._living[pipe]
        if answer is not None and not answer[0]:
            self._answers[rank] = answer[1]
        elif answer is not None:
            raise RuntimeError(f"rank {rank}: {answer[0]}")
        elif self._check.kills and rank == self._place.size - 1 and not self.is_killed:
            self.is_killed = True
            if self._check.restarts:
                self._start(replace(self._place, rank=rank, is_fresh=True))
        else:
            raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}")


def _serve(check: Callable[[Place], Facts], place: Place, log: str, pipe: Connection) -> None:
    """Run one rank of a check (in its process)."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    if not place.is_cpu:
        torch.cuda.set_device(place.device)
    try:
        facts = check(place)
        if not place.is_cpu:
            require(len(used := own_gpus()) <= 1, f"this rank has contexts on {used}")
        pipe.send(("", facts))
    except CheckSkippedError as e:
        pipe.send(("", {_SKIPPED: str(e)}))
    except Exception as e:
        traceback.print_exc()
        pipe.send((f"{type(e).__name__}: {e}", {}))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a communicator that was aborted may wait in its destructor


def own_gpus() -> set[str]:
    """Return the GPUs on which this process has a context; none if nvidia-smi does not know it."""
    ask = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    try:
        lines = run(ask, timeout_s=20.0).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return set()
    rows = (line.split(", ") for line in lines if line.count(", ") == 1)
    return {gpu for pid, gpu in rows if pid == str(os.getpid())}


def perform(name: str, place: Place) -> Outcome:
    """Run one check; never raises."""
    check = CHECKS[name]
    size = place.size if check.fewest else 1
    if name == "transports":
        size = min(size, 2)
    if size < check.fewest or (check.needs_group and check.fewest > 1 and not place.has_nccl):
        return Outcome(name, "skipped", check.what, {}, "it needs two ranks, each with a GPU")
    if not place.has_nccl and check.needs_group:
        size, place = 1, replace(place, has_nccl=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        ranks = Ranks(check, replace(place, size=size), Path(folder))
        error, facts = "", {}
        try:
            answers = ranks.run()
            facts = {**answers[max(answers)], **answers[0], "ranks": size}
            if _SKIPPED in facts:
                return Outcome(name, "skipped", check.what, {}, facts[_SKIPPED])
            require(ranks.is_killed == check.kills, "the last rank was to be killed")
            if name == "training":
                _compare(answers)
        except Exception as e:
            error = str(e)
        finally:
            ranks.close()
        log = _last_lines(Path(folder)) if error else ""
    return Outcome(name, "FAIL" if error else "ok", check.what, facts, error, log)


def _compare(answers: dict[int, Facts]) -> None:
    states = {rank: (facts["step"], facts["state"]) for rank, facts in answers.items()}
    require(len(set(states.values())) == 1, f"the replicas differ in the end: {states}")
    *survivors, _ = (answers[rank]["failed_steps"] for rank in sorted(answers))
    require(max(survivors) <= 1, f"steps of the survivors that failed: {survivors}")


def _last_lines(folder: Path) -> str:
    texts = []
    for path in sorted(folder.glob("rank*.log")):
        lines = path.read_text(errors="replace").splitlines()
        texts += [f"--- {path.name}, {len(lines)} lines", *lines[-_LOG_LINES:]]
    return "\n".join(texts)


# ---- the report


def describe_machine() -> Facts:
    """Return versions and hardware, without names."""
    versions = {"Python": platform.python_version(), "kernel": platform.release()}
    for package in ("hpc_elastic", "torch"):
        versions[package] = metadata.version(package)
    facts: Facts = {
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": psutil.virtual_memory().total / GB,
        "gpus": [],
    }
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        if dist.is_nccl_available():
            nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            versions["NCCL"] = ".".join(map(str, nccl))
        for i in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(i)
            facts["gpus"].append(f"{found.name}, {found.total_memory / GB:.0f} GB")
        if shutil.which("nvidia-smi"):
            facts["topology"] = run(["nvidia-smi", "topo", "-m"], timeout_s=30).stdout
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            versions["driver"] = run(query, timeout_s=30).stdout.split("\n")[0]
    return facts


def choose_place(args: argparse.Namespace, folder: str) -> Place:
    """Return where the checks run: how many ranks, on what, and by which backend."""
    place = Place(num_bytes=int(args.gb * GB), folder=folder, is_cpu=args.cpu)
    if args.cpu:
        return replace(place, size=args.ranks or 3)
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        return replace(place, size=min(args.ranks or _MOST_RANKS, num_gpus))
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # from NCCL 2.30 on
    shared = replace(place, size=2)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as logs:
        ranks = Ranks(Check(check_collectives, "", 60.0), shared, Path(logs))
        try:
            ranks.run()
        except RuntimeError as e:
            print(f"two ranks share no GPU here: {str(e).splitlines()[0][:200]}", flush=True)
            shared = replace(shared, has_nccl=False)
        finally:
            ranks.close()
    return shared


def main(argv: list[str] | None = None) -> int:
    """Run all checks, print the report, and write it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="rehearse with gloo and CPU tensors")
    parser.add_argument("--gb", type=float, default=20.0, help="size of the large state")
    parser.add_argument("--ranks", type=int, help="ranks; default: one a GPU, up to four")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--directory", default=".", help="for the checkpoint; a disk with room")
    parser.add_argument("--report", type=Path, default=Path("gpu_check.json"))
    args = parser.parse_args(argv)
    if args.gb <= 0 or (args.ranks is not None and args.ranks < 1):
        parser.error("--gb has to be above 0, and --ranks at least 1")
    if not args.cpu and not torch.cuda.is_available():
        print(
            f"No GPU: torch {torch.__version__} finds no CUDA device here, so nothing was "
            "checked.\nRun this on a node with GPUs; --cpu rehearses the same lines with gloo on "
            "the CPU."
        )
        return NO_GPU
    _context.set_forkserver_preload(["gpu_check"])
    machine = describe_machine()
    kind = "rehearsal on the CPU, which checks neither NCCL nor a GPU" if args.cpu else "GPU check"
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    print(f"hpc_elastic {kind}: {gpus}\n{json.dumps(machine['versions'])}", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory(dir=args.directory, prefix=".gpu-check-") as folder:
        place = choose_place(args, folder)
        for name in args.only:
            outcomes.append(perform(name, place))
            print(_line(outcomes[-1]), flush=True)
    report = {"schema": 1, "is_rehearsal": args.cpu, "machine": machine}
    report |= {"has_nccl_group": place.has_nccl and not args.cpu, "ranks": place.size}
    args.report.write_text(json.dumps({**report, "checks": [vars(o) for o in outcomes]}, indent=1))
    has_failed = any(o.verdict == "FAIL" for o in outcomes)
    print(f"\n{'A check has failed' if has_failed else 'All is well'}: see {args.report}.")
    if args.cpu:
        print("This was the rehearsal: it shows nothing of NCCL, CUDA or GPUs.")
    else:
        print(
            f"What to send us: {args.report}, in an issue of the repository that you have cloned,\n"
            "also if all is well. It has versions, hardware, figures, and the last log lines of\n"
            "checks that failed."
        )
    return 1 if has_failed else 0


def _line(outcome: Outcome) -> str:
    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    facts = ", ".join(f"{name} {text(value)}" for name, value in outcome.facts.items())
    lines = [f"{outcome.verdict:8} {outcome.name}: {outcome.what}"]
    lines += [f"         {part}" for part in (facts, outcome.error) if part]
    return "\n".join(lines)


if __name__ == "__main__":
    from gpu_check import main as main_of_module  # whose functions other processes can import

    sys.exit(main_of_module())
