"""Waiting for descriptors of any number."""

import os
import resource
from collections.abc import Iterator

import pytest

from hpc_elastic._util import readable


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose ends have numbers that select(2) refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    low = os.pipe()
    high = tuple(os.dup2(end, 3000 + i) for i, end in enumerate(low))
    for end in low:
        os.close(end)
    yield high
    for end in high:
        os.close(end)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_may_have_any_number(pipe):
    """It is readable once there is something to read."""
    read, write = pipe
    assert readable(read, timeout_s=0) == []
    os.write(write, b"x")
    assert readable(read) == [read]


def test_a_file_at_its_end_is_readable():
    """Its writer is gone; what was asked for is what is returned."""
    read, write = os.pipe()
    with os.fdopen(read) as file:
        os.close(write)
        assert readable(file) == [file]


def test_a_year_may_be_waited_for():
    """As by a task without a time limit, whose end Slurm puts a year ahead."""
    read, write = os.pipe()
    os.write(write, b"x")
    assert readable(read, timeout_s=365 * 86400.0) == [read]
    os.close(read)
    os.close(write)
