"""The settings on the doctor's command line, as Hydra reads them on a script's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_elastic.config import RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError
from hpc_elastic.settings import resolve

_TOP_LEVEL = ("nodes", "nproc_per_node", "ft")
_SHOWN = (
    *("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_node", "mem"),
    *("constraint", "exclude", "exclusive", "gang", "interface", "grace_s", "notice_signal"),
)


def parse(words: Sequence[str]) -> RunSettings:
    """Return the settings that were asked for, checked.

    Args:
        words: Overrides such as ``launcher=slurm``, ``partition=gpu`` (for
            ``launcher.partition=gpu``), ``nodes=1:16``.

    Raises:
        ConfigError: one of them can not work, or asks for another launcher than slurm.
    """
    given = {_key(word): word for word in words}
    config: dict[str, Any] = {"launcher": {"backend": "slurm"}}
    for key, word in given.items():
        _put(config, key, _value(word))
    overrides = [f"{key}={word.partition('=')[2]}" for key, word in given.items()]
    return resolve(config, overrides=overrides)


def launcher_of(settings: RunSettings) -> SlurmSettings:
    """Return the settings of Slurm; `parse` makes no others."""
    assert isinstance(settings.launcher, SlurmSettings)
    return settings.launcher


def shown(settings: RunSettings) -> dict[str, Any]:
    """Return what of the settings may stand in a bug report: nothing that may hold a secret."""
    launcher = launcher_of(settings)
    asked = {name: getattr(launcher, name) for name in _SHOWN}
    container = asdict(launcher.container)
    return {
        "nodes": asdict(settings.nodes),
        "nproc_per_node": settings.nproc_per_node,
        **asked,
        "container": {name: container[name] for name in ("runtime", "image")},
    }


def _key(word: str) -> str:
    """Return the dotted key of a word; below ``launcher`` unless it says otherwise."""
    key, equals, _ = word.lstrip("+").partition("=")
    if not equals or not key:
        raise ConfigError(word, None, "write KEY=VALUE, such as partition=gpu")
    if key in (*_TOP_LEVEL, "launcher") or key.startswith("launcher."):
        return key
    return f"launcher.{key}"


def _value(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, text = word.partition("=")
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException as e:
        raise ConfigError(key, text, f"can not be read: {e}") from e
    if override.is_sweep_override():
        raise ConfigError(key, text, "one value, no sweep: the doctor looks at one run")
    return override.value()


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a tree; ``launcher=slurm`` says what is known already."""
    if key == "launcher":
        if value != "slurm":
            remedy = "only slurm can be looked at; give the keys of a group of your own by hand"
            raise ConfigError(key, value, remedy)
        return
    *path, name = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[name] = value
