"""What does not fit between a checkpoint and the present state is named, with both sides."""

import pytest
import torch
from safetensors.torch import save_file

from hpc_elastic.checkpoint.manifest import Chunk, Manifest, TensorEntry
from hpc_elastic.checkpoint.resharding import (
    files_needed,
    like_parameters,
    read,
    targets,
)
from hpc_elastic.checkpoint.store import read_manifest
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError


def manifest(**tensors: TensorEntry) -> Manifest:
    """Return a manifest of these tensors."""
    return Manifest(1, 7, 1, 0.0, (), tensors, {}, {})


def entry(*shape: int, dtype: str = "float32", file: str = "a.safetensors") -> TensorEntry:
    """Return a tensor that is stored whole."""
    return TensorEntry(shape, dtype, (Chunk((0,) * len(shape), shape, file, "w"),))


@pytest.mark.parametrize(
    ("tensors", "into", "what"),
    [
        ({}, torch.zeros(2), "w is not in the checkpoint"),
        ({"w": entry(2, 3)}, torch.zeros(3, 2), r"shape \[2, 3\] in the checkpoint, but \[3, 2\]"),
        ({"w": entry(2)}, torch.zeros(2).half(), "float32 in the checkpoint, but float16 now"),
    ],
)
def test_a_tensor_that_differs_is_named(tmp_path, tensors, into, what):
    """A missing tensor, another shape, another type: the error names the key and both."""
    with pytest.raises(CheckpointError, match=what):
        read(manifest(**tensors), tmp_path, {"w": into})


def test_a_file_that_lacks_the_tensor_is_damaged(tmp_path):
    """A shard that does not hold what the manifest says is corrupt, and is named."""
    save_file({"v": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointCorruptError, match=r"a\.safetensors should hold w\[2\]"):
        read(manifest(w=entry(2)), tmp_path, {"w": torch.zeros(2)})


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    """The error names the file that is missing."""
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json: .*No such file"):
        read_manifest(tmp_path)


def test_only_files_that_hold_what_is_wanted_are_needed():
    """A rank that wants nothing of a file does not ask for it."""
    found = manifest(w=entry(4, file="a"), v=entry(4, file="b"), u=entry(0, file="c"))
    assert files_needed(found, {"w": torch.zeros(4), "u": torch.zeros(0)}) == {"a"}


def test_a_part_of_a_box_is_read_in_place(tmp_path):
    """Rows and columns of stored boxes land in the right places of a strided target."""
    whole = torch.arange(60, dtype=torch.bfloat16).reshape(6, 10)
    boxes = {"top": whole[:4].contiguous(), "bottom": whole[4:].contiguous()}
    save_file(boxes, tmp_path / "a")
    chunks = (Chunk((0, 0), (4, 10), "a", "top"), Chunk((4, 0), (2, 10), "a", "bottom"))
    into = torch.zeros(10, 6, dtype=torch.bfloat16).t()
    stored = manifest(w=TensorEntry((6, 10), "bfloat16", chunks))
    read(stored, tmp_path, {"w": into})
    assert torch.equal(into, whole)


def test_a_fresh_optimizer_gets_tensors_like_its_parameters():
    """New states have the checkpoint's type and the parameter's place; its step stays a number."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.AdamW([parameter])
    saved = {"state": {0: {"step": None, "exp_avg": None}}, "param_groups": [{"params": [0]}]}
    like = like_parameters(optimizer, saved, "optimizer")
    assert like == {"optimizer/state/0/exp_avg": parameter}
    stored = manifest(a=entry(2, 3, dtype="bfloat16"), s=entry())
    made = targets(stored, ["a", "s"], {}, {"a": parameter})
    assert (made["a"].shape, made["a"].dtype, made["s"].shape) == ((2, 3), torch.bfloat16, ())


def test_other_parameter_groups_are_refused():
    """The error names both numbers of parameters by group."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    saved = {"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]}
    with pytest.raises(CheckpointError, match=r"\[2, 1\] parameters in its groups, the present.*1"):
        like_parameters(optimizer, saved, "optimizer")
