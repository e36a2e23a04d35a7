"""Checkpoints that are atomic, verified and asynchronous (import `Checkpointer` from here).

    <directory>/step-00000100/manifest.json           what it holds; every file that counts
                              part-<rank>.json        what this rank wrote
                              shard-<rank>.safetensors
    <directory>/.staging-step-100-<token>/            not committed yet, or never will be
    <directory>/owner.json                            the run that saves there

- `checkpointer`  the user's object, and its options
- `save`          one save: write, commit, or take back
- `snapshot`      host buffers
- `state`         the user's objects as a tree of tensors and values, what is trained and missing
                  there; `generators` has the random number generators of a process
- `sharding`      which rank writes what
- `equality`      one checkpoint of what all ranks wrote, where what is stored once is the same
- `shard_file`    the file of a rank: its layout, written past the page cache, and read
- `owner`         whose a directory is, and the group of ranks that saves there
- `store`         the folders of a directory: commit, verification, removal
- `prune`         which checkpoints go
- `manifest`      what a checkpoint holds (pure)
- `restore`       the newest checkpoint that verifies, of this run or another; `resharding` reads it
                  under any mesh
- `export`        one file for torch.load
- `memory_tier`   saves in the memory of nodes; `node_memory` has a node's folder
                  and copies on another node

`store`, `prune`, `owner`, `manifest`, `shard_file` and `node_memory` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_elastic.checkpoint.checkpointer import Checkpointer, CheckpointOptions
    from hpc_elastic.checkpoint.memory_tier import MemoryTier
    from hpc_elastic.checkpoint.restore import follow_checkpoints

__all__ = ["CheckpointOptions", "Checkpointer", "MemoryTier", "follow_checkpoints"]


def __getattr__(name: str) -> Any:
    """Import torch only when somebody saves or restores: the command line does not."""
    if name in __all__:
        from hpc_elastic.checkpoint import checkpointer, restore

        return getattr(restore if name == "follow_checkpoints" else checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
