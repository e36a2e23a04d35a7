"""sinfo: partitions and nodes, in the formats of ``-o``. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.config import Partition
from hpc_elastic.testing.fake_slurm.errors import Refusal, unknown
from hpc_elastic.testing.fake_slurm.nodes import SHORT
from hpc_elastic.testing.fake_slurm.options import FLAG, VALUE, Table, parse

OPTIONS = Table(
    {
        **dict.fromkeys(("noheader", "all", "Node"), FLAG),
        **dict.fromkeys(("format", "partition", "nodes"), VALUE),
    },
    {"h": "noheader", "a": "all", "N": "Node", "o": "format", "p": "partition", "n": "nodes"},
)
_DEFAULT = "%9P %.5a %.10l %.6D %.6t %N"
_SPEC = re.compile(r"%(\.?)(\d*)([A-Za-z])")
_Row = tuple[Partition, str, tuple[str, ...]]


def sinfo(argv: Sequence[str], cluster: Cluster) -> str:
    """Return what sinfo prints.

    Raises:
        Refusal: something that it can not do.
    """
    options = parse(argv, OPTIONS)
    if options.rest:
        raise Refusal(f"Unrecognized option: {options.rest[0]}")
    pattern = options.get("format") or _DEFAULT
    fields = _fields(cluster)
    for m in _SPEC.finditer(pattern):
        if m[3] not in fields:
            raise unknown(f"%{m[3]} in sinfo's --format")

    def show(row: _Row | None) -> str:
        def value(m: re.Match[str]) -> str:
            head, text = fields[m[3]]
            shown = head if row is None else text(row)
            cut = shown[: int(m[2])] if m[2] else shown
            return cut.rjust(int(m[2] or 0)) if m[1] else cut.ljust(int(m[2] or 0))

        return _SPEC.sub(value, pattern)

    by_state = bool(re.search(r"%\.?\d*[tT]", pattern)) or "Node" in options
    wanted = options.get("partition")
    partitions = [
        p for p in cluster.config.partitions if wanted is None or p.name in wanted.split(",")
    ]
    names = nodelist.expand(options.get("nodes") or "") or list(cluster.nodes)
    rows = _rows(cluster, partitions, names, by_state=by_state, apart="Node" in options)
    lines = [show(row) for row in rows]
    if "noheader" not in options:
        lines.insert(0, show(None))
    return "".join(f"{line}\n" for line in lines)


def _rows(
    cluster: Cluster,
    partitions: Sequence[Partition],
    names: Sequence[str],
    *,
    by_state: bool,
    apart: bool,
) -> list[_Row]:
    groups: dict[tuple[str, str, str], tuple[Partition, str, list[str]]] = {}
    states = {n: _state(cluster, n) for n in names if n in cluster.nodes}
    for partition in partitions:
        for name, state in states.items():
            key = (name if apart else "", partition.name, state if by_state else "")
            groups.setdefault(key, (partition, state, []))[2].append(name)
    rows = [(partition, state, tuple(members)) for partition, state, members in groups.values()]
    return sorted(rows, key=lambda r: list(cluster.nodes).index(r[2][0])) if apart else rows


def _state(cluster: Cluster, name: str) -> str:
    return cluster.nodes[name].state(cluster.table.jobs, cluster.config.cpus_per_node)


def _fields(cluster: Cluster) -> dict[str, tuple[str, Callable[[_Row], str]]]:
    config = cluster.config
    return {
        "P": ("PARTITION", lambda r: r[0].name + ("*" if r[0].is_default else "")),
        "R": ("PARTITION", lambda r: r[0].name),
        "a": ("AVAIL", lambda r: "down" if r[0].name in cluster.closed else "up"),
        "l": ("TIMELIMIT", lambda _: "infinite"),
        "D": ("NODES", lambda r: str(len(r[2]))),
        "t": ("STATE", lambda r: SHORT[r[1]]),
        "T": ("STATE", lambda r: r[1]),
        "N": ("NODELIST", lambda r: nodelist.compress(r[2])),
        "c": ("CPUS", lambda _: str(config.cpus_per_node)),
        "m": ("MEMORY", lambda _: str(config.memory_mb)),
        "G": ("GRES", lambda _: "(null)"),
        "f": ("AVAIL_FEATURES", lambda _: "(null)"),
    }
