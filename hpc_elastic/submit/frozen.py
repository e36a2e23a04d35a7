"""A config frozen at submission: plain containers, with interpolations resolved once and for all.

Every rank and every requeue must see the same values, so ``${now:...}`` and whatever else depends
on the moment is resolved here. What only the node can know (``${oc.env:SLURM_JOB_ID}``) fails
here in its resolver, and stays an interpolation. A reference to a key that does not exist can
never work: that is the user's error, and is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf, base
from omegaconf._utils import OmegaConfDumper  # its rule for which strings need quotes
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from hpc_elastic.errors import ConfigError

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
