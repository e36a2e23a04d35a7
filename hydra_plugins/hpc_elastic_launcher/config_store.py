"""Register what Hydra needs to know by name: the launcher, and the defaults of its two groups."""

from __future__ import annotations

from dataclasses import asdict

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hpc_elastic.config.schema import LauncherSettings, LocalSettings, SlurmSettings

LAUNCHER = "hydra_plugins.hpc_elastic_launcher.launcher.ElasticLauncher"
BACKENDS: dict[str, type[LauncherSettings]] = {"slurm": SlurmSettings, "local": LocalSettings}


def register() -> None:
    """Fill Hydra's ConfigStore; a second call stores the same again.

    The defaults of every setting stand in the config of Hydra's own group ``hydra/launcher``,
    which ``launcher=slurm`` and ``launcher=local`` choose. Hydra merges that group before the
    user's config.yaml, wherever ``launcher=slurm`` stands, and also if it is appended: a default in
    the ``launcher`` group itself would then replace what the user's config.yaml says.
    """
    store = ConfigStore.instance()
    for backend, settings in BACKENDS.items():
        # Open, because Hydra would refuse an unknown key with a message of its own, where
        # `hpc_elastic.config` says what the user may have meant.
        launcher = OmegaConf.create(asdict(settings()), flags={"struct": False})
        node = {
            "hydra": {"launcher": {"_target_": LAUNCHER}},
            "nodes": 1,
            "nproc_per_node": "auto",
            "ft": False,
            "launcher": launcher,
        }
        name = f"hpc_elastic_{backend}"
        store.store(name=name, group="hydra/launcher", node=node, package="_global_")
