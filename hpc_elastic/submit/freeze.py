"""One job of a Hydra sweep, frozen: what a requeued task will run, whatever has changed by then.

`freeze_job` decides (it writes nothing), `write_hydra_files` writes what Hydra itself writes into
the output directory of a job, but with interpolations resolved (see `frozen`). Workers load these
files in place of composing the config again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from hpc_elastic.config import RunSettings
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rundir import RunDir
from hpc_elastic.settings import as_config, resolve
from hpc_elastic.submit.frozen import freeze, to_yaml

_OF_THE_JOB = ("job", "runtime", "overrides", "job_logging")
"""What is resolved of the ``hydra`` node: all that a running job can meet. The rest is kept as it
is; resolving it would cost more than all the other work of freezing a job."""

_HELP = ("help", "hydra_help")
"""Texts of ``--help``: Hydra leaves them out of what it prints of a config, too."""


@dataclass(frozen=True)
class FrozenJob:
    """One job of the sweep, as it will be written.

    Attributes:
        number: hydra.job.num.
        overrides: The user's overrides, without those of Hydra itself.
        dir: Absolute path of the run directory.
        settings: What the run asked for, checked.
        task: The frozen config that the user's function gets.
        hydra: The frozen ``hydra`` node.
    """

    number: int
    overrides: tuple[str, ...]
    dir: Path
    settings: RunSettings
    task: dict[str, Any]
    hydra: dict[str, Any]


def freeze_job(config: DictConfig, number: int) -> FrozenJob:
    """Freeze the composed config of one job.

    Args:
        config: The config of the job, as Hydra composes it; hydra.job.num and id and
            hydra.runtime.output_dir are set in it as Hydra's own launchers do.
        number: Its number in the sweep.

    Raises:
        ConfigError: a setting can not work, or an interpolation names a missing key.
    """
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = config  # type: ignore[assignment]  # for the ${hydra:} resolver
    try:
        sweep = _enter_job(config, number)
        overrides = tuple(config.hydra.overrides.task)
        task = _freeze_task(config)
        hydra = {**_freeze_hydra(config.hydra), "sweep": sweep}
    finally:
        HydraConfig.instance().cfg = before
    settings = resolve(task, overrides=overrides, sweep_params=_sweep_params(config))
    path = Path(hydra["runtime"]["output_dir"])
    return FrozenJob(number, overrides, path, settings, {**task, **as_config(settings)}, hydra)


def write_hydra_files(job: FrozenJob) -> None:
    """Write ``.hydra/`` into the run directory, which exists."""
    folder = RunDir(job.dir).hydra
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(job.task))
    (folder / "hydra.yaml").write_text(to_yaml({"hydra": job.hydra}))
    (folder / "overrides.yaml").write_text(to_yaml(list(job.overrides)))


def require_writable(folder: Path) -> None:
    """Make the sweep directory, or say why that is not possible.

    Raises:
        RunDirectoryError: it can not be made or written to; choose another.
    """
    probe = folder / ".hpc_elastic-probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as e:
        remedy = "choose a folder on the shared file system with hydra.sweep.dir=..."
        what = f"can not write to the sweep directory {folder}: {e}"
        raise RunDirectoryError(f"{what}; {remedy}") from e


def _enter_job(config: DictConfig, number: int) -> dict[str, Any]:
    """Set what Hydra's own launchers set for a job; return ``hydra.sweep``, resolved."""
    with read_write(config.hydra), open_dict(config.hydra):
        hydra = config.hydra
        hydra.job.num = number
        hydra.job.id = str(number)
        sweep = {"dir": str(hydra.sweep.dir), "subdir": str(hydra.sweep.subdir)}
        hydra.runtime.output_dir = str(Path(sweep["dir"], sweep["subdir"]).absolute())
    return sweep


def _sweep_params(config: DictConfig) -> dict[str, Any]:
    params = OmegaConf.select(config, "hydra.sweeper.params")
    return dict(params) if isinstance(params, DictConfig) else {}


def _freeze_task(config: DictConfig) -> dict[str, Any]:
    return {str(key): freeze(config, key) for key in config if key != "hydra"}


def _freeze_hydra(hydra: DictConfig) -> dict[str, Any]:
    return {str(name): _freeze_section(hydra, str(name)) for name in hydra if name not in _HELP}


def _freeze_section(hydra: DictConfig, name: str) -> Any:
    if name in _OF_THE_JOB:
        return freeze(hydra, name, f"hydra.{name}")
    node = hydra._get_node(name)
    container = isinstance(node, DictConfig | ListConfig)
    return OmegaConf.to_container(node, enum_to_str=True) if container else freeze(hydra, name)
