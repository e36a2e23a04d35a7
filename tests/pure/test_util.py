"""Helpers of all packages: counts and durations as text, waiting for descriptors."""

import errno
import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from hpc_elastic._util import counted, duration, node_time, patiently, readable, short


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3, "0 s"), (0.44, "0.4 s"), (5, "5 s"), (9.96, "10 s"), (45.3, "45 s"), (119, "119 s"),
        (120, "2 min"), (125, "2 min 5 s"), (599.4, "9 min 59 s"), (620, "10 min"), (3590, "1 h"),
        (12_000, "3 h 20 min"), (86_390, "1 d"), (90_000, "1 d 1 h"), (3 * 86_400, "3 d"),
    ],
)  # fmt: skip
def test_a_duration_is_no_more_exact_than_is_of_use(seconds, said):
    """Its two largest units."""
    assert duration(seconds) == said


def test_a_time_below_a_second_is_told_in_milliseconds():
    """What nobody can measure is told as the least that can be."""
    said = [short(s) for s in (0, 2e-5, 0.0042, 0.999, 1.04, 12.3, 125)]
    assert said == ["0.1 ms", "0.1 ms", "4.2 ms", "999.0 ms", "1 s", "12 s", "2 min 5 s"]


def test_a_number_and_its_noun():
    """Thousands apart."""
    assert [counted(n, "node") for n in (0, 1, 2000)] == ["0 nodes", "1 node", "2,000 nodes"]
    assert counted(3, "node lost", "nodes lost") == "3 nodes lost"


def test_node_time_has_the_unit_of_what_stands_beside():
    """So that a column can be compared."""
    assert [node_time(s) for s in (12, 1200, 36_000)] == [
        "12.0 node-s", "20.0 node-min", "10.0 node-h",
    ]  # fmt: skip
    assert node_time(60, like=36_000) == "0.0 node-h"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose ends have numbers that select(2) refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD, 3000) for end in low)
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


def test_a_call_is_repeated_while_the_system_is_full():
    """With growing pauses, and not for ever; another error is none that passes."""
    pauses, errors = [], [errno.ENOSPC, errno.EDQUOT, errno.EMFILE]

    def work():
        if errors:
            raise OSError(errors.pop(), "full")
        return 7

    assert patiently(work, pauses.append) == 7
    assert pauses == sorted(set(pauses)) and len(pauses) == 3
    errors += [errno.EAGAIN] * 100
    with pytest.raises(BlockingIOError):
        patiently(work, pauses.append)
    errors[:] = [errno.EACCES]
    with pytest.raises(PermissionError):
        patiently(work, pauses.append)
    assert sum(pauses) < 200 and not errors
