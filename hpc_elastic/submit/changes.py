"""What may be changed when a run is resumed: where and on how many nodes it runs, not what it is.

The config that the training reads, and its code, are frozen at the submission: changing them would
make another run of it. What was asked of the launcher stands in ``settings.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_elastic.config import RunSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.rundir import RunDir
from hpc_elastic.settings import resolve
from hpc_elastic.settings.overrides import put, read_override

CHANGEABLE = ("nodes", "nproc_per_node")
"""Keys beside those of ``launcher``."""

_REMEDIES = {
    "launcher": "a run stays with its launcher; to change it, submit the run anew",
    "launcher.backend": "a run stays with its launcher; to change it, submit the run anew",
    "ft": "whether nodes are replicas is decided when a run is submitted",
    "launcher.wait": "resume never waits; to watch the run: hpc-elastic attach, or status --watch",
    "launcher.dry_run": "resume has no dry run",
    "launcher.snapshot": "the code of a run stays as it was at the submission",
    "launcher.spread": "it orders the runs of a sweep, and one alone is resumed",
    "launcher.global_batch": "it is a part of the training, whose config stays as it was",
}
_FROZEN = (
    "the config of a run is frozen; only nodes, nproc_per_node and launcher.* can be given here. "
    "To train with another value, submit a new run"
)


def stored(run: RunDir) -> dict[str, Any]:
    """Return what was asked for when the run was submitted or resumed last, as a config tree.

    Raises:
        RunDirectoryError: it is not there, or not readable.
    """
    config = run.hydra / "config.yaml"
    try:
        if run.settings.exists():
            found = json.loads(run.settings.read_text())
        else:  # submitted before there was such a file
            import yaml

            found = yaml.safe_load(config.read_text())
    except FileNotFoundError as e:
        raise RunDirectoryError(f"{run.path} has no settings.json: it can not be resumed") from e
    except (OSError, ValueError) as e:
        raise RunDirectoryError(f"{run.settings}: not readable: {e}") from e
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{run.settings}: not readable: it holds no settings")
    return found


def changed(before: Mapping[str, Any], overrides: Sequence[str]) -> RunSettings:
    """Return the settings to resume a run with (pure).

    Args:
        before: What was asked for, see `stored`.
        overrides: Hydra's, such as ``nodes=1:4`` or ``launcher.partition=gpu``.

    Raises:
        ConfigError: names the first that can not be, and says what to do instead.
    """
    config: dict[str, Any] = json.loads(json.dumps(before))
    for override in overrides:
        key, value = read_override(override)
        require_changeable(key, value)
        put(config, key, value)
    settings = resolve(config, overrides=list(overrides))
    launcher = replace(settings.launcher, wait=True, dry_run=False, snapshot=False)
    return replace(settings, launcher=launcher)


def require_changeable(key: str, value: object) -> None:
    """Refuse a key that is a part of the run itself.

    Raises:
        ConfigError: says why, and what to do instead.
    """
    known = key in CHANGEABLE or (key.startswith("launcher.") and key not in _REMEDIES)
    if not known:
        raise ConfigError(key, value, _REMEDIES.get(key, _FROZEN))
