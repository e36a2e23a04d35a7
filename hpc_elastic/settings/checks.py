"""The keys below ``launcher`` that have a form or a range of their own, as one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_elastic.errors import ConfigError
from hpc_elastic.settings.flags import sbatch_flags, srun_args
from hpc_elastic.settings.forms import parse_time
from hpc_elastic.settings.groups import Given, Parser, integer, number, text, texts

WORKER_VARIABLES = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    ]
)
"""What the agent sets for each worker, beside all of TORCHELASTIC_*."""


def _bounded(read: Callable[[Given], float], low: float, *, above: bool = False) -> Parser:
    """Return a parser of numbers that are at least ``low``, or above it."""

    def parse(given: Given) -> float:
        value = read(given)
        if value < low or (above and value == low):
            kind = "whole number" if read is integer else "number"
            bound = f"above {low:g}" if above else f"of at least {low:g}"
            raise given.refuse(f"allowed is a {kind} {bound}")
        return value

    return parse


def _matching(pattern: str, allowed: str) -> Callable[[Given], str]:
    """Return a parser of texts of one form."""

    def parse(given: Given) -> str:
        value = str(given.value) if isinstance(given.value, int) else given.value
        if isinstance(given.value, bool) or not re.fullmatch(pattern, str(value)):
            raise given.refuse(f"allowed is {allowed}")
        return str(value)

    return parse


def _gpus(given: Given) -> int | str:
    value = _GPUS(given)
    return int(value) if value.isdigit() else value


def _existing_file(given: Given) -> str:
    path = text(given)
    if not Path(path).is_file():
        raise given.refuse(f"no such file (looked for {Path(path).absolute()})")
    return path


def _time(given: Given) -> str:
    return parse_time(given.value, from_yaml=not given.typed, key=given.key)


def _environment(given: Given) -> dict[str, str]:
    if not isinstance(given.value, Mapping):
        raise given.refuse("allowed is a mapping of variable names to texts")
    return {
        _variable(Given(f"{given.key}.{name}", value), name): _variable_value(
            Given(f"{given.key}.{name}", value)
        )
        for name, value in given.value.items()
    }


def _variable(given: Given, name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise given.refuse("not a variable name: letters, digits and _, no digit first")
    if name in WORKER_VARIABLES or name.startswith("TORCHELASTIC_"):
        raise given.refuse("the agent sets this variable for each worker; leave it out")
    return name


def _variable_value(given: Given) -> str:
    """Numbers pass as they are printed; true and null have no one spelling in an environment."""
    value = given.value
    if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
        raise given.refuse("allowed is a text or a number; put it in quotes")
    return str(value)


def _mounts(given: Given) -> list[str]:
    for mount in texts(given):
        if not re.fullmatch(r"[^,:\s][^,:\n]*(:[^,:\n]+){0,2}", mount):
            raise given.refuse(f"{mount!r} is not of the form SOURCE[:TARGET[:OPTIONS]]")
    return texts(given)


def _modules(given: Given) -> list[str]:
    for module in texts(given):
        if not all(part.isidentifier() for part in module.split(".")):
            raise given.refuse(f"{module!r} is not the name of a module, such as transformers")
    return texts(given)


def _hang_after(given: Given) -> float | None:
    """Return seconds; None for the default, 0 for never."""
    if given.value == "auto":
        return None
    if given.value is False:
        return 0.0
    try:
        value = number(given)
        _WAIT(given)
        return value
    except ConfigError as e:
        raise given.refuse("allowed is a number of seconds, auto, or false for never") from e


def _port(given: Given) -> int:
    value = integer(given)
    if not 1 <= value <= 65535:
        raise given.refuse("allowed is a port from 1 to 65535, or null for none")
    return value


_word = _matching(r"[^\s,=]\S*", "a name without spaces; a number from YAML goes in quotes")


def _name(given: Given) -> str:
    """Return a name that Slurm knows: no spaces, and no number that YAML may have changed."""
    return _word(Given(given.key, text(given), given.typed))


_GPUS = _matching(
    r"[1-9]\d*|[A-Za-z][\w.-]*:[1-9]\d*(,[A-Za-z][\w.-]*:[1-9]\d*)*",
    "a count of at least 1 or 'TYPE:COUNT', such as 2 or 'a100:2'",
)
_AT_LEAST_0, _AT_LEAST_1 = _bounded(integer, 0), _bounded(integer, 1)
_WAIT, _SPAN = _bounded(number, 0), _bounded(number, 0, above=True)

PARSERS: dict[str, Parser] = {
    "launcher.max_restarts": _AT_LEAST_0,
    "launcher.max_attempts_without_progress": _AT_LEAST_1,
    "launcher.max_requeues": _AT_LEAST_0,
    "launcher.notice_s": _SPAN,
    "launcher.global_batch": _AT_LEAST_1,
    "launcher.grace_s": _SPAN,
    "launcher.poll_s": _SPAN,
    "launcher.grow_after_s": _WAIT,
    "launcher.min_wait_s": _SPAN,
    "launcher.interface": _name,
    "launcher.env": _environment,
    "launcher.rendezvous.join_timeout_s": _SPAN,
    "launcher.rendezvous.start_timeout_s": _WAIT,
    "launcher.rendezvous.last_call_s": _WAIT,
    "launcher.rendezvous.heartbeat_s": _SPAN,
    "launcher.rendezvous.lost_after_s": _SPAN,
    "launcher.agent.monitor_interval_s": _SPAN,
    "launcher.agent.stop_timeout_s": _AT_LEAST_0,
    "launcher.agent.omp_num_threads": _AT_LEAST_1,
    "launcher.agent.preload": _modules,
    "launcher.agent.hang_after_s": _hang_after,
    "launcher.agent.metrics_port": _port,
    "launcher.partition": _name,
    "launcher.account": _name,
    "launcher.qos": _name,
    "launcher.time": _time,
    "launcher.gpus_per_node": _gpus,
    "launcher.cpus_per_node": _AT_LEAST_1,
    "launcher.mem": _matching(
        r"0|[1-9]\d*[KMGTkmgt]",
        "a whole number with its unit K, M, G or T, such as 64G, or 0 for all of the node's",
    ),
    "launcher.array_parallelism": _AT_LEAST_1,
    "launcher.container.mounts": _mounts,
    "launcher.sbatch": sbatch_flags,
    "launcher.srun_args": srun_args,
    "launcher.template": _existing_file,
    "launcher.max_agents": _AT_LEAST_1,
}
