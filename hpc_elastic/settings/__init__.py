"""From the tree that Hydra composed to checked `RunSettings`, or to a `ConfigError`.

    resolve.py   the whole tree: which group, every key, what keys demand of each other
    groups.py    one dataclass from one mapping: types, unknown keys and their near misses
    checks.py    the keys that have a form or a range of their own
    flags.py     sbatch and srun flags that a key owns, or that would break a run
    overrides.py what `resume` and `doctor` are given, as Hydra reads it
    forms.py     nodes, time and nproc_per_node, and YAML's base-60 trap

Pure, but for one look whether ``launcher.template`` exists. Used on the login node only.
"""

from hpc_elastic.settings.forms import parse_nodes, parse_nproc, parse_time
from hpc_elastic.settings.resolve import as_config, resolve

__all__ = ["as_config", "parse_nodes", "parse_nproc", "parse_time", "resolve"]
