"""Checkpoints that are atomic, verified and asynchronous (import `Checkpointer` from here).

    <directory>/step-00000100/manifest.json           what it holds; every file that counts
                              part-<rank>.json        what this rank wrote
                              shard-<rank>.safetensors
    <directory>/.staging-step-100-<token>/            not committed yet, or never will be
    <directory>/owner.json                            the run that saves there

- `checkpointer`  the user's object, and its options
- `save`          one save: write, commit, or take back
- `snapshot`      host buffers
- `state`         the user's objects as a tree of tensors and values
- `generators`    the random number generators of a process
- `sharding`      which rank writes what
- `equality`      what is stored once is the same on all ranks (pure); `samples` describes a rank's
- `files`         the file of a rank, which `shard_file` writes past the page cache, and reads
- `owner`         whose a directory is
- `forgotten`     what is trained and not in the state
- `store`         the folders of a directory: commit, verification, removal
- `prune`         which checkpoints go
- `manifest`      what a checkpoint holds (pure)
- `restore`       the newest checkpoint that verifies, of this run or another; `resharding` reads it
                  under any mesh
- `export`        one file for torch.load
- `memory_tier`   saves in the memory of nodes: `node_memory` a node's folder, `replication` copies
                  on another node, `gathering` brings a save together again
- `collectives`   the group of ranks, and tensors exchanged in it

`store`, `prune`, `owner`, `manifest` and `equality` need no torch.
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
