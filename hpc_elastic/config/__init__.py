"""From the tree that Hydra composed to checked `RunSettings`, or to a `ConfigError`.

- `schema`        the settings: dataclasses, types and defaults
- `parse`         one dataclass from one mapping, near misses of unknown keys; nodes, time, nproc
- `sbatch_flags`  sbatch and srun flags that a key owns, or that would break a run
- `resolve`       the whole tree: which group, ranges, and what keys demand of each other

Pure, but for one look whether ``launcher.template`` exists. Used on the login node only.
"""
