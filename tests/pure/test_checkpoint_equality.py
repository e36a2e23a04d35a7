"""Samples of tensors: equal exactly where the numbers are, for any type and layout."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_elastic.checkpoint.equality import Comparer, require_alike
from hpc_elastic.checkpoint.manifest import Described
from hpc_elastic.checkpoint.sharding import Planner
from hpc_elastic.checkpoint.state import flatten
from hpc_elastic.errors import CheckpointMismatchError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def describe(state: dict[str, Any], rank: int = 0, number: int = 0) -> Described:
    """Return what one of two ranks has."""
    planner, flat = Planner(rank, 2), flatten(state)
    planner.plan(flat.tensors, flat.first, flat.own)
    group: Any = SimpleNamespace(rank=rank, world_size=2)
    found = Comparer(planner, group).describe(flat, number, compare=False)
    assert found is not None
    return found


def compare(first: dict[str, Any], second: dict[str, Any], number: int = 0) -> list[str]:
    """Compare two ranks; return what is harmless."""
    told: list[str] = []
    described = {0: describe(first, 0, number), 1: describe(second, 1, number)}
    require_alike(described, lambda _what, text: told.append(text))
    return told


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of every type, and of awkward forms."""
    torch.manual_seed(seed)
    data = torch.randint(0, 2, (3 * 16 * 50,), dtype=torch.uint8)
    made = {str(d): data.bool() if d is torch.bool else data.view(d) for d in DTYPES}
    made |= {str(d): torch.randn(99, dtype=d) for d in (torch.float64, torch.complex128)}
    base = torch.randn(40, 30)
    return {
        **made, "scalar": torch.tensor(3.5 + seed), "empty": torch.empty(0, 3),
        "transposed": base.t(), "strided": base[::3, 1::2], "expanded": base[:1].expand(7, 30),
        "conj": torch.randn(99, dtype=torch.complex64).conj(), "neg": torch._neg_view(base[0]),
        "nan": torch.full((100,), torch.nan), "zero": torch.tensor([0.0]),
    }  # fmt: skip


def test_equal_numbers_have_equal_samples_whatever_their_type_and_layout():
    """Not-a-number and strides are no difference."""
    laid_out = {
        name: t.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        for name, t in tensors().items()
    }
    for number in (0, 7):
        assert compare({"all": tensors()}, {"all": laid_out}, number) == []


@pytest.mark.parametrize("name", [name for name in tensors() if name not in ("empty", "nan")])
def test_other_numbers_are_named(name):
    """Of every type and form."""
    second = tensors() | {name: tensors(1)[name] if name != "zero" else torch.tensor([1.0])}
    with pytest.raises(CheckpointMismatchError, match=f"all/{name}: the numbers differ") as e:
        compare({"all": tensors()}, {"all": second})
    assert "per_rank=('all',)" in str(e.value)


def test_each_comparison_looks_at_other_places():
    """The first element at once; a difference in a few others is found by and by."""
    found = []
    for place in (slice(1), slice(140, 150), slice(298, 301)):
        first, second = torch.zeros(301), torch.zeros(301)
        second[place] = 1.0
        found.append([])
        for number in range(0, 600, 10):
            try:
                compare({"t": first}, {"t": second}, number)
            except CheckpointMismatchError:
                found[-1].append(number)
    assert found[0][0] == 0
    assert all(0 < len(numbers) < 60 for numbers in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_replicas_that_have_drifted_apart_by_rounding_are_only_named(dtype):
    """Their last digits differ; integers that are close are other numbers."""
    torch.manual_seed(0)
    first = torch.randn(3000).to(dtype)
    second = (first.double() * (1 + torch.finfo(dtype).eps * torch.randn(3000).double())).to(dtype)
    (told,) = compare({"t": first}, {"t": second})
    assert told.startswith("t: the numbers of ranks 0, 1 differ in their last digits")
    with pytest.raises(CheckpointMismatchError):
        compare({"t": torch.arange(3000)}, {"t": torch.arange(3000) + (torch.arange(3000) > 2990)})


def test_values_that_are_no_tensors_are_named_and_not_refused():
    """They are rank 0's; an object that may differ has its own."""
    (told,) = compare({"log": {"loss": 0.1}}, {"log": {"loss": 0.2}})
    assert told == (
        "log: values that are no tensors differ between rank 0 and rank 1: log/loss is 0.1 on rank "
        "0 and 0.2 on rank 1; those of rank 0 are saved for all"
    )


@pytest.mark.parametrize(
    ("values", "other", "named"),
    [
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, "it/a/1/1 is 3 on rank 0 and 4 on rank 1"),
        ({"a": 1}, {"a": 1, "b": "x" * 99}, 'it/b is missing on rank 0 and "' + "x" * 40),
        ({"h": [0] * 999}, {"h": [0] * 998 + [1]}, "it/h is another one on rank 1;"),
        ({"a": float("inf")}, {"a": 2.0}, 'it/a is "inf" on rank 0 and 2.0 on rank 1'),
        ({"a": 1}, {"a": [1]}, "it/a is 1 on rank 0 and [1] on rank 1"),
        (
            {f"{i}": 0 for i in range(9999)},
            {f"{i}": i for i in range(9999)},
            "1: it is another one on",
        ),
    ],
    ids=["nested", "missing", "long", "no JSON", "another type", "many"],
)
def test_the_first_value_that_differs_is_named_with_both_values(values, other, named):
    """Of long lists a checksum; nothing of a state with very many values."""
    (told,) = compare({"it": values}, {"it": other})
    assert named in told


def test_a_learning_rate_that_differs_is_named():
    """Among the state of an optimizer and its many parameters."""

    def optimizer(lr: float) -> torch.optim.Optimizer:
        made = torch.optim.AdamW([torch.zeros(1, requires_grad=True) for _ in range(500)], lr=lr)
        for parameter in made.param_groups[0]["params"]:
            parameter.grad = torch.ones(1)
        made.step()
        return made

    (told,) = compare({"o": optimizer(0.1)}, {"o": optimizer(0.1 + 1e-9)})
    assert "o/param_groups/0/lr is 0.1 on rank 0 and 0.100000001 on rank 1" in told


def test_a_group_of_holders_is_compared_within_itself():
    """Ranks that hold another part of a tensor have other numbers."""
    first, other = (describe({"t": torch.full((9,), value)}) for value in (1.0, 2.0))
    parts = {0: first, 1: first, 2: replace(other, holders=(2,)), 3: replace(other, holders=(2,))}
    require_alike(parts)
    with pytest.raises(CheckpointMismatchError, match="between ranks 2, 3"):
        require_alike({**parts, 3: replace(first, holders=(2,))})


def test_numbers_are_compared_at_the_first_save_and_then_at_each_tenth():
    """And at the first after a change; the structure always."""
    planner, group = Planner(1, 2), SimpleNamespace(rank=1, world_size=2)
    comparer: Any = Comparer(planner, group)  # type: ignore[arg-type]
    state, compared = {"t": torch.zeros(9)}, []
    for number in range(3, 25):
        if number == 13:
            state["new"] = torch.zeros(2)
        flat = flatten(state)
        planner.plan(flat.tensors, flat.first, flat.own)
        found = comparer.describe(flat, number, compare=number == 17)
        assert set(found.structure) == set(state)
        if found.samples:
            compared.append(number)
    assert compared == [3, 10, 13, 17, 20]
