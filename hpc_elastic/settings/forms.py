"""The forms of ``nodes``, ``time`` and ``nproc_per_node``.

YAML 1.1 reads an unquoted ``1:16`` as the base-60 number 76 and ``24:00:00`` as 86400. What reaches
us is then a plain integer, and nobody can tell which of the two was written. Such an integer is
refused if it comes from YAML; quoted, or given on the command line (where Hydra's own grammar makes
a text of ``1:16``), it means itself. Source: https://yaml.org/type/int.html
"""

from __future__ import annotations

import re

from hpc_elastic.config import NodeRange, Nproc
from hpc_elastic.errors import ConfigError, near_miss

BASE = 60
NODES = "a count such as 4 or a range such as '1:16', at least 1"
TIME = "minutes, 'MM:SS', 'HH:MM:SS', 'D-HH', 'D-HH:MM', 'D-HH:MM:SS' or 'UNLIMITED'"
NPROC_WORDS = ("auto", "gpu", "cpu")

_TIME = re.compile(r"\d+|\d+:[0-5]?\d(:[0-5]?\d)?|\d+-\d+(:[0-5]?\d){0,2}")


def parse_nodes(value: object, *, from_yaml: bool, key: str = "nodes") -> NodeRange:
    """Return how many nodes ``4``, ``'4'`` or ``'1:16'`` allows.

    Args:
        value: As composed by Hydra.
        from_yaml: Whether YAML may have read a range as a base-60 number.
        key: The name to use in messages.

    Raises:
        ConfigError: not such a form, a number below 1, min above max, or an ambiguous integer.
    """
    if from_yaml and isinstance(value, int) and value > BASE and value % BASE:
        raise ConfigError(key, value, _ambiguous_nodes(key, value))
    m = re.fullmatch(r"(\d+)(?::(\d+))?", _text(value))
    if m is None:
        raise ConfigError(key, value, f"allowed is {NODES}")
    low, high = int(m[1]), int(m[2] or m[1])
    if low < 1:
        raise ConfigError(key, value, f"allowed is {NODES}")
    if low > high:
        raise ConfigError(key, value, f"min is above max; write {key}: '{high}:{low}'")
    return NodeRange(low, high)


def _ambiguous_nodes(key: str, number: int) -> str:
    """Say what YAML did to ``a:b``, and how both readings are written."""
    low, high = divmod(number, BASE)
    exact = f"{key}: '{number}' for exactly {number} nodes"
    if low > high:
        why = f"a range of nodes has the smaller number first; write {key}: '{high}:{low}' for that"
    else:
        why = f"write {key}: '{low}:{high}' for {low} to {high} nodes"
    return f"unquoted in YAML, {low}:{high} is the base-60 number {number}; {why}, or {exact}"


def parse_time(value: object, *, from_yaml: bool, key: str = "launcher.time") -> str:
    """Return a wall time in a form that sbatch takes.

    Args:
        value: As composed by Hydra; an integer means minutes.
        from_yaml: Whether YAML may have read ``24:00:00`` as a base-60 number.
        key: The name to use in messages.

    Raises:
        ConfigError: not one of Slurm's forms, zero, or an ambiguous integer.
    """
    if from_yaml and isinstance(value, int) and value >= BASE:
        raise ConfigError(key, value, _ambiguous_time(key, value))
    text = _text(value)
    if text.upper() == "UNLIMITED":
        return "UNLIMITED"
    if not _TIME.fullmatch(text) or not text.strip("0:-"):
        raise ConfigError(key, value, f"allowed is {TIME}")
    return text


def _ambiguous_time(key: str, number: int) -> str:
    """Say what YAML did to a clock time, and how both readings are written."""
    minutes, seconds = divmod(number, BASE)
    clock = f"{minutes}:{seconds:02}"
    if minutes >= BASE:
        clock = f"{minutes // BASE}:{minutes % BASE:02}:{seconds:02}"
    name = key.rpartition(".")[2]
    return (
        f"unquoted in YAML, {clock} is the base-60 number {number}; write {name}: '{clock}' "
        f"for that clock time, or {name}: '{number}' for {number} minutes"
    )


def parse_nproc(value: object, *, key: str = "nproc_per_node") -> Nproc:
    """Return how many workers a node gets.

    Raises:
        ConfigError: neither a count of at least 1 nor one of the three words.
    """
    if value == "auto" or value == "gpu" or value == "cpu":
        return value
    text = _text(value)
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    hint = near_miss(text, NPROC_WORDS)
    raise ConfigError(key, value, f"allowed is a count of at least 1, auto, gpu or cpu{hint}")


def _text(value: object) -> str:
    """Return what a person may have written for a text or a whole number; empty for the rest."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    return str(value).strip()
