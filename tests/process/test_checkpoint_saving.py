"""What a save does to the training: blocks little, waits or skips, hurries, never ends it."""

import errno
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import torch
from group import eventually
from savers import Counter, checkpointer, names_in, restored, save_at
from scarcity import no_thread

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions, shard_file
from hpc_elastic.checkpoint import save as save_module
from hpc_elastic.checkpoint.generators import capture_generators
from hpc_elastic.checkpoint.shard_file import BlockFile
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.errors import CheckpointError, CheckpointFencedError, ConfigError
from hpc_elastic.worker import reporting, shared_page

PATIENCE_S = 30.0
AT_NEXT = shared_page.CheckpointRequest(5, None, confirmed=True, pause=True)
"""To stay at the next checkpoint, whichever that is."""


class Disk:
    """A disk that writes the first block of a shard, and then stands still until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.goes_on = threading.Event()
        write_block = BlockFile.write
        monkeypatch.setattr(shard_file, "BLOCK_BYTES", 1 << 20)

        def write(file: BlockFile, block: memoryview) -> None:
            write_block(file, block)
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.goes_on.wait(PATIENCE_S)

        monkeypatch.setattr(BlockFile, "write", write)


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    """Stands still in the middle of asynchronous saves."""
    made = Disk(monkeypatch)
    yield made
    made.goes_on.set()


# ---- asynchronous -------------------------------------------------------------------------


def test_the_state_may_change_as_soon_as_a_save_has_returned(tmp_path, disk):
    """What is committed is the state as it was."""
    counter = Counter()
    c = checkpointer(tmp_path, counter)
    assert save_at(c, counter, 1)
    assert disk.reached.wait(PATIENCE_S)
    counter.set(2)
    assert Store(tmp_path).steps() == []
    disk.goes_on.set()
    c.wait()
    assert restored(tmp_path) == 1


def test_a_second_save_waits_for_the_first(tmp_path, disk, caplog):
    """And says so; both are committed."""
    caplog.set_level(logging.DEBUG)
    counter = Counter()
    with checkpointer(tmp_path, counter) as c, ThreadPoolExecutor(1) as pool:
        save_at(c, counter, 1)
        assert disk.reached.wait(PATIENCE_S)
        second = pool.submit(save_at, c, counter, 2)
        while "step 2 waits for step 1" not in caplog.text:
            assert not second.done()
        disk.goes_on.set()
        assert second.result(PATIENCE_S) is True
    assert Store(tmp_path).steps() == [2, 1]


def test_checkpoints_say_nothing_in_the_log_of_the_script(tmp_path, caplog):
    """Hydra lets INFO through: a line a checkpoint would be a line in the user's own output."""
    caplog.set_level(logging.INFO)
    counter = Counter()
    with checkpointer(tmp_path, counter, keep_last=1) as c:
        for step in range(1, 4):
            save_at(c, counter, step)
            c.wait()
    assert Store(tmp_path).steps() == [3] and caplog.text == ""
    assert restored(tmp_path) == 3
    assert caplog.text.count("restored the checkpoint of step 3") == len(caplog.messages) == 1


def test_a_second_save_is_skipped_if_so_wished(tmp_path, disk, caplog):
    """With a line in the log, and without an error."""
    counter = Counter()
    with checkpointer(tmp_path, counter, when_busy="skip") as c:
        save_at(c, counter, 1)
        assert disk.reached.wait(PATIENCE_S)
        assert save_at(c, counter, 2) is False
        disk.goes_on.set()
        c.wait()
        assert save_at(c, counter, 3) is True
    assert "step 2 is skipped: step 1 is still being written" in caplog.text
    assert Store(tmp_path).steps() == [3, 1]
    assert c.failures == 0


def test_a_step_is_saved_once(tmp_path, disk):
    """The same step again, under way or committed, leaves the checkpoint as it is."""
    counter = Counter()
    with checkpointer(tmp_path, counter) as c, ThreadPoolExecutor(1) as pool:
        save_at(c, counter, 1)
        assert disk.reached.wait(PATIENCE_S)
        second = pool.submit(c.save, 1)
        assert not wait([second], 0.2).done
        disk.goes_on.set()
        assert second.result(PATIENCE_S) is True
        assert c.save(1, urgent=True) is True
        inode = (tmp_path / "step-00000001").stat().st_ino
        assert c.save(1) is True
    assert (tmp_path / "step-00000001").stat().st_ino == inode


def test_a_save_in_the_background_that_fails_does_not_end_the_training(
    tmp_path, monkeypatch, caplog
):
    """It is logged and counted; `wait` says why, once; nothing is left; the next one works."""
    counter = Counter()
    c = checkpointer(tmp_path, counter)
    save_at(c, counter, 1)
    c.wait()
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", fail)
        assert save_at(c, counter, 2) is True
        with pytest.raises(CheckpointError, match=r"step 2 was not written to .*Input/output") as e:
            c.wait()
    assert isinstance(e.value.__cause__, OSError)
    assert "step 2 was not written" in caplog.text and c.failures == 1
    eventually(lambda: names_in(tmp_path) == ["step-00000001"])
    c.wait()
    assert save_at(c, counter, 2) is True
    c.close()
    assert restored(tmp_path) == 2


def fail(_: int) -> None:
    """Stand for a disk that breaks."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_the_error_of_the_training_goes_before_that_of_a_save(tmp_path, monkeypatch):
    """A `with` block that fails fails with its own error."""
    counter = Counter()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ZeroDivisionError), checkpointer(tmp_path, counter) as c:
        save_at(c, counter, 1)
        raise ZeroDivisionError


def test_without_a_thread_a_save_is_written_at_once(tmp_path, monkeypatch, caplog):
    """A want of threads ends no training."""
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    counter = Counter()
    c = checkpointer(tmp_path, counter)
    assert save_at(c, counter, 1)
    assert Store(tmp_path).steps() == [1]
    assert "can't start new thread: step 1 is written at once" in caplog.text
    c.close()


def test_what_is_committed_has_not_failed(tmp_path, monkeypatch):
    """Though it cannot be seen which older ones are to go."""
    counter = Counter()
    monkeypatch.setattr(save_module.Save, "_retire", lambda _: fail(0))
    with checkpointer(tmp_path, counter) as c:
        save_at(c, counter, 1)
    assert c.failures == 0 and names_in(tmp_path) == ["step-00000001"]


def test_buffers_are_used_again(tmp_path):
    """So only the first save meets fresh memory, and that is made in the background."""
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        memories = set()
        for step in range(1, 5):
            save_at(c, counter, step)
            c.wait()
            memories.add(id(c._snapshots._map))
    assert len(memories) == 1


# ---- urgent -------------------------------------------------------------------------------


def test_what_goes_with_its_replica_is_committed_at_once(tmp_path, disk, monkeypatch):
    """A replica that has left the run, as all that have the state do, commits nothing any more."""
    monkeypatch.setattr(reporting, "_reporter", reporting._Reporter())
    reporting.save_is_last(True)
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        assert save_at(c, counter, 1) is True
        assert Store(tmp_path).steps() == [1]
        disk.goes_on.set()


def test_an_urgent_save_returns_when_it_is_committed(tmp_path):
    """It leaves the older ones for later."""
    counter = Counter()
    with checkpointer(tmp_path, counter, keep_last=1) as c:
        save_at(c, counter, 1)
        c.wait()  # else it may be given up
        counter.set(2)
        assert c.save(2, urgent=True) is True
        assert Store(tmp_path).steps() == [2, 1]
    assert restored(tmp_path) == 2


@pytest.fixture
def hurried(disk, monkeypatch) -> Disk:
    """Stands still until an urgent save asks the earlier one to give up."""
    abort = save_module.Save.abort_if_unfinished

    def abort_and_go_on(save: save_module.Save) -> None:
        abort(save)
        disk.goes_on.set()

    monkeypatch.setattr(save_module.Save, "abort_if_unfinished", abort_and_go_on)
    return disk


@pytest.mark.parametrize(("num_elements", "expected"), [(3_000_000, [2]), (300_000, [2, 1])])
def test_an_urgent_save_gives_up_an_earlier_one(tmp_path, hurried, num_elements, expected, caplog):
    """One that is almost written is finished first."""
    caplog.set_level(logging.INFO)
    counter = Counter(size=num_elements)
    with checkpointer(tmp_path, counter) as c:
        counter.set(1)
        save = ThreadPoolExecutor(1).submit(c.save, 1)
        assert save.result(PATIENCE_S) and hurried.reached.wait(PATIENCE_S)
        if expected == [2, 1]:  # its only block is written by now, but not counted
            c._save._num_written = c._save.snapshot.layout.num_bytes
        counter.set(2)
        assert c.save(2, urgent=True) is True
    assert Store(tmp_path).steps() == expected
    assert c.failures == 0
    assert ("an urgent one took its place" in caplog.text) == (expected == [2])
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in sorted(expected)]


def test_an_urgent_save_does_not_wait_for_a_slow_one_of_the_same_step(tmp_path, hurried, caplog):
    """It is written anew, in the training's own thread."""
    caplog.set_level(logging.INFO)
    counter = Counter(size=3_000_000)
    with checkpointer(tmp_path, counter) as c:
        counter.set(1)
        assert c.save(1) and hurried.reached.wait(PATIENCE_S)
        assert c.save(1, urgent=True) is True
    assert Store(tmp_path).steps() == [1]
    assert "an urgent one took its place" in caplog.text
    assert names_in(tmp_path) == ["step-00000001"]


@pytest.fixture
def page(tmp_path, monkeypatch) -> shared_page.SharedPage:
    """Make this process a worker, with a page that its agent has made."""
    folder = tmp_path / "control"
    folder.mkdir()
    made = shared_page.SharedPage.create(folder, 0)
    monkeypatch.setenv(shared_page.DIRECTORY_VARIABLE, str(folder))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(reporting, "_reporter", reporting._Reporter())
    return made


def test_a_worker_that_is_asked_to_stay_commits_and_stays(tmp_path, page):
    """The step is announced once it is committed, and not before."""
    counter = Counter()
    c = checkpointer(tmp_path / "c", counter)
    page.request_checkpoint(AT_NEXT)
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(save_at, c, counter, 3)
        while page.read().paused != 5:
            assert not saved.done()
        assert page.read().boundary == 3 and Store(tmp_path / "c").steps() == [3]
        page.request_checkpoint(None)
        assert saved.result(PATIENCE_S) is True


def test_a_second_checkpointer_of_a_run_is_refused(tmp_path, page):
    """The first one's save keeps the worker, so the second would never save that step."""
    counter = Counter()
    first = checkpointer(tmp_path / "a", counter)
    with pytest.raises(ConfigError, match=r"^directory=.*/b'.*/a, .*put both states into one"):
        checkpointer(tmp_path / "b", counter)
    checkpointer(tmp_path / "a", counter).close()
    first.close()
    checkpointer(tmp_path / "b", counter).close()
    leaked = [checkpointer(tmp_path / "c", counter)]
    save_at(leaked[0], counter, 1)  # a save and its Checkpointer know each other
    leaked[0].wait()
    leaked.clear()
    checkpointer(tmp_path / "d", counter).close()


def test_another_state_in_the_same_directory_is_refused(tmp_path, page):
    """Each would replace, or keep out, the other's checkpoint of the same step."""
    first = Checkpointer({"net": Counter(), "sampler": Counter()}, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"open Checkpointer of .*/a, with the state net, sam"):
        Checkpointer({"optimizer": Counter()}, tmp_path / "a")
    first.close()
    Checkpointer({"optimizer": Counter()}, tmp_path / "a").close()


def test_one_beside_it_keeps_nobody_and_announces_nothing(tmp_path, page):
    """It is saved when the script says so, and the group changes at the other's."""
    counter = Counter()
    with checkpointer(tmp_path / "a", counter) as main:
        beside = checkpointer(tmp_path / "b", counter, boundary=False)
        page.request_checkpoint(AT_NEXT)
        assert save_at(beside, counter, 3)
        beside.close()
        assert (page.read().boundary, page.read().stored, page.read().paused) == (None, None, 0)
        assert Store(tmp_path / "b").steps() == [3]
        assert beside.load_latest() == 3
        page.request_checkpoint(None)
        assert save_at(main, counter, 4)
    assert page.read().boundary == 4


def test_a_commit_in_the_background_is_announced(tmp_path, page, disk):
    """Without holding up anything; not before it is there."""
    counter = Counter()
    with checkpointer(tmp_path / "c", counter) as c:
        save_at(c, counter, 3)
        assert disk.reached.wait(PATIENCE_S)
        assert page.read().boundary is None
        disk.goes_on.set()
    assert (page.read().boundary, page.read().stored) == (3, 3)


def test_a_save_that_failed_is_not_announced(tmp_path, page, monkeypatch):
    """Neither an urgent one nor another; nobody stays for it."""
    counter = Counter()
    c = checkpointer(tmp_path / "c", counter)
    monkeypatch.setattr(os, "fsync", fail)
    page.request_checkpoint(AT_NEXT)
    assert c.save(3) is False
    assert (page.read().boundary, page.read().paused) == (None, 0)
    told = page.read()
    assert (told.num_unsaved, told.unsaved, told.stored) == (1, 3, None)
    assert "Input/output error" in page.why_not_saved()


def test_a_save_that_came_too_late_is_not_told(tmp_path, page, monkeypatch):
    """Another group has taken over; it saves, and nothing is wrong."""
    counter = Counter()
    c = checkpointer(tmp_path / "c", counter)

    def fenced() -> None:
        raise CheckpointFencedError("the group is over")

    monkeypatch.setattr("hpc_elastic.run.fencing.check_fence", fenced)
    assert save_at(c, counter, 3) is True
    with pytest.raises(CheckpointError, match="the group is over"):
        c.wait()
    assert page.read().num_unsaved == 0 and c.failures == 1


# ---- the program's end --------------------------------------------------------------------


def run_program(code: str, folder: Path, argument: str) -> None:
    """Run a program that ends with 7, at once."""
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder), argument],
        cwd=Path(__file__).parent, capture_output=True, text=True,
        timeout=4 * PATIENCE_S,  # its imports alone take 24 s beside six others on two cores
    )  # fmt: skip
    assert run.returncode == 7, run.stderr


PROGRAM = """
import sys
from pathlib import Path
from group import eventually
from savers import Counter, checkpointer, save_at
from hpc_elastic.checkpoint import owner, save

if sys.argv[2] == "of two":  # the other rank is gone
    save.EXIT_TIMEOUT_S = 0.2
    owner.RankGroup.current = lambda: owner.RankGroup(0, 2, "p1")
    owner.RankGroup.broadcast_json = lambda self, value, source=0: value
    owner.RankGroup.gather = lambda self, row: [list(row)] * 2
    owner.RankGroup.gather_json = lambda self, value: [value] * 2
counter = Counter()
save_at(checkpointer(Path(sys.argv[1]), counter), counter, 1)
raise SystemExit(7)
"""


@pytest.mark.parametrize(("which", "steps"), [("alone", [1]), ("of two", [])], ids=["a", "b"])
def test_the_end_of_the_program_waits_for_a_save_but_not_for_ever(tmp_path, which, steps):
    """A save under way is finished; one that cannot be finished is given up."""
    run_program(PROGRAM, tmp_path / "c", which)
    assert Store(tmp_path / "c").steps() == steps


RETURNS = """
import sys
import threading
from pathlib import Path
from savers import Counter, checkpointer, save_at
from hpc_elastic.checkpoint.shard_file import BlockFile
from hpc_elastic.worker import reporting

write, goes_on = BlockFile.write, threading.Event()

def write_late(*args):
    if threading.current_thread() is not threading.main_thread():
        goes_on.wait()
    write(*args)

BlockFile.write = write_late
c = checkpointer(Path(sys.argv[1]), counter := Counter(), asynchronous=True)
save_at(c, counter, 1)
threading.Timer(0.5, goes_on.set).start()
reporting.function_returned()
raise SystemExit(7 if c.is_idle else 1)
"""


def test_a_worker_has_returned_once_its_last_save_is_committed(tmp_path):
    """The run ends when all have returned, and nothing is committed after its end."""
    run_program(RETURNS, tmp_path / "c", "")
    assert Store(tmp_path / "c").steps() == [1]


HELD_UP = """
import os
import sys
import threading
from pathlib import Path
from group import eventually
from savers import Counter, checkpointer, save_at
from hpc_elastic.checkpoint import store

store._GETS_ON_S = 0.2
held_up = []
unlink, names_in = os.unlink, store.names_in

def unlink_held_up(path, **kwargs):
    if ".trash-" in str(path):  # a dead node has a delegation of it
        held_up.append(Path(path).parent)
        threading.Event().wait()
    unlink(path, **kwargs)

def names_held_up(folder):
    if folder in held_up:  # whose lock the removal has
        threading.Event().wait()
    return names_in(folder)

os.unlink, store.names_in = unlink_held_up, names_held_up
counter = Counter()
is_asynchronous = sys.argv[2] == "asynchronous"
with checkpointer(Path(sys.argv[1]), counter, 1, asynchronous=is_asynchronous) as c:
    for step in range(1, 6):
        save_at(c, counter, step)
        c.wait()
raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["asynchronous", pytest.param("at once", marks=pytest.mark.long)])
def test_nothing_waits_for_a_removal_that_is_held_up(tmp_path, how):
    """Neither a save nor the program's end waits for a removal that hangs."""
    run_program(HELD_UP, tmp_path / "c", how)
    assert 5 in Store(tmp_path / "c").steps()
    assert any(name.startswith(".trash-") for name in names_in(tmp_path / "c"))


# ---- random numbers -----------------------------------------------------------------------


def draw() -> list[float]:
    """Draw from every generator."""
    normal = random.gauss(0, 1), np.random.standard_normal(), torch.randn(1).item()
    return [random.random(), np.random.rand(), torch.rand(1).item(), *normal]


def test_random_numbers_go_on_where_they_were(tmp_path):
    """Those of Python, NumPy and torch, halves of pairs included."""
    draw()
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        save_at(c, counter, 1)
    expected = [draw() for _ in range(3)]
    assert expected[0] != expected[1]
    assert restored(tmp_path) == 1
    assert [draw() for _ in range(3)] == expected


def test_random_numbers_are_left_alone_if_so_wished(tmp_path):
    """Whether they were saved or not."""
    with Checkpointer({"x": torch.zeros(3)}, tmp_path) as c:
        c.save(1)
    state = capture_generators()
    c = Checkpointer({"x": torch.zeros(3)}, tmp_path, options=CheckpointOptions(rng=False))
    draw()
    after = capture_generators()
    assert c.load_latest() == 1
    assert capture_generators() == after != state
