"""Checkpoints that are atomic, verified and asynchronous (import `Checkpointer` from here).

    <directory>/step-00000100/manifest.json           what it holds; every file that counts
                              part-<rank>.json        what this rank wrote
                              shard-<rank>.safetensors
    <directory>/.staging-step-100-<token>/            not committed yet, or never will be

The modules, downwards: `checkpointer` (the user's object) and `options`, `saving` (one save: write,
commit), `staging` (the folder of a save until then), `snapshot` (host buffers), `state` (the user's
objects as a tree of tensors and values), `writer` (safetensors files), `rng`, `retention`, `store`
(the folders of a directory), `values` and `manifest` (pure). `store`, `manifest`, `values`,
`retention` and `options` do without torch.

What a rank writes is planned in `sharding`, and read back under any mesh by `reading` and `shards`;
`export` writes one file for torch.load. Near memory: `tiers` (where saves go), `memory` (a node's
folder), `peers` and `neighbour` (copies on another node), `gathering` and `exchange` (bringing a
save together again).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.checkpoint.checkpointer import Checkpointer
    from hpc_elastic.checkpoint.options import Options
    from hpc_elastic.checkpoint.tiers import Tiers

__all__ = ["Checkpointer", "Options", "Tiers"]


def __getattr__(name: str) -> Any:
    """Import torch only when somebody saves or restores: the command line does not."""
    if name in __all__:
        from hpc_elastic.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
