"""The jobs of a cluster: submitted, numbered, and found by the names that commands take."""

from __future__ import annotations

import itertools
import re

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm.errors import Refusal
from hpc_elastic.testing.fake_slurm.jobs import Job
from hpc_elastic.testing.fake_slurm.request import Request

_NAME = re.compile(r"(\d+)(?:_(?:(\d+)|\[(.+)\]|(\*)))?", re.ASCII)
INVALID = "Invalid job id specified"


class Table:
    """All jobs that Slurm has not forgotten, in the order in which they were submitted.

    Elements of an array wait in one record; each gets a number of its own when it leaves it, and
    the last one has the array's.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._numbers = itertools.count(1)
        self._orders = itertools.count()

    def submit(
        self, request: Request, array: str | None, now: float, max_array_size: int
    ) -> tuple[int, list[Job]]:
        """Add a job, or all elements of an array; return its id, and them.

        Raises:
            Refusal: the indices are malformed or too large.
        """
        if array is None:
            job = self._new(request, now)
            job.number = next(self._numbers)
            self.jobs.append(job)
            return job.number, [job]
        indices, limit = _indices(array, max_array_size)
        number = next(self._numbers)
        elements = [self._new(request, now) for _ in indices]
        for job, index in zip(elements, indices, strict=True):
            job.array, job.index, job.limit = number, index, limit
            job.num_in_array, job.bounds = len(indices), (indices[0], indices[-1])
        self.jobs += elements
        return number, elements

    def _new(self, request: Request, now: float) -> Job:
        return Job(
            request, now, next(self._orders),
            held=request.hold, begin=request.begin, may_requeue=request.requeue,
            excluded=frozenset(request.exclude), limit_s=request.limit_s,
        )  # fmt: skip

    def number(self, job: Job) -> None:
        """Give a job that leaves its array's record a number of its own."""
        if job.number is None:
            in_record = sum(j.array == job.array and j.number is None for j in self.jobs)
            job.number = job.array if in_record == 1 else next(self._numbers)

    def find(self, name: str) -> list[Job]:
        """Return the jobs that ``12``, ``12_3`` or ``12_[1-3]`` stands for; none is unknown.

        Raises:
            Refusal: it is no name of a job.
        """
        m = _NAME.fullmatch(name)
        if m is None:
            raise Refusal(f"Invalid job id {name}")
        number = int(m[1])
        whole = [job for job in self.jobs if job.array == number]
        if m[2] is None and m[3] is None:
            return whole or [job for job in self.jobs if job.number == number]
        wanted = {int(m[2])} if m[2] else set(_indices(m[3], 1 << 30)[0])
        return [job for job in whole if job.index in wanted]

    def forget(self, before: float) -> None:
        """Forget jobs that ended before a moment."""
        self.jobs = [j for j in self.jobs if not (j.is_over and (j.ended or 0.0) < before)]


def _indices(text: str, max_size: int) -> tuple[list[int], int | None]:
    try:
        indices, limit = nodelist.expand_indices(text)
    except ValueError as e:
        raise Refusal(f"Invalid job array specification: {e}") from e
    if max(indices) >= max_size:
        raise Refusal("Batch job submission failed: Invalid job array specification")
    return sorted(set(indices)), limit
