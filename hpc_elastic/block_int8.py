"""Tensors as 8-bit integers, with a scale for each block.

A value is off by at most 1/254 of the largest magnitude in its block of 256; the error's norm is
0.7 % of the values' where those are normally distributed. That takes 1.016 bytes a value, about a
quarter of float32. A block with an infinity or not-a-number comes back as not-a-number, so that an
overflow stays visible.

T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Work

from hpc_elastic.ft.process_group import AlteredWork, ProcessGroup

BLOCK = 256
"""Values with a common scale."""
MAX_MEMBERS = 7
"""Of a group in which an exchange of all members' codes is less than a float32 ring allreduce."""


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a floating-point tensor as int8, and the scales of its blocks, float32.

    Both are of the shape [number of blocks, ..]; the codes are filled up with zeros to whole
    blocks.
    """
    flat = values.detach().reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(scaled).round_().clamp_(-127, 127).to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the float32 tensor that `quantize` was given, rounded."""
    return (codes.float() * scales).view(-1)[: shape.numel()].view(shape)


def sum_quantized(group: ProcessGroup, tensor: torch.Tensor) -> Work:
    """Begin to sum a tensor over a group, in place, by 8-bit integers; return the work.

    Each member gathers the codes of all, and adds them in float32 in the same order, so all get the
    same sum. A member receives 1.016 (n - 1) bytes a value, a ring allreduce of float32 8 (n - 1) /
    n: a quarter of that in a group of two, half in one of four. With more than `MAX_MEMBERS` it
    costs more than float32.
    """
    codes, scales = quantize(tensor)
    mine = torch.cat([codes.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])
    gathered = [torch.zeros_like(mine) for _ in range(group.size())]

    def finish(end: Callable[[], Any]) -> list[torch.Tensor]:
        end()
        total = torch.zeros(tensor.shape, device=tensor.device)
        for part in gathered:
            theirs, scaled = part[: codes.numel()], part[codes.numel() :]
            total += dequantize(
                theirs.view(torch.int8).view_as(codes),
                scaled.view(torch.float32).view_as(scales),
                tensor.shape,
            )
        tensor.copy_(total)
        return [tensor]

    return AlteredWork(group.allgather([gathered], [mine]), finish)
