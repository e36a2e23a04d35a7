"""A Hydra sweep as elastic runs: its jobs are frozen as `RunRequest`s, and return as JobReturns.

The Hydra launcher plugin calls `launch_sweep`. It differs from Hydra's own launchers in two points,
both because a job runs elsewhere, in several processes:

- Callbacks' on_job_start and on_job_end are called here, before the submission and after the run
  has ended, not in the workers.
- With ``launcher.wait=false`` and ``launcher.dry_run=true`` the JobReturns are complete and have
  neither value nor config, since nothing has run yet.

Every rank and every requeued task must see the same config, so a job is frozen: interpolations that
depend on the moment, such as ``${now:...}``, are resolved once. An interpolation that only a node
can resolve (``${oc.env:SLURM_JOB_ID}``) fails here in its resolver, and is kept. A reference to a
key that does not exist can never work, and is an error at once. Workers load the frozen files
instead of composing the config again.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, base, open_dict, read_write
from omegaconf._utils import OmegaConfDumper  # its rule for texts that need quotes
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from hpc_elastic.config.resolve import as_config, resolve
from hpc_elastic.errors import ConfigError, HpcElasticError
from hpc_elastic.launcher.hydra_compose import SharingLoader
from hpc_elastic.launcher.plan import RunRequest
from hpc_elastic.launcher.run_handle import Outcome
from hpc_elastic.launcher.run_view import unescaped
from hpc_elastic.launcher.submit import ended_by_interrupt, is_awaited, submit
from hpc_elastic.launcher.user_code import entry_of
from hpc_elastic.launcher.wait import wait
from hpc_elastic.run.directory import Entry


@dataclass(frozen=True)
class Sweep:
    """The arguments of Hydra to a launcher at its set-up."""

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig

    @property
    def dir(self) -> Path:
        """Absolute path of the sweep directory."""
        return Path(str(self.config.hydra.sweep.dir)).absolute()


class LauncherError(HpcElasticError, CompactHydraException):
    """An error that Hydra prints without a traceback; its ``__cause__`` is the error itself."""


def launch_sweep(
    sweep: Sweep, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Freeze and submit the jobs of one batch, and wait for them unless ``launcher.wait`` is false.

    Args:
        sweep: The arguments of the set-up.
        job_overrides: The overrides of each job.
        initial_job_idx: hydra.job.num of the first job.

    Raises:
        HpcElasticError: Nothing was submitted. A run that fails later raises when its JobReturn is
            read, as Hydra expects.
        SystemExit: It was interrupted; what has become of the runs was printed.
    """
    with ended_by_interrupt():
        entry = entry_of(sweep.task_function, "hydra")
        load, shared = sweep.context.config_loader.load_sweep_config, SharedSections()
        with cached_grammar():
            jobs = [
                freeze_job(load(sweep.config, list(overrides)), number, entry, shared)
                for number, overrides in enumerate(job_overrides, initial_job_idx)
            ]
        callbacks = sweep.context.callbacks
        for job in jobs if callbacks.callbacks else ():
            callbacks.on_job_start(config=job.config(), task_function=sweep.task_function)
        with suppress(OSError):  # Hydra's sweeper wrote it, and launcher.env may hold tokens
            (sweep.dir / "multirun.yaml").chmod(0o600)
        requests = [job.request for job in jobs]
        runs = submit(requests, sweep=sweep.dir, name=str(sweep.config.hydra.job.name))
        launcher = requests[0].settings.launcher
        if not is_awaited(launcher):
            return [_job_return(job) for job in jobs]
        job_of, returns = {job.request.dir: job for job in jobs}, {}

        def on_end(outcome: Outcome) -> None:
            path = outcome.run.dir
            returns[path] = on_job_end(sweep, job_of[path], outcome)

        wait(runs, poll_interval_s=launcher.poll_interval_s, on_end=on_end)
    return [returns[path] for path in job_of]


def hide_traceback(error: HpcElasticError) -> LauncherError:
    """Return an error that Hydra prints as its text alone; a traceback of the launcher is no help.

    With HYDRA_FULL_ERROR=1 Hydra prints the traceback.
    """
    if isinstance(error, LauncherError):
        return error
    hidden = LauncherError(str(error))
    hidden.__cause__ = error
    return hidden


def share_composition(context: HydraContext) -> None:
    """Make Hydra's sweeper compose its jobs as cheaply as the launcher (see `hydra_compose`)."""
    if not isinstance(context.config_loader, SharingLoader):
        context.config_loader = cast(Any, SharingLoader(context.config_loader))


def require_sweep_dir(config: DictConfig) -> None:
    """Refuse a directory that Hydra uses for a single job only, and would ignore here.

    Args:
        config: The config of the whole sweep.

    Raises:
        ConfigError: ``hydra.run.dir`` was given on the command line.
    """
    typed = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    for override in map(str, typed or ()):  # ${hydra.job.num} has no value yet
        key, _, value = override.partition("=")
        if key.lstrip("+") == "hydra.run.dir":
            remedy = "with a launcher, Hydra's runs are a sweep: use hydra.sweep.dir=..., and "
            remedy += "hydra.sweep.subdir=... for the folder of each run in it"
            raise ConfigError("hydra.run.dir", value, remedy)


def on_job_end(sweep: Sweep, job: FrozenJob, outcome: Outcome) -> JobReturn:
    """Return the JobReturn of a run that has ended, after Hydra's callbacks of that name."""
    returned = _job_return(job)
    returned.return_value = outcome.value
    returned.cfg = OmegaConf.create(job.task)
    returned.hydra_cfg = OmegaConf.create({"hydra": job.hydra})
    if outcome.error is not None:
        returned.status = JobStatus.FAILED
        returned.return_value = hide_traceback(outcome.error)
        returned.overrides = list(map(unescaped, job.request.overrides))  # Hydra prints them
    if sweep.context.callbacks.callbacks:
        sweep.context.callbacks.on_job_end(config=job.config(), job_return=returned)
    return returned


def _job_return(job: FrozenJob) -> JobReturn:
    return JobReturn(
        overrides=list(job.request.overrides),
        working_dir=str(job.request.dir),
        task_name=JobRuntime.instance().get("name"),
        status=JobStatus.COMPLETED,
    )


# ---- freeze a job

_OF_THE_JOB = ("job", "runtime", "overrides")
_RESOLVED = (*_OF_THE_JOB, "job_logging")
"""Sections of the ``hydra`` node that a running job may read, and that are resolved. Resolving the
others would cost more than all other work of freezing a job."""
_HELP = ("help", "hydra_help")
"""Texts of ``--help``, which Hydra also leaves out when it prints a config."""
_WITHIN_HYDRA = re.compile(r"([^$\\]|\$\{hydra\.(runtime\.output_dir|job\.name)\})*")
"""Texts of Hydra's defaults whose references are in the same frozen file, with a value: they are
kept, since parsing one interpolation costs as much as all other work for a job."""


@dataclass(frozen=True)
class FrozenJob:
    """One job of the sweep, with its configs as frozen.

    Attributes:
        request: The run to submit.
        task: The config that the user's function gets.
        hydra: The ``hydra`` node.
    """

    request: RunRequest
    task: dict[str, Any]
    hydra: dict[str, Any]

    def config(self) -> DictConfig:
        """Return both in one, for callbacks."""
        return OmegaConf.create({**self.task, "hydra": self.hydra})


@contextmanager
def cached_grammar() -> Iterator[None]:
    """Let OmegaConf parse each text only once, while the jobs of a sweep are frozen.

    Its parser takes a millisecond for ``${hydra.job.num}``; the tree depends on the text alone. The
    garbage collector is paused: a third of the time goes to its passes over small objects.
    """
    parse, collects = base.parse, gc.isenabled()  # type: ignore[attr-defined]
    base.parse = lru_cache(maxsize=4096)(parse)  # type: ignore[attr-defined]
    gc.disable()
    try:
        yield
    finally:
        base.parse = parse  # type: ignore[attr-defined]
        if collects:
            gc.enable()


def freeze_job(
    config: DictConfig, number: int, entry: Entry, shared: SharedSections | None = None
) -> FrozenJob:
    """Freeze the composed config of one job.

    Args:
        config: The config of the job, as Hydra composes it. hydra.job.num, hydra.job.id and
            hydra.runtime.output_dir are set in it, as Hydra's own launchers do.
        number: Number of the job in the sweep.
        entry: The user's function.
        shared: Sections of the jobs before.

    Raises:
        ConfigError: A setting cannot work, or an interpolation names a missing key.
    """
    shared = shared or SharedSections()
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = config  # type: ignore[assignment]  # for the ${hydra:} resolver
    try:
        node = config.hydra
        _set(node.job, "num", number)
        _set(node.job, "id", str(number))
        sweep = {"dir": str(node.sweep.dir), "subdir": str(node.sweep.subdir)}
        _set(node.runtime, "output_dir", str(Path(sweep["dir"], sweep["subdir"]).absolute()))
        overrides = tuple(node.overrides.task)
        task = {str(key): freeze(config, key) for key in config if key != "hydra"}
        hydra = {
            name: freeze(node, name, f"hydra.{name}")
            if name in _OF_THE_JOB
            else shared.plain(node, name)
            for name in map(str, node)
            if name not in _HELP
        }
        hydra["sweep"] = sweep
    finally:
        HydraConfig.instance().cfg = before
    params = OmegaConf.select(config, "hydra.sweeper.params")
    sweep_params = dict(params) if isinstance(params, DictConfig) else {}
    settings = resolve(task, overrides=overrides, sweep_params=cast(Any, sweep_params))
    task = {**task, **as_config(settings)}
    files = {
        "config.yaml": shared.yaml(task),
        "hydra.yaml": shared.yaml(hydra, top="hydra"),
        "overrides.yaml": to_yaml(list(overrides)),
    }
    path = Path(hydra["runtime"]["output_dir"])
    return FrozenJob(RunRequest(path, settings, entry, overrides, files), task, hydra)


def _set(parent: DictConfig, name: str, value: object) -> None:
    """Set a value; making a config writable costs ten times as much as writing to it."""
    node = parent._get_node(name)
    if isinstance(node, ValueNode) and not node._get_flag("readonly"):
        node._set_value(value)
        return
    with read_write(parent), open_dict(parent):
        parent[name] = value


class SharedSections:
    """Sections of the config that the jobs of a sweep share, made plain and written once.

    They are most of a job's files: most of ``hydra``, and ``launcher``. A section of ``hydra`` is
    identified by its node: jobs that are alike have the same one (see `hydra_compose`).
    """

    def __init__(self) -> None:
        self._plain: dict[str, tuple[Any, Any]] = {}
        self._text: dict[tuple[str, str], tuple[Any, str, str]] = {}

    def plain(self, hydra: DictConfig, name: str) -> Any:
        """Return a section as plain values; it is shared if no job changes it."""
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
        """Return ``to_yaml(config)``; with a ``top``, ``to_yaml({top: config})``."""
        if not config:
            return to_yaml({top: {}} if top else {})
        head = f"{top}:\n" if top else ""
        return head + "".join(self._section(top, name, plain) for name, plain in config.items())

    def _section(self, top: str, name: str, plain: Any) -> str:
        before, before_repr, text = self._text.get((top, name), (None, "", ""))
        if plain is before and text:
            return text
        plain_repr = repr(plain)  # unlike ==, it distinguishes 1 from True
        if plain_repr != before_repr:
            section = {name: plain}
            text = to_yaml({top: section}).removeprefix(f"{top}:\n") if top else to_yaml(section)
        self._text[top, name] = (plain, plain_repr, text)
        return text


def freeze(parent: DictConfig | ListConfig, name: Any, key: str = "") -> Any:
    """Return one entry of a config as plain values, its interpolations resolved.

    Args:
        parent: The config that holds it, attached to the whole.
        name: Its key, or its index.
        key: Its dotted name in the whole, for errors.

    Raises:
        ConfigError: An interpolation names a key that does not exist.
    """
    node = parent._get_node(name)  # unlike parent[name], cheap, and without resolution
    assert not isinstance(node, list) and node is not None
    raw = node._value()
    if isinstance(node, DictConfig | ListConfig) and not isinstance(raw, str | None):
        return _resolve(node, key or str(name))
    return _freeze_leaf(parent, name, raw, key or str(name))


def _resolve(config: Any, key: str, plain: Any = None) -> Any:
    """Return a container as plain values, each interpolation in it replaced by its value."""
    if plain is None:
        plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, dict | list):
            _resolve(config._get_node(name), f"{key}.{name}", value)
        elif isinstance(value, str) and "${" in value:
            plain[name] = _freeze_leaf(config, name, value, f"{key}.{name}")
    return plain


def _freeze_leaf(parent: DictConfig | ListConfig, name: Any, raw: Any, key: str) -> Any:
    """Return the value of a leaf; an interpolation that only a node can resolve stays as it is."""
    if key.startswith("hydra.") and isinstance(raw, str) and _WITHIN_HYDRA.fullmatch(raw):
        return raw
    if not OmegaConf.is_interpolation(parent, name):
        return raw.name if isinstance(raw, Enum) else raw
    try:
        value = parent[name]
    except (InterpolationKeyError, InterpolationValidationError) as e:
        reason = str(e).splitlines()[0]
        raise ConfigError(key, raw, f"the interpolation cannot be resolved: {reason}") from e
    except OmegaConfBaseException:
        return raw
    if isinstance(value, DictConfig | ListConfig):
        return _resolve(value, key)
    if isinstance(value, Enum):
        return value.name
    # a reader of the frozen file must not take a resolved text for an interpolation
    return value.replace("${", "\\${") if isinstance(value, str) else value


_FastDumper: Any = getattr(yaml, "CDumper", yaml.Dumper)


class _Dumper(_FastDumper):  # type: ignore[misc]
    """OmegaConf's YAML, written by libyaml: eight times as fast."""

    def ignore_aliases(self, data: object) -> bool:
        """Write equal containers twice: readers need no anchors."""
        return True


_Dumper.add_representer(str, OmegaConfDumper.str_representer)


def to_yaml(plain: Any) -> str:
    """Return ``OmegaConf.to_yaml`` of plain values."""
    text: str = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text
