"""The entry point of the ``slurm`` backend: ``torchrun --rdzv-backend=slurm``.

torch loads this when its rendezvous package is imported, in every program that uses torch elastic,
so nothing heavy is imported before the backend is really asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_TORCHRUN = "torch.distributed.run"  # as ``python -m`` starts it


def slurm_backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler from torchrun's parameters."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        from hpc_elastic.errors import HpcElasticError
        from hpc_elastic.rendezvous.torch_handler import create_handler

        try:
            return create_handler(parameters)
        except HpcElasticError as e:
            if not _is_torchrun():
                raise
            raise SystemExit(f"torchrun --rdzv-backend=slurm: {e}") from e  # without a traceback

    return create


def _is_torchrun() -> bool:
    """Return whether this program is torchrun, and no other that uses torch elastic."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).name == "torchrun" or getattr(spec, "name", "") == _TORCHRUN
