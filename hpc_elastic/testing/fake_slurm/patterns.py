"""The file name patterns of ``--output``: ``%A_%a.log``. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_elastic.testing.fake_slurm.errors import unknown
from hpc_elastic.testing.fake_slurm.jobs import Job
from hpc_elastic.testing.fake_slurm.variables import user

_SYMBOL = re.compile(r"%(\d*)(.)")


def default(job: Job) -> str:
    """Return the pattern of a job that names none."""
    return "slurm-%A_%a.out" if job.array is not None else "slurm-%j.out"


def expand(
    pattern: str, job: Job, *, node: str, node_id: int = 0, rank: int = 0, step: int | None = None
) -> Path:
    """Return the file that a pattern stands for, in the job's directory if it is relative.

    Raises:
        Refusal: it has a symbol that the fake does not know.
    """
    values = {
        "%": "%",
        "j": str(job.number),
        "J": f"{job.number}" + ("" if step is None else f".{step}"),
        "A": str(job.number if job.array is None else job.array),
        "a": str(4294967294 if job.index is None else job.index),
        "N": node,
        "n": str(node_id),
        "t": str(rank),
        "s": "batch" if step is None else str(step),
        "u": user(),
        "x": job.request.name,
    }

    def value(m: re.Match[str]) -> str:
        if m[2] not in values:
            raise unknown(f"%{m[2]} in the file name {pattern}")
        text = values[m[2]]
        return text.zfill(int(m[1])) if m[1] and m[2] in "jJAants" else text

    return Path(job.request.cwd) / _SYMBOL.sub(value, pattern)
