"""What the facts of a host mean: the login node's, and each node's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_elastic.doctor.findings import Finding, by_value, fail, ok, unknown, warn
from hpc_elastic.doctor.host import Host
from hpc_elastic.mount import LOCAL
from hpc_elastic.slurm.nodelist import compress

_MIN_FILES = 4096
"""An agent that leads holds a connection for each node, a worker's loaders several for each CPU."""
_MIN_PROCESSES = 4096
_MIN_LOCKED_BYTES = 1 << 30


def judge(host: Host, *, own_python: bool = True) -> Iterator[Finding]:
    """Yield what is to be said of the login node.

    Args:
        host: Its facts.
        own_python: Whether the nodes use the interpreter of this process: no container's, and no
            ``launcher.python``.
    """
    yield _commands(host)
    if own_python:
        yield _python(host)
    yield from limits("host", [host])
    yield clock("host", [host])


def _commands(host: Host) -> Finding:
    check = "host.commands"
    if not host.missing_commands:
        return ok(check, "Slurm's commands are installed")
    return fail(
        check,
        f"not on PATH: {', '.join(host.missing_commands)}",
        "runs are submitted, watched and cancelled by them",
        "run the doctor on a login node, or `module load slurm`",
    )


def _python(host: Host) -> Finding:
    check, why = "host.python", "the nodes start this very interpreter, by its path"
    found = f"{host.python} on {host.python_fs or 'an unknown file system'}"
    if host.python_fs in LOCAL:
        remedy = (
            "harmless where the nodes have the same at the same path (--probe finds out); else "
            "make the environment on the shared file system, or set launcher.python"
        )
        return warn(check, f"{found}, which is this machine's own", why, remedy)
    return ok(check, found, why)


def limits(group: str, hosts: list[Host]) -> Iterator[Finding]:
    """Yield one finding for each kind of limit, over all hosts."""
    yield _limit(
        f"{group}.nofile", hosts, "nofile", _MIN_FILES,
        "open files: the leading agent holds a connection for each node, loaders several each",
        "raise the hard limit (limits.conf; PropagateResourceLimits in slurm.conf)",
        hard=True,
    )  # fmt: skip
    yield _limit(
        f"{group}.nproc", hosts, "nproc", _MIN_PROCESSES,
        "processes and threads: each worker has many, and as many loaders as it is told to",
        "raise it (`ulimit -u`, limits.conf), or use fewer loaders",
    )  # fmt: skip
    yield _limit(
        f"{group}.memlock", hosts, "memlock", _MIN_LOCKED_BYTES,
        "locked memory: NCCL over InfiniBand fails without it; TCP does not need it",
        "have the admin set it to unlimited (LimitMEMLOCK of slurmd; limits.conf)",
        matters=group != "host" and any(h.has_infiniband for h in hosts),
    )  # fmt: skip
    yield from _address_space(group, hosts)


def _limit(
    check: str, hosts: list[Host], name: str, least: int, why: str, remedy: str,
    *, hard: bool = False, matters: bool = True,
) -> Finding:  # fmt: skip
    """Judge one limit.

    Args:
        check: Name of the check.
        hosts: Where it was looked at.
        name: The limit's name.
        least: What is enough.
        why: Why it matters.
        remedy: What to do.
        hard: The hard limit counts: the agent raises the soft one itself.
        matters: Whether a low limit costs anything here.
    """
    values = {h.name: h.limits.get(name, (None, None))[hard] for h in hosts}
    low = {host: n for host, n in values.items() if n is not None and n < least}
    what = f"{'hard ' if hard else ''}limit of {name}"
    if not low:
        smallest = min((n for n in values.values() if n is not None), default=None)
        return ok(check, f"{what}: {_size(name, smallest)}", why)
    found = by_value({host: _size(name, n) for host, n in low.items()})
    if not matters:
        return ok(check, f"{what}: {found}; it matters on nodes with InfiniBand only", why)
    return warn(check, f"{what}: {found}", why, remedy)


def _size(name: str, number: int | None) -> str:
    if number is None:
        return "unlimited"
    if name in ("memlock", "as"):
        return f"{number / (1 << 20):,.0f} MiB"
    return f"{number:,}"


def _address_space(group: str, hosts: list[Host]) -> Iterator[Finding]:
    """Yield a finding where an address space is limited: CUDA reserves more than there is."""
    limited = [h for h in hosts if h.limits.get("as", (None, None))[0] is not None]
    if limited:
        sizes = by_value({h.name: _size("as", h.limits["as"][0]) for h in limited})
        why = "CUDA and torch reserve far more addresses than they use memory"
        remedy = "`ulimit -v unlimited` in launcher.setup; limits.conf"
        yield warn(f"{group}.address_space", f"limited to {sizes}", why, remedy)


def clock(group: str, hosts: list[Host]) -> Finding:
    """Judge whether time services keep the clocks."""
    check = f"{group}.clock"
    why = "logs and events of the nodes are put in order by their clocks; elections are not"
    adrift = [h.name for h in hosts if h.clock_kept is False]
    if adrift:
        remedy = "have the admin run chrony or systemd-timesyncd (in a container: on its host)"
        return warn(
            check, f"no time service keeps the clock of {compress(sorted(adrift))}", why, remedy
        )
    if any(h.clock_kept is None for h in hosts):
        return unknown(check, "the kernel does not say whether the clock is kept", why)
    return ok(check, "a time service keeps the clock", why)
