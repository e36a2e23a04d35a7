"""The entry point of the ``slurm`` backend: ``torchrun --rdzv-backend=slurm``.

torch loads this when its rendezvous package is imported, in every program that uses torch elastic,
so nothing heavy is imported before the backend is really asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def slurm_backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler from torchrun's parameters."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        from hpc_elastic.rendezvous.torchrun import create_handler

        return create_handler(parameters)

    return create
