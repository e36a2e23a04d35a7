"""A process that saves is killed at any instant: nothing is lost but the attempt."""

import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
from savers import (
    PATIENCE_S,
    Counter,
    Crash,
    checkpointer,
    count_on,
    exit_code,
    fork,
    in_nursery,
    names_in,
    restored,
    save_at,
)  # fmt: skip

from hpc_elastic.checkpoint.store import Store, verify_checkpoint

NUM_KILLS = 200 if os.environ.get("HPC_ELASTIC_LONG") else 60
LONGEST_S = 0.03
"""A save takes a few milliseconds; so kills hit everything between two lines of the saver."""


def lines_of(told: int) -> list[int]:
    """Wait for what a process says, and return it; nothing at its end."""
    assert select.select([told], [], [], PATIENCE_S)[0]
    return [int(line) for line in os.read(told, 4096).split()]


def one_life(folder: Path, least: int, num_lines: int, further_s: float) -> int:
    """Let a process say so many lines, and kill it a little later; return the last line."""
    told, tell = os.pipe()
    pid = fork(count_on, folder, 0, tell)
    os.close(tell)
    lines = lines_of(told)
    assert lines[0] >= least, f"went on from {lines}, but {least} was committed"
    while len(lines) < num_lines:
        lines += lines_of(told)
    time.sleep(further_s)
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL
    lines += lines_of(told)
    os.close(told)
    return lines[-1]


def save_and_close(folder: Path) -> None:
    """Save once more, and end as a process does that is not killed."""
    counter = Counter()
    with checkpointer(folder, counter) as c:
        assert save_at(c, counter, (c.load_latest() or 0) + 1)


def lives(folder: Path) -> None:
    """Kill a process at random points."""
    random.seed(4)
    committed = 0
    for _ in range(NUM_KILLS):
        num_lines, further_s = random.randint(1, 2), random.uniform(0, LONGEST_S)
        committed = one_life(folder, committed, num_lines, further_s)
    assert restored(folder) >= committed > NUM_KILLS / 2
    store = Store(folder)
    assert exit_code(fork(save_and_close, folder)) == 0
    assert len(store.steps()) == 2, "the last process removes what the killed ones left"
    assert all(verify_checkpoint(store.folder(step)) == [] for step in store.steps())


def test_a_kill_at_a_random_point_loses_nothing_that_was_committed(tmp_path):
    """Many lives in one directory: each goes on from a good checkpoint, never an older one."""
    in_nursery(lives, tmp_path)


def save_and_crash(folder: Path, step: int, crash: Crash) -> None:
    """Save a step, with a crash at some call that changes the file system."""
    counter = Counter()
    c = checkpointer(folder, counter, keep_last=1, asynchronous=False)
    c.load_latest()
    crash.plant()
    assert save_at(c, counter, step)


def begin_group(number: int) -> None:
    """Each attempt is another group of one run, formed by the log entry of that index."""
    path = Path(os.environ["RDZV"], f"entry.{number}.json")
    path.touch()
    os.environ["HPC_ELASTIC_FENCE"] = str(path)


def crash_everywhere(folder: Path, after: bool) -> None:
    """Crash at the first call, the second, and so on, until a save gets through."""
    at, step, code = 0, 1, 9
    while code == 9:
        at += 1
        begin_group(at)
        before = restored(folder) if folder.exists() else None
        code = exit_code(fork(save_and_crash, folder, step, Crash(at, after)))
        assert code in (0, 9)
        assert restored(folder) in (before, step)
        names = names_in(folder)
        assert sum(name.startswith(".staging") for name in names) <= 1, names
        step = (restored(folder) or 0) + 1
    assert at > 20
    names = names_in(folder)
    assert [name for name in names if name.startswith(".")] == [], names


def replace_and_crash(folder: Path, writer: int, crash: Crash) -> None:
    """Save the step that was restored, with another state, and crash."""
    counter = Counter(writer)
    c = checkpointer(folder, counter, keep_last=1, asynchronous=False)
    step = c.load_latest() or 1
    crash.plant()
    assert save_at(c, counter, step)


def writer_of(folder: Path) -> int:
    """Restore, and return which writer's state it is; all of it is checked."""
    counter = Counter()
    assert checkpointer(folder, counter, asynchronous=False).load_latest() == 1
    return counter.restored_writer


def crash_while_replacing(folder: Path, after: bool) -> None:
    """Crash at each call of a save that replaces the only checkpoint there is."""
    begin_group(1)
    assert exit_code(fork(replace_and_crash, folder, 1, Crash(0, after))) == 0
    at, code, known = 1, 9, 1
    while code == 9:
        at += 1
        begin_group(at)
        code = exit_code(fork(replace_and_crash, folder, at, Crash(at - 1, after)))
        assert code in (0, 9)
        found = writer_of(folder)
        assert found in (known, at) and (code or found == at)
        known = found
    assert at > 20
    begin_group(at + 1)
    assert exit_code(fork(save_and_close, folder)) == 0
    assert [name for name in names_in(folder) if name.startswith(".")] == []


@pytest.mark.parametrize(
    "after",
    [pytest.param(False, marks=pytest.mark.long, id="before"), pytest.param(True, id="after")],
)
def test_a_crash_while_a_checkpoint_is_replaced_leaves_one_of_the_two(tmp_path, after):
    """The directory never holds neither, under whichever name."""
    (tmp_path / "rdzv").mkdir()
    in_nursery(crash_while_replacing, tmp_path / "checkpoints", after, RDZV=str(tmp_path / "rdzv"))


@pytest.mark.parametrize(
    "after",
    [pytest.param(False, id="before"), pytest.param(True, marks=pytest.mark.long, id="after")],
)
def test_a_crash_at_any_call_leaves_the_earlier_or_the_new_checkpoint(tmp_path, after):
    """Before or after each call that writes; a write may be torn. The next save cleans up."""
    (tmp_path / "rdzv").mkdir()
    in_nursery(crash_everywhere, tmp_path / "checkpoints", after, RDZV=str(tmp_path / "rdzv"))
