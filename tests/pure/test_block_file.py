"""Files written in large blocks: what is written is what is read, direct or not."""

import errno
import fcntl
import mmap
import os
import random

import pytest

from hpc_elastic.checkpoint.shard_file import BLOCK_BYTES, PAGE_BYTES, BlockFile

MIB = 1 << 20
SIZES = {
    "nothing": [],
    "a few bytes": [5],
    "a page": [PAGE_BYTES],
    "header and data": [PAGE_BYTES, 3 * MIB],
    "an end that is no page": [PAGE_BYTES, 3 * MIB + 7],
    "many small ones": [1, 100, 5000, 70_000] * 30,
    "small between large": [2 * MIB, 3, 2 * MIB, PAGE_BYTES - 3, 2 * MIB + 1],
    "more than a block": [BLOCK_BYTES + 5, BLOCK_BYTES],
}


def pieces(sizes: list[int], offset: int) -> list[memoryview]:
    """Return memory of those sizes, which begins so many bytes behind a page boundary."""
    made = []
    for size in sizes:
        memory = memoryview(mmap.mmap(-1, size + offset))[offset:]
        memory[:] = random.Random(size).randbytes(size)
        made.append(memory)
    return made


def written(path, data: list[memoryview], *, direct: bool = True) -> bytes:
    """Write pieces into a new file, and return what is in it."""
    file = BlockFile(path, direct=direct)
    for piece in data:
        file.write(piece)
    file.finish(sync=True)
    file.close()
    return path.read_bytes()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("offset", [0, 64], ids=["at pages", "anywhere"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_what_is_written_is_what_is_read(tmp_path, sizes, offset, direct):
    """Whatever the sizes of the pieces, and wherever in memory they lie."""
    data = pieces(sizes, offset)
    assert written(tmp_path / "file", data, direct=direct) == b"".join(data)


def test_memory_that_can_not_be_written_is_taken_as_well(tmp_path):
    """Bytes, such as the header of a file."""
    data = [memoryview(bytes(4096)), memoryview(b"ab" * MIB)]
    assert written(tmp_path / "file", data) == b"".join(data)


def test_whole_pages_go_past_the_page_cache(tmp_path, monkeypatch):
    """All but the end of the file, if it is no whole page."""
    how = []
    write = os.write

    def watch(fd, data):
        how.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", watch)
    data = pieces([PAGE_BYTES, 2 * MIB, 9], 0)
    written(tmp_path / "file", data)
    assert how == [(True, PAGE_BYTES), (True, 2 * MIB), (False, 9)]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_file_system_that_refuses_direct_writes_gets_others(tmp_path, monkeypatch, at_once):
    """It refuses the flag, as tmpfs may, or the first write, as it wants more than whole pages."""
    setting, write = fcntl.fcntl, os.write

    def set_flags(fd, command, argument=0):
        if at_once and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return setting(fd, command, argument)

    def write_cached(fd, data):
        if setting(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "write", write_cached)
    data = pieces([PAGE_BYTES, 2 * MIB + 1], 0)
    assert written(tmp_path / "file", data) == b"".join(data)


def test_other_errors_are_raised(tmp_path, monkeypatch):
    """So that a full disk ends the save."""

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", pieces([2 * MIB], 0))


def test_a_file_that_exists_stays_as_it_is(tmp_path):
    """Two savers never write one file."""
    (tmp_path / "file").write_text("there")
    with pytest.raises(FileExistsError):
        BlockFile(tmp_path / "file", direct=True)
    assert (tmp_path / "file").read_text() == "there"
