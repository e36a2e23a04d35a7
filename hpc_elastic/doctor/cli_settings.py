"""The settings on the doctor's command line, as Hydra reads them on a script's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_elastic.config.resolve import put, read_override, resolve
from hpc_elastic.config.schema import RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError

_TOP_LEVEL = ("nodes", "nproc_per_node", "ft")
_SHOWN = (
    *("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_node", "mem"),
    *(
        "constraint",
        "exclude",
        "exclusive",
        "coallocate_min",
        "interface",
        "preempt_grace_s",
        "preempt_signal",
    ),
)


def parse(words: Sequence[str]) -> RunSettings:
    """Return the settings that were asked for, checked.

    Args:
        words: Overrides such as ``launcher=slurm``, ``partition=gpu`` (for
            ``launcher.partition=gpu``), ``nodes=1:16``.

    Raises:
        ConfigError: one of them can not work, or asks for another launcher than slurm.
    """
    config: dict[str, Any] = {"launcher": {"backend": "slurm"}}
    overrides = []
    for word in words:
        short, value = read_override(word)
        key = _on_a_run(short)
        overrides.append(f"{key}={word.partition('=')[2]}")
        if key != "launcher":
            put(config, key, value)
        elif value != "slurm":
            remedy = "only slurm can be looked at; give the keys of a group of your own by hand"
            raise ConfigError(key, value, remedy)
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


def _on_a_run(key: str) -> str:
    """Return the key as a script has it: below ``launcher`` unless it says otherwise."""
    if key in (*_TOP_LEVEL, "launcher") or key.startswith("launcher."):
        return key
    return f"launcher.{key}"
