"""scancel: jobs, elements and whole arrays; ended, or sent a signal."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from hpc_elastic.testing.fake_slurm import variables
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.errors import Refusal
from hpc_elastic.testing.fake_slurm.jobs import Job
from hpc_elastic.testing.fake_slurm.options import FLAG, VALUE, Parsed, Table, parse
from hpc_elastic.testing.fake_slurm.request import signal_name
from hpc_elastic.testing.fake_slurm.scontrol import nodelist_names

OPTIONS = Table(
    {
        **dict.fromkeys(("signal", "state", "user", "name", "partition"), VALUE),
        **dict.fromkeys(("batch", "full", "me", "quiet"), FLAG),
    },
    {
        **{"s": "signal", "t": "state", "u": "user", "n": "name", "p": "partition", "b": "batch"},
        **{"f": "full", "Q": "quiet"},
    },
)
_FILTERS = ("state", "user", "name", "partition", "me")


def scancel(argv: Sequence[str], cluster: Cluster, now: float) -> str:
    """Cancel jobs, or send them a signal; what is unknown or has ended is no error, as in Slurm.

    Raises:
        Refusal: it was given neither a job nor a filter, or something it can not do.
    """
    options = parse(argv, OPTIONS)
    if not options.rest and not any(name in options for name in _FILTERS):
        raise Refusal("No job identification provided")
    names = [name for word in options.rest for name in nodelist_names(word)]
    jobs = [job for name in names for job in cluster.table.find(name)]
    chosen = [job for job in (jobs if names else cluster.table.jobs) if _is_meant(job, options)]
    number = options.get("signal")
    for job in [job for job in chosen if not job.is_over]:
        if number is None:
            cluster.cancel(job, now)
        elif job.has_nodes:
            _signal(job, signal.Signals[f"SIG{signal_name(number)}"], options, cluster)
    return ""


def _is_meant(job: Job, options: Parsed) -> bool:
    state = options.get("state")
    if state is not None and job.shown_state not in state.upper().split(","):
        return False
    if (options.get("user") or variables.user()) != variables.user():
        return False
    if (options.get("name") or job.request.name) != job.request.name:
        return False
    return (options.get("partition") or job.request.partition) == job.request.partition


def _signal(job: Job, number: int, options: Parsed, cluster: Cluster) -> None:
    """Send a signal to the steps; to the batch script with --batch, to all of it with --full."""
    if "batch" in options:
        cluster.signal_batch(job, number, with_children=False)
        return
    if "full" in options:
        cluster.signal_batch(job, number, with_children=True)
    cluster.signal_steps(job, number)
