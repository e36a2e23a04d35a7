"""Tensors as 8-bit integers, with a scale for each block.

A value is off by at most 1/254 of the largest magnitude in its block of 256; the error's norm is
0.7 % of the values' where those are normally distributed. That takes 1.016 bytes a value, about a
quarter of float32. A block with an infinity or not-a-number comes back as not-a-number, so that an
overflow stays visible.

T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).
"""

from __future__ import annotations

import torch

BLOCK = 256
"""Values with a common scale."""


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8-bit form of a tensor of floating-point numbers.

    Returns:
        int8 of the shape [number of blocks, `BLOCK`], filled up with zeros, and the scales,
        float32 of the shape [number of blocks, 1].
    """
    flat = values.detach().reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(scaled).round_().clamp_(-127, 127).to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the float32 tensor that `quantize` was given, rounded."""
    return (codes.float() * scales).view(-1)[: shape.numel()].view(shape)
