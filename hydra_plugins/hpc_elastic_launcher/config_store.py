"""Register what Hydra needs to know by name: the launcher, and the schemas of its two groups."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from hpc_elastic.config import LauncherSettings, LocalSettings, SlurmSettings

LAUNCHER = "hydra_plugins.hpc_elastic_launcher.launcher.ElasticLauncher"
BACKENDS: dict[str, type[LauncherSettings]] = {"slurm": SlurmSettings, "local": LocalSettings}


def register() -> None:
    """Fill Hydra's ConfigStore; a second call stores the same again."""
    store = ConfigStore.instance()
    for backend, settings in BACKENDS.items():
        store.store(name=backend, group="launcher/schema", node=_schema(backend, settings()))
    store.store(name="hpc_elastic", group="hydra/launcher", node={"_target_": LAUNCHER})


def _schema(backend: str, settings: LauncherSettings) -> DictConfig:
    """Return every key of a group without a value, and open to keys that do not exist.

    Without values, because a group that is appended (``+launcher=slurm``) is merged after the
    user's own config.yaml: a default here would replace what stands there, ``???`` never does.
    Open, because Hydra would refuse an unknown key with a message of its own, where
    `hpc_elastic.settings` says what the user may have meant.
    """
    keys = {**_unset(asdict(settings)), "backend": backend}
    return OmegaConf.create(keys, flags={"struct": False})


def _unset(defaults: dict[str, Any]) -> dict[str, Any]:
    """Replace the values below mappings by ``???``."""
    return {
        key: _unset(value) if isinstance(value, dict) else MISSING
        for key, value in defaults.items()
    }
