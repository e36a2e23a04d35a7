"""The Hydra plugins: the launcher, its config defaults, and the search path of its config groups.

Hydra imports every module of ``hydra_plugins`` for every Hydra script on the machine, whether it
uses this launcher or not. So a user's script need not import anything, and this module imports
nothing but Hydra's interface and the defaults before the first launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from hpc_elastic._util import folder
from hpc_elastic.config.schema import LauncherSettings, LocalSettings, SlurmSettings

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from hpc_elastic.launcher.sweep import Sweep

BACKENDS: dict[str, type[LauncherSettings]] = {"slurm": SlurmSettings, "local": LocalSettings}
TARGET = f"{__name__}.ElasticLauncher"
"""``hydra.launcher._target_`` of both."""


class ElasticLauncher(Launcher):
    """Runs each job of a sweep as an elastic run, on Slurm or on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep: Sweep | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep Hydra's arguments, and check that the sweep directory is writable."""
        from hpc_elastic.errors import HpcElasticError
        from hpc_elastic.launcher.submit import require_writable
        from hpc_elastic.launcher.sweep import (
            Sweep,
            hide_traceback,
            require_sweep_dir,
            share_composition,
        )

        share_composition(hydra_context)
        self._sweep = Sweep(hydra_context, task_function, config)
        try:
            require_sweep_dir(config)
            require_writable(self._sweep.dir)
        except HpcElasticError as e:
            raise hide_traceback(e) from e

    @property
    def sweep(self) -> Sweep:
        """Hydra's arguments of the set-up."""
        assert self._sweep is not None, "Hydra calls setup first"
        return self._sweep

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs and return how each ended (see `hpc_elastic.launcher.sweep`)."""
        from hydra.core.utils import configure_log, setup_globals

        from hpc_elastic.errors import HpcElasticError
        from hpc_elastic.launcher.sweep import hide_traceback, launch_sweep

        setup_globals()
        hydra = self.sweep.config.hydra
        configure_log(hydra.hydra_logging, hydra.verbose)
        try:
            return launch_sweep(self.sweep, job_overrides, initial_job_idx)
        except HpcElasticError as e:
            raise hide_traceback(e) from e


class HpcElasticSearchPath(SearchPathPlugin):
    """Appends the packaged config groups, so that the user's groups of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder by path: ``pkg://`` finds it in a wheel only, not in a clone."""
        search_path.append("hpc_elastic", folder("conf").as_uri())


def register_defaults() -> None:
    """Store the defaults of every setting in Hydra's ConfigStore; may be called again.

    They are stored in Hydra's own group ``hydra/launcher``, which ``launcher=slurm`` and
    ``launcher=local`` choose. Hydra merges that group before the user's config.yaml, wherever
    ``launcher=slurm`` stands, even appended. A default in the ``launcher`` group itself would
    replace the value in the user's config.yaml.
    """
    store = ConfigStore.instance()
    for backend, settings in BACKENDS.items():
        # not a struct: `hpc_elastic.config` refuses unknown keys with the nearest known key
        launcher = OmegaConf.create(asdict(settings()), flags={"struct": False})
        node = {
            "hydra": {"launcher": {"_target_": TARGET}},
            "nodes": 1,
            "nproc_per_node": "auto",
            "ft": False,
            "launcher": launcher,
        }
        name = f"hpc_elastic_{backend}"
        store.store(name=name, group="hydra/launcher", node=node, package="_global_")


register_defaults()
