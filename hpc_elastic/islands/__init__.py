"""DiLoCo between islands, trainings that share only a folder; `outer_round` has the theory.

    from hpc_elastic.islands import IslandDiLoCo, RoundPolicy, load_global_parameters

`hpc_elastic.ft` offers the same names. All are imported on first use: the package itself needs no
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.islands.diloco import (
        DivergedIslandError,
        IslandDiLoCo,
        IslandTimeoutError,
        load_global_parameters,
    )
    from hpc_elastic.islands.outer_round import ContributionHead, OuterRound, RoundPolicy

__all__ = [
    "ContributionHead", "DivergedIslandError", "IslandDiLoCo", "IslandTimeoutError", "OuterRound",
    "RoundPolicy", "load_global_parameters",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_pure = name in ("ContributionHead", "OuterRound", "RoundPolicy")
    home = importlib.import_module(f"{__name__}.{'outer_round' if is_pure else 'diloco'}")
    return getattr(home, name)
