"""From the tree that Hydra composed to checked `RunSettings`, or to a `ConfigError`.

- `schema`        the settings: dataclasses, types, forms and defaults
- `parse`         one dataclass from one mapping, near misses of unknown keys; nodes, time, nproc
- `slurm_flags`   sbatch and srun flags that a key owns, or that would break a run
- `timeouts`      the order that the design needs between time-outs
- `resolve`       the whole tree: the group, the forms, and contradictions between keys

Pure, except for a check that ``launcher.template`` exists. Used on the login node only.
"""
