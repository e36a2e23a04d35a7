"""Composition of the configs of a sweep by Hydra, with shared work for jobs that are alike.

Hydra composes each job's config from scratch: it reads the YAML of every group again, which takes
about 50 ms per job, and does so twice, since the sweeper composes every job to validate it. That is
20 s for a sweep of 200. Jobs of a sweep mostly differ in values (``lr=0.1``) and not in groups
(``model=large``), and Hydra applies values after it has merged all groups. So jobs with the same
groups share that merge, and consecutive jobs the values that they have in common. What remains per
job is a copy of the nodes that it changes, and its own values.

The sweeper's validation changes nothing, so the launcher gets the same config object again.

The result is checked against Hydra: when a second job has the same groups, the first is composed
both ways. If the two differ, or the overrides are unusual, Hydra composes every job in full.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, open_dict, read_write

from hpc_elastic._util import hydra_release
from hpc_elastic.config.schema import TOP_LEVEL

_REMEMBERED = 1000
"""Most configs that are kept from the sweeper's validation for the launcher."""
_WORKERS_ONLY = "HPC_ELASTIC_WORKERS_ONLY"
"""In ``hydra.job.env_set``: ends the program if Hydra runs a job itself."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_PLAIN = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


class SweepComposer:
    """Composes the jobs of a sweep; ``master`` is the config of the whole (login node)."""

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
        overrides do not touch, and the parent of those is the config composed last. Hydra's errors
        about the overrides (HydraException) pass through.
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
            typed = OmegaConf.to_container(self._master.hydra.overrides.hydra, resolve=False)
            options = self._loader.get_group_options(
                key,
                results_filter=None,
                config_name=self._master.hydra.job.config_name,
                overrides=[str(line) for line in typed or ()],
            )
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
