"""The Hydra plugin ``hydra/sweeper=elastic_optuna``, and its defaults.

Hydra imports this module for every Hydra script, as it does `launcher`, so it imports nothing but
Hydra's interface and the defaults before the sweep.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from hpc_elastic.config.schema import OptunaSettings
from hydra_plugins.hpc_elastic_launcher import launcher

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig


class ElasticOptunaSweeper(Sweeper):
    """Runs each trial of an Optuna study as an elastic run (`hpc_elastic.launcher.optuna_sweep`).

    ``settings`` are ``hydra.sweeper``, as of `OptunaSettings`; `setup` checks them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._raw = settings
        self._settings = OptunaSettings()
        self._launcher = launcher.ElasticLauncher()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Check the settings, and that the launcher is one of ours, and set that up."""
        from hpc_elastic.config.resolve import resolve_sweeper
        from hpc_elastic.errors import ConfigError, HpcElasticError
        from hpc_elastic.launcher.sweep import hide_traceback

        try:
            self._settings = resolve_sweeper(self._raw)
            chosen = OmegaConf.select(config, "hydra.launcher._target_")
            if chosen != launcher.TARGET:
                remedy = "hydra/sweeper=elastic_optuna needs launcher=slurm or launcher=local: "
                remedy += "another launcher returns the results of a whole batch at once"
                raise ConfigError("hydra/launcher", chosen, remedy)
        except HpcElasticError as e:
            raise hide_traceback(e) from e
        self._launcher.setup(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the study until it has ``n_trials`` trials that have ended."""
        from hydra.core.utils import configure_log, setup_globals

        from hpc_elastic.errors import ConfigError, HpcElasticError
        from hpc_elastic.launcher.sweep import hide_traceback

        setup_globals()
        sweep = self._launcher.sweep
        configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose)
        try:
            try:
                from hpc_elastic.launcher.optuna_sweep import run_study
            except ModuleNotFoundError as e:
                if e.name != "optuna":
                    raise
                remedy = "Optuna is not installed: pip install optuna"
                raise ConfigError("hydra/sweeper", "elastic_optuna", remedy) from e
            run_study(sweep, self._settings, arguments)
        except HpcElasticError as e:
            raise hide_traceback(e) from e


def register_sweeper() -> None:
    """Store the sweeper's defaults in Hydra's ConfigStore; may be called again."""
    node: dict[str, Any] = {
        "_target_": f"{__name__}.{ElasticOptunaSweeper.__name__}",
        "_recursive_": False,  # the sampler is made after the check of all settings
        "_convert_": "all",
        **asdict(OptunaSettings()),
    }
    # not a struct: our own check refuses unknown keys with the nearest known key
    config = OmegaConf.create(node, flags={"struct": False})
    ConfigStore.instance().store(name="elastic_optuna", group="hydra/sweeper", node=config)


register_sweeper()
