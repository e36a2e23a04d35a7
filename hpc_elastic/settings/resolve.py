"""The whole tree: which launcher, every key, and what the keys demand of each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from hpc_elastic.config import LocalSettings, NodeRange, Nproc, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError, near_miss
from hpc_elastic.settings.checks import PARSERS
from hpc_elastic.settings.flags import gpus_in_gres
from hpc_elastic.settings.forms import parse_nodes, parse_nproc
from hpc_elastic.settings.groups import UNSET, Given, Reader, boolean, type_hints

Backend = SlurmSettings | LocalSettings
BACKENDS: dict[str, type[Backend]] = {"slurm": SlurmSettings, "local": LocalSettings}
TOP_LEVEL = ("nodes", "nproc_per_node", "ft")


def resolve(
    config: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    sweep_params: Mapping[str, Any] | None = None,
) -> RunSettings:
    """Return the settings of one run, checked.

    Args:
        config: The composed config as a plain container, interpolations resolved; keys of the
            user's own are not looked at. ``???`` and absent keys take their defaults.
        overrides: The run's Hydra overrides, such as ``nodes=76``. A value given there was never
            read by YAML.
        sweep_params: ``hydra.sweeper.params``. Hydra turns them into overrides, but they come
            from YAML.

    Raises:
        ConfigError: something can not work. It lists all that is wrong, one a line; its ``key``
            and ``value`` are the first one's.
    """
    launcher = config.get("launcher")
    backend = _backend(launcher)
    keys = {key: value for key, value in dict(launcher or {}).items() if key != "backend"}
    typed = _typed(overrides, sweep_params or {})
    reader = Reader(typed, PARSERS, elsewhere=lambda key: _elsewhere(key, backend))

    nodes = reader.attempt(lambda: _nodes(config.get("nodes"), typed="nodes" in typed))
    nproc = reader.attempt(lambda: _nproc(config.get("nproc_per_node")))
    ft = reader.attempt(lambda: _ft(config.get("ft")))
    settings = reader.group(BACKENDS[backend], keys, "launcher")
    if not reader.errors and nodes:
        reader.errors.extend(_contradictions(nodes, settings, ft=bool(ft)))
    if reader.errors or nodes is None or nproc is None or ft is None:
        raise _joined(reader.errors)
    return RunSettings(nodes, nproc, settings, ft)


def as_config(settings: RunSettings) -> dict[str, Any]:
    """Return the settings as the config tree that resolves to them again.

    To be merged into the config that is frozen for the workers: no key of ours is ``???`` in it.
    """
    low, high = settings.nodes.min, settings.nodes.max
    backend = next(name for name, cls in BACKENDS.items() if isinstance(settings.launcher, cls))
    return {
        "nodes": str(low) if low == high else f"{low}:{high}",
        "nproc_per_node": settings.nproc_per_node,
        "ft": settings.ft,
        "launcher": {**asdict(settings.launcher), "backend": backend},
    }


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
    """Return the keys whose values were typed on the command line, as literals."""
    typed: dict[str, bool] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+").partition("@")[0]
        typed[key] = "${" not in value and not _is_param(key, value, sweep_params)
    return frozenset(key for key, literal in typed.items() if literal)


def _is_param(key: str, value: str, sweep_params: Mapping[str, Any]) -> bool:
    """Tell whether an override is a number that YAML read as a parameter of the sweep."""
    param = sweep_params.get(key)
    return isinstance(param, int) and str(param) == value


def _nodes(value: object, *, typed: bool) -> NodeRange:
    if value is None or value == UNSET:
        return NodeRange(1, 1)
    return parse_nodes(value, from_yaml=not typed)


def _nproc(value: object) -> Nproc:
    return "auto" if value is None or value == UNSET else parse_nproc(value)


def _ft(value: object) -> bool:
    return False if value is None or value == UNSET else boolean(Given("ft", value))


def _elsewhere(key: str, backend: str) -> str | None:
    """Say where a key that does not exist under this name and launcher does exist."""
    name = key.rpartition(".")[2]
    if name in TOP_LEVEL:
        return f"; it stands at the top level: {name}=..."
    for place in _keys(BACKENDS[backend], "launcher"):
        if place.rpartition(".")[2] == name:
            return f" (did you mean {place}?)"
    for other in BACKENDS.keys() - {backend}:
        if key in _keys(BACKENDS[other], "launcher"):
            return f" with launcher={backend}; it belongs to launcher={other}"
    return None


def _keys(cls: type[Any], path: str) -> Iterator[str]:
    """Yield the dotted key of every field, groups included."""
    hints = type_hints(cls)
    for field in fields(cls):
        yield f"{path}.{field.name}"
        if is_dataclass(inner := hints[field.name]) and isinstance(inner, type):
            yield from _keys(inner, f"{path}.{field.name}")


def _contradictions(nodes: NodeRange, settings: Backend, *, ft: bool) -> Iterator[ConfigError]:
    """Yield what single keys allow, but not together."""
    if ft and settings.grow == "never":
        remedy = "with ft=true a node that comes is always admitted: leave it out"
        yield ConfigError("launcher.grow", settings.grow, remedy)
    rendezvous = settings.rendezvous
    if rendezvous.lost_after_s <= rendezvous.heartbeat_s:
        remedy = f"must be above launcher.rendezvous.heartbeat_s ({rendezvous.heartbeat_s:g})"
        yield ConfigError("launcher.rendezvous.lost_after_s", rendezvous.lost_after_s, remedy)
    if settings.agent.stop_timeout_s >= rendezvous.start_timeout_s:
        remedy = (
            f"must be below launcher.rendezvous.start_timeout_s ({rendezvous.start_timeout_s:g})"
        )
        yield ConfigError("launcher.agent.stop_timeout_s", settings.agent.stop_timeout_s, remedy)
    if isinstance(settings, LocalSettings):
        yield from _too_few("launcher.max_agents", settings.max_agents, nodes)
    else:
        if not settings.gang:  # else the min part is no part of the array
            yield from _too_few("launcher.array_parallelism", settings.array_parallelism, nodes)
        yield from _slurm_contradictions(settings)


def _too_few(key: str, limit: int | None, nodes: NodeRange) -> Iterator[ConfigError]:
    if limit is not None and limit < nodes.min:
        yield ConfigError(key, limit, f"must be at least {nodes.min}, the min of the key nodes")


def _slurm_contradictions(settings: SlurmSettings) -> Iterator[ConfigError]:
    box = settings.container
    if box.image and not box.runtime:
        remedy = "needs launcher.container.runtime=apptainer or pyxis"
        yield ConfigError("launcher.container.image", box.image, remedy)
    if box.runtime and not box.image:
        remedy = "needs launcher.container.image=..."
        yield ConfigError("launcher.container.runtime", box.runtime, remedy)
    for name in ("mounts", "args"):
        if getattr(box, name) and not box.runtime:
            remedy = "needs launcher.container.runtime and launcher.container.image"
            yield ConfigError(f"launcher.container.{name}", getattr(box, name), remedy)
    for flag in settings.sbatch:
        if settings.mem is not None and flag in ("mem-per-cpu", "mem-per-gpu"):
            remedy = f"contradicts launcher.mem={settings.mem}; give only one of them"
            yield ConfigError(f"launcher.sbatch.{flag}", settings.sbatch[flag], remedy)
    if settings.exclusive and settings.sbatch.get("oversubscribe"):
        remedy = "contradicts launcher.exclusive=true; give only one of them"
        yield ConfigError("launcher.sbatch.oversubscribe", True, remedy)
    gres = settings.sbatch.get("gres")
    if gpus_in_gres(gres) is not None and settings.gpus_per_node is not None:
        remedy = f"contradicts launcher.gpus_per_node={settings.gpus_per_node}; give only one"
        yield ConfigError("launcher.sbatch.gres", gres, remedy)


def _joined(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error that says them all."""
    first = ConfigError(errors[0].key, errors[0].value, "")
    first.args = ("\n".join(map(str, errors)),)
    return first
