"""The Hydra launcher plugin, which the groups ``launcher=slurm`` and ``launcher=local`` choose.

Hydra imports this module for every Hydra script on the machine, whether it uses us or not: so
nothing but Hydra's own interface is imported before the first launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from hpc_elastic.launcher.sweep import Sweep


class ElasticLauncher(Launcher):
    """Runs each job of a sweep as an elastic run, on Slurm or on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._sweep: Sweep | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra gives, and see that the sweep directory can be written to."""
        from hpc_elastic.errors import ConfigError, RunDirectoryError
        from hpc_elastic.launcher.sweep import (
            Sweep,
            compact,
            require_sweep_dir,
            require_writable,
            share_composition,
        )

        share_composition(hydra_context)
        self._sweep = Sweep(hydra_context, task_function, config)
        try:
            require_sweep_dir(config)
            require_writable(self._sweep.dir)
        except (ConfigError, RunDirectoryError) as e:
            raise compact(e) from e.__cause__

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs and return how each ended (see `hpc_elastic.launcher.sweep`)."""
        from hydra.core.utils import configure_log, setup_globals

        from hpc_elastic.errors import HpcElasticError
        from hpc_elastic.launcher.sweep import compact, launch_sweep

        assert self._sweep is not None, "Hydra calls setup first"
        setup_globals()
        hydra = self._sweep.config.hydra
        configure_log(hydra.hydra_logging, hydra.verbose)
        try:
            return launch_sweep(self._sweep, job_overrides, initial_job_idx)
        except HpcElasticError as e:
            raise compact(e) from e.__cause__
