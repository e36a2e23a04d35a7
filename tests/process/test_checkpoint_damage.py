"""What is damaged is passed over; a disk that cannot be written loses nothing that is there."""

import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from disks import full, mounted, read_only
from group import eventually
from savers import (
    Counter,
    checkpointer,
    exit_code,
    flip_a_bit,
    fork,
    in_nursery,
    names_in,
    restored,
    save_at,
)

from hpc_elastic.checkpoint import Checkpointer, CheckpointOptions, restore
from hpc_elastic.checkpoint.owner import Owner, tag
from hpc_elastic.checkpoint.store import Store, file_problem, read_manifest, verify_checkpoint
from hpc_elastic.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFencedError,
    CheckpointNotFoundError,
    ConfigError,
)  # fmt: skip


def save_all(folder: Path, *steps: int, keep_last: int = 5) -> None:
    """Go on from what is there, and save steps, all good."""
    counter = Counter()
    with checkpointer(folder, counter, keep_last) as c:
        c.load_latest()
        for step in steps:
            assert save_at(c, counter, step)


def cut_short(path: Path) -> None:
    """Cut a file short."""
    os.truncate(path, path.stat().st_size - 1)


# ---- damage -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shard-0.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path, caplog, name, damage):
    """The log names the file; the next save of that step replaces it."""
    save_all(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003" / name)
    assert restored(tmp_path) == 2
    assert name in caplog.text and "step-00000003 is passed over" in caplog.text
    save_all(tmp_path, 3)
    assert restored(tmp_path) == 3
    assert Store(tmp_path).steps() == [3, 2, 1]
    assert not any(name.startswith(".") for name in names_in(tmp_path))


def test_any_flipped_bit_of_a_shard_is_found(tmp_path):
    """At 300 random places, the header's among them."""
    random.seed(3)
    save_all(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    (entry,) = read_manifest(folder).files
    bits = [random.randrange(8 * 300) for _ in range(100)]
    bits += [random.randrange(8 * entry.num_bytes) for _ in range(200)]
    for bit in bits:
        flip_a_bit(folder / entry.name, bit)
        assert "was changed" in file_problem(folder, entry)
        flip_a_bit(folder / entry.name, bit)
    assert file_problem(folder, entry) is None


def test_all_damaged_is_an_error_and_not_a_new_beginning(tmp_path):
    """Nobody wants a week of training to begin anew without a word."""
    save_all(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_bit(tmp_path / f"step-{step:08d}" / "shard-0.safetensors")
    with pytest.raises(CheckpointCorruptError, match=r"\[1, 2\].*move them away"):
        restored(tmp_path)


def ones(*names: str) -> dict[str, torch.Tensor]:
    """Return a few tensors."""
    return {name: torch.ones(5000) for name in names}


def save_two(folder: Path, *states: dict[str, dict[str, torch.Tensor]]) -> None:
    """Save two states as steps 1 and 2, and damage the last number of the second."""
    for step, state in enumerate(states, 1):
        with Checkpointer(state, folder) as c:
            c.save(step)
    shard = folder / "step-00000002" / "shard-0.safetensors"
    flip_a_bit(shard, 8 * shard.stat().st_size - 1)


def test_numbers_of_a_damaged_checkpoint_stay_in_no_tensor(tmp_path):
    """They are there once the damage shows, and the earlier checkpoint lacks one of the tensors."""
    save_two(tmp_path, {"d": ones("v")}, {"d": ones("v", "w")})
    c = Checkpointer({"d": ones("v", "w")}, tmp_path)
    with pytest.raises(CheckpointError, match=r"d/w has .*\(steps \[2\]\).* step 1: move"):
        c.load_latest()
    with pytest.raises(ConfigError, match=r"state=.*d/v.*begin with a new state"):
        c.save(3)


def test_where_keys_may_differ_a_damaged_checkpoint_is_verified_first(tmp_path):
    """What the earlier one lacks is left alone."""
    save_two(tmp_path, {"v": ones("t")}, {"v": ones("t"), "ema": ones("t")})
    state = {"v": {"t": torch.zeros(5000)}, "ema": {"t": torch.zeros(5000)}}
    c = Checkpointer(state, tmp_path, options=CheckpointOptions(strict=False))
    assert c.load_latest() == 1
    assert (state["v"]["t"].sum(), state["ema"]["t"].sum()) == (5000, 0)


def test_the_last_good_one_is_never_removed(tmp_path):
    """A newer one that turned out to be damaged does not count among those that are kept."""
    save_all(tmp_path, 10, 20, 30)
    flip_a_bit(tmp_path / "step-00000030" / "shard-0.safetensors")
    counter = Counter()
    with checkpointer(tmp_path, counter, keep_last=2) as c:
        assert c.load_latest() == 20
        save_at(c, counter, 25)
    assert Store(tmp_path).steps() == [30, 25, 20]
    with checkpointer(tmp_path, counter, keep_last=2) as c:
        assert c.load_latest() == 25
        save_at(c, counter, 35)
    assert Store(tmp_path).steps() == [35, 25]


def test_other_files_and_folders_do_not_disturb(tmp_path):
    """Whatever lies about in the directory."""
    save_all(tmp_path, 1)
    for name in ("step-2", "step-00000002x", "notes", ".staging-step-9-r1-0", ".memory-id"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000009").touch()
    (tmp_path / "step-00000008").mkdir()
    assert restored(tmp_path) == 1


def test_a_checkpoint_that_is_seen_late_is_not_passed_over(tmp_path, monkeypatch):
    """A client of NFS may remember for a while that there was no such folder."""
    save_all(tmp_path, 1, 2)
    looks = []

    def look(folder: Path):
        looks.append(folder.name)
        if len(looks) < 3:
            raise CheckpointNotFoundError(str(folder))
        return read_manifest(folder)

    monkeypatch.setattr(restore, "read_manifest", look)
    assert restored(tmp_path) == 2
    assert set(looks) == {"step-00000002"}


# ---- disks --------------------------------------------------------------------------------


HALF_A_CHECKPOINT = 800_000


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Eight megabytes; a checkpoint has about two."""
    with mounted(tmp_path / "disk", "8m") as disk:
        yield disk


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "state", [partial(full, room=HALF_A_CHECKPOINT), read_only], ids=["full", "read_only"]
)
def test_a_disk_that_can_not_be_written_costs_only_the_attempt(
    small_disk, state, asynchronous, caplog
):
    """Training goes on, `wait` says why, nothing is left behind, and the next save works."""
    counter = Counter()
    c = checkpointer(small_disk / "c", counter, asynchronous=asynchronous)
    save_at(c, counter, 1)
    c.wait()
    with state(small_disk):
        assert save_at(c, counter, 2) is asynchronous
        with pytest.raises(CheckpointError, match=r"step 2 .*disk/c: .*(No space|Read-only)"):
            c.wait()
        eventually(lambda: names_in(small_disk / "c") == ["step-00000001"])
        assert c.load_latest() == 1
    assert c.failures == 1 and "the earlier ones are as they were" in caplog.text
    assert save_at(c, counter, 3)
    c.close()
    assert restored(small_disk / "c") == 3


def test_a_directory_that_can_not_be_written_is_refused_at_once(small_disk):
    """Not at the first save, hours later."""
    with read_only(small_disk), pytest.raises(ConfigError, match=r"directory='.*give another"):
        checkpointer(small_disk / "c", Counter())
    (small_disk / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        checkpointer(small_disk / "file" / "c", Counter())


# ---- two writers, and one that may not ----------------------------------------------------


def save_range(folder: Path, writer: int, told: int) -> None:
    """Save twenty steps, as soon as the other writer is there too."""
    counter = Counter(writer)
    with checkpointer(folder, counter) as c:
        os.read(told, 1)
        for step in range(1, 21):
            save_at(c, counter, step)


def two_writers(folder: Path) -> None:
    """Two processes that know nothing of each other save the same steps."""
    told, tell = os.pipe()
    writers = [fork(save_range, folder, writer, told) for writer in (1, 2)]
    os.write(tell, b"go")
    assert [exit_code(pid) for pid in writers] == [0, 0]
    assert restored(folder) == 20
    assert all(
        verify_checkpoint(Store(folder).folder(step)) == [] for step in Store(folder).steps()
    )


def test_of_two_writers_the_first_wins_each_step(tmp_path):
    """Every checkpoint is one writer's, whole."""
    in_nursery(two_writers, tmp_path)


def test_a_good_checkpoint_of_the_same_step_is_kept(tmp_path, caplog):
    """A writer that comes second, and knows of no checkpoint, changes nothing."""
    caplog.set_level(logging.WARNING)
    counter = Counter()
    with checkpointer(tmp_path, counter) as second:
        save_all(tmp_path, 1)
        before = (tmp_path / "step-00000001" / "manifest.json").stat().st_ino
        save_at(second, counter, 1)
    assert (tmp_path / "step-00000001" / "manifest.json").stat().st_ino == before
    assert "there already, and good" in caplog.text


@pytest.fixture
def records(tmp_path, monkeypatch) -> Path:
    """Make this process one of the group that record 3 formed; return the folder of records."""
    folder = tmp_path / "rdzv"
    folder.mkdir()
    (folder / "entry.3.json").touch()
    monkeypatch.setenv("HPC_ELASTIC_FENCE", str(folder / "entry.3.json"))
    return folder


def test_a_fenced_writer_commits_nothing(tmp_path, records):
    """Another group was formed while this one wrote."""
    folder, counter = tmp_path / "c", Counter()
    c = checkpointer(folder, counter)
    save_at(c, counter, 1)
    c.wait()
    (records / "entry.4.json").touch()
    save_at(c, counter, 2)
    with pytest.raises(CheckpointFencedError, match="entry 4 exists"):
        c.wait()
    eventually(lambda: names_in(folder) == ["step-00000001"])


def test_leftovers_go_once_their_group_is_surely_over(tmp_path, records):
    """By its record, or by age; those of a group that may live stay."""
    folder = tmp_path / "c"
    folder.mkdir()
    mine = tag(Owner.current().run)
    names = {f"r2u{mine}": False, f"r3u{mine}": False, f"r4u{mine}": True}
    names |= {f"r2u{'0' * 8}": True, "r2": True, "pabc": True, "pdef": False}
    for token in names:
        (folder / f".staging-step-7-{token}-0").mkdir()
    os.utime(folder / ".staging-step-7-pdef-0", (0, 0))
    (folder / ".trash-step-1").mkdir()
    counter = Counter()
    with checkpointer(folder, counter) as c:
        save_at(c, counter, 1)
        c.wait()
        save_at(c, counter, 2)
    left = sorted(path.name for path in folder.glob(".*"))
    assert left == sorted(f".staging-step-7-{token}-0" for token, stays in names.items() if stays)
