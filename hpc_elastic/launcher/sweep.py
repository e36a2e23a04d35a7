"""A Hydra sweep as elastic runs: from the overrides of its jobs to their JobReturns.

The launcher plugin hands its arguments to `launch_sweep`. Two differences from Hydra's own
launchers, both because the job runs elsewhere, in several processes:

- callbacks' on_job_start and on_job_end are called here, before the submission and after the
  run has ended, not in the workers;
- with ``launcher.wait=false`` and ``launcher.dry_run=true`` the JobReturns are complete and have
  neither value nor config, since nothing has run yet.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, base, open_dict, read_write
from omegaconf._utils import OmegaConfDumper  # its rule for which strings need quotes
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from hpc_elastic.config.resolve import as_config, resolve
from hpc_elastic.config.schema import RunSettings
from hpc_elastic.errors import ConfigError, HpcElasticError, RunDirectoryError
from hpc_elastic.launcher import detach, session
from hpc_elastic.launcher.hydra_compose import SharingLoader
from hpc_elastic.launcher.plan import PlannedRun
from hpc_elastic.launcher.prepare import Prepared, entry_of, several_at_once
from hpc_elastic.launcher.wait import Outcome
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import write_atomic


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives to a launcher at its set-up."""

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig

    @property
    def dir(self) -> Path:
        """Return the absolute path of the sweep directory."""
        return Path(str(self.config.hydra.sweep.dir)).absolute()


def launch_sweep(
    sweep: Sweep, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Freeze, submit and, unless told otherwise, wait for the jobs of one batch.

    Args:
        sweep: What Hydra set up.
        job_overrides: The overrides of each job.
        initial_job_idx: hydra.job.num of the first.

    Raises:
        HpcElasticError: nothing was submitted. A run that fails later raises when its JobReturn
            is read, as Hydra wants it.
        SystemExit: it was interrupted; what has become of the runs was printed.
    """
    detached = detach.report_file() is not None
    shared = SharedSections()
    with session.ended_by_interrupt():
        jobs = _freeze(sweep, job_overrides, initial_job_idx, shared)
        for job in jobs:
            _on_job_start(sweep, job)
        prepared = _prepare(sweep, jobs, shared)
        if prepared.plan.launcher.dry_run:
            session.announce(prepared)
            return [_returned(job) for job in jobs]
        submitted = session.submit(prepared)
        with session.let_go_on_failure(submitted.handle):
            if detached:
                _detach(prepared, submitted)
            elif not prepared.plan.launcher.wait:
                session.announce(prepared, submitted)
        if prepared.plan.backend == "slurm" and (detached or not prepared.plan.launcher.wait):
            return [_returned(job) for job in jobs]
        outcomes = session.wait(submitted)
    return [_ended(sweep, job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]


def _detach(prepared: Prepared, submitted: session.Submitted) -> None:
    """Tell `hpc-elastic submit` what was submitted; a launcher that goes on leaves its terminal.

    That one does so once: by the second batch of its sweep the command has returned.
    """
    file, plan = detach.report_file(), prepared.plan
    assert file is not None
    if plan.backend == "local" and detach.has_left_terminal():
        return
    log = detach.log_of(plan) if plan.backend == "local" else None
    if log is not None:
        detach.leave_terminal(log)
    detach.tell(file, detach.entry(prepared, list(submitted.handle.job_ids), log=log))


def _prepare(sweep: Sweep, jobs: Sequence[FrozenJob], shared: SharedSections) -> Prepared:
    entry = entry_of(sweep.task_function, "hydra")
    prepared = session.prepare_runs(
        [PlannedRun(job.dir, job.settings, job.overrides) for job in jobs],
        entry,
        sweep=sweep.dir,
        name=str(sweep.config.hydra.job.name),
        source=Path(entry.script).parent if entry.script else Path(entry.cwd),
    )
    several_at_once(partial(write_hydra_files, shared=shared), jobs)
    _make_private(sweep.dir / "multirun.yaml")
    return prepared


def _make_private(file: Path) -> None:
    """Take away others' right to read what Hydra's sweeper wrote: ``launcher.env`` is in it."""
    with suppress(OSError):
        file.chmod(0o600)


def compact(error: HpcElasticError) -> HpcElasticError:
    """Return the same error, of a class that Hydra prints without a traceback.

    The message says all that the user needs; a stack of Hydra's and our internals would bury it.
    With HYDRA_FULL_ERROR=1 it is there. The error stays an instance of its own class.
    """
    if not isinstance(error, CompactHydraException):
        own = type(error)
        error.__class__ = type(own.__name__, (own, CompactHydraException), {})
    return error


def share_composition(context: HydraContext) -> None:
    """Make Hydra's sweeper compose its jobs as cheaply as we do (see `hydra_compose`)."""
    if not isinstance(context.config_loader, SharingLoader):
        context.config_loader = cast(Any, SharingLoader(context.config_loader))


def _freeze(
    sweep: Sweep,
    job_overrides: Sequence[Sequence[str]],
    initial_job_idx: int,
    shared: SharedSections,
) -> list[FrozenJob]:
    load = sweep.context.config_loader.load_sweep_config
    with _paused_gc(), remembered_grammar():
        return [
            freeze_job(load(sweep.config, list(overrides)), number, shared)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Spare a burst of a million small objects the collector's looks at it: a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _has_callbacks(sweep: Sweep) -> bool:
    return bool(sweep.context.callbacks.callbacks)


def _on_job_start(sweep: Sweep, job: FrozenJob) -> None:
    if _has_callbacks(sweep):
        config = OmegaConf.create({**job.task, "hydra": job.hydra})
        sweep.context.callbacks.on_job_start(config=config, task_function=sweep.task_function)


def _ended(sweep: Sweep, job: FrozenJob, outcome: Outcome) -> JobReturn:
    returned = _returned(job, outcome.value)
    returned.cfg = OmegaConf.create(job.task)
    returned.hydra_cfg = OmegaConf.create({"hydra": job.hydra})
    if outcome.error is not None:
        returned.status = JobStatus.FAILED
        returned.return_value = compact(outcome.error)
        returned.overrides = [session.as_typed(line) for line in job.overrides]  # Hydra prints them
    if _has_callbacks(sweep):
        config = OmegaConf.create({**job.task, "hydra": job.hydra})
        sweep.context.callbacks.on_job_end(config=config, job_return=returned)
    return returned


def _returned(job: FrozenJob, value: Any = None) -> JobReturn:
    returned = JobReturn(
        overrides=list(job.overrides),
        working_dir=str(job.dir),
        task_name=JobRuntime.instance().get("name"),
        status=JobStatus.COMPLETED,
    )
    returned.return_value = value
    return returned


# ---- One job of a Hydra sweep, frozen: what a requeued task will run, whatever has changed by then
# `freeze_job` decides (it writes nothing), `write_hydra_files` writes what Hydra itself writes
# into the output directory of a job, but with interpolations resolved. Workers load
# these files in place of composing the config again.


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
    is known by its node: jobs that are alike have the same one (see `hydra_compose`).
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


# ---- A config frozen at submission: plain containers, with interpolations resolved
# Every rank and every requeue must see the same values, so ``${now:...}`` and whatever else
# depends on the moment is resolved here. What only the node can know (``${oc.env:SLURM_JOB_ID}``)
# fails here in its resolver, and stays an interpolation. A reference to a key that does not exist
# can never work: that is the user's error, and is told at once.


_WITHIN_HYDRA = re.compile(r"([^$\\]|\$\{hydra\.(runtime\.output_dir|job\.name)\})*")
"""Texts of Hydra's defaults whose references stand in the same frozen file, with a value: worth
the exception, since parsing one interpolation costs as much as all else that is done to a job."""

_FastDumper: Any = getattr(yaml, "CDumper", yaml.Dumper)


class _Dumper(_FastDumper):  # type: ignore[misc]
    """OmegaConf's YAML, written by libyaml: eight times as fast."""

    def ignore_aliases(self, data: object) -> bool:
        """Write equal containers out twice: readers need no anchors."""
        return True


_Dumper.add_representer(str, OmegaConfDumper.str_representer)


@contextmanager
def remembered_grammar() -> Iterator[None]:
    """Let OmegaConf parse each text once only, while the jobs of a sweep are frozen.

    Its parser takes a millisecond for ``${hydra.job.num}``; the tree depends on the text alone.
    """
    parse = base.parse  # type: ignore[attr-defined]
    base.parse = lru_cache(maxsize=4096)(parse)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        base.parse = parse  # type: ignore[attr-defined]


def freeze(parent: DictConfig | ListConfig, name: Any, key: str = "") -> Any:
    """Return one entry of a config as plain values, its interpolations resolved.

    Args:
        parent: The config that holds it, still attached to the whole.
        name: Its key, or its index.
        key: Its dotted name in the whole, for errors.

    Raises:
        ConfigError: an interpolation names a key that does not exist.
    """
    node = _child(parent, name)
    raw = node._value()
    if isinstance(node, DictConfig | ListConfig) and not isinstance(raw, str | None):
        return _container(node, key or str(name))
    return _leaf(parent, name, raw, key or str(name))


def to_yaml(plain: Any) -> str:
    """Return what ``OmegaConf.to_yaml`` would write."""
    text: str = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text


def _container(config: DictConfig | ListConfig, key: str) -> Any:
    plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return _resolve(config, plain, key)


def _resolve(config: DictConfig | ListConfig, plain: Any, key: str) -> Any:
    """Replace, in place, each interpolation below ``plain`` by its value."""
    for name, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, dict | list):
            _resolve(_child(config, name), value, f"{key}.{name}")
        elif isinstance(value, str) and "${" in value:
            plain[name] = _leaf(config, name, value, f"{key}.{name}")
    return plain


def _child(config: DictConfig | ListConfig, name: Any) -> Any:
    return config._get_node(name)  # unlike config[name], cheap, and no resolution


def _leaf(parent: DictConfig | ListConfig, name: Any, raw: Any, key: str) -> Any:
    """Return the value of a leaf; of an interpolation that only a node can resolve, itself."""
    if key.startswith("hydra.") and isinstance(raw, str) and _WITHIN_HYDRA.fullmatch(raw):
        return raw
    if not OmegaConf.is_interpolation(parent, name):
        return raw.name if isinstance(raw, Enum) else raw
    try:
        return _plain(parent[name], key)
    except (InterpolationKeyError, InterpolationValidationError) as e:
        reason = str(e).splitlines()[0]
        raise ConfigError(key, raw, f"the interpolation can not be resolved: {reason}") from e
    except OmegaConfBaseException:
        return raw


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, DictConfig | ListConfig):
        return _container(value, key)
    if isinstance(value, Enum):
        return value.name
    # Whoever loads the frozen file must not take a resolved text for an interpolation.
    return value.replace("${", "\\${") if isinstance(value, str) else value
