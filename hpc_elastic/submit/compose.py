"""The config of each job of a sweep, composed by Hydra, and cheaply where jobs are alike.

Hydra composes a job's config from nothing: it reads the YAML of every group again, which costs
about 50 ms a job, and does so twice, since the sweeper composes every job to validate it. That is
20 s for a sweep of 200. Jobs of a sweep mostly differ in values (``lr=0.1``) and not in groups
(``model=large``), and Hydra itself applies values after all groups have been merged. So jobs with
the same groups share that merge: what remains is a copy of what they change, and their values.

That this gives what Hydra gives is checked, not believed: the second job with the same groups
is composed both ways, and where the two differ, or where anything is unusual about the overrides,
every job goes the long way.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

_PLAIN = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


class SweepComposer:
    """Composes the jobs of one sweep (login node).

    Args:
        loader: Hydra's config loader, from the HydraContext of the launcher.
        master: The config of the sweep as a whole, from ``Launcher.setup``.
    """

    def __init__(self, loader: Any, master: DictConfig) -> None:
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._seen: set[tuple[str, ...]] = set()
        self._shared: dict[tuple[str, ...], DictConfig | None] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the config of the job with these overrides, as `load_sweep_config` would.

        It is good until the next call: jobs that are alike share all top-level nodes that their
        overrides do not touch, and those belong to the job composed last.

        Raises:
            HydraException: Hydra's own errors about the overrides.
        """
        split = self._split(overrides)
        if split is None:
            return self._in_full(overrides)
        groups, values = split
        if groups not in self._seen:
            self._seen.add(groups)
            return self._in_full(overrides)
        if groups not in self._shared:
            return self._share(groups, overrides, values)
        shared = self._shared[groups]
        return (
            self._in_full(overrides) if shared is None else self._apply(shared, overrides, values)
        )

    def _in_full(self, overrides: Sequence[str]) -> DictConfig:
        config: DictConfig = self._loader.load_sweep_config(self._master, list(overrides))
        return config

    def _share(
        self, groups: tuple[str, ...], overrides: Sequence[str], values: list[Override]
    ) -> DictConfig:
        """Compose a job both ways, and keep the short one if it gives the same."""
        full = self._in_full(overrides)
        try:
            shared = self._in_full(groups)
            same = _raw(self._apply(shared, overrides, values)) == _raw(full)
        except HydraException:
            same = False
        self._shared[groups] = shared if same else None
        return full

    def _apply(
        self, shared: DictConfig, overrides: Sequence[str], values: list[Override]
    ) -> DictConfig:
        """Do the rest of what Hydra does for a job: its values, and what names them."""
        config = copy.deepcopy(shared, _untouched(shared, values))
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        naming = config.hydra.job.config.override_dirname
        with open_dict(config.hydra):
            config.hydra.overrides.task = list(overrides)
            config.hydra.job.override_dirname = get_overrides_dirname(
                overrides=[self._parsed[line] for line in overrides],
                kv_sep=naming.kv_sep,
                item_sep=naming.item_sep,
                exclude_keys=naming.exclude_keys,
            )
        return config

    def _split(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], list[Override]] | None:
        """Return the overrides of groups and of values; None if that can not be told safely."""
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
        if line not in self._parsed:
            self._parsed[line] = self._parser.parse_override(line)
        return self._parsed[line]

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self._groups:
            options = self._loader.get_group_options(
                key,
                results_filter=None,
                config_name=self._master.hydra.job.config_name,
                overrides=list(self._master.hydra.overrides.hydra),
            )
            self._groups[key] = bool(options)
        return self._groups[key]


def _untouched(shared: DictConfig, values: Sequence[Override]) -> dict[int, Any]:
    """Return deepcopy's memo of the top-level nodes that it need not copy.

    Those that no override goes into; and ``hydra``, the largest, in which only what names the job
    is set anew each time. The copy becomes the parent of all of them.
    """
    touched = {override.key_or_group.partition(".")[0].partition("[")[0] for override in values}
    nodes = (shared._get_node(key) for key in shared if key not in touched)
    return {id(node): node for node in nodes if isinstance(node, DictConfig)}


class SharingLoader:
    """Hydra's config loader, with `load_sweep_config` through a `SweepComposer`.

    The launcher puts it into the HydraContext that it shares with the sweeper, so that the
    sweeper's validation of every job is cheap as well. Everything else goes to the real loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._composers: dict[int, SweepComposer] = {}

    def __getattr__(self, name: str) -> Any:
        """Hand everything else on."""
        return getattr(self._loader, name)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the config of one job; it is good until the next call."""
        return self.composer(master_config).compose(sweep_overrides)

    def composer(self, master_config: DictConfig) -> SweepComposer:
        """Return the composer for a sweep; it knows what was composed before."""
        key = id(master_config)
        if key not in self._composers:
            self._composers[key] = SweepComposer(self._loader, master_config)
        return self._composers[key]


def _raw(config: DictConfig) -> object:
    return OmegaConf.to_container(config, resolve=False)
