"""From the tree that Hydra composed to checked `RunSettings`, or to a `ConfigError`.

- `schema`   the settings: dataclasses, types, forms and defaults
- `parse`    one dataclass from one mapping, near misses of unknown keys; nodes, time, nproc
- `resolve`  the whole tree: the group, the forms, and contradictions between keys
- `frozen`   the user's config as plain data, for its workers

Pure, except for checks of files that settings name, on the login node.
"""
