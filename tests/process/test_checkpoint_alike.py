"""What is stored once is compared between the ranks; what each has for itself comes back to it."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions
from hpc_elastic.checkpoint.store import Store, read_manifest, verify_checkpoint
from hpc_elastic.errors import CheckpointError, HpcElasticError

SMALL, LARGE = 8, 256
"""Rows and columns of a matrix that one rank writes, and of one that two share."""


class Recorded(logging.Handler):
    """Keeps what is logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("hpc_elastic").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


def linear(size: int, value: float) -> nn.Linear:
    """Return a layer whose weights are all one number."""
    made = nn.Linear(size, size, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def owned(rank: int, size: int) -> dict[str, Any]:
    """Return parameters that are equal, and an optimizer with its state on the owner only."""
    net = nn.ModuleList(linear(size, i) for i in range(4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for i, p in enumerate(net.parameters()):
        if i % dist.get_world_size() == rank:
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 10.0 * i + rank)
    return {"net": net, "opt": optimizer}


def attempt(action: Callable[[], object]) -> str:
    """Return the error of an action, or what it returns."""
    try:
        return str(action())
    except HpcElasticError as e:
        return f"{type(e).__name__}: {e}"


# ---- structure ----------------------------------------------------------------------------


def other_structures(rank: int, folder: Path) -> list[str]:
    """Make Checkpointers of states that are built differently on each rank."""
    states: list[dict[str, Any]] = [
        {"model": nn.ModuleDict({f"layer{rank}": linear(SMALL, 1.0)})},
        {"model": linear(SMALL + rank, 1.0)},
        {"model": linear(SMALL, 1.0).to(torch.float64 if rank else torch.float32)},
        owned(rank, SMALL),
        {"x": torch.ones(3), **({"mine": {}} if rank else {})},
    ]
    return [attempt(lambda s=s: Checkpointer(s, folder)) for s in states]


def test_ranks_with_other_tensors_are_refused_at_construction(tmp_path):
    """Pipeline stages, other shapes, types and keys: all ranks name the same tensor and remedy."""
    first, second = run_ranks(other_structures, 2, tmp_path)
    assert first == second
    for said, name in zip(
        first,
        ["model/layer0.weight", "model/weight float32[8,8]", "model/weight float32", "opt/state/"],
        strict=False,
    ):
        assert said.startswith("InexactError") and name in said and "rank 1" in said
        assert f"per_rank=({name.partition('/')[0]!r},)" in said
    assert "state='mine': only one of rank 0 and rank 1 has this key" in first[4]


def directories(rank: int, folder: Path) -> list[str]:
    """Save where each rank works in a folder of its own; then give each another directory."""
    (own := folder / f"second-{rank}").mkdir()
    os.chdir(own)
    with Checkpointer({"net": linear(SMALL, 1.0)}) as checkpointer:
        saved = str(checkpointer.save(3, urgent=True))
    given = attempt(lambda: Checkpointer({"net": linear(SMALL, 1.0)}, folder / f"given-{rank}"))
    return [saved, given]


def test_the_default_directory_is_that_of_rank_0_and_others_are_refused(tmp_path):
    """Hydra names an output directory by the second in which each process has started."""
    for saved, given in run_ranks(directories, 2, tmp_path):
        assert saved == "True"
        assert given.startswith("ConfigError: directory=") and "given-1" in given
        assert "rank 1 has it" in given and "hydra.run.dir=" in given
    assert Store(tmp_path / "second-0" / "checkpoints").steps() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second-0", "second-1"]


def changed_later(rank: int, folder: Path, size: int) -> list[str]:
    """Save once the optimizer has made its state, on the owner of each parameter only."""
    state = owned(rank, size)
    state["opt"].state.clear()
    c = Checkpointer(state, folder)
    made = owned(rank, size)
    for p, other in zip(state["net"].parameters(), made["net"].parameters(), strict=True):
        if other in made["opt"].state:
            state["opt"].state[p] = made["opt"].state[other]
    return [attempt(lambda: c.save(1)), attempt(c.wait), attempt(lambda: c.save(2))]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_state_on_its_owner_only_is_refused_by_the_first_save_and_raised_by_the_next(
    tmp_path, size
):
    """It would be rank 0's, or could not be restored at all."""
    for saved, waited, again in run_ranks(changed_later, 2, tmp_path, size):
        assert saved == "True"
        for said in (waited, again):
            assert said.startswith("CheckpointMismatchError: opt: rank 1 and rank 0")
            assert "opt/state/0/momentum_buffer" in said and "per_rank=('opt',)" in said
    assert Store(tmp_path).steps() == []


# ---- numbers ------------------------------------------------------------------------------


class Held:
    """An object with a state of its own, such as a wrapper of a model."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.values = dict(state)


class Position(Held):
    """A loader of one rank."""

    def __iter__(self):
        return iter(())


def replicated(value: float) -> DTensor:
    """Return a DTensor that all ranks hold, each with a number of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.full((SMALL,), value), mesh, [Replicate()], run_check=False)


def other_numbers(rank: int, folder: Path) -> list[list[str]]:
    """Save tensors that have the same names, and other numbers on each rank."""
    found = []
    for name, item in {
        "small": linear(SMALL, rank), "large": linear(LARGE, rank), "bare": torch.tensor(rank),
        "dict": {"deep": [torch.full((3,), float(rank))]}, "sharded": {"x": replicated(rank)},
        "ema": Held(shadow=torch.full((LARGE, LARGE), float(rank))),
    }.items():  # fmt: skip
        c = Checkpointer({name: item}, folder / name)
        c.save(1)
        found.append([attempt(c.wait), attempt(lambda c=c: c.save(2))])
        if isinstance(item, nn.Linear):
            dist.broadcast(item.weight.data, 0)
            found[-1].append(str(c.save(3)))
            c.close()
    return found


def test_ranks_with_other_numbers_are_refused_by_the_first_save_and_the_next_raises(tmp_path):
    """On every rank, with the tensor and the remedy; made equal, they are saved."""
    first, second = run_ranks(other_numbers, 2, tmp_path)
    assert first == second
    names = ["small/weight", "large/weight", "bare", "dict/deep/0", "sharded/x", "ema/shadow"]
    for (waited, again, *more), name in zip(first, names, strict=True):
        for said in (waited, again):
            assert said.startswith(f"CheckpointMismatchError: {name}: the numbers differ"), said
            assert "ranks 0, 1" in said and f"per_rank=({name.partition('/')[0]!r},)" in said
        assert more == (["True"] if name.endswith("weight") else [])
        steps = Store(tmp_path / name.partition("/")[0]).steps()
        assert steps == ([3] if more else [])


def later(rank: int, folder: Path) -> list[str]:
    """Begin to differ after the first save."""
    net = linear(SMALL, 1.0)
    c = Checkpointer({"net": net}, folder)
    said = []
    for step in range(12):
        if step == 3:
            nn.init.constant_(net.weight, rank + 2.0)
        c.save(step)
        said.append(attempt(c.wait))
        if said[-1] != "None":
            break
    return said


def test_ranks_that_begin_to_differ_are_found_within_ten_saves(tmp_path):
    """Numbers are compared now and then."""
    for said in run_ranks(later, 2, tmp_path):
        assert said[:10] == ["None"] * 10
        assert said[10].startswith("CheckpointMismatchError: net/weight")


def harmless(rank: int, folder: Path) -> list[list[str]]:
    """Save what may differ: the last digits of replicas, values of rank 0, statistics."""
    torch.manual_seed(0)
    weights, log = torch.randn(LARGE, LARGE), Recorded()
    digits, told = torch.randint(0, 2, weights.shape, dtype=torch.int16), []
    half = (weights.bfloat16().view(torch.int16) + rank * digits).view(torch.bfloat16)
    for item in (
        {"w": weights * (1 + rank * 1e-6), "half": half},
        {"loss": 0.5 + rank},
        nn.BatchNorm1d(3).requires_grad_(False),
    ):
        if isinstance(item, nn.Module):
            item.running_mean.fill_(rank)
        with Checkpointer({"it": item}, folder / f"{len(told)}") as c:
            for step in range(12):
                c.save(step)
        assert c.failures == 0
        told.append(log.lines[:])
        log.lines.clear()
    return told


def test_harmless_differences_are_saved_and_named_once_at_most(tmp_path):
    """Replicas that have drifted apart by rounding; plain values; buffers are not compared."""
    (drifted, values, buffers), *_ = run_ranks(harmless, 2, tmp_path)
    assert len(drifted) == 1 and "differ in their last digits" in drifted[0]
    assert values == [
        "it: values that are no tensors differ between rank 0 and rank 1: it/loss is 0.5 on "
        "rank 0 and 1.5 on rank 1; those of rank 0 are saved for all"
    ]
    assert buffers == []


def plateau(rank: int, folder: Path) -> list[list[str]]:
    """Save a schedule that each rank has given a metric of its own."""
    log, told = Recorded(), []
    for options in ({}, {"accept_inexact": ("schedule",)}, {"per_rank": ("schedule",)}):
        optimizer = torch.optim.SGD(linear(SMALL, 1.0).parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        where = folder / f"{len(told)}"
        state = {"schedule": schedule}
        with Checkpointer(state, where, options=CheckpointOptions(**options)) as c:
            for step in range(3):
                schedule.step(0.5 + rank + step)
                c.save(step)
        told.append(log.lines[:])
        log.lines.clear()
    return told


def test_a_schedule_with_a_metric_of_the_ranks_own_is_named_at_the_first_save(tmp_path):
    """Once, with both values; not where the user has said what each rank is to get."""
    (told, accepted, own), *_ = run_ranks(plateau, 2, tmp_path)
    assert len(told) == 1 and "schedule/best is 0.5 on rank 0 and 1.5 on rank 1" in told[0]
    assert accepted == own == []


# ---- what each rank has for itself --------------------------------------------------------


def make_own(rank: int, filled: bool) -> dict[str, Any]:
    """Return a state of which each rank has its own, or the same before it is restored."""

    def number(n: float) -> float:
        return n + rank if filled else -1.0

    stage = nn.ModuleDict({f"layer{rank}": linear(LARGE, number(3.0)), "norm": nn.BatchNorm1d(2)})
    optimizer = torch.optim.SGD(stage.parameters(), 0.1, momentum=0.9)
    if filled:
        for p in stage.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 5.0 + rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = linear(LARGE + 1, 1.0)
    fully_shard(sharded, mesh=mesh)
    moments = torch.optim.AdamW(sharded.parameters())
    if filled:
        sharded(torch.randn(2, LARGE + 1)).square().sum().backward()
        moments.step()
    return {
        "stage": stage, "optimizer": optimizer, "sharded": sharded, "moments": moments,
        "buffer": Held(count=number(7.0), rows=torch.full((SMALL,), number(100.0))),
        "loader": Position(rows=torch.full((LARGE, LARGE), number(9.0))),
        "same": Held(shadow=torch.full((SMALL,), 4.0 if filled else -1.0)),
        "bare": torch.full((3 + rank,), number(1.0)),
    }  # fmt: skip


PER_RANK = ("stage", "optimizer", "bare", "sharded", "moments")


def text_of(state: dict[str, Any]) -> dict[str, str]:
    """Describe a state."""
    return {k: repr(getattr(v, "state_dict", lambda v=v: v)()) for k, v in state.items()}


def own_there_and_back(rank: int, folder: Path) -> None:
    """Save, and restore into fresh objects; on the same ranks."""
    torch.manual_seed(0)
    options = CheckpointOptions(per_rank=PER_RANK)
    made, fresh = make_own(rank, True), make_own(rank, False)
    with Checkpointer(made, folder, options=options) as c:
        assert c.save(1)
    assert text_of(made) != text_of(fresh)
    with Checkpointer(fresh, folder, options=options) as c:
        assert c.load_latest() == 1
    for key, text in text_of(made).items():
        assert text_of(fresh)[key] == text, key


def on_one_rank(rank: int, folder: Path) -> list[str]:
    """Restore one key each, as one process."""
    fresh: dict[str, Any] = {
        "stage": nn.ModuleDict({"layer0": linear(LARGE, 0.0), "norm": nn.BatchNorm1d(2)}),
        "bare": torch.zeros(3),
        "buffer": Held(),
        "loader": Position(),
        "same": Held(),
    }
    said = []
    for key, item in fresh.items():
        options = CheckpointOptions(strict=False, accept_inexact=(key,) if said else ())
        said.append(
            attempt(lambda k=key, i=item, o=options: Checkpointer({k: i}, folder, options=o)
                    .load_latest())
        )  # fmt: skip
    found = [fresh[key].values.get("rows", torch.tensor(0)).unique().tolist()
             for key in ("buffer", "loader")]  # fmt: skip
    return [*said, str(found), str(fresh["same"].values["shadow"].unique().tolist())]


def test_each_rank_gets_its_own_back_under_the_same_world_size_only(tmp_path):
    """Keys that are named, shards among them; and tensors in the states of objects."""
    run_ranks(own_there_and_back, 2, tmp_path)
    assert verify_checkpoint(tmp_path / "step-00000001") == []
    names = read_manifest(tmp_path / "step-00000001").tensors
    assert {"buffer~rank0/rows", "buffer~rank1/rows", "same/shadow"} <= set(names)
    assert not any(name.startswith("same~rank") for name in names), "what is equal is stored once"
    (said,) = run_ranks(on_one_rank, 1, tmp_path)
    stage, bare, buffer, loader, same, found, shadow = said
    for refused in (stage, bare):
        assert "each of 2 ranks has saved its own part" in refused
        assert "restore it with 2 ranks" in refused
    assert (buffer, loader, same) == ("1", "1", "1")
    assert found == "[[100.0], [9.0]]" and shadow == "[4.0]"


def test_an_unknown_key_and_a_text_are_no_keys_of_ranks(tmp_path):
    """Each is refused by name."""
    with pytest.raises(HpcElasticError, match=r"per_rank='model': give a tuple of keys"):
        CheckpointOptions(per_rank="model")
    with pytest.raises(HpcElasticError, match=r"per_rank='modle': .*did you mean 'model'"):
        Checkpointer(
            {"model": nn.Linear(1, 1)}, tmp_path, options=CheckpointOptions(per_rank=("modle",))
        )


def optimizers_of_shards(rank: int, folder: Path) -> tuple[str, str, str]:
    """Save and restore nested shards of parameters' shape; save one of another shape."""
    net = linear(LARGE, 1.0)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    (weight,) = net.parameters()
    made, fresh = torch.optim.SGD([weight]), torch.optim.SGD([weight])
    made.state[weight] = {"pair": [torch.full_like(weight, 2.0), torch.full((3,), 4.0)]}
    with Checkpointer({"opt": made}, folder / "fits") as c:
        c.save(1)
    with Checkpointer({"opt": fresh}, folder / "fits") as c:
        c.load_latest()
    made.state[weight]["factor"] = torch.full_like(weight, 1.0).mean(0)
    said = attempt(lambda: Checkpointer({"opt": made}, folder / "refused"))
    made.state[weight].pop("factor")
    return repr(made.state_dict()), repr(fresh.state_dict()), said


def test_shards_that_a_fresh_optimizer_could_not_make_are_refused_at_once(tmp_path):
    """Those that are shaped like their parameter come back, however deep they are nested."""
    for made, fresh, said in run_ranks(optimizers_of_shards, 2, tmp_path):
        assert made == fresh
        assert said.startswith("InexactError: state: opt/state/0/factor=(256,): it is a DTensor")


def flat_parameters(rank: int, folder: Path) -> list[str]:
    """Make Checkpointers of FSDP1, and of its optimizer alone."""
    said = []
    for use_orig_params in (False, True):
        inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        model = FullyShardedDataParallel(
            inner, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        for state in (
            {"net": model},
            {"net": nn.Sequential(model)},
            {"net": torch.optim.Adam(model.parameters())},
        ):
            said.append(attempt(lambda s=state: Checkpointer(s, folder)))
    return said


def test_fsdp1_is_refused_at_construction(tmp_path):
    """Its moments would be another rank's; torch still marks flat parameters as it did."""
    for said in run_ranks(flat_parameters, 2, tmp_path):
        assert len(said) == 6
        assert all("state: net=" in s and "use fully_shard (FSDP2)" in s for s in said), said


def test_another_rank_that_can_not_load_ends_it_for_all(tmp_path):
    """Nobody goes on with half a group."""
    run_ranks(save_one, 2, tmp_path)
    said = run_ranks(load_one, 2, tmp_path)
    assert "another rank could not restore" in said[0] and "it: " in said[1]


class Fragile(Held):
    """An object that cannot be loaded on rank 1."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise."""
        if dist.get_rank():
            raise CheckpointError("not here")


def save_one(rank: int, folder: Path) -> None:
    """Save an object."""
    with Checkpointer({"it": Fragile(a=1)}, folder) as c:
        c.save(1)


def load_one(rank: int, folder: Path) -> str:
    """Load it."""
    return attempt(Checkpointer({"it": Fragile(a=1)}, folder).load_latest)
