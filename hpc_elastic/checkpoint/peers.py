"""The workers of a group as each other's neighbours: on which node they are, and at which address.

A node is known by the group rank that torch's agent gives its workers, and outside of one by the
name of the host.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from hpc_elastic.checkpoint.exchange import gather
from hpc_elastic.checkpoint.group import Group
from hpc_elastic.checkpoint.memory import WORD_BITS, identity
from hpc_elastic.errors import CheckpointError


@dataclass(frozen=True)
class Peer:
    """A worker as the others know it."""

    rank: int
    node: int
    local_rank: int
    address: str
    port: int


def choose_neighbour(peers: Sequence[Peer], rank: int) -> Peer | None:
    """Return the worker that keeps copies of a rank's saves; None if there is one node (pure).

    It is on the next node, in the order of the nodes' numbers.
    """
    me = peers[rank]
    nodes = sorted({peer.node for peer in peers})
    if len(nodes) == 1:
        return None
    following = nodes[(nodes.index(me.node) + 1) % len(nodes)]
    there = sorted((p for p in peers if p.node == following), key=lambda peer: peer.local_rank)
    return there[me.local_rank % len(there)]


def told_words(group: Group, directory: Path) -> list[int]:
    """Return numbers of rank 0: the directory's, and five random ones (every rank; collective).

    Raises:
        CheckpointError: rank 0 can not give the directory a number.
    """
    words, error = [-1] * 6, None
    if group.rank == 0:
        try:
            words = [identity(directory), *(secrets.randbits(WORD_BITS) for _ in range(5))]
        except OSError as e:
            error = e
    words = gather(group, words)[0]
    if words[0] < 0:
        raise CheckpointError(f"rank 0 can not write to {directory}: {error or 'see its log'}")
    return words


def meet(group: Group, address: str, port: int) -> list[Peer]:
    """Tell all ranks where this one is, and return where they are (every rank; collective).

    Args:
        group: All ranks.
        address: Numeric, on which this worker listens.
        port: On which it does.
    """
    number, version = int(ipaddress.ip_address(address)), 6 if ":" in address else 4
    words = [number >> (WORD_BITS * i) & ((1 << WORD_BITS) - 1) for i in range(3)]
    local_rank = int(os.environ.get("LOCAL_RANK", str(group.rank)))
    rows = gather(group, [_node_number(), local_rank, port, version, *words])
    order = list(dict.fromkeys(row[0] for row in rows))
    return [
        Peer(rank, order.index(row[0]), row[1], _address(row[3], row[4:]), row[2])
        for rank, row in enumerate(rows)
    ]


def _node_number() -> int:
    """Return a number that the workers of this node have in common, and those of no other."""
    group_rank = os.environ.get("GROUP_RANK")
    if group_rank is not None:
        return int(group_rank)
    machine = f"{socket.gethostname()}|{os.environ.get('SLURM_NODEID', '')}"
    return int.from_bytes(blake2b(machine.encode(), digest_size=7).digest())


def _address(version: int, words: Sequence[int]) -> str:
    number = sum(word << (WORD_BITS * i) for i, word in enumerate(words))
    kind = ipaddress.IPv6Address if version == 6 else ipaddress.IPv4Address
    return str(kind(number))
