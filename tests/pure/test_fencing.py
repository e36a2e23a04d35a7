"""The fence: only the run's present group may commit."""

import pytest

import hpc_elastic
from hpc_elastic.errors import CheckpointError, CheckpointFencedError
from hpc_elastic.run import fencing


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """A run directory's entries; this worker belongs to the group of number 2."""
    for number in (1, 2):
        fencing.entry_path(tmp_path, number).touch()
    monkeypatch.setenv(fencing.VARIABLE, str(fencing.entry_path(tmp_path, 2)))
    return tmp_path


def test_outside_a_run_everything_is_allowed(monkeypatch):
    """The same script commits its checkpoints without us."""
    monkeypatch.delenv(fencing.VARIABLE, raising=False)
    fencing.check_fence()


def test_the_present_group_may_commit(entries):
    """As often as it likes."""
    fencing.check_fence()
    fencing.check_fence()


def test_any_later_entry_ends_the_group(entries):
    """Another leader, another round, the end of the run: the fence does not ask which."""
    fencing.entry_path(entries, 3).touch()
    with pytest.raises(CheckpointFencedError, match="entry 3 exists") as e:
        fencing.check_fence()
    assert isinstance(e.value, CheckpointError)
    assert str(fencing.entry_path(entries, 2)) in str(e.value)


def test_numbers_are_compared_as_numbers(entries, monkeypatch):
    """The tenth entry comes after the ninth."""
    fencing.entry_path(entries, 10).touch()
    monkeypatch.setenv(fencing.VARIABLE, str(fencing.entry_path(entries, 9)))
    with pytest.raises(CheckpointFencedError):
        fencing.check_fence()


def test_other_files_are_no_entries(entries):
    """Leases, staged entries and what an NFS client leaves behind do not fence anybody."""
    for name in ("lease.9", ".entry.99", "entry.9.json~", ".nfs0009", "entry.x.json"):
        (entries / name).touch()
    fencing.check_fence()


def test_a_folder_that_can_not_be_read_is_no_leave(tmp_path, monkeypatch):
    """Whoever does not know whether he may, may not."""
    monkeypatch.setenv(fencing.VARIABLE, str(tmp_path / "gone" / "entry.2.json"))
    with pytest.raises(OSError, match="gone"):
        fencing.check_fence()


def test_the_package_offers_it():
    """`from hpc_elastic import check_fence` is what a script writes."""
    assert hpc_elastic.check_fence is fencing.check_fence
