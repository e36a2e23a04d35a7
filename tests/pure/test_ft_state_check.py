"""The digest of a state, and the conclusion from the digests of several replicas."""

import pytest
import torch

from hpc_elastic.ft.checkpointing._layout import digest_tensor
from hpc_elastic.ft.state_check import (
    Mismatch,
    StateDigest,
    detail_row,
    find_corrupted,
    find_tensors,
)

CHECKS = 10_000


def draw(num_bytes, seed=0):
    return torch.randint(
        256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 64, 4095, 4096 * 8, 4096 * 8 * 3 + 13])
def test_every_flipped_bit_changes_the_digest(num_bytes):
    """Each of the bits of a small tensor, and each of many in one with rows, words and a rest."""
    data = draw(num_bytes)
    whole = digest_tensor(data).item()
    places = range(num_bytes) if num_bytes < 100 else draw(4 * 200, 1).view(torch.int32) % num_bytes
    for place in {*map(int, places), num_bytes - 1}:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert digest_tensor(data).item() != whole
            data[place] ^= 1 << bit
    assert digest_tensor(data).item() == whole


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.cfloat]
)
def test_digest_is_of_the_bits_wherever_they_are(dtype):
    """Neither the place in memory nor gaps between the elements change it."""
    tensor = (torch.randn(3, 1001) * 9).to(dtype)
    padded = torch.zeros(3, 2001, dtype=dtype)
    padded[:, 1::2][:, :1000] = tensor[:, :1000]
    memory = torch.zeros(3003 + 1, dtype=dtype)
    memory[1:] = tensor.flatten()
    expected = digest_tensor(tensor)
    assert digest_tensor(memory[1:].view(3, 1001)) == expected
    assert digest_tensor(padded[:, 1::2][:, :1000]) == digest_tensor(tensor[:, :1000])
    assert digest_tensor(tensor[:0]) == 0


def test_words_and_rows_that_change_places_are_noticed():
    """Rows have different factors, tensors too; within a row the sum does not know the place."""
    rows = torch.arange(3 * 4096)
    swapped = torch.cat([rows[4096:8192], rows[:4096], rows[8192:]])
    assert digest_tensor(rows) != digest_tensor(swapped)
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert StateDigest.of([a, b]).total != StateDigest.of([b, a]).total


def test_tensors_of_a_state():
    """They are found in dicts and lists, with their paths; numbers and sparse ones are left out."""
    weight = torch.nn.Parameter(torch.ones(2))
    state = {"model": {"w": weight}, "opt": [{"m": torch.ones(1)}, 3], 5: torch.eye(2).to_sparse()}
    assert [path for path, _ in find_tensors(state)] == ["model.w", "opt.0.m"]


def test_equal_states_never_differ():
    """The digest of a copy is the same in 10,000 checks of states that change each time."""
    generator = torch.Generator().manual_seed(1)
    state = {"w": torch.randn(67, 129), "b": torch.randn(33).bfloat16()}
    for _ in range(CHECKS):
        state["w"].add_(torch.randn(129, generator=generator), alpha=0.1)
        copies = {key: tensor.clone() for key, tensor in state.items()}
        assert StateDigest.of(copies) == StateDigest.of(state)


@pytest.mark.parametrize(
    ("digests", "suspects", "is_certain"),
    [
        (["ab", "ab", "xb"], (2,), True),
        (["xb", "ab", "ab", "ay"], (0, 3), True),
        (["ab", "xb"], (0, 1), False),
        (["ab", "ab", "xb", "xb"], (0, 1, 2, 3), False),
        (["ab", "ac", "ad"], (0, 1, 2), False),
        (["xbc", "ayc", "abz"], (0, 1, 2), False),
    ],
)
def test_majority_decides(digests, suspects, is_certain):
    """Of each tensor; where there is none, or no member is right in all, nothing is certain."""
    rows = [[ord(letter) for letter in text] for text in digests]
    assert find_corrupted(rows) == (suspects, is_certain)


def mismatch(*states):
    digests = [StateDigest.of(state) for state in states]
    return Mismatch.of(
        [detail_row(d, f"r{n} (host h{n}, rank 0)") for n, d in enumerate(digests)],
        digests[0].paths,
    )


def test_mismatch_names_replica_host_and_tensors():
    """At most three tensors are listed."""
    right = {key: torch.ones(1) for key in "abcde"}
    found = mismatch(right, {**right, "b": torch.zeros(1)}, right)
    assert str(found) == (
        "the state of r1 (host h1, rank 0) differs from that of the other replicas in b"
    )
    found = mismatch(right, right, {key: torch.zeros(1) for key in "abcde"})
    assert str(found).endswith("in a, b, c and 2 more")


def test_mismatch_of_two_names_both():
    """And says what may be the matter, if it is none of the hardware."""
    text = str(mismatch({"a": torch.ones(1)}, {"a": torch.zeros(1)}))
    assert "r0 (host h0, rank 0), r1 (host h1, rank 0) differ in a" in text
    assert "check_state" in text
