"""Tensors as 8-bit integers: the error, the bytes, and what is not finite."""

import pytest
import torch

from hpc_elastic.block_int8 import BLOCK, dequantize, quantize


@pytest.mark.parametrize("shape", [(1000,), (3, 300), (1,), (), (0,), (2, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_is_off_by_a_254th_of_the_largest_in_its_block(shape, dtype):
    """Blocks of very different magnitudes do not harm each other."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    flat = values.view(-1)
    flat[: flat.numel() // 2] *= 1e-4
    codes, scales = quantize(values)
    found = dequantize(codes, scales, values.shape)
    assert found.shape == values.shape
    for part, exact in zip(found.view(-1).split(BLOCK), flat.float().split(BLOCK), strict=True):
        if len(exact):
            bound = exact.abs().max() / 254
            assert (part - exact).abs().max() <= bound * 1.001


def test_the_bytes_are_about_a_quarter():
    """One byte a value, and four for each block."""
    codes, scales = quantize(torch.randn(256 * 100))
    assert codes.nbytes + scales.nbytes == 260 * 100


def test_what_is_not_finite_stays_visible():
    """Its block becomes not-a-number; the others are as they were. Zeros stay zeros."""
    values = torch.zeros(3 * BLOCK)
    values[BLOCK + 5], values[2 * BLOCK] = float("inf"), 1.0
    found = dequantize(*quantize(values), values.shape)
    assert found[:BLOCK].tolist() == [0.0] * BLOCK
    assert bool(found[BLOCK : 2 * BLOCK].isnan().all())
    assert found[2 * BLOCK :].tolist() == [1.0] + [0.0] * (BLOCK - 1)
