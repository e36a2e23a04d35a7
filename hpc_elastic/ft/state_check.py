"""The check for silent data corruption: equal replicas hold equal bits.

Memory, a link or an arithmetic unit that fails may change a number without any error. Replicas that
start alike and apply the same averaged gradients hold the same state, bit by bit, so a difference
shows that. `Manager` compares the state every ``check_every`` steps, rank by rank with the
counterparts in the other groups, in the process group of the step:

1. Each member adds its row to a table of three numbers a member: a mark, a hash of the names and
   forms of its tensors, and a digest of all their bits. Equal rows end the check.
2. Only where they differ, a second table has the digest of each tensor and the name of each member.
   The members draw the same conclusion from it (`find_corrupted`).

It finds what differs *now*: parameters, and an optimizer's state. It does not find a wrong gradient
that was averaged, since all replicas have applied it. Groups with different hardware or libraries
may round differently, and differ by nature.
"""

# ruff: noqa: D102  (some names say it all)

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import cast

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft.checkpointing import _layout
from hpc_elastic.ft.process_group import ProcessGroup

_NAME_BYTES = 128
_LISTED = 3


class CorruptedStateError(HpcElasticError):
    """This replica's state differs from that of most others: it heals from one of them."""


# ---- digests


def find_tensors(state: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors of a state with their paths; of a DTensor, this rank's shard."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from find_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from find_tensors(value, f"{path}.{number}" if path else str(number))
    elif isinstance(state, torch.Tensor):
        local: torch.Tensor = _layout.local_part(state)
        is_dense = type(local) in (torch.Tensor, torch.nn.Parameter)
        if is_dense and local.layout == torch.strided and not local.is_meta:
            yield path, local


@dataclass(frozen=True)
class StateDigest:
    """The digests of a state's tensors; ``form`` is a hash of their paths, types and shapes."""

    paths: tuple[str, ...]
    form: int
    tensors: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, state: object) -> StateDigest:
        found = list(find_tensors(state))
        digests = _layout.digest_tensors([tensor for _, tensor in found])
        form = json.dumps([(path, str(t.dtype), list(t.shape)) for path, t in found])
        hashed = blake2b(form.encode(), digest_size=8).digest()
        return cls(
            tuple(path for path, _ in found), int.from_bytes(hashed, "big", signed=True),
            tuple(digests), _layout.combine_digests(digests),
        )  # fmt: skip


# ---- what the members exchange


Row = Sequence[int]
_MARK = 1


def compare(
    pg: ProcessGroup,
    place: tuple[int, int],
    state: StateDigest,
    name: str,
    on_mismatch: Callable[[Mismatch], None],
    *,
    on_device: bool,
) -> Mismatch | None:
    """Compare a state with those of all members of a group; return None if they are equal.

    All call it in the same step. ``place`` is the own replica rank and their number. It returns
    once all have received what differs, and before it waits for them it calls ``on_mismatch``.
    """

    def exchange(own: Row) -> list[list[int]]:
        """Return the row of each member, by replica rank."""
        rank, size = place
        table = torch.zeros(size, len(own), dtype=torch.int64)
        table[rank] = torch.tensor(own)
        if on_device:
            table = table.to(torch.accelerator.current_accelerator())
        start_allreduce(pg, table, ReduceOp.SUM).wait()
        rows: list[list[int]] = table.tolist()
        if (error := pg.errored()) is not None:
            raise error
        if any(row[0] != _MARK for row in rows):
            raise RuntimeError("a member has not sent the digest of its state")
        return rows

    summary = [_MARK, state.form, state.total]
    table = exchange(summary)
    if all(row == table[0] for row in table):
        return None
    if any(row[1] != table[0][1] for row in table):  # the tensors are not the same ones
        paths = ("names, types or shapes of the tensors",)
        state = replace(state, paths=paths, tensors=(state.form,))
    found = Mismatch.of(exchange(detail_row(state, name)), state.paths)
    on_mismatch(found)
    with suppress(Exception):  # all have read it before one aborts the quorum
        exchange(summary)
    return found


def start_allreduce(
    pg: ProcessGroup, tensor: torch.Tensor, op: ReduceOp | ReduceOp.RedOpType
) -> Work:
    """Start to reduce one tensor over a group, in place."""
    options = AllreduceOptions()
    options.reduceOp = cast(ReduceOp, op)
    return pg.allreduce([tensor], options)


def detail_row(state: StateDigest, name: str) -> list[int]:
    """Return a member's row of the second table; all members have tensors of the same form."""
    text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return [_MARK, *text, *state.tensors]


@dataclass(frozen=True)
class Mismatch:
    """Members of one rank in their groups whose states differ.

    Attributes:
        suspects: Replica ranks that differ from most others in one of them; those of all members
            that may be wrong, if a tensor has no majority.
        is_certain: Most members agree on each tensor, and one of them on all.
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    suspects: tuple[int, ...]
    is_certain: bool

    @classmethod
    def of(cls, table: Sequence[Row], paths: Sequence[str]) -> Mismatch:
        begin = 1 + _NAME_BYTES
        names = [bytes(row[1:begin]).rstrip(b"\0").decode(errors="replace") for row in table]
        digests = [row[begin:] for row in table]
        differing = [n for n in range(len(paths)) if len({row[n] for row in digests}) > 1]
        suspects, is_certain = find_corrupted(digests)
        return cls(tuple(names), tuple(paths[n] for n in differing), suspects, is_certain)

    @property
    def listed(self) -> str:
        """A few of the tensors, and the number of the others."""
        more = f" and {len(self.tensors) - _LISTED} more" if len(self.tensors) > _LISTED else ""
        return ", ".join(self.tensors[:_LISTED]) + more

    def __str__(self) -> str:
        names = ", ".join(self.names[rank] for rank in self.suspects)
        if self.is_certain:
            return f"the state of {names} differs from that of the other replicas in {self.listed}"
        return (
            f"the states of {names} differ in {self.listed}, and no majority shows which is right. "
            "Leave out what is not equal by nature, such as running means: check_state"
        )


def find_corrupted(digests: Sequence[Row]) -> tuple[tuple[int, ...], bool]:
    """Return the members whose state is wrong, and whether that is certain.

    Each member's row is the digest of each tensor; at least one differs. Wrong are the members that
    differ from a strict majority in some tensor. Where a tensor has no majority, as with two
    members, or where no member is right in all tensors: all members that may be wrong.
    """
    suspects: set[int] = set()
    is_certain = True
    for column in zip(*digests, strict=True):
        value, count = Counter(column).most_common(1)[0]
        if 2 * count > len(column):
            suspects |= {rank for rank, own in enumerate(column) if own != value}
        else:
            suspects |= set(range(len(column)))
            is_certain = False
    return tuple(sorted(suspects)), is_certain and len(suspects) < len(digests)
