"""A transport over the process group of the replicas: for networks that only NCCL makes fast.

The layout goes first, as JSON in a tensor of bytes; then one tensor after the other. One source
sends, and its training waits for that; with `HTTPTransport` no training waits, and there may be
several sources.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from hpc_elastic.ft.checkpointing._layout import PackedState, StateLayout, Target, encode_refusal
from hpc_elastic.ft.checkpointing.transport import CheckpointTransport, HealError

T = TypeVar("T")

_LENGTH, _LAYOUT, _FIRST_TENSOR = 1, 2, 3
"""Tags."""


class PGTransport(CheckpointTransport[T]):
    """Sends states over a process group that the Manager configures.

    `abort` is the process group's own: the Manager calls it, and what is under way raises.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            pg: Of all replicas; ranks are replica ranks.
            timeout: As torchft's; not used, since each call brings its own.
            device: Where ``pg`` takes tensors: ``cpu`` for gloo, the own GPU for NCCL.
            state_dict: Returns the own present state. If given, what it has on ``device`` is
                received into; such a heal leaves the state half changed if it fails. None: the
                Manager's, which is not received into.
        """
        self._pg = pg
        self._device = torch.device(device)
        self.state_dict = state_dict
        self.in_place = state_dict is not None

    def metadata(self) -> str:
        """Return a placeholder: the process group knows its peers."""
        return "<n/a>"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Send a state; returns once it is sent.

        Raises:
            ConfigError: Something in the state cannot be sent; the message names its path.
            HealError: A destination did not take it.
        """
        state = PackedState(state_dict, step)
        self._send_layout(state.layout.to_json(), dst_ranks, timeout)
        for tag, raw in enumerate(state.raw, _FIRST_TENSOR):
            if len(raw):
                self._send(raw, dst_ranks, tag, timeout)
        self._synchronize()

    def refuse_checkpoint(
        self, dst_ranks: list[int], step: int, reason: str, timeout: timedelta
    ) -> None:
        """See the base class."""
        self._send_layout(encode_refusal(step, reason), dst_ranks, timeout)
        self._synchronize()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of a peer; see the base class.

        Raises:
            HealError: The source did not send it, or one of another step.
            UnusableStateError: It cannot be sent, or does not fit here.
        """
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, src_rank, _LENGTH, timeout)
        raw = torch.empty(int(length.item()), dtype=torch.uint8)
        self._receive(raw, src_rank, _LAYOUT, timeout)
        layout = StateLayout.from_json(raw.numpy().tobytes())
        if layout.step != step:
            raise HealError(f"replica {src_rank} sends step {layout.step}, not {step}")
        device = self._device.type
        target = Target(layout, self.state_dict, in_place=self.in_place, device=device)
        for tag, memory in enumerate(target.raw, _FIRST_TENSOR):
            if len(memory):
                self._receive(memory, src_rank, tag, timeout)
        self._synchronize()
        return cast(T, target.state())

    def _send_layout(self, raw: bytes, dst_ranks: list[int], timeout: timedelta) -> None:
        layout = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._send(torch.tensor([len(layout)], dtype=torch.int64), dst_ranks, _LENGTH, timeout)
        self._send(layout, dst_ranks, _LAYOUT, timeout)

    def _send(
        self, tensor: torch.Tensor, dst_ranks: list[int], tag: int, timeout: timedelta
    ) -> None:
        there = tensor.to(self._device)
        try:
            works = [self._pg.send([there], rank, tag) for rank in dst_ranks]
            for work in works:
                work.wait(timeout)
        except RuntimeError as e:
            raise HealError(f"the state could not be sent to replicas {dst_ranks}: {e}") from e

    def _receive(self, into: torch.Tensor, src_rank: int, tag: int, timeout: timedelta) -> None:
        same = into.device.type == self._device.type
        there = into if same else torch.empty_like(into, device=self._device)
        try:
            self._pg.recv([there], src_rank, tag).wait(timeout)
        except RuntimeError as e:
            raise HealError(f"replica {src_rank} did not send its state: {e}") from e
        if not same:
            into.copy_(there)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":  # another thread, with another stream, goes on
            torch.cuda.current_stream(self._device).synchronize()
