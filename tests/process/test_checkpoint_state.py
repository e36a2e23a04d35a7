"""Whatever a training has comes back exactly, in place; what cannot is refused at once."""

import copy
import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions, resharding
from hpc_elastic.checkpoint.equality import merge
from hpc_elastic.checkpoint.shard_file import write_part
from hpc_elastic.checkpoint.sharding import ShardLayout, ShardPiece
from hpc_elastic.checkpoint.snapshot import Snapshots
from hpc_elastic.checkpoint.state import Flat
from hpc_elastic.checkpoint.store import read_manifest
from hpc_elastic.errors import CheckpointError, ConfigError, HpcElasticError


def save(folder: Path, state: dict[str, Any], step: int = 1) -> None:
    """Save a state."""
    with Checkpointer(state, folder) as c:
        assert c.save(step)


def there_and_back(folder: Path, made: Any, fresh: Any) -> Any:
    """Save one object, and restore it into another one."""
    save(folder, {"it": made})
    assert Checkpointer({"it": fresh}, folder).load_latest() == 1
    return fresh


def train(net: nn.Module, optimizer: torch.optim.Optimizer, *schedulers: Any) -> None:
    """Make a step."""
    net(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for scheduler in schedulers:
        scheduler.step()


def net() -> nn.Module:
    """Return a model with buffers, and with weights under two names."""
    made = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.LayerNorm(6))
    made[2].weight = made[0].weight
    return made


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.Adagrad(p),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_training_goes_on_bit_for_bit(tmp_path, make):
    """With a fresh model, optimizer and schedulers; random numbers included."""

    def begin() -> tuple[Any, ...]:
        model = net()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
        optimizer = make(groups)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4])
        return model, optimizer, steps

    def state(parts: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))

    parts = begin()
    for _ in range(3):
        train(*parts)
    save(tmp_path, state(parts))
    for _ in range(3):
        train(*parts)
    others = begin()
    assert Checkpointer(state(others), tmp_path).load_latest() == 1
    for _ in range(3):
        train(*others)
    for a, b in zip(parts, others, strict=True):
        assert repr(a.state_dict()) == repr(b.state_dict())


def test_tensors_are_filled_in_place(tmp_path):
    """Who holds one sees the restored numbers: parameters, bare tensors, those in a dict."""
    values = {"deep": [{"t": torch.arange(3.0)}]}
    model, bare = net(), torch.arange(5)
    expected = copy.deepcopy((model.state_dict(), bare, values))
    state = {"model": model, "bare": bare, "values": values}
    save(tmp_path, state)
    weight, inner = model[0].weight, values["deep"][0]["t"]
    with torch.no_grad():
        weight.zero_()
        bare.zero_()
        inner.zero_()
    values["new"] = 1
    Checkpointer(state, tmp_path).load_latest()
    assert repr((model.state_dict(), bare, values)) == repr(expected)
    assert model[0].weight is weight and weight.any() and values["deep"][0]["t"] is inner


class OwnForm(torch.optim.Optimizer):
    """An optimizer whose state is not shaped like its parameters, nor named as torch does."""

    form: str

    def __init__(self, params: Any, form: str = "") -> None:
        super().__init__(params, {"lr": 0.1})
        self.form = form
        self.extra = torch.zeros(3)

    def step(self, closure: Any = None) -> None:
        """Count."""
        self.extra += 1
        for i, group in enumerate(self.param_groups):
            group["weight_sum"] = group.get("weight_sum", 0.0) + 0.5
            group["lengths"] = torch.full((2,), i + 1.0)
            for p in group["params"]:
                state = self.state[p]
                size = p.numel()
                if self.form == "nested":  # as of Shampoo and SOAP
                    state.setdefault("GG", [torch.zeros(n, n) for n in p.shape])
                    state.setdefault("deep", {"q": (torch.zeros(size + 1), [torch.zeros(())])})
                    for each in (*state["GG"], *state["deep"]["q"][1]):
                        each += 1.5
                elif self.form == "8 bit":
                    state.setdefault("codes", torch.zeros(size, dtype=torch.uint8))
                    state.setdefault("absmax", torch.zeros(-(-size // 4), dtype=torch.float64))
                    state["codes"] += 7
                    state["absmax"] += 1 / 3
                else:
                    state.setdefault("z", torch.zeros_like(p)).add_(1)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form, or another."""
        if self.form != "own":
            return super().state_dict()
        moments = [self.state[p].get("z", None) for g in self.param_groups for p in g["params"]]
        return {"moments": [m for m in moments if m is not None], "extra": {"count": self.extra}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        if self.form != "own":
            super().load_state_dict(state)
            return
        parameters = [p for g in self.param_groups for p in g["params"]]
        for p, z in zip(parameters, state["moments"], strict=True):
            self.state[p]["z"] = z
        self.extra = state["extra"]["count"]


@pytest.mark.parametrize("form", ["nested", "8 bit", "own", "schedule-free"])
def test_an_optimizer_of_another_form_comes_back_exactly_into_a_fresh_one(tmp_path, form):
    """Nested lists, types and shapes that no parameter has, its own names, keys of groups."""

    def made() -> OwnForm:
        first, second = nn.Linear(3, 4), nn.Linear(4, 2)
        groups = [{"params": list(first.parameters())}, {"params": list(second.parameters())}]
        return OwnForm(groups, form)

    def state(of: OwnForm) -> dict[str, Any]:
        parameters = [p for group in of.param_groups for p in group["params"]]
        return {"net": nn.ParameterList(parameters), "optimizer": of}

    optimizer, fresh = made(), made()
    for _ in range(2):
        optimizer.step()
    save(tmp_path, state(optimizer))
    assert Checkpointer(state(fresh), tmp_path).load_latest() == 1
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())
    optimizer.step()
    fresh.step()
    assert repr(fresh.state_dict()) == repr(optimizer.state_dict())


class Filtered(torch.optim.SGD):
    """An optimizer whose groups have functions, as LARS is often written."""

    def __init__(self, params: Any, **functions: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        for group in self.param_groups:
            group.update(functions)
        self.defaults.update(functions)


def is_matrix(p: torch.Tensor) -> bool:
    """Return whether weights are to decay."""
    return p.ndim > 1


def test_functions_in_the_groups_of_an_optimizer_are_those_of_the_script(tmp_path):
    """They are not saved, and the present ones stay; what else is in a group is restored."""
    functions = {
        "decays": is_matrix, "adapts": lambda p: p.ndim == 1, "norm": torch.linalg.vector_norm,
        "kind": nn.Linear, "part": functools.partial(torch.add, alpha=2), "bound": "".join,
        "none": None,
    }  # fmt: skip
    made, fresh = net(), net()
    optimizer = Filtered(made.parameters(), **functions)
    train(made, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    other = Filtered(fresh.parameters(), **{**functions, "decays": len, "none": len})
    save(tmp_path, {"model": made, "it": optimizer})
    assert Checkpointer({"model": fresh, "it": other}, tmp_path).load_latest() == 1
    (group,) = other.param_groups
    assert group["lr"] == 0.05 and group["decays"] is len
    assert all(group[name] is functions[name] for name in ("adapts", "norm", "kind", "part"))
    assert group["none"] is None, "what was saved counts, where something was saved"
    assert len(other.state) == len(optimizer.state) > 0


def test_moments_keep_their_type_beside_parameters_of_another_one(tmp_path):
    """torch's load_state_dict would cast them to that of the parameter."""

    def made(value: float) -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], momentum=0.9)
        optimizer.state[weight]["momentum_buffer"] = torch.full((2,), value)
        return optimizer

    for fresh in (made(0.0), torch.optim.SGD([nn.Parameter(torch.zeros(2).bfloat16())])):
        there_and_back(tmp_path, made(1 / 3), fresh)
        (state,) = fresh.state.values()
        assert state["momentum_buffer"].tolist() == torch.full((2,), 1 / 3).tolist()


def test_dicts_lists_and_sets_are_filled_in_place_at_every_depth(tmp_path):
    """Who appends to a list after a restore appends to what the next save has."""
    made: dict[str, Any] = {
        "log": {"losses": [3.0, [1, 2], {"a": 1}], "best": {"v": 1.0}}, "seen": {1, 2},
        "order": OrderedDict(b=1, a=[2]), "count": Counter("aab"), "pair": ([1],), "gone": [1],
        "by": defaultdict(list, x=[1]),
    }  # fmt: skip
    fresh: dict[str, Any] = {
        "log": {"losses": [0.0, [], {}, 4, 5], "best": {"other": 2}}, "seen": {9},
        "order": OrderedDict(a=[], c=3), "count": Counter("z"), "pair": ([],), "gone": (1,),
        "new": 1, "by": defaultdict(int, x=[]),
    }  # fmt: skip
    log, losses, best = fresh["log"], fresh["log"]["losses"], fresh["log"]["best"]
    inner, seen, order, count, by = (
        losses[1], fresh["seen"], fresh["order"], fresh["count"], fresh["by"],
    )  # fmt: skip
    there_and_back(tmp_path, made, fresh)
    assert repr(fresh) == repr(made)
    assert fresh["log"] is log and log["losses"] is losses and log["best"] is best
    assert losses[1] is inner and fresh["seen"] is seen and fresh["order"] is order
    assert fresh["count"] is count and fresh["by"] is by and fresh["by"]["y"] == []


def test_a_list_that_stands_in_two_places_is_not_filled_with_two_contents(tmp_path):
    """The second place gets a list of its own where they differ in the checkpoint."""
    same: list[int] = []
    fresh = there_and_back(tmp_path, {"a": [1], "b": [2, 3]}, {"a": same, "b": same})
    assert fresh == {"a": [1], "b": [2, 3]} and fresh["a"] is same


def tied(is_tied: bool, *values: float) -> nn.Module:
    """Return an embedding and a head, which may be one tensor."""
    made = nn.ModuleDict({"embed": nn.Embedding(50, 4), "head": nn.Linear(4, 50, bias=False)})
    for part, value in zip(made.values(), values, strict=True):
        nn.init.constant_(part.weight, value)
    if is_tied:
        made["head"].weight = made["embed"].weight
    return made


def test_two_tensors_do_not_become_one_by_chance(tmp_path):
    """Weights that differ are refused by a tied model, with both names; equal ones are fine."""
    save(tmp_path / "two", {"net": tied(False, 1.0, 2.0)})
    with pytest.raises(CheckpointError, match=r"net/head\.weight and net/embed\.weight are one"):
        Checkpointer({"net": tied(True, 0.0, 0.0)}, tmp_path / "two").load_latest()
    for saved, restored in ((False, True), (True, False), (True, True)):
        made = tied(restored, 0.0, 0.0)
        there_and_back(tmp_path / f"{saved}-{restored}", tied(saved, 3.0, 3.0), made)
        assert all((part.weight == 3.0).all() for part in made.values())


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every type, and of awkward forms."""
    random_bytes = torch.randint(0, 2, (3 * 16 * 5,), dtype=torch.uint8)
    made = {
        str(dtype): (random_bytes.bool() if dtype is torch.bool else random_bytes.view(dtype))
        for dtype in DTYPES
    }
    base = torch.randn(40, 30)
    return {
        **made,
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "transposed": base.t(),
        "strided": base[::3, 1::2], "expanded": base[:1].expand(7, 30),
        "conj": torch.randn(3, dtype=torch.complex64).conj(), "neg": torch._neg_view(base[0]),
        "large": torch.randn(300, 1000), "large.t": torch.randn(300, 1000).t(),
        "parameter": nn.Parameter(base.clone()), "a/b": base[1], "größe": base[2],
    }  # fmt: skip


@pytest.mark.parametrize("urgent", [False, True])
def test_tensors_of_every_type_and_form_come_back(tmp_path, urgent):
    """From a copy, and from the memory that they stand in."""
    made = {"all": tensors()}
    expected = {
        name: t.detach().clone(memory_format=torch.contiguous_format)
        for name, t in made["all"].items()
    }
    with Checkpointer(made, tmp_path) as c:
        assert c.save(1, urgent=urgent)
    fresh: dict[str, Any] = {}
    Checkpointer({"all": fresh}, tmp_path).load_latest()
    assert list(fresh) == list(expected)
    for name, tensor in expected.items():
        found = fresh[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found) == bytes_of(tensor), name


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements as bytes, not-a-number included."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def test_numpy_arrays_and_numbers_come_back(tmp_path):
    """With their types; also what is read-only, or lies across the memory."""
    fixed = np.arange(3)
    fixed.flags.writeable = False
    made = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "across": np.eye(3)[:, 1:],
        "fixed": fixed, "zero": np.array(3.0), "number": np.float32(0.1), "flag": np.bool_(True),
    }  # fmt: skip
    fresh = there_and_back(tmp_path, made, {})
    for key, value in made.items():
        assert type(fresh[key]) is type(value) and fresh[key].dtype == value.dtype
        np.testing.assert_array_equal(fresh[key], value)


def test_a_shard_is_a_safetensors_file(tmp_path):
    """Any reader of that format can open it; the data begins at a page."""
    model = net()
    save(tmp_path, {"model": model})
    path = tmp_path / "step-00000001" / "shard-0.safetensors"
    found = load_file(path)
    assert set(found) == {f"model/{name}" for name in model.state_dict()}
    assert torch.equal(found["model/0.weight"], model[0].weight)
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0


def test_a_modules_own_ways_to_load_are_kept(tmp_path):
    """Hooks and the version of its format see what they would from torch.load."""

    class Old(nn.Linear):
        _version = 3
        seen = None

        def _load_from_state_dict(self, state_dict, prefix, metadata, *args):
            Old.seen = metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    there_and_back(tmp_path, Old(3, 3), Old(3, 3))
    assert Old.seen == 3


class Asking:
    """An object of the script that asks a model, wrapped or not, for its state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return it as a script does."""
        return {"weights": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.model.load_state_dict(state["weights"])


def in_ddp(model: nn.Module) -> nn.Module:
    """Return it as with several ranks."""
    return nn.parallel.DistributedDataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    """Return it as torch.compile wraps it, without a compiler."""
    return torch.compile(model, backend="eager")


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda m: m,
    "DDP": in_ddp,
    "DataParallel": nn.DataParallel,
    "compiled": compiled,
    "compiled DDP": lambda m: compiled(in_ddp(m)),
    "DDP of a compiled one": lambda m: in_ddp(compiled(m)),
}


@pytest.fixture
def one_rank_group():
    """A process group of this process, which DDP needs."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def part(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a model one part of which is wrapped, and has checkpointed activations."""
    return nn.ModuleDict({"a": wrap(checkpoint_wrapper(nn.Sequential(net()))), "b": net()})


@pytest.mark.parametrize("form", ["whole", "part", "object"])
def test_a_model_has_the_same_names_however_it_is_wrapped(tmp_path, one_rank_group, form):
    """Saved under any of torch's wrappers, it is restored under any other one."""
    make = {"whole": lambda wrap: wrap(net()), "part": part,
            "object": lambda wrap: Asking(wrap(net()))}[form]  # fmt: skip
    names = set()
    for by, wrap in WRAPPED.items():
        made = make(wrap)
        save(tmp_path / by, {"it": made})
        names.add(frozenset(read_manifest(tmp_path / by / "step-00000001").tensors))
        for other in WRAPPED.values():
            fresh = make(other)
            assert Checkpointer({"it": fresh}, tmp_path / by).load_latest() == 1
            for a, b in zip(tensors_of(made), tensors_of(fresh), strict=True):
                assert torch.equal(a, b)
    assert form == "object" or len(names) == 1


def tensors_of(it: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model or of an object that has one."""
    return list(getattr(it, "model", it).state_dict().values())


def test_checkpoints_with_the_names_of_wrappers_are_restored(tmp_path, one_rank_group):
    """Those of earlier versions, which stored the names of a compiled model as they are."""
    made = compiled(in_ddp(net()))
    save(tmp_path, {"model": RawNames(made)})
    assert "model/_orig_mod.module.0.weight" in read_manifest(tmp_path / "step-00000001").tensors
    fresh = net()
    assert Checkpointer({"model": fresh}, tmp_path).load_latest() == 1
    assert torch.equal(fresh[0].weight, made.module[0].weight)


class RawNames:
    """An object whose state is that of a model, under its names."""

    fits_any_world_size = True

    def __init__(self, model: nn.Module) -> None:
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


def test_the_names_of_parameters_in_an_optimizer_are_those_of_the_present_model(
    tmp_path, one_rank_group
):
    """An optimizer that was made from named_parameters() names the wrapped ones."""
    made, fresh = in_ddp(net()), net()
    optimizers = [torch.optim.SGD(m.named_parameters(), 0.1) for m in (made, fresh)]
    there_and_back(tmp_path, *optimizers)
    assert optimizers[1].param_groups[0]["param_names"][0] == "0.weight"


def test_private_names_of_torchs_wrappers():
    """The parts of a name that are cut out; if they change, `state` changes."""
    assert "_orig_mod.weight" in compiled(nn.Linear(1, 1)).state_dict()
    names = dict(checkpoint_wrapper(nn.BatchNorm1d(1)).named_buffers())
    assert "_checkpoint_wrapped_module.running_mean" in names


# ---- what does not fit --------------------------------------------------------------------


def test_other_keys_are_refused_by_name(tmp_path, caplog):
    """Unless the user says that he means it."""
    save(tmp_path, {"model": net(), "ema": torch.ones(2)})
    state = {"model": net(), "sampler": {"at": 1}}
    with pytest.raises(
        CheckpointError,
        match="sampler is only in the state; ema is only in the checkpoint: give the same",
    ):
        Checkpointer(state, tmp_path).load_latest()
    assert Checkpointer(state, tmp_path, options=CheckpointOptions(strict=False)).load_latest() == 1
    assert state["sampler"] == {"at": 1} and "left alone" in caplog.text


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(6, 7), nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, bias=False),
        nn.Sequential(nn.Linear(6, 6)),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_name(tmp_path, other):
    """Another shape, another type, less or other parameters."""
    save(tmp_path, {"model": nn.Linear(6, 6)})
    with pytest.raises(CheckpointError, match=r"(?s)model.*(weight|bias)"):
        Checkpointer({"model": other}, tmp_path).load_latest()


def test_an_object_that_can_not_load_is_named(tmp_path):
    """With its own error as the cause."""

    class Fragile:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    save(tmp_path, {"it": Fragile()})
    with pytest.raises(CheckpointError, match=r"it: Fragile\.load_state_dict: 'b'") as e:
        Checkpointer({"it": Fragile()}, tmp_path).load_latest()
    assert isinstance(e.value.__cause__, KeyError)


class Holds:
    """An object whose state holds something."""

    def __init__(self, what: object) -> None:
        self._what = what

    def state_dict(self) -> dict[str, object]:
        """Return it, deep inside."""
        return {"a": [self._what]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "state={}: give a mapping"),
        (net(), "(?s)state=Sequential.*give a mapping"),
        ({1: net()}, "state=1: its keys have to be texts"),
        ({"f": len}, "state: f=.*state_dict"),
        ({"net": Holds(object())}, r"state: net/a/0=<class 'object'>: .*Convert it"),
        ({"v": {"x": {"y": len}}}, r"state: v/x/y=<class 'builtin"),
        ({"v": {"x": np.array(["a"])}}, r"state: v/x=<class 'numpy.ndarray'>"),
        ({"v": {"1": torch.ones(1), 1: torch.ones(1)}}, "v/1=.*two keys"),
        ({"v": {"s": torch.ones(3).to_sparse()}}, "v/s is sparse: save it dense"),
        ({"v": {"m": torch.ones(3, device="meta")}}, "v/m is on the meta device"),
    ],
)
def test_what_can_not_be_stored_is_refused_at_construction(tmp_path, state, message):
    """With its path and a remedy; not hours later."""
    with pytest.raises(HpcElasticError, match=message):
        Checkpointer(state, tmp_path)


def test_what_can_no_longer_be_stored_is_refused_by_the_save(tmp_path):
    """On the caller's thread."""
    state = {"it": {"here": 1}}
    with Checkpointer(state, tmp_path) as c:
        state["it"]["here"] = torch.return_types.max((torch.ones(1), torch.ones(1)))
        with pytest.raises(ConfigError, match=r"^state: it/here=.*takes tensors"):
            c.save(1)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True])
def test_a_step_is_a_count(tmp_path, step):
    """Whatever counts as an integer; nothing else."""
    c = Checkpointer({"x": torch.zeros(1)}, tmp_path)
    with pytest.raises(ConfigError, match=rf"step={step!r}"):
        c.save(step)
    assert c.save(np.int64(3), urgent=True)


@pytest.mark.parametrize(
    "wrong", [{"when_busy": "drop"}, {"replicated": "all"}, {"timeout_s": 0}], ids=str
)
def test_wrong_options_are_refused(wrong):
    """By name."""
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*give"):
        CheckpointOptions(**wrong)


def test_several_ranks_need_a_process_group(tmp_path, monkeypatch):
    """Else each would take itself for the only one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CheckpointError, match=r"WORLD_SIZE=4.*init_process_group"):
        Checkpointer({"x": torch.zeros(1)}, tmp_path)


def test_names_that_look_like_those_of_pieces_are_kept_apart(tmp_path):
    """A tensor in pieces beside one whose name is that of a piece, and the format's own name."""
    whole = torch.arange(6.0).reshape(2, 3)
    names = ["w", "w[0,0]", "w[0]", "w[1,0]", "w[]", "w[][]", "__metadata__", "__metadata__[]"]
    pieces = [
        ShardPiece("w", (2, 3), "float32", (0, 0), (1, 3), (0, 0)),
        ShardPiece("w", (2, 3), "float32", (1, 0), (1, 3), (1, 0)),
        *(ShardPiece(name, (2, 3), "float32", (0, 0), (2, 3), (0, 0)) for name in names[1:]),
    ]
    tensors = {name: whole + 10 * i for i, name in enumerate(names)}
    snapshot = Snapshots().borrow(Flat(tensors=tensors), ShardLayout.of(pieces))
    manifest = merge([write_part(tmp_path, 0, snapshot)], step=1, world_size=1, created=0.0)
    found = {name: torch.zeros(2, 3) for name in names}
    resharding.read(manifest, tmp_path, found)
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    assert len(load_file(tmp_path / "shard-0.safetensors")) == len(pieces)


def test_parameters_come_back_as_such(tmp_path):
    """Into a dict that has them, and into one that has not."""
    made = {"weight": nn.Parameter(torch.ones(2)), "ids": nn.Parameter(torch.arange(3), False)}
    fresh = there_and_back(tmp_path, made, {})
    assert [type(value) for value in fresh.values()] == [nn.Parameter] * 2
    assert fresh["weight"].requires_grad
    assert not fresh["ids"].requires_grad
    mine = nn.Parameter(torch.zeros(2))
    assert there_and_back(tmp_path, made, {"weight": mine})["weight"] is mine
    assert mine.tolist() == [1.0, 1.0]


def test_an_expanded_view_is_refused_before_anything_is_restored(tmp_path):
    """Its elements are one in memory, so it cannot be filled."""
    save(tmp_path, {"a": torch.ones(3), "b": torch.ones(4, 2)})
    state = {"a": torch.zeros(3), "b": torch.zeros(4, 1).expand(4, 2)}
    with pytest.raises(CheckpointError, match=r"^b is an expanded view.*clone"):
        Checkpointer(state, tmp_path).load_latest()
    assert state["a"].tolist() == [0.0] * 3


def test_conjugate_and_negative_views_are_filled(tmp_path):
    """As their user sees them."""
    wanted = torch.tensor([1 + 2j, 3 - 4j])
    save(tmp_path, {"conj": wanted, "neg": wanted.imag.clone()})
    state = {"conj": torch.zeros(2, dtype=torch.cfloat).conj(), "neg": wanted.clone().conj().imag}
    assert state["neg"].is_neg()
    assert Checkpointer(state, tmp_path).load_latest() == 1
    assert torch.equal(state["conj"], wanted)
    assert state["neg"].tolist() == wanted.imag.tolist()


class Kept:
    """An object that takes the state that it gets as it is."""

    def __init__(self, **state: torch.Tensor) -> None:
        self.state = state

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return it."""
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take it over."""
        self.state = state


def test_tensors_without_a_parameter_come_back_to_the_cpu(tmp_path):
    """`torch.set_default_device` is for what a script makes, and not for what it has saved."""
    made = Kept(rng=torch.Generator().get_state(), wide=torch.ones(9, 9).T)
    model, trained = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizer, fresh = torch.optim.Adam(trained.parameters()), torch.optim.Adam(model.parameters())
    train(trained, optimizer)
    came_back = Kept()
    torch.set_default_device("meta")
    try:
        save(tmp_path, {"it": made, "optimizer": optimizer})
        state = {"it": came_back, "optimizer": fresh}
        assert Checkpointer(state, tmp_path).load_latest() == 1
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(came_back.state[name], made.state[name]) for name in made.state)
    for theirs, ours in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
