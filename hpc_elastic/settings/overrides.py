"""Overrides of Hydra's that are given without a script: to `resume`, to `doctor`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_elastic.errors import ConfigError


def read_override(override: str) -> tuple[str, Any]:
    """Return the dotted key and the value of an override such as ``launcher.partition=gpu``.

    Raises:
        ConfigError: it is none, or deletes, or stands for several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as e:
        why = f"an override is written KEY=VALUE, such as nodes=1:4; Hydra says: {e}"
        raise ConfigError("override", override, why) from e
    key = str(parsed.key_or_group)
    if parsed.is_delete():
        raise ConfigError(f"~{key}", override, "a key can not be deleted here; give it a value")
    if parsed.is_sweep_override():
        why = "no sweep: this is about one run; give one value"
        raise ConfigError(key, override.partition("=")[2], why)
    return key, _plain(parsed.value())


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a config tree; a mapping adds to the one that is there."""
    *groups, name = key.split(".")
    for group in groups:
        if not isinstance(config.get(group), dict):
            config[group] = {}
        config = config[group]
    merged = isinstance(value, dict) and isinstance(config.get(name), dict)
    config[name] = {**config[name], **value} if merged else value


def _plain(value: Any) -> Any:
    """Return a parsed value as JSON has it; texts lose the marks of their quotes."""
    if isinstance(value, Mapping):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
