"""The composed config as checked settings: the launcher, every key, contradictions between keys.

Below ``launcher``, `FORMS` has the forms that values have beyond their types. Of sbatch's and
srun's own flags, those are refused that a key owns, since they would contradict it, and those that
would break a run. sbatch checks whether the others exist, since each release of Slurm has more of
them. Source: https://slurm.schedmd.com/sbatch.html

`ORDER` has the order between the time-outs and intervals of a run: each pair that the design needs.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from hpc_elastic.config import parse
from hpc_elastic.config.parse import Given, Parser, integer, number, text, texts, time_limit_s
from hpc_elastic.config.schema import (
    BACKENDS,
    PRUNERS,
    SAMPLERS,
    TOP_LEVEL,
    Backend,
    LauncherSettings,
    NodeRange,
    NotifyEvent,
    NotifySettings,
    OptunaSettings,
    RunSettings,
    SlurmSettings,
)
from hpc_elastic.errors import ConfigError, near_miss

_NEW_NAMES = {
    "gang": "coallocate_min",
    "grow": "scale_up",
    "grow_after_s": "scale_up_timeout_s",
    "min_wait_s": "below_min_timeout_s",
    "notice_s": "signal_delay_s",
    "notice_signal": "preempt_signal",
    "grace_s": "preempt_grace_s",
    "max_attempts_without_progress": "max_failed_rounds",
    "spread": "queue_order",
    "poll_s": "poll_interval_s",
    "snapshot": "code_snapshot",
    "agent.spares": "agent.warm_workers",
    "agent.preload": "agent.warm_imports",
    "agent.hang_after_s": "agent.hang_timeout_s",
    "rendezvous.start_timeout_s": "rendezvous.straggler_timeout_s",
    "rendezvous.lost_after_s": "rendezvous.heartbeat_timeout_s",
    "rendezvous.heartbeat_s": "rendezvous.heartbeat_interval_s",
}
_NEW_VALUES = {
    "grow": {"boundary": "checkpoint", "now": "immediate", "never": "on_restart"},
    "spread": {"runs": "breadth_first", "nodes": "depth_first"},
}
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    f"launcher.{old}": (f"launcher.{new}", _NEW_VALUES.get(old, {}))
    for old, new in _NEW_NAMES.items()
}
"""Former names of settings: the present name, and the values renamed with it."""


def resolve(
    config: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    sweep_params: Mapping[str, Any] | None = None,
) -> RunSettings:
    """Return the checked settings of one run.

    Args:
        config: The composed config as a plain container, interpolations resolved. Keys of the
            user's own are ignored; ``???`` and absent keys take their defaults.
        overrides: The run's Hydra overrides, such as ``nodes=76``. YAML has not read their values.
        sweep_params: ``hydra.sweeper.params``. Hydra turns them into overrides, but they come from
            YAML.

    Raises:
        ConfigError: Settings cannot work. It lists all errors, one per line; its ``key`` and
            ``value`` are those of the first.
    """
    launcher = config.get("launcher")
    backend = _backend(launcher)
    keys = {key: value for key, value in dict(launcher or {}).items() if key != "backend"}
    typed = _typed(overrides, sweep_params or {})
    reader = parse.GroupReader(FORMS, typed, elsewhere=lambda given: _elsewhere(given, backend))

    own = {key: config[key] for key in TOP_LEVEL if config.get(key) not in (None, parse.UNSET)}
    given = {**TOP_LEVEL, **own}
    is_yaml = "nodes" not in typed
    nodes = reader.attempt(lambda: parse.parse_nodes(given["nodes"], from_yaml=is_yaml))
    nproc = reader.attempt(lambda: parse.parse_nproc(given["nproc_per_node"]))
    ft = reader.attempt(lambda: parse.boolean(Given("ft", given["ft"])))
    settings = reader.group(BACKENDS[backend], keys, "launcher")
    if not reader.errors and nodes:
        reader.errors.extend(_contradictions(nodes, settings, ft=bool(ft)))
    _raise_all(reader.errors)
    assert nodes is not None and nproc is not None and ft is not None
    resolved = RunSettings(nodes, nproc, settings, ft)
    _require_possible_sizes(resolved)
    return resolved


def resolve_sweeper(raw: Mapping[str, Any]) -> OptunaSettings:
    """Return the checked settings of ``hydra/sweeper=elastic_optuna``; raise as `resolve` does."""
    reader = parse.GroupReader(FORMS)
    keys = {key: value for key, value in raw.items() if not key.startswith("_")}
    settings = reader.group(OptunaSettings, keys, "hydra.sweeper")
    is_multiple = isinstance(settings.direction, list) and len(settings.direction) > 1
    if settings.pruner is not None and is_multiple:
        remedy = "trials of several objectives cannot be compared before they end: leave it out"
        reader.errors.append(ConfigError("hydra.sweeper.pruner", settings.pruner, remedy))
    _raise_all(reader.errors)
    return settings


def _raise_all(errors: Sequence[ConfigError]) -> None:
    if errors:
        error = ConfigError(errors[0].key, errors[0].value, errors[0].remedy)
        error.args = ("\n".join(map(str, errors)),)
        raise error


def _backend(launcher: object) -> str:
    backend = launcher.get("backend") if isinstance(launcher, Mapping) else None
    if isinstance(backend, str) and backend in BACKENDS:
        return backend
    remedy = "choose one with +launcher=slurm or +launcher=local"
    if backend is None:
        raise ConfigError("launcher", launcher, f"no launcher of hpc_elastic is chosen; {remedy}")
    hint = near_miss(str(backend), BACKENDS)
    raise ConfigError("launcher.backend", backend, f"allowed is slurm or local{hint}; {remedy}")


def _typed(overrides: Sequence[str], sweep_params: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys whose values were given on the command line, as literals."""
    typed: dict[str, bool] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+").partition("@")[0]
        param = sweep_params.get(key)
        is_param = isinstance(param, int) and str(param) == value  # a number that YAML has read
        typed[key] = "${" not in value and not is_param
    return frozenset(key for key, literal in typed.items() if literal)


def _elsewhere(given: Given, backend: str) -> str | None:
    """Return where a key that does not exist under this name and launcher does exist."""
    key, name = given.key, given.key.rpartition(".")[2]
    if key in RENAMED:
        new, values = RENAMED[key]
        asked = {old: value for old, value in values.items() if old == given.value} or values
        mapped = ", ".join(f"{old} -> {value}" for old, value in asked.items())
        return f"; it is now called {new}" + (f" ({mapped})" if mapped else "")
    if name in TOP_LEVEL:
        return f"; it stands at the top level: {name}=..."
    (other,) = BACKENDS.keys() - {backend}
    ours, theirs = (list(_keys(BACKENDS[each], "launcher")) for each in (backend, other))
    for place in ours:
        if place.rpartition(".")[2] == name:
            return f" (did you mean {place}?)"
    if key in theirs:
        return f" with launcher={backend}; it belongs to launcher={other}"

    def is_near(place: str) -> bool:
        return bool(near_miss(name, [place.rpartition(".")[2]]))

    if any(map(is_near, ours)):
        return None
    if hint := near_miss(key, filter(is_near, theirs)):
        return f"{hint}; that belongs to launcher={other}, and this is launcher={backend}"
    return near_miss(name, TOP_LEVEL)


def _keys(cls: type[Any], path: str) -> Iterator[str]:
    """Yield the dotted key of every field, groups included."""
    hints = parse.type_hints(cls)
    for field in fields(cls):
        yield f"{path}.{field.name}"
        if is_dataclass(inner := hints[field.name]) and isinstance(inner, type):
            yield from _keys(inner, f"{path}.{field.name}")


def _require_possible_sizes(settings: RunSettings) -> None:
    """Refuse ``launcher.world_sizes`` that the run could not keep to, from its min to its max."""
    nodes, nproc, counts = settings.nodes, settings.nproc_per_node, settings.node_counts
    sizes = settings.launcher.world_sizes
    fitting = NodeRange(counts[0], counts[-1], nodes.unit) if counts else None
    if not sizes or (fitting == nodes and not settings.ft):
        return
    if settings.ft:
        remedy = "with ft=true replicas come and go at any step: leave it out"
    elif not isinstance(nproc, int):
        remedy = "give the number of workers on each node: nproc_per_node=4"
    elif fitting is None:
        remedy = f"nodes={nodes} with {nproc} workers each has none of them: give others, or nodes"
    else:
        remedy = f"min and max of nodes={nodes} need such a size: nodes={fitting}, or other sizes"
    raise ConfigError("launcher.world_sizes", sizes, remedy)


class TimeoutOrder(NamedTuple):
    """``times`` the shorter one must be below the longer one.

    A name is a key of the settings, or ``module:NAME`` of a value that is fixed in the code. Pairs
    of keys are checked here, the others by a test. A wait that grows at random is named by its
    base; the module that draws it has its bound.
    """

    shorter: str
    longer: str
    why: str
    times: float = 1.0


_RENDEZVOUS, _FT = "launcher.rendezvous", "ft.quorum:QuorumRules"

ORDER = (
    TimeoutOrder(f"{_RENDEZVOUS}.heartbeat_interval_s", f"{_RENDEZVOUS}.heartbeat_timeout_s",
          "one late heartbeat loses no node, and a lease expires (5 intervals) within an election "
          "(2 time-outs)", 2.5),
    TimeoutOrder("transport.connection:CONNECT_TIMEOUT_S", f"{_RENDEZVOUS}.heartbeat_timeout_s",
          "an agent can connect to a new leader within an election (2 time-outs)", 0.5),
    TimeoutOrder(f"{_RENDEZVOUS}.heartbeat_timeout_s", f"{_RENDEZVOUS}.straggler_timeout_s",
          "a round waits for members that are still in an election (2 time-outs)", 2.0),
    TimeoutOrder("launcher.agent.stop_timeout_s", f"{_RENDEZVOUS}.straggler_timeout_s",
          "a round waits for members that are still stopping their workers"),
    TimeoutOrder("launcher.agent.monitor_interval_s", f"{_RENDEZVOUS}.straggler_timeout_s",
          "a round waits for members that have not polled their workers yet"),
    TimeoutOrder(f"{_RENDEZVOUS}.straggler_timeout_s", f"{_RENDEZVOUS}.join_timeout_s",
          "a round closes without a straggler before the agents that wait for it give up"),
    TimeoutOrder(f"{_RENDEZVOUS}.last_call_s", f"{_RENDEZVOUS}.join_timeout_s",
          "a round closes after its last call before the agents that wait for it give up"),
    TimeoutOrder("launcher.below_min_timeout_s", f"{_RENDEZVOUS}.join_timeout_s",
          "nodes below the minimum return to the queue before their agents give up, and fail"),
    TimeoutOrder(f"{_RENDEZVOUS}.heartbeat_timeout_s", f"{_FT}.live_timeout_s",
          "a replica that is silent counts as lost before it counts as slow"),
    TimeoutOrder(f"{_FT}.short_reconnect_timeout_s", f"{_FT}.reconnect_timeout_s",
          "a new lighthouse waits less where half of the quorum has asked for the next one"),
    TimeoutOrder(f"{_FT}.reconnect_timeout_s", f"{_FT}.live_timeout_s",
          "members that reconnect are not dropped as slow"),
    TimeoutOrder("ft.manager_server:SILENCE_S", "ft.process_group:DEFAULT_TIMEOUT",
          "the loss of a replica's server is found before a collective gives up"),
    TimeoutOrder("ft.process_group:DEFAULT_TIMEOUT", "agent.hang_watch:REPLICA_MIN_LIMIT_S",
          "replicas that wait in a collective for a slow one leave it out before they count as "
          "hung", 2.0),
)  # fmt: skip


def timeout_contradictions(settings: LauncherSettings) -> Iterator[ConfigError]:
    """Yield an error for each pair of keys that has not the order of `ORDER`; null is no limit."""
    for order in ORDER:
        if ":" in order.shorter + order.longer:
            continue
        keys = (order.shorter, order.longer)
        shorter, longer = (attrgetter(k.removeprefix("launcher."))(settings) for k in keys)
        if shorter is None or longer is None or order.times * shorter < longer:
            continue
        what = "it" if order.times == 1 else f"{order.times:g} times it"
        remedy = f"{what} must be below {order.longer} ({longer:g}), so that {order.why}"
        yield ConfigError(order.shorter, shorter, f"{remedy}: lower it, or raise the other")


def _contradictions(nodes: NodeRange, settings: Backend, *, ft: bool) -> Iterator[ConfigError]:
    """Yield an error for each contradiction between keys that are valid alone."""
    if ft and settings.scale_up == "on_restart":
        remedy = "with ft=true a late node always joins at once: leave it out"
        yield ConfigError("launcher.scale_up", settings.scale_up, remedy)
    if ft and settings.resume_args:
        remedy = "with ft=true a replica that starts again heals from the others: leave it out"
        yield ConfigError("launcher.resume_args", settings.resume_args, remedy)
    for key in ("min_efficiency", "sweep_growth"):
        if ft and (value := getattr(settings, key)) != getattr(LauncherSettings, key):
            remedy = "with ft=true every node is taken in: leave it out"
            yield ConfigError(f"launcher.{key}", value, remedy)
    yield from timeout_contradictions(settings)
    if settings.agent.numa is not None and not settings.agent.preflight:
        remedy = "the preflight finds where the GPUs are: leave it on, or leave out numa"
        yield ConfigError("launcher.agent.preflight", False, remedy)
    notify = settings.notify
    if notify != NotifySettings() and not notify.has_receiver:
        remedy = "needs launcher.notify.command or launcher.notify.webhook, which get the messages"
        yield ConfigError("launcher.notify", asdict(notify), remedy)
    key, limit = "launcher.max_agents", getattr(settings, "max_agents", None)
    if isinstance(settings, SlurmSettings):
        # with coallocate_min the min part is no part of the array
        key = "launcher.array_parallelism"
        limit = None if settings.coallocate_min else settings.array_parallelism
    if limit is not None and limit < nodes.min:
        yield ConfigError(key, limit, f"must be at least {nodes.min}, the min of the key nodes")
    if isinstance(settings, SlurmSettings):
        yield from _slurm_contradictions(settings)
        yield from _pool_contradictions(nodes, settings, ft)


def _pool_contradictions(
    nodes: NodeRange, settings: SlurmSettings, ft: bool
) -> Iterator[ConfigError]:
    key, pools = "launcher.pools", settings.pools
    if ft and len({pool.throughput for pool in pools}) > 1:
        remedy = "with ft=true all replicas have the same share of a batch: leave it out"
        yield ConfigError(f"{key}.throughput", [pool.throughput for pool in pools], remedy)
    if pools and settings.coallocate_min:
        remedy = "with launcher.coallocate_min the min nodes are one job: leave one of them out"
        yield ConfigError(key, len(pools), remedy)
    total = sum(pool.nodes for pool in pools)
    if pools and total != nodes.max:
        what = f"they have {total} nodes together, and the max of the key nodes is {nodes.max}"
        yield ConfigError(key, [pool.nodes for pool in pools], f"{what}: make them equal")
    for at, pool in enumerate(pools):
        if pool.nodes < 1:
            remedy = "give the number of its nodes, at least 1"
            yield ConfigError(f"{key}.{at}.nodes", pool.nodes, remedy)
        time, time_min = pool.time or settings.time, pool.time_min or settings.time_min
        yield from _gap_contradictions(f"{key}.{at}", time, time_min, pool.harvest)
    if not pools:
        yield from _gap_contradictions(
            "launcher", settings.time, settings.time_min, settings.harvest
        )


def _gap_contradictions(
    where: str, time: str | None, time_min: str | None, harvest: str | None
) -> Iterator[ConfigError]:
    full_s = None if time is None else time_limit_s(time)
    if full_s is None:
        remedy = "needs launcher.time: the wall time that a task gets where nothing is in its way"
        if time_min is not None:
            yield ConfigError(f"{where}.time_min", time_min, remedy)
        if harvest not in (None, "off"):
            yield ConfigError(f"{where}.harvest", harvest, remedy)
    elif time_min is not None:
        least_s = time_limit_s(time_min)
        if least_s is None or not 60 <= least_s <= full_s:
            remedy = f"allowed is at least a minute, and at most launcher.time ({time})"
            yield ConfigError(f"{where}.time_min", time_min, remedy)


def _slurm_contradictions(settings: SlurmSettings) -> Iterator[ConfigError]:
    box, key = settings.container, "launcher.container"
    if box.runtime and not box.image:
        yield ConfigError(f"{key}.runtime", box.runtime, f"needs {key}.image=...")
    for name in ("image", "mounts", "args") if not box.runtime else ():
        needed = "=apptainer or pyxis" if name == "image" else f" and {key}.image"
        if value := getattr(box, name):
            yield ConfigError(f"{key}.{name}", value, f"needs {key}.runtime{needed}")
    for flag in settings.sbatch:
        if settings.mem is not None and flag in ("mem-per-cpu", "mem-per-gpu"):
            remedy = f"contradicts launcher.mem={settings.mem}; give only one of them"
            yield ConfigError(f"launcher.sbatch.{flag}", settings.sbatch[flag], remedy)
    if settings.exclusive and settings.sbatch.get("oversubscribe"):
        remedy = "contradicts launcher.exclusive=true; give only one of them"
        yield ConfigError("launcher.sbatch.oversubscribe", True, remedy)
    gres = settings.sbatch.get("gres")
    if parse.gpus_in_gres(gres) is not None and settings.gpus_per_node is not None:
        remedy = f"contradicts launcher.gpus_per_node={settings.gpus_per_node}; give only one"
        yield ConfigError("launcher.sbatch.gres", gres, remedy)


# ---- the keys below ``launcher`` that have a form or a range of their own


WORKER_VARIABLES = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    ]
)
"""Variables that the agent sets for each worker, beside TORCHELASTIC_*."""


def _between(
    read: Callable[[Given], float], low: float, high: float, allowed: str
) -> Callable[[Given], float]:
    def parse(given: Given) -> float:
        value = read(given)
        if not low <= value <= high:
            raise given.refuse(f"allowed is {allowed}")
        return value

    return parse


def _matching(pattern: str, allowed: str) -> Callable[[Given], str]:
    def parse(given: Given) -> str:
        value = str(given.value) if isinstance(given.value, int) else given.value
        if isinstance(given.value, bool) or not re.fullmatch(pattern, str(value)):
            raise given.refuse(f"allowed is {allowed}")
        return str(value)

    return parse


def _existing_file(given: Given) -> str:
    path = text(given)
    if not Path(path).is_file():
        raise given.refuse(f"no such file (looked for {Path(path).absolute()})")
    return path


def _environment(given: Given) -> dict[str, str]:
    if not isinstance(given.value, Mapping):
        raise given.refuse("allowed is a mapping of variable names to texts")
    found: dict[str, str] = {}
    for name, value in given.value.items():
        entry = Given(f"{given.key}.{name}", value)
        if wrong := _wrong_variable(name):
            raise entry.refuse(wrong)
        # true and null have no single spelling in an environment
        is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
        if not is_text or "\0" in str(value):
            raise entry.refuse("allowed is a text or a number; put it in quotes")
        found[name] = str(value)
    return found


def _wrong_variable(name: object) -> str | None:
    """Return what is wrong with the name of a variable of the workers; None if nothing is."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "not a variable name: letters, digits and _, no digit first"
    if name in WORKER_VARIABLES or name.startswith("TORCHELASTIC_"):
        return "the agent sets this variable for each worker; leave it out"
    return None


def _env_file(given: Given) -> str:
    path = str(Path(_existing_file(given)).absolute())
    read_env_file(path)
    return path


def read_env_file(path: str | None) -> dict[str, str]:
    """Return the variables in ``launcher.env_file``; none if it is not given.

    Raises ConfigError if it cannot be read, others may read or write it, or a line is no variable;
    the error names the line, and no value.
    """
    key = "launcher.env_file"
    if path is None:
        return {}
    found: dict[str, str] = {}
    for at, line in enumerate(_read_private(key, path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, is_variable, value = line.partition("=")
        wrong = _wrong_variable(name.strip()) if is_variable else "not NAME=value"
        if wrong or "\0" in value:
            raise ConfigError(key, path, f"line {at}: {wrong or 'it has a null character'}")
        found[name.strip()] = value
    return found


def _read_private(key: str, path: str) -> str:
    """Return the text of a file of secrets; ConfigError if others may read or write it."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigError(key, path, f"other users have access to it: chmod 600 {path}")
            return file.read()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(key, path, f"it cannot be read: {e}") from e


def _webhook(given: Given) -> str:
    """Return the URL, also that of a variable ``$NAME`` or of a file; no error shows it."""
    url, where = text(given), "***"
    if "://" not in url:
        where, is_name = url, url.startswith("$")
        url = os.environ.get(url[1:], "") if is_name else _read_private(given.key, url).strip()
    if not re.fullmatch(r"https?://[!-~]+", url):
        remedy = "allowed is a URL (https://...), or a variable $NAME or a file that has one"
        raise ConfigError(given.key, where, remedy)
    return url


def _texts_that(are_right: Callable[[str], object], wrong: str) -> Parser:
    """Return a parser of a list of texts of one form."""

    def parse_texts(given: Given) -> list[str]:
        found = texts(given)
        for text_ in found:
            if not are_right(text_):
                raise given.refuse(f"{text_!r} is not {wrong}")
        return found

    return parse_texts


def _world_sizes(given: Given) -> list[int]:
    values = given.value if isinstance(given.value, list | tuple) else None
    if values is None or not all(type(value) is int and value > 0 for value in values):
        raise given.refuse("allowed is a list of numbers of workers, such as [1, 2, 4, 8]")
    return sorted(set(values))


_MOST_NETWORKS = 3_900
"""The kernel takes a filter of 4,096 instructions: one a network of IPv4, up to 13 one of IPv6."""


def _networks(given: Given) -> list[str]:
    remedy = "give the networks of the nodes, such as [10.1.0.0/16]"
    found: dict[int, list[Any]] = {4: [], 6: []}
    for network in texts(given):
        try:
            parsed = ipaddress.ip_network(network, strict=False)
        except ValueError:
            raise given.refuse(f"{network!r} is no network: {remedy}") from None
        found[parsed.version].append(parsed)
    least = {version: len([*ipaddress.collapse_addresses(n)]) for version, n in found.items()}
    if least[4] + 13 * least[6] > _MOST_NETWORKS:
        raise given.refuse(f"the kernel takes no filter with this number of addresses: {remedy}")
    return texts(given)


def _hang_after(given: Given) -> float | None:
    """Return seconds; None for the default, 0 for never."""
    if given.value == "auto":
        return None
    if given.value is False:
        return 0.0
    try:
        return _WAIT(given)
    except ConfigError as e:
        raise given.refuse("allowed is a number of seconds, auto, or false for never") from e


def _warm_workers(given: Given) -> str | bool:
    """Return how they are made; false for ``off``, as YAML reads it."""
    if isinstance(given.value, bool):
        return given.value
    how = parse.choice(given, ("fork", "spawn", "off"))
    return how != "off" and how


def _choices(given: Given, listed: Sequence[Any], allowed: tuple[str, ...]) -> list[str]:
    return [parse.choice(replace(given, value=each), allowed) for each in listed]


def _directions(given: Given) -> list[str]:
    listed = given.value if isinstance(given.value, list | tuple) else [given.value]
    if not listed:
        raise given.refuse("allowed is minimize or maximize, or a list of them")
    return _choices(given, listed, ("minimize", "maximize"))


def _component(*names: str) -> Parser:
    """Return a parser of a name, or of a mapping that Hydra instantiates."""

    def parse_component(given: Given) -> str | dict[str, Any]:
        value = given.value
        if isinstance(value, Mapping) and isinstance(value.get("_target_"), str):
            return dict(value)
        if isinstance(value, str) and value in names:
            return value
        allowed = f"allowed is {', '.join(names)}, or a mapping with _target_"
        raise given.refuse(f"{allowed}{near_miss(str(value), names)}")

    return parse_component


def _parameters(given: Given) -> dict[str, Any]:
    if not isinstance(given.value, Mapping):
        raise given.refuse("allowed is a mapping, such as {lr: 'interval(0.01, 0.1)'}")
    return {str(name): value for name, value in given.value.items()}


_LOGS = "every attempt of every task has its own logs in the run directory"
_SURVIVES = "the loss of one node or agent must not end the others"
_REMEDIES = {
    "use the key nodes, and launcher.array_parallelism for the limit": "array",
    "use the key nodes; every array task is one node": "nodes",
    "use the key nproc_per_node; every array task is one node with one agent": "ntasks"
    " ntasks-per-node ntasks-per-core ntasks-per-socket ntasks-per-gpu",
    _LOGS: "output error open-mode",
    "tasks are always requeued by Slurm; the run ends when its training has ended": "requeue"
    " no-requeue",
    f"{_SURVIVES}; launcher.coallocate_min sets it": "no-kill",
    "each one-node task would need all of them; use launcher.exclude or launcher.constraint": (
        "nodelist nodefile"
    ),
    "use launcher.gpus_per_node": "gpus gpus-per-node gpus-per-task gpus-per-socket",
    "use launcher.cpus_per_node": "cpus-per-task mincpus",
    "use launcher.setup for shell lines before the task": "wrap",
    "use launcher.dry_run": "test-only",
    "the launcher reads what sbatch prints": "parsable quiet verbose help usage version",
    "the launcher queries its own cluster; submit from a login node of the other one": "clusters"
    " cluster-constraint",
}
_KEYS = (
    "job-name partition account qos time time-min mem constraint exclude exclusive container wait"
)
_OWNED = {
    **{flag: remedy for remedy, flags in _REMEDIES.items() for flag in flags.split()},
    **{flag: f"use launcher.{flag.replace('-', '_')}" for flag in _KEYS.split()},
}
"""Flags that cannot be given, each with the remedy."""
_TIMES = frozenset(["begin", "deadline", "delay-boot"])
"""Flags whose value may be a clock time, which YAML reads as a base-60 number."""

_DASHED = (
    "acctg-freq container-id core-spec cores-per-socket cpu-freq cpus-per-gpu delay-boot "
    "export-file extra-node-info get-user-env gpu-bind gpu-freq ignore-pbs kill-on-invalid-dep "
    "mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu oom-kill-step "
    "sockets-per-node spread-job thread-spec threads-per-core tres-bind tres-per-task "
    "use-min-nodes wait-all-nodes"
)
"""Flags of Slurm that may be written with underscores; options of a site (SPANK) have some."""

_SRUN_OWNED = {
    **{name: _OWNED[name] for name in ("nodes", "ntasks", "ntasks-per-node", "nodelist")},
    **{name: _LOGS for name in ("output", "error", "open-mode")},
    "label": _LOGS,
    "multi-prog": "every task starts the same agent",
    **{name: _SURVIVES for name in ("no-kill", "kill-on-bad-exit", "wait")},
}
_SHORT = {
    **{"N": "nodes", "n": "ntasks", "w": "nodelist", "o": "output", "e": "error", "l": "label"},
    **{"k": "no-kill", "K": "kill-on-bad-exit", "W": "wait"},
}


def _sbatch_flags(given: Given) -> dict[str, str | int | bool | None]:
    """Return further sbatch flags, each under its long name with dashes."""
    if not isinstance(given.value, Mapping):
        raise given.refuse("allowed is a mapping of flags to values, such as {reservation: night}")
    flags: dict[str, str | int | bool | None] = {}
    for written, value in given.value.items():
        entry = Given(f"{given.key}.{written}", value)
        name = str(written).lstrip("-")
        dashed = name.replace("_", "-")
        if dashed in _OWNED or dashed in _DASHED.split():
            name = dashed
        if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or len(name) == 1:
            raise entry.refuse("write the flag's long name, such as reservation or mail-type")
        if name in _OWNED:
            raise entry.refuse(f"the flag --{name} cannot be given here: {_OWNED[name]}")
        if name in flags:
            raise entry.refuse(f"the flag --{name} is given twice")
        if name in _TIMES and isinstance(value, int):
            value = parse.parse_time(value, from_yaml=True, key=entry.key)
        is_text = isinstance(value, str) and value.isprintable()
        if not is_text and not (value is None or isinstance(value, bool | int)):
            allowed = "a text of one line, a whole number, true, or null for unset"
            raise entry.refuse(f"allowed is {allowed}")
        flags[name] = value
    return flags


def _srun_args(given: Given) -> list[str]:
    """Return further arguments of srun; no flag contradicts how a task is started."""
    args = texts(given)
    for arg in args:
        name = ""  # of a value
        if arg.startswith("--"):
            name = arg[2:].partition("=")[0]
        elif arg.startswith("-"):
            name = _SHORT.get(arg[1:2], "")
        if name in _SRUN_OWNED:
            raise given.refuse(f"{arg!r} cannot be given here: {_SRUN_OWNED[name]}")
    return args


def _resume_args(given: Given) -> list[str]:
    """Return words of a command, in which one file at most is to be found."""
    words = texts(given)
    if re.sub(r"\{newest:[^{}]+\}", "", " ".join(words), count=1).count("{newest"):
        raise given.refuse("allowed is one {newest:GLOB}, as in ['--resume', '{newest:out/*.pt}']")
    return words


_word = _matching(r"[^\s,=]\S*", "a name without spaces; a number from YAML goes in quotes")
_gpu_text = _matching(
    r"[1-9]\d{0,2}|\w[\w.-]*:[1-9]\d*(,\w[\w.-]*:[1-9]\d*)*",
    "a count from 1 to 999 or 'TYPE:COUNT', such as 2 or 'a100:2'; YAML needs the quotes for a "
    "type like '3090:2', which it takes for a time",
)


def _name(given: Given) -> str:
    """Return a name without spaces, and no number, since YAML may have changed it."""
    return _word(replace(given, value=text(given)))


def _gpus(given: Given) -> int | str:
    value = _gpu_text(given)
    return int(value) if value.isdigit() else value


_WAIT = _between(number, 0, math.inf, "a number of at least 0")

FORMS: dict[str, Parser] = {
    "at least 0": _between(integer, 0, math.inf, "a whole number of at least 0"),
    "at least 1": _between(integer, 1, math.inf, "a whole number of at least 1"),
    "wait": _WAIT,
    "span": _between(number, math.ulp(0.0), math.inf, "a number above 0"),
    "share": _between(number, 0, 1, "a number from 0 to 1"),
    "port": _between(integer, 1, 65535, "a port from 1 to 65535, or null for none"),
    "throughput": _between(number, 0.01, 100, "a number from 0.01 to 100, such as 2.5"),
    "hang time-out": _hang_after,
    "warm workers": _warm_workers,
    "time": lambda given: parse.parse_time(given.value, from_yaml=not given.typed, key=given.key),
    "world sizes": _world_sizes,
    "name": _name,
    "GPUs": _gpus,
    "memory": _matching(
        r"0|[1-9]\d*[KMGTkmgt]",
        "a whole number with its unit K, M, G or T, such as 64G, or 0 for all of the node's",
    ),
    "file": _existing_file,
    "environment": _environment,
    "environment file": _env_file,
    "webhook": _webhook,
    "notify events": lambda given: _choices(given, texts(given), get_args(NotifyEvent)),
    "networks": _networks,
    "modules": _texts_that(
        lambda name: all(map(str.isidentifier, name.split("."))),
        "the name of a module, such as transformers",
    ),
    "mounts": _texts_that(
        re.compile(r"[^,:\s][^,:\n]*(:[^,:\n]+){0,2}").fullmatch,
        "of the form SOURCE[:TARGET[:OPTIONS]]",
    ),
    "sbatch": _sbatch_flags,
    "srun": _srun_args,
    "resume args": _resume_args,
    "direction": _directions,
    "sampler": _component(*SAMPLERS),
    "pruner": _component(*PRUNERS),
    "parameters": _parameters,
}
"""The parser of each form that a field of the schema names."""


# ---- overrides of commands without a script, such as `resume` and `doctor`


def read_override(override: str, sweep: str | None = None) -> tuple[str, Any]:
    """Return dotted key and only value of an override, or the value for a sweep; or ConfigError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as e:
        why = f"an override is written KEY=VALUE, such as nodes=1:4; Hydra: {e}"
        raise ConfigError("override", override, why) from e
    key = str(parsed.key_or_group)
    if parsed.is_delete():
        raise ConfigError(f"~{key}", override, "a key cannot be deleted here; give it a value")
    if parsed.is_sweep_override():
        if sweep is not None:
            return key, sweep
        why = "a sweep is not possible for one run; give one value"
        raise ConfigError(key, override.partition("=")[2], why)
    return key, _plain(parsed.value())


def read_setting(word: str) -> tuple[str, Any]:
    """Return key and value of a setting that no script of Hydra reads: ``partition=a,b``.

    A value whose type is a text is taken as it is, as sbatch takes it (``a100&ib``), and so is one
    that would be a sweep.
    """
    key, equals, text = word.partition("=")
    is_text = get_type_hints(SlurmSettings).get(key) == str | None
    if equals and is_text and not text.startswith(("'", '"')) and text != "null":
        return key, text
    return read_override(word, sweep=text)


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a config tree; a mapping is merged into an existing one."""
    *groups, name = key.split(".")
    for group in groups:
        if not isinstance(config.get(group), dict):
            config[group] = {}
        config = config[group]
    merged = isinstance(value, dict) and isinstance(config.get(name), dict)
    config[name] = {**config[name], **value} if merged else value


def _plain(value: Any) -> Any:
    """Return a parsed value as JSON values; quoted texts become plain texts."""
    if isinstance(value, Mapping):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
