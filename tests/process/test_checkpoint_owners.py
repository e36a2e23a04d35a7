"""A directory of checkpoints is one training's: others are refused, or change nothing."""

import errno
import logging
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from savers import Counter, checkpointer, names_in, restored, save_at

from hpc_elastic import Checkpointer, launch
from hpc_elastic.checkpoint import CheckpointOptions, MemoryTier
from hpc_elastic.checkpoint.owner import read
from hpc_elastic.checkpoint.snapshot import Snapshots, is_out_of_memory
from hpc_elastic.checkpoint.store import Store, read_manifest, verify_checkpoint
from hpc_elastic.errors import CheckpointError, ConfigError, WorkerGroupError
from hpc_elastic.run.directory import Entry, RunDir
from specs import spec_of, started_run

# ---- two runs -----------------------------------------------------------------------------


@pytest.fixture
def enter(tmp_path, monkeypatch):
    """Makes this process a worker of a run, which is made if need be."""

    def enter(name: str) -> RunDir:
        run = RunDir(tmp_path / name)
        if not run.path.exists():
            entry = Entry("function", "f", module="m")
            started_run(run, spec_of(name, 1, 1, 1, 0, entry, str(tmp_path), [(0, 0)]))
        monkeypatch.setenv("HPC_ELASTIC_FENCE", str(run.rdzv / "entry.2.json"))
        return run

    return enter


def save_as(rank: int, folder: str, run: str) -> tuple[bool, str, list[float]]:
    """Save at the same step as the other run, with half of its ranks late; restore."""
    value = float("AB".index(run) + 1)
    net = torch.nn.Linear(128, 256, bias=False)
    torch.nn.init.constant_(net.weight, value)
    c = Checkpointer({"net": net}, Path(folder, "c"))
    late = (rank == 1) == (run == "A")
    while len(list(Path(folder).glob("ready-*"))) < 4:
        Path(folder, f"ready-{run}{rank}").touch()
        time.sleep(0.01)
    time.sleep(0.5 * late)
    saved, said = c.save(100), "committed"
    try:
        c.wait()
    except CheckpointError as e:
        said = str(e)
    c.load_latest()
    return saved, said, net.weight.unique().tolist()


def test_two_groups_never_make_one_checkpoint_of_half_of_each(tmp_path):
    """The one that has opened the directory last has it; the other is told."""
    with ThreadPoolExecutor(2) as threads:
        found = []
        for run in "AB":
            (tmp_path / run / "rdzv").mkdir(parents=True)
            fence = {"HPC_ELASTIC_FENCE": str(tmp_path / run / "rdzv" / "entry.2.json")}
            env = dict.fromkeys(range(2), fence)
            found.append(threads.submit(run_ranks, save_as, 2, str(tmp_path), run, env=env))
        a, b = (each.result() for each in found)
    (owner,) = [run for run in "AB" if read(tmp_path / "c").run.startswith(f"{run}-")]
    mine, other = (a, b) if owner == "A" else (b, a)
    assert all(said == "committed" for _, said, _ in mine)
    assert all("belongs to the run" in said for _, said, _ in other)
    assert all(len(values) == 1 for _, _, values in a + b), "of one run each"
    assert verify_checkpoint(tmp_path / "c" / "step-00000100") == []


def test_another_run_is_refused_and_may_take_over_on_purpose(tmp_path, enter):
    """Each is named; the one that was replaced cannot come back, with whatever script."""
    counter = Counter()
    with_a, with_b = ({"take_over": name} for name in "AB")
    enter("A")
    a = checkpointer(tmp_path / "c", counter)
    save_at(a, counter, 1)
    a.wait()
    enter("B")
    with pytest.raises(ConfigError, match=r"the run A \(.*/A\), with the state counter: .*'A'"):
        checkpointer(tmp_path / "c", counter)
    b = checkpointer(tmp_path / "c", counter, **with_a)
    assert b.load_latest() == 1
    save_at(b, counter, 2)
    b.close()
    assert read_manifest(tmp_path / "c" / "step-00000002").run == "B"
    enter("A")
    save_at(a, counter, 3)
    with pytest.raises(CheckpointError, match="belongs to the run B"):
        a.close()
    for options in ({}, with_a):
        with pytest.raises(ConfigError, match="the run B"):
            checkpointer(tmp_path / "c", counter, **options)
    enter("B")
    checkpointer(tmp_path / "c", counter, **with_a).close()
    assert Store(tmp_path / "c").steps() == [2, 1]
    enter("C")
    checkpointer(tmp_path / "c", counter, **with_b).close()


def test_who_only_reads_is_not_refused(tmp_path, enter, monkeypatch, caplog):
    """An evaluation, or a notebook: it restores, marks nothing, and hears of it when it saves."""
    caplog.set_level(logging.INFO)
    counter = Counter()
    enter("A")
    with checkpointer(tmp_path / "c", counter) as a:
        save_at(a, counter, 1)
    enter("B")
    beside = checkpointer(tmp_path / "c", counter, boundary=False)
    monkeypatch.delenv("HPC_ELASTIC_FENCE")
    by_hand = checkpointer(tmp_path / "c", counter)
    assert caplog.text.count("it may restore from there, and not save") == 2
    for reader in (beside, by_hand):
        assert reader.load_latest() == 1
        with pytest.raises(ConfigError, match="the run A"):
            reader.save(2)
    assert read(tmp_path / "c").run == "A"


def test_a_directory_without_a_mark_is_the_first_runs_that_opens_it(tmp_path, enter):
    """One of hpc_elastic 0.2.0; whoever has only looked at it does not have it."""
    counter = Counter()
    with checkpointer(tmp_path / "c", counter) as c:
        save_at(c, counter, 1)
    (tmp_path / "c" / "owner.json").unlink()
    assert restored(tmp_path / "c") == 1
    enter("A")
    with checkpointer(tmp_path / "c", counter) as c:
        assert c.load_latest() == 1
        save_at(c, counter, 2)
    assert read(tmp_path / "c").run == "A"


def test_the_best_model_has_a_directory_of_its_own(tmp_path):
    """Outside of a run it is said at its first save: until then it may be meant to restore."""
    counter = Counter()
    with checkpointer(tmp_path, counter) as main:
        best = checkpointer(tmp_path, counter, boundary=False)
        with pytest.raises(ConfigError, match="would remove the other's checkpoints"):
            best.save(1)
        save_at(main, counter, 1)
    best.close()
    later = checkpointer(tmp_path, counter, boundary=False)
    assert later.load_latest() == 1
    with pytest.raises(ConfigError, match="a directory of its own"):
        later.save(2)


def train(folder: str, lr: float) -> float:
    """Train a few steps; return the learning rate of the last."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    state = {"parameter": parameter.data, "run": {"lr": lr}}
    with Checkpointer(state, Path(folder, "c")) as checkpoints:
        for step in range(checkpoints.load_latest() or 0, 3):
            checkpoints.save(step + 1)
    return state["run"]["lr"]


@pytest.mark.long
def test_a_run_with_another_learning_rate_does_not_get_the_state_of_the_first(tmp_path):
    """It has trained no step, and succeeded with the first one's."""
    launch(train, str(tmp_path), 0.1, nproc_per_node=1, run_dir=tmp_path / "a")
    with pytest.raises(WorkerGroupError, match=r"holds the checkpoints of the run train-.*take_ov"):
        launch(train, str(tmp_path), 0.2, nproc_per_node=1, run_dir=tmp_path / "b", max_restarts=0)


# ---- the newest ---------------------------------------------------------------------------


def test_a_training_from_scratch_in_an_old_directory_is_refused(tmp_path):
    """At its first save: the next restart would go on from the old training."""
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        for step in (5, 10):
            save_at(c, counter, step)
    fresh = checkpointer(tmp_path, counter)
    for step in (1, 10):
        with pytest.raises(ConfigError, match=r"step=1.*step 10, which this .* call load_latest"):
            save_at(fresh, counter, step)
    assert fresh.load_latest() == 10
    assert save_at(fresh, counter, 11)
    fresh.close()
    assert Store(tmp_path).steps() == [11, 10]


def test_what_another_object_of_this_process_has_restored_is_known(tmp_path):
    """One that fills the weights alone, and is closed; then one with all of the state."""
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        save_at(c, counter, 5)
    full = {"counter": counter, "more": {"x": 1}}
    some = CheckpointOptions(strict=False)
    with Checkpointer(full, tmp_path, options=some) as c:
        assert c.load_latest() == 5
    with Checkpointer(full, tmp_path) as c:
        assert c.save(5) and c.save(6)


def test_a_lower_step_after_a_higher_one_is_refused(tmp_path):
    """`save(epoch)` beside `save_if_due(step)`: a restart would take the older state."""
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        save_at(c, counter, 100)
        with pytest.raises(ConfigError, match=r"step=1: step 100 was saved .* optimizer steps"):
            c.save(1)
        save_at(c, counter, 101)
        c.load_latest()


def test_the_best_model_may_be_of_a_step_after_that_of_the_restart(tmp_path):
    """Its directory has a later step, of the steps that were lost; the new one replaces it."""
    state = {"x": torch.zeros(3)}
    options = CheckpointOptions(boundary=False)
    for value in (1.0, 2.0):
        with Checkpointer(state, tmp_path, options=options) as best:
            state["x"].fill_(value)
            assert best.save(7)
    state["x"].zero_()
    assert Checkpointer(state, tmp_path, options=options).load_latest() == 7
    assert state["x"].tolist() == [2.0] * 3


# ---- the same step again ------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("links", [True, False])
def test_a_state_that_has_changed_replaces_that_of_the_step(
    tmp_path, monkeypatch, asynchronous, restarts, links
):
    """Averaged or merged weights at the last step; what has not changed is not written again."""
    if not links:
        monkeypatch.setattr(os, "link", _refuse_link)
    state = {"x": torch.zeros(30_000), "note": {"is": "trained"}}
    options = CheckpointOptions(asynchronous=asynchronous, rng=False)
    folder = tmp_path / "step-00000003"

    def saved(c: Checkpointer) -> tuple[int, int]:
        assert c.save(3)
        c.wait()
        paths = (folder, folder / "shard-0.safetensors")
        return tuple(path.stat().st_ino for path in paths)  # type: ignore[return-value]

    c = Checkpointer(state, tmp_path, keep_last=1, options=options)
    first = saved(c)
    if restarts:
        c.close()
        c = Checkpointer(state, tmp_path, keep_last=1, options=options)
        assert c.load_latest() == 3
    assert saved(c) == first, "nothing has changed"
    state["note"]["is"] = "noted"
    second = saved(c)
    assert second[0] != first[0] and (second[1] == first[1]) is links
    state["x"].fill_(2.0)
    third = saved(c)
    assert third[0] != second[0] and third[1] != second[1]
    c.close()
    assert names_in(tmp_path) == ["step-00000003"] and verify_checkpoint(folder) == []
    state["x"].zero_()
    assert Checkpointer(state, tmp_path, options=options).load_latest() == 3
    assert state["x"].unique().tolist() == [2.0] and state["note"] == {"is": "noted"}


_ORDERS = {"a": 1, "b": 2}, {"b": 2, "a": 1}


@pytest.mark.parametrize(("before", "after"), [(1, True), (0.0, -0.0), _ORDERS])
def test_a_value_that_is_equal_and_not_the_same_has_changed(tmp_path, before, after):
    """1 is not True, and a dict has an order: what is restored would be another state."""
    state = {"x": torch.zeros(3), "note": {"is": before}}
    options = CheckpointOptions(rng=False)
    with Checkpointer(state, tmp_path, options=options) as c:
        assert c.save(3)
        c.wait()
        state["note"]["is"] = after
        assert c.save(3)
    state["note"]["is"] = None
    assert Checkpointer(state, tmp_path, options=options).load_latest() == 3
    assert repr(state["note"]["is"]) == repr(after)


def _refuse_link(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def change_on_one_rank(rank: int, folder: str) -> list[float]:
    """Change the part of one rank only; save the step again, restore."""
    state = {"small": torch.zeros(3), "large": torch.zeros(50_000)}
    with Checkpointer(state, folder) as c:
        assert c.save(1) and c.save(1)
        state["large"][-1] = 5.0  # in the second rank's share
        assert c.save(1)
    assert c.failures == 0
    state["large"].zero_()
    assert Checkpointer(state, folder).load_latest() == 1
    return state["large"].unique().tolist()


def test_the_ranks_need_not_agree_whether_a_state_has_changed(tmp_path):
    """Those whose share is the same take part."""
    assert run_ranks(change_on_one_rank, 2, str(tmp_path)) == [[0.0, 5.0]] * 2
    assert names_in(tmp_path) == ["step-00000001"]


def test_a_step_that_is_in_memory_is_written_when_it_is_saved_again(tmp_path):
    """The newer state is the one that a restart takes."""
    state = {"x": torch.zeros(1000)}
    tier = MemoryTier(tmp_path / "memory", shared_every=100)
    with Checkpointer(state, tmp_path / "c", memory_tier=tier) as c:
        for step in (1, 2, 2):
            state["x"] += 1
            assert c.save(step)
    assert Store(tmp_path / "c").steps() == [2, 1]
    state["x"].zero_()
    with Checkpointer(state, tmp_path / "c", memory_tier=tier) as c:
        assert c.load_latest() == 2
    assert state["x"].unique().tolist() == [3.0]


# ---- no memory ----------------------------------------------------------------------------


class NoMemory:
    """A machine that has no memory for the buffers of saves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hpc_elastic.checkpoint.snapshot.mmap", self)
        self.PAGESIZE, self.MAP_PRIVATE = mmap.PAGESIZE, mmap.MAP_PRIVATE
        self.MAP_ANONYMOUS = mmap.MAP_ANONYMOUS

    def mmap(self, *_: object, **__: object) -> None:
        """Fail as the kernel does."""
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_without_memory_for_the_buffer_a_save_is_written_at_once(tmp_path, monkeypatch, caplog):
    """From the state's own memory; it is said once."""
    NoMemory(monkeypatch)
    counter = Counter()
    with checkpointer(tmp_path, counter) as c:
        for step in (1, 2):
            assert save_at(c, counter, step)
            assert c.is_idle and Store(tmp_path).steps()[0] == step
    assert c.failures == 0 and restored(tmp_path) == 2
    assert caplog.text.count("there is no memory to copy the state to (") == 1


def one_without_memory(rank: int, folder: str) -> tuple[bool, int, list[int]]:
    """One rank has no memory at all for its second save."""
    state = {"x": torch.zeros(100_000)}
    with Checkpointer(state, folder) as c:
        assert c.save(1)
        c.wait()
        if rank:
            c._snapshots = Snapshots()
            for name in ("copy", "borrow"):
                setattr(c._snapshots, name, _allocate)
        saved = c.save(2)
        with pytest.raises(CheckpointError, match="there is no memory for it"):
            c.wait()
    return saved, c.failures, Store(Path(folder)).steps()


def _allocate(*_: object) -> None:
    torch.empty(1 << 50)


def test_without_any_memory_a_save_has_failed(tmp_path):
    """On all ranks, and the training goes on."""
    found = run_ranks(one_without_memory, 2, str(tmp_path))
    assert found == [(True, 1, [1]), (False, 1, [1])]


def test_torch_says_that_memory_is_out_in_words_of_its_own():
    """Its error of the CPU has no type for it (private: the text is torch's)."""
    with pytest.raises(RuntimeError) as e:
        _allocate()
    assert is_out_of_memory(e.value) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("no")) and not is_out_of_memory(OSError(errno.EIO, ""))
