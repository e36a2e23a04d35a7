"""The Hydra plugins: launcher, sweeper, their defaults, and the search path of the config groups.

Hydra imports every module of ``hydra_plugins`` for every Hydra script on the machine, whether it
uses this launcher or not. So a user's script need not import anything, and this module imports
nothing but Hydra's interface before a config uses it: the defaults are made then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from hpc_elastic._util import folder, hydra_release

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from hpc_elastic.config.schema import OptunaSettings
    from hpc_elastic.launcher.sweep import Sweep

TARGET = f"{__name__}.ElasticLauncher"
"""``hydra.launcher._target_`` of both."""


class ElasticLauncher(Launcher):
    """Runs each job of a sweep as an elastic run, on Slurm or on this machine.

    ``launcher=slurm`` and ``launcher=local`` make Hydra use this class also where a defaults list
    names another launcher, whose settings come as ``others``: `setup` refuses it.
    """

    def __init__(self, backend: str | None = None, **others: Any) -> None:
        super().__init__()
        self._is_chosen = backend is not None
        self._sweep: Sweep | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep Hydra's arguments, and check that the sweep directory can be used."""
        from hpc_elastic.launcher import sweep
        from hpc_elastic.launcher.submit import open_sweep

        if not self._is_chosen:
            ours = f"hydra/launcher=hpc_elastic_{OmegaConf.select(config, 'launcher.backend')}"
            remedy = "a defaults list of the config chooses another launcher: remove it there, or "
            remedy += f"add {ours} on the command line"
            choice = config.hydra.runtime.choices.get("hydra/launcher")
            _exit_without_effect(config, "hydra/launcher", choice, remedy)
        sweep.share_composition(hydra_context, config)
        self._sweep = sweep.Sweep(hydra_context, task_function, config)
        with sweep.without_traceback():
            sweep.check_overrides(config)
            open_sweep(self._sweep.dir)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs and return how each ended (see `hpc_elastic.launcher.sweep`)."""
        from hpc_elastic.launcher.sweep import launch_sweep, without_traceback

        with without_traceback():
            return launch_sweep(self.begin_sweep(), job_overrides, initial_job_idx)

    def begin_sweep(self) -> Sweep:
        """Return Hydra's arguments of the set-up, once its globals and its log are set up."""
        from hydra.core.utils import configure_log, setup_globals

        assert self._sweep is not None, "Hydra calls setup first"
        setup_globals()
        hydra = self._sweep.config.hydra
        configure_log(hydra.hydra_logging, hydra.verbose)
        return self._sweep


class ElasticOptunaSweeper(Sweeper):
    """Runs each trial of an Optuna study as an elastic run (`hpc_elastic.launcher.optuna_sweep`).

    ``settings`` are ``hydra.sweeper``, as of `OptunaSettings`; `setup` checks them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._raw = settings
        self._settings: OptunaSettings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Check the settings, and that the launcher is one of ours, and set that up."""
        from hpc_elastic.config.resolve import resolve_sweeper
        from hpc_elastic.errors import ConfigError
        from hpc_elastic.launcher.sweep import without_traceback

        with without_traceback():
            self._settings = resolve_sweeper(self._raw)
            chosen: Any = OmegaConf.to_container(config.hydra.launcher)
            if (target := chosen.pop("_target_")) != TARGET:
                remedy = "hydra/sweeper=elastic_optuna needs launcher=slurm or launcher=local: "
                remedy += "another launcher returns the results of a whole batch at once"
                raise ConfigError("hydra/launcher", target, remedy)
        self._launcher = ElasticLauncher(**chosen)
        self._launcher.setup(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the study until it has ``n_trials`` trials that have ended."""
        from hpc_elastic.errors import ConfigError
        from hpc_elastic.launcher.sweep import without_traceback

        sweep = self._launcher.begin_sweep()
        with without_traceback():
            try:
                from hpc_elastic.launcher.optuna_sweep import run_study
            except ModuleNotFoundError as e:
                if e.name != "optuna":
                    raise
                remedy = "Optuna is not installed: pip install optuna"
                raise ConfigError("hydra/sweeper", "elastic_optuna", remedy) from e
            run_study(sweep, self._settings, arguments)


def refuse_own_process() -> str:
    """End the program where Hydra itself runs a job (the resolver ``hpc_elastic_workers_only``).

    The training would run in this process, perhaps on a login node, with exit code 0. The groups
    ``launcher=slurm`` and ``launcher=local`` name it in ``hydra.job.env_set``, which Hydra resolves
    right before it calls the user's function; jobs of ours do not have it (`launcher.sweep`). A
    callback of Hydra's would be refused from 1.4 on where a script has a whitelist.
    """
    config = HydraConfig.instance().cfg
    if config is None or OmegaConf.is_missing(config.hydra.runtime, "output_dir"):
        return ""  # no job yet: somebody reads or prints the config of the sweep
    if str(config.hydra.mode).endswith("MULTIRUN"):
        key = "hydra/sweeper"
        value: object = config.hydra.runtime.choices.get(key)
        remedy = "this sweeper runs jobs in this process, without a launcher: use hydra/sweeper="
        remedy += "basic or elastic_optuna"
    else:
        key, value, remedy = "hydra.mode", "RUN", "Hydra runs a single job in this process: "
        remedy += "leave it out" if hydra_release() < (1, 4) else "add -m, which Hydra 1.4 needs"
    return _exit_without_effect(config, key, value, remedy)


def _exit_without_effect(config: DictConfig, key: str, value: object, remedy: str) -> NoReturn:
    from hpc_elastic.errors import ConfigError

    choice = config.hydra.runtime.choices.get("launcher")
    sys.exit(f"launcher={choice} has no effect: {ConfigError(key, value, remedy)}")


class HpcElasticSearchPath(SearchPathPlugin):
    """Appends the packaged config groups, so that the user's groups of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder by path: ``pkg://`` finds it in a wheel only, not in a clone."""
        search_path.append("hpc_elastic", folder("conf").as_uri())


class _MadeAtUse(ConfigNode):
    """A node of Hydra's ConfigStore that is made when a composition takes a copy of it.

    Hydra 1.3 copies the whole store in each composition, too: that makes and copies no node.
    """

    def __copy__(self) -> ConfigNode:
        return ConfigNode(self.name, _node(self.name), self.group, self.package, self.provider)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigNode:
        return self


@functools.cache
def _node(name: str) -> DictConfig:
    from hpc_elastic.config.schema import BACKENDS, TOP_LEVEL, OptunaSettings

    # not a struct: `hpc_elastic.config` refuses unknown keys with the nearest known key
    flags = {"struct": False}
    if name == "elastic_optuna.yaml":
        sweeper: dict[str, Any] = {
            "_target_": f"{__name__}.{ElasticOptunaSweeper.__name__}",
            "_recursive_": False,  # the sampler is made after the check of all settings
            "_convert_": "all",
            **asdict(OptunaSettings()),
        }
        return OmegaConf.create(sweeper, flags=flags)
    backend = name.removeprefix("hpc_elastic_").removesuffix(".yaml")
    launcher = OmegaConf.create(asdict(BACKENDS[backend]()), flags=flags)
    ours = {"_target_": TARGET, "backend": backend}
    return OmegaConf.create({"hydra": {"launcher": ours}, **TOP_LEVEL, "launcher": launcher})


def register_defaults() -> None:
    """Store the defaults of every setting in Hydra's ConfigStore; may be called again.

    Those of the launcher are in Hydra's own group ``hydra/launcher``, which ``launcher=slurm`` and
    ``launcher=local`` choose. Hydra merges that group before the user's config.yaml, wherever
    ``launcher=slurm`` stands, even appended. A default in the ``launcher`` group itself would
    replace the value in the user's config.yaml.
    """
    is_old = hydra_release() < (1, 4)
    register: Any = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    register("hpc_elastic_workers_only", refuse_own_process, replace=True)
    store = ConfigStore.instance()
    # with another hydra/launcher, keys of ours reach the check that refuses it (`setup`)
    keys: dict[str, Any] = {"launcher": OmegaConf.create({}, flags={"struct": False})}
    if is_old:  # later ones take it from the command line or the script's config
        keys["hydra"] = {"mode": "MULTIRUN"}
    store.store(name="hpc_elastic_keys", node=keys, package="_global_")
    launchers = (("launcher", f"hpc_elastic_{name}", "_global_") for name in ("slurm", "local"))
    for group, name, package in (*launchers, ("sweeper", "elastic_optuna", None)):
        store.store(name=name, group=f"hydra/{group}", node={}, package=package)
        nodes = store.repo["hydra"][group]
        nodes[f"{name}.yaml"] = _MadeAtUse(**vars(nodes[f"{name}.yaml"]))


register_defaults()
