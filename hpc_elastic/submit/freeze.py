"""One job of a Hydra sweep, frozen: what a requeued task will run, whatever has changed by then.

`freeze_job` decides (it writes nothing), `write_hydra_files` writes what Hydra itself writes into
the output directory of a job, but with interpolations resolved (see `frozen`). Workers load these
files in place of composing the config again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, open_dict, read_write

from hpc_elastic.config import RunSettings
from hpc_elastic.errors import ConfigError, RunDirectoryError
from hpc_elastic.files import write_atomic
from hpc_elastic.rundir import RunDir
from hpc_elastic.settings import as_config, resolve
from hpc_elastic.submit.frozen import freeze, to_yaml

_OF_THE_JOB = ("job", "runtime", "overrides")
_RESOLVED = (*_OF_THE_JOB, "job_logging")
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


class SharedSections:
    """The sections of the config that the jobs of a sweep share, made plain and written once.

    They are the bulk of a job's files: most of ``hydra``, and ``launcher``. A section of ``hydra``
    is known by its node: jobs that are alike have the same one (see `compose`).
    """

    def __init__(self) -> None:
        self._plain: dict[str, tuple[Any, Any]] = {}
        self._text: dict[tuple[str, str], tuple[Any, str, str]] = {}

    def plain(self, hydra: DictConfig, name: str) -> Any:
        """Return a section that no job changes as plain values."""
        node = hydra._get_node(name)
        if name in self._plain and self._plain[name][0] is node:
            return self._plain[name][1]
        container = isinstance(node, DictConfig | ListConfig)
        plain = OmegaConf.to_container(node, enum_to_str=True) if container else None
        if name in _RESOLVED or not container:
            resolved = freeze(hydra, name, f"hydra.{name}")
            if resolved != plain:  # it may differ from job to job
                return resolved
        self._plain[name] = (node, plain)
        return plain

    def yaml(self, config: Mapping[str, Any], top: str = "") -> str:
        """Return what ``to_yaml(config)`` would; with a ``top``, ``to_yaml({top: config})``."""
        if not config:
            return to_yaml({top: {}} if top else {})
        head = f"{top}:\n" if top else ""
        return head + "".join(self._section(top, name, plain) for name, plain in config.items())

    def _section(self, top: str, name: str, plain: Any) -> str:
        before, said, text = self._text.get((top, name), (None, "", ""))
        if plain is before and text:
            return text
        saying = repr(plain)  # unlike ==, it tells 1 from True
        if saying != said:
            section = {name: plain}
            text = to_yaml({top: section}).removeprefix(f"{top}:\n") if top else to_yaml(section)
        self._text[top, name] = (plain, saying, text)
        return text


def freeze_job(config: DictConfig, number: int, shared: SharedSections | None = None) -> FrozenJob:
    """Freeze the composed config of one job.

    Args:
        config: The config of the job, as Hydra composes it; hydra.job.num and id and
            hydra.runtime.output_dir are set in it as Hydra's own launchers do.
        number: Its number in the sweep.
        shared: What is known from the jobs before.

    Raises:
        ConfigError: a setting can not work, or an interpolation names a missing key.
    """
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = config  # type: ignore[assignment]  # for the ${hydra:} resolver
    try:
        sweep = _enter_job(config, number)
        overrides = tuple(config.hydra.overrides.task)
        task = _freeze_task(config)
        hydra = {**_freeze_hydra(config.hydra, shared or SharedSections()), "sweep": sweep}
    finally:
        HydraConfig.instance().cfg = before
    settings = resolve(task, overrides=overrides, sweep_params=_sweep_params(config))
    path = Path(hydra["runtime"]["output_dir"])
    return FrozenJob(number, overrides, path, settings, {**task, **as_config(settings)}, hydra)


def write_hydra_files(job: FrozenJob, shared: SharedSections | None = None) -> None:
    """Write ``.hydra/`` into the run directory, which exists.

    The files are their owner's only: ``launcher.env`` may hold tokens, and it stands in the
    config as well as among the overrides.
    """
    folder, shared = RunDir(job.dir).hydra, shared or SharedSections()
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("config", shared.yaml(job.task)),
        ("hydra", shared.yaml(job.hydra, top="hydra")),
        ("overrides", to_yaml(list(job.overrides))),
    ):
        write_atomic(folder / f"{name}.yaml", text, mode=0o600)


def require_sweep_dir(config: DictConfig) -> None:
    """Refuse a directory that Hydra uses for a single job only, and would ignore here.

    Args:
        config: The config of the sweep as a whole.

    Raises:
        ConfigError: ``hydra.run.dir`` was typed.
    """
    typed = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    for override in map(str, typed or ()):  # ${hydra.job.num} has no value yet
        key, _, value = override.partition("=")
        if key.lstrip("+") == "hydra.run.dir":
            remedy = "with a launcher, Hydra's runs are a sweep: use hydra.sweep.dir=..., and "
            remedy += "hydra.sweep.subdir=... for the folder of each run in it"
            raise ConfigError("hydra.run.dir", value, remedy)


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
    hydra = config.hydra
    _set(hydra.job, "num", number)
    _set(hydra.job, "id", str(number))
    sweep = {"dir": str(hydra.sweep.dir), "subdir": str(hydra.sweep.subdir)}
    _set(hydra.runtime, "output_dir", str(Path(sweep["dir"], sweep["subdir"]).absolute()))
    return sweep


def _set(parent: DictConfig, name: str, value: object) -> None:
    """Set a value; to let a config be changed costs ten times as much as to change it."""
    node = parent._get_node(name)
    if isinstance(node, ValueNode) and not node._get_flag("readonly"):
        node._set_value(value)
        return
    with read_write(parent), open_dict(parent):
        parent[name] = value


def _sweep_params(config: DictConfig) -> dict[str, Any]:
    params = OmegaConf.select(config, "hydra.sweeper.params")
    return dict(params) if isinstance(params, DictConfig) else {}


def _freeze_task(config: DictConfig) -> dict[str, Any]:
    return {str(key): freeze(config, key) for key in config if key != "hydra"}


def _freeze_hydra(hydra: DictConfig, shared: SharedSections) -> dict[str, Any]:
    return {
        name: freeze(hydra, name, f"hydra.{name}")
        if name in _OF_THE_JOB
        else shared.plain(hydra, name)
        for name in map(str, hydra)
        if name not in _HELP
    }
