"""A Hydra sweep as elastic runs: its jobs are frozen as `RunRequest`s, and return as JobReturns.

The Hydra launcher plugin calls `launch_sweep`. It differs from Hydra's own launchers in two points,
both because a job runs elsewhere, in several processes:

- Callbacks' on_job_start and on_job_end are called here, before the submission and after the run
  has ended, not in the workers.
- With ``launcher.wait=false`` and ``launcher.dry_run=true`` the JobReturns are complete and have
  neither value nor config, since nothing has run yet.

A job is frozen as Hydra has composed it (`config.frozen`), and workers load the frozen files
instead of composing the config again. Interpolations stay what they are, and are read once here:
what depends on the moment, such as ``${now:...}``, is recorded, since every rank and every requeued
task must see the same; and a reference to a key that does not exist is reported, since it may be a
mistake that shows only hours later. The settings of the launcher are resolved here.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.errors import CompactHydraException, HydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, base, open_dict, read_write
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from hpc_elastic._util import hydra_release
from hpc_elastic.config import frozen
from hpc_elastic.config.frozen import Encoder, Frozen, Interpolation
from hpc_elastic.config.resolve import resolve
from hpc_elastic.config.schema import TOP_LEVEL, RunSettings
from hpc_elastic.errors import ConfigError, HpcElasticError
from hpc_elastic.launcher import detach
from hpc_elastic.launcher.plan import RunRequest
from hpc_elastic.launcher.run_handle import RunHandle
from hpc_elastic.launcher.submit import ended_by_interrupt, is_awaited, submit
from hpc_elastic.launcher.user_code import command_line, entry_of
from hpc_elastic.launcher.wait import shown, wait
from hpc_elastic.report.run_view import RunEnd, unescaped
from hpc_elastic.run.directory import Entry

_log = logging.getLogger(__name__)


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

    The first job has the number ``initial_job_idx``. Raises HpcElasticError if nothing was
    submitted: a run that fails later raises when its JobReturn is read, as Hydra expects.
    """
    with ended_by_interrupt():
        batch = Batch(sweep)
        numbered = enumerate(job_overrides, initial_job_idx)
        jobs = batch.freeze(shown(numbered, "runs composed", len(job_overrides)))
        batch.on_job_start(jobs)
        with suppress(OSError):  # Hydra's sweeper wrote it, and launcher.env may hold tokens
            (sweep.dir / "multirun.yaml").chmod(0o600)
        requests = [job.request for job in jobs]
        runs = submit(requests, sweep=sweep.dir, name=str(sweep.config.hydra.job.name))
        launcher = requests[0].settings.launcher
        if not is_awaited(launcher):
            return [_job_return(job) for job in jobs]
        job_of, returns = {job.request.dir: job for job in jobs}, {}

        def on_end(run: RunHandle, end: RunEnd) -> None:
            returns[run.dir] = batch.on_job_end(job_of[run.dir], end)

        wait(runs, poll_interval_s=launcher.poll_interval_s, on_end=on_end)
    return [returns[path] for path in job_of]


def hide_traceback(error: HpcElasticError) -> LauncherError:
    """Return an error that Hydra prints as its text alone; with HYDRA_FULL_ERROR=1, in full."""
    if isinstance(error, LauncherError):
        return error
    hidden = LauncherError(str(error))
    hidden.__cause__ = error
    return hidden


@contextmanager
def without_traceback() -> Iterator[None]:
    """Report the errors of a block, and let Hydra print them by `hide_traceback`."""
    try:
        yield
    except LauncherError:
        raise
    except HpcElasticError as e:
        detach.report_error(e)
        raise hide_traceback(e) from e


def share_composition(context: HydraContext, config: DictConfig) -> None:
    """Make Hydra's sweeper compose its jobs as the launcher does (see `SweepComposer`)."""
    if hidden := settings_in(config):
        lines: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        name_overrides(config, OverridesParser.create().parse_overrides(lines), hidden)
    if not isinstance(context.config_loader, SharingLoader):
        context.config_loader = cast(Any, SharingLoader(context.config_loader))


_LISTS_OF_SLURM = re.compile(r"launcher\.(exclude|constraint|gpus_per_node)")


def check_overrides(config: DictConfig) -> None:
    """Raise ConfigError for overrides that Hydra ignores, or reads otherwise than they are meant.

    They are ``hydra.run.dir``, what is no text of the locale, and lists of Slurm's:
    ``launcher.exclude=node1,node2`` would be two runs, each without one node. A sweep over
    partitions is named.
    """
    typed: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    for line in map(str, itertools.chain(*typed.values())):  # ${hydra.job.num} has no value yet
        key, _, value = line.partition("=")
        if key.lstrip("+") == "hydra.run.dir":
            remedy = "with a launcher, Hydra's runs are a sweep: use hydra.sweep.dir=..., and "
            remedy += "hydra.sweep.subdir=... for the folder of each run in it"
            raise ConfigError("hydra.run.dir", value, remedy)
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            where = sys.getfilesystemencoding()
            remedy = f"these bytes are no text in {where}: type UTF-8, and set LC_ALL=C.UTF-8 and "
            raise ConfigError(key, value, f"{remedy}PYTHONUTF8=1")
    lines = [str(line) for line in typed["task"] or () if "launcher." in str(line)]
    for override in OverridesParser.create().parse_overrides(lines):
        key, value = override.key_or_group, str(override.input_line).partition("=")[2]
        if not override.is_sweep_override():
            continue
        quoted = f"""'{key}="{value}"'"""
        if _LISTS_OF_SLURM.fullmatch(key):
            remedy = f"Hydra reads a run for each value; for one run with all of them type {quoted}"
            raise ConfigError(key, value, remedy)
        if key == "launcher.partition":
            note = f"{key}={value}: a run for each partition; for one run on nodes of any: {quoted}"
            print(note, file=sys.stderr)


class Batch:
    """Jobs of a sweep that are submitted by this process, with Hydra's callbacks of each."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._entry = entry_of(sweep.task_function, "hydra", command_line())
        self._shared = SharedSections()
        self._callbacks = sweep.context.callbacks

    def freeze(self, overrides: Iterable[tuple[int, Sequence[str]]]) -> list[FrozenJob]:
        """Return the jobs with these numbers (hydra.job.num) and overrides."""
        config, load = self._sweep.config, self._sweep.context.config_loader.load_sweep_config
        with cached_grammar():
            return [
                freeze_job(load(config, list(lines)), number, self._entry, self._shared)
                for number, lines in overrides
            ]

    def on_job_start(self, jobs: Iterable[FrozenJob]) -> None:
        """Call Hydra's callbacks of that name."""
        function = self._sweep.task_function
        for job in jobs if self._callbacks.callbacks else ():
            self._callbacks.on_job_start(config=job.config(), task_function=function)

    def on_job_end(self, job: FrozenJob, end: RunEnd) -> JobReturn:
        """Return the JobReturn of a run that has ended, after Hydra's callbacks of that name."""
        returned = _job_return(job)
        returned.return_value = end.value
        returned.cfg = frozen.decode(job.task)
        returned.hydra_cfg = frozen.whole_config(Frozen({}, {}), job.hydra)
        if end.error is not None:
            returned.status = JobStatus.FAILED
            returned.return_value = hide_traceback(end.error)
            returned.overrides = list(map(unescaped, job.request.overrides))  # Hydra prints them
        if self._callbacks.callbacks:
            self._callbacks.on_job_end(config=job.config(), job_return=returned)
        return returned


def _job_return(job: FrozenJob) -> JobReturn:
    overrides, name = list(job.request.overrides), JobRuntime.instance().get("name")
    folder, status = str(job.request.dir), JobStatus.COMPLETED
    return JobReturn(overrides=overrides, working_dir=folder, task_name=name, status=status)


_REMEMBERED = 1000
"""Most configs that are kept from the sweeper's validation for the launcher."""
_WORKERS_ONLY = "HPC_ELASTIC_WORKERS_ONLY"
"""In ``hydra.job.env_set``: ends the program if Hydra runs a job itself."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_PLAIN = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


class SweepComposer:
    """Composes the jobs of a sweep, with shared work for jobs that are alike.

    Hydra composes each job's config from scratch: it reads the YAML of every group again, which
    takes about 50 ms per job, and does so twice, since the sweeper composes every job to validate
    it. That is 20 s for a sweep of 200. Jobs mostly differ in values (``lr=0.1``) and not in groups
    (``model=large``), and Hydra applies values after it has merged all groups. So jobs with the
    same groups share that merge, and consecutive jobs the values that they have in common. What
    remains per job is a copy of the nodes that it changes, and its own values. The sweeper's
    validation changes nothing, so the launcher gets the same config object again.

    The result is checked against Hydra: when a second job has the same groups, the first is
    composed both ways. If the two differ, or the overrides are unusual, Hydra composes every job in
    full. ``master`` is the config of the whole.
    """

    def __init__(self, loader: Any, master: DictConfig) -> None:
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._of_key: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._hidden = settings_in(master)
        self._first: dict[tuple[str, ...], tuple[tuple[str, ...], object]] = {}
        """Groups -> overrides of the first job with them, and its config."""
        self._given: dict[tuple[str, ...], DictConfig] = {}
        """Overrides -> config that was returned once."""
        self._shared: dict[tuple[str, ...], DictConfig | None] = {}
        self._before: tuple[str, ...] = ()
        self._common: tuple[DictConfig, tuple[str, ...], DictConfig] | None = None

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the config of the job with these overrides, as `load_sweep_config` would.

        It is valid until the next call: jobs that are alike share all top-level nodes that their
        overrides do not touch, and the parent of those is the config composed last.
        """
        before, self._before = self._before, tuple(overrides)
        config = self._given.pop(self._before, None)
        if config is None:
            config = self._composed(overrides, before)
            if len(self._given) < _REMEMBERED:
                self._given[self._before] = config
            return config
        hydra = config._get_node("hydra")
        if any(s is not None and s._get_node("hydra") is hydra for s in self._shared.values()):
            _adopt(config)
            self._name(config, overrides)
        return config

    def _composed(self, overrides: Sequence[str], before: tuple[str, ...]) -> DictConfig:
        split = self._split(overrides)
        if split is None:
            return self._in_full(overrides)
        groups, values = split
        if groups not in self._first:
            full = self._in_full(overrides)
            self._first[groups] = (tuple(overrides), _raw(full))
            return full
        if groups not in self._shared:
            self._shared[groups] = self._share(groups)
        shared = self._shared[groups]
        if shared is None:
            return self._in_full(overrides)
        # in common with the job before, or its own; values below one top-level key stay together,
        # since their order matters
        new = {_top(value) for value in values if value.input_line not in before}
        common = [value for value in values if _top(value) not in new]
        own = [value for value in values if _top(value) in new]
        lines = tuple(str(value.input_line) for value in common)
        if self._common is None or self._common[0] is not shared or self._common[1] != lines:
            self._common = (shared, lines, self._set(shared, common))
        return self._name(self._set(self._common[2], own), overrides)

    def _in_full(self, overrides: Sequence[str]) -> DictConfig:
        config: DictConfig = self._loader.load_sweep_config(self._master, list(overrides))
        environment = config.hydra.job.env_set
        with read_write(environment), open_dict(environment), suppress(KeyError):
            del environment[_WORKERS_ONLY]
        if self._hidden:
            name_overrides(config, self._parser.parse_overrides(list(overrides)), self._hidden)
        return config

    def _share(self, groups: tuple[str, ...]) -> DictConfig | None:
        """Return what jobs with these groups share; None if the first job would differ with it."""
        overrides, full = self._first[groups]
        try:
            shared = self._in_full(groups)
            _, values = self._split(overrides) or ((), [])
            same = _raw(self._name(self._set(shared, values), overrides)) == full
        except HydraException:
            same = False
        return shared if same else None

    def _set(self, shared: DictConfig, values: list[Override]) -> DictConfig:
        """Return a copy with these values; it shares the nodes that they do not touch."""
        touched = {_top(override) for override in values}
        meta = copy.copy(shared.__dict__["_metadata"])
        meta.flags = dict(meta.flags or {})
        config = DictConfig.__new__(DictConfig)
        nodes = shared.__dict__["_content"].items()
        content = {key: copy.deepcopy(node) if key in touched else node for key, node in nodes}
        config.__dict__.update(shared.__dict__, _metadata=meta, _content=content, _flags_cache=None)
        _adopt(config)
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    def _name(self, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """Set what Hydra sets of a job beside its values: its overrides."""
        hydra: Any = config._get_node("hydra")
        _replace(hydra._get_node("overrides"), "task", list(overrides))
        name_overrides(config, [self._parsed[line] for line in overrides], self._hidden)
        return config

    def _split(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], list[Override]] | None:
        """Return the overrides of groups and of values; None if they cannot be separated safely."""
        groups, values = [], []
        for line in overrides:
            override = self._parse(line)
            is_group = self._is_group(override)
            if override.is_hydra_override() or override.is_sweep_override():
                return None
            if is_group and isinstance(override.value(), dict):
                return None
            if is_group or override.package is not None:
                groups.append(line)
            elif override.type in _PLAIN:
                values.append(override)
            else:
                return None
        return tuple(groups), values

    def _parse(self, line: str) -> Override:
        """Return the override; of a key that was parsed before, a number needs no parser."""
        if line not in self._parsed:
            key, _, text = line.partition("=")
            alike = self._of_key.get(key)
            if alike is not None and _NUMBER.fullmatch(text):
                value = float(text) if "." in text else int(text)
                self._parsed[line] = replace(alike, _value=value, input_line=line)
            else:
                self._parsed[line] = self._parser.parse_override(line)
                if _NUMBER.fullmatch(text):
                    self._of_key[key] = self._parsed[line]
        return self._parsed[line]

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self._groups:
            hydra = self._master.hydra
            typed = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
            options = self._loader.get_group_options(
                key, results_filter=None, config_name=hydra.job.config_name,
                overrides=[str(line) for line in typed or ()],
            )  # fmt: skip
            self._groups[key] = bool(options)
        return self._groups[key]


def settings_in(config: DictConfig) -> frozenset[str]:
    """Return the keys of the launcher's settings that were typed, and have one value in all jobs.

    ``hydra.job.override_dirname``, which names folders, leaves them out: they do not distinguish
    the jobs, and ``launcher.env`` may hold tokens.
    """
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    parsed = OverridesParser.create().parse_overrides([str(line) for line in typed or ()])
    swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
    keys = {override.key_or_group for override in parsed} - swept
    return frozenset(key for key in keys if re.match(r"launcher\b", key) or key in TOP_LEVEL)


def name_overrides(
    config: DictConfig, overrides: Sequence[Override], hidden: Collection[str]
) -> None:
    """Leave the hidden keys out of ``hydra.job.override_dirname``.

    Hydra 1.4 makes it of the config when it is read, and 1.3 had made it before.
    """
    hydra: Any = config._get_node("hydra")
    job = hydra._get_node("job")
    naming = job._get_node("config")._get_node("override_dirname")
    excluded = {key._value() for key in naming._get_node("exclude_keys")._value()}.union(hidden)
    if hydra_release() >= (1, 4):
        with read_write(naming):
            naming.exclude_keys = sorted(excluded)
        return
    lines = sorted(str(o.input_line) for o in overrides if o.key_or_group not in excluded)
    between, equals = (naming._get_node(name)._value() for name in ("item_sep", "kv_sep"))
    set_value(job, "override_dirname", between.join(lines).replace("=", equals))


def set_value(parent: DictConfig, name: str, value: object) -> None:
    """Set a value; making a config writable costs ten times as much as writing to it."""
    node = parent._get_node(name)
    if isinstance(node, ValueNode) and not node._get_flag("readonly"):
        node._set_value(value)
        return
    with read_write(parent), open_dict(parent):
        parent[name] = value


def _replace(parent: DictConfig, name: str, lines: list[str]) -> None:
    """Set a list of texts; equal texts are kept, which is cheaper."""
    before = parent._get_node(name)
    nodes: Any = before._content if isinstance(before, ListConfig) else None
    if not isinstance(nodes, list) or len(nodes) != len(lines):
        with open_dict(parent):
            parent[name] = lines
        return
    for node, line in zip(nodes, lines, strict=True):
        if node._value() != line:
            node._set_value(line)


def _adopt(config: DictConfig) -> None:
    """Make a config the parent of its nodes, which others may have, too."""
    for node in config.__dict__["_content"].values():
        node._set_parent(config)


def _top(override: Override) -> str:
    return override.key_or_group.partition(".")[0].partition("[")[0]


class SharingLoader:
    """Hydra's config loader, with `load_sweep_config` by a `SweepComposer`.

    The launcher puts it into the HydraContext that it shares with the sweeper, so that the
    sweeper's validation is cheap as well. All other attributes are those of the real loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._composers: dict[int, SweepComposer] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real loader."""
        return getattr(self._loader, name)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the config of one job; it is valid until the next call."""
        key = id(master_config)
        if key not in self._composers:
            self._composers[key] = SweepComposer(self._loader, master_config)
        return self._composers[key].compose(sweep_overrides)


def _raw(config: DictConfig) -> object:
    return OmegaConf.to_container(config, resolve=False)


# ---- freeze a job

_OF_THE_JOB = ("hydra.job", "hydra.runtime", "hydra.overrides")
"""Sections that are other ones in each job, as some of the values in them are."""
_CALL = re.compile(r"\$\{\s*(?!hydra:)[\w.]+:")
"""A call of a resolver. Parsing an interpolation costs a millisecond."""


@dataclass(frozen=True)
class FrozenJob:
    """One job of the sweep, with its configs as frozen: the user's, and the ``hydra`` node."""

    request: RunRequest
    task: Frozen
    hydra: Frozen

    def config(self) -> DictConfig:
        """Return both in one, for callbacks."""
        return frozen.whole_config(self.task, self.hydra)


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
    """Freeze the composed config of one job; ConfigError if a setting or a value cannot work.

    Its number, id and folder are set in it, as Hydra's own launchers do. ``shared`` has the
    sections of the jobs before.
    """
    shared = shared or SharedSections()
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = config  # type: ignore[assignment]  # for the ${hydra:} resolver
    try:
        with shared.recorder.recording() as calls:
            node: Any = config._get_node("hydra")
            set_value(node._get_node("job"), "num", number)
            set_value(node._get_node("job"), "id", str(number))
            sweep = node._get_node("sweep")
            is_default = sweep._get_node("subdir")._value() == "${hydra.job.num}"
            subdir = str(number) if is_default else str(sweep["subdir"])
            folder = Path(str(sweep["dir"]), subdir).absolute()
            set_value(node._get_node("runtime"), "output_dir", str(folder))
            task, hydra = shared.plain(config, skip=("hydra",)), shared.plain(node, "hydra")
            settings = shared.settings(config, task, hydra)
    finally:
        HydraConfig.instance().cfg = before
    overrides = tuple(map(str, hydra.values["overrides"]["task"] or ()))
    files = {
        "config.yaml": shared.texts(task.values),
        "hydra.yaml": shared.texts(hydra.values, "hydra"),
        "overrides.yaml": [to_yaml(list(overrides))],
        frozen.FROZEN_FILE: [shared.types(task, hydra), f"{json.dumps([*map(vars, calls)])}}}"],
    }
    return FrozenJob(RunRequest(folder, settings, entry, overrides, files), task, hydra)


@dataclass(frozen=True)
class _Section:
    node: Any
    value: Any
    plain: Frozen
    interpolations: list[Interpolation]


class SharedSections:
    """What the jobs of a sweep share: sections of the config, made plain and written once.

    They are most of a job's files: most of ``hydra``, ``launcher``, and what no override changes. A
    section is identified by its node: jobs that are alike have the same one (see `SweepComposer`).
    What is wrong in all jobs is reported once.
    """

    def __init__(self) -> None:
        self.recorder = frozen.Recorder()
        self._sections: dict[str, _Section] = {}
        self._text: dict[tuple[str, ...], tuple[Any, str, str]] = {}
        self._types: tuple[list[Any], str] = ([], "")
        self._settings: dict[str, RunSettings] = {}
        self._reported: set[str] = set()

    def plain(self, node: DictConfig, name: str = "", skip: Sequence[str] = ()) -> Frozen:
        """Return a node as `Encoder.encode` does; a section that no job changes is made plain once.

        Interpolations are read that are new, or call a resolver.
        """
        content: dict[str, Any] = cast(Any, node._value())
        _, types = Encoder().encode(node, name, skip=tuple(content))
        sections = {
            key: self._section(child, f"{name}.{key}" if name else str(key))
            for key, child in content.items()
            if key not in skip
        }
        below = {str(at): of.types for at, of in enumerate(sections.values()) if of.types}
        values = {key: of.values for key, of in sections.items()}
        return Frozen(values, {**types, "in": below} if below else types)

    def _section(self, node: Any, name: str) -> Frozen:
        if name in _OF_THE_JOB:
            return self.plain(node, name)
        section, value, of_hydra = self._sections.get(name), node._value(), name[:6] == "hydra."
        is_new = section is None or section.node is not node or section.value is not value
        if section is None or is_new or name == "hydra.overrides.task":
            encoder = Encoder()
            plain, found = encoder.encode(node, name), encoder.interpolations
            section = self._sections[name] = _Section(node, value, plain, found)
            for hint, first in encoder.lost.items() if not of_hydra else ():
                remedy = "define it at module level, in a module that workers import"
                self._report(f"{first}: its type {hint} is lost in workers", remedy)
        for interpolation in section.interpolations:
            if _CALL.search(interpolation.text) or (is_new and not of_hydra):
                self._read(interpolation)
        return section.plain

    def _read(self, interpolation: Interpolation) -> None:
        """Read an interpolation to record its calls; a worker may succeed where this fails."""
        try:
            interpolation.value()
        except InterpolationKeyError as e:
            problem = f"{interpolation.name}: {interpolation.text}: {str(e).splitlines()[0]}"
            self._report(problem, "it fails in workers unless the function sets the key")
        except OmegaConfBaseException:
            return

    def _report(self, problem: str, remedy: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            _log.warning("%s; %s", problem, remedy)

    def settings(self, config: DictConfig, task: Frozen, hydra: Frozen) -> RunSettings:
        """Return the checked settings of a job; ConfigError as of `resolve`."""
        keys = [key for key in (*TOP_LEVEL, "launcher") if key in task.values]
        given = {key: self._resolved(config, key, task.values[key]) for key in keys}
        lines = list(map(str, hydra.values["overrides"]["task"] or ()))
        ours = [line for line in lines if line.lstrip("+").startswith(("launcher", *TOP_LEVEL))]
        known = repr((given, ours, hydra.values.get("sweeper")))
        if known not in self._settings:
            params = OmegaConf.select(config, "hydra.sweeper.params")
            of_yaml = dict(params) if isinstance(params, DictConfig) else {}
            resolved = resolve(given, overrides=lines, sweep_params=cast(Any, of_yaml))
            self._settings[known] = resolved
        return self._settings[known]

    def _resolved(self, config: DictConfig, key: str, plain: Any) -> Any:
        """Return a setting of ours as plain values; raise ConfigError if it cannot be resolved."""
        interpolations = self._sections[key].interpolations
        for each in interpolations:
            try:
                each.value()
            except OmegaConfBaseException as e:
                remedy = f"the interpolation cannot be resolved: {str(e).splitlines()[0]}"
                raise ConfigError(each.name, each.text, remedy) from e
        if not interpolations:
            return plain
        value = config[key]
        is_config = isinstance(value, DictConfig | ListConfig)
        return OmegaConf.to_container(value, resolve=True, enum_to_str=True) if is_config else value

    def types(self, task: Frozen, hydra: Frozen) -> str:
        """Return the first part of the file of the types, up to the calls."""
        both = [task.types, hydra.types]
        if both != self._types[0]:
            types = json.dumps({"config": task.types, "hydra": hydra.types})
            self._types = (both, f'{types[:-1]}, "calls": ')
        return self._types[1]

    def texts(self, config: Mapping[str, Any], *path: str) -> list[str]:
        """Return ``to_yaml(config)`` in pieces; with a ``path``, as what stands there."""
        if not config:
            return [_yaml_at(path[:-1], path[-1], {}) if path else to_yaml({})]
        pieces = [f"{'  ' * (len(path) - 1)}{path[-1]}:\n"] if path else []
        for name, plain in config.items():
            inner = (*path, name)
            whole = ".".join(map(str, inner)) not in _OF_THE_JOB
            pieces += [self._text_of(inner, plain)] if whole else self.texts(plain, *inner)
        return pieces

    def _text_of(self, path: tuple[str, ...], plain: Any) -> str:
        before, before_repr, text = self._text.get(path, (None, "", ""))
        if plain is before and text:
            return text
        plain_repr = repr(plain)  # unlike ==, it distinguishes 1 from True
        if plain_repr != before_repr:
            text = _yaml_at(path[:-1], path[-1], plain)
        self._text[path] = (plain, plain_repr, text)
        return text


def _yaml_at(path: Sequence[str], name: str, plain: Any) -> str:
    """Return the lines of a key as they stand below others."""
    section, is_leaf = {name: plain}, isinstance(plain, str | int)
    if is_leaf and len(text := to_yaml(section)) < 60 and "\n" not in text[:-1]:
        return "  " * len(path) + text
    for top in reversed(path):
        section = {top: section}
    text = to_yaml(section)
    for depth, top in enumerate(path):
        text = text.removeprefix(f"{'  ' * depth}{top}:\n")
    return text


class _Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
    """OmegaConf's YAML, written by libyaml: eight times as fast."""

    def ignore_aliases(self, data: object) -> bool:
        """Write equal containers twice: readers need no anchors."""
        return True


def _represent_text(dumper: Any, text: str) -> yaml.Node:
    """Quote also what only OmegaConf reads as a number or a boolean: ``1e3``, ``y``."""
    style = "'" if text in ("y", "Y", "n", "N") else None
    with suppress(ValueError):
        float(text)
        style = "'"
    node: yaml.Node = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


_Dumper.add_representer(str, _represent_text)


def to_yaml(plain: Any) -> str:
    """Return ``OmegaConf.to_yaml`` of plain values."""
    text: str = yaml.dump(
        plain, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text
