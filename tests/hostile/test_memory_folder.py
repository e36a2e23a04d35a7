"""A stranger comes first to the names that the user has in /dev/shm and in the home directory."""

import os

import pytest
from strangers import STRANGER

from hpc_elastic.checkpoint import node_memory
from hpc_elastic.checkpoint.node_memory import PREFIX, base_folder, remove_leftovers
from hpc_elastic.errors import ConfigError, DamagedFileError
from hpc_elastic.transport.auth import user_folder, user_key
from hpc_elastic.worker import shared_page


@pytest.fixture
def shared(open_folder, monkeypatch):
    """What stands for /dev/shm."""
    open_folder.chmod(0o1777)
    monkeypatch.setattr(node_memory, "SHARED_MEMORY", open_folder)
    monkeypatch.delenv(shared_page.DIRECTORY_VARIABLE, raising=False)
    return open_folder


@pytest.fixture
def name(shared):
    """The name of the user's folder."""
    return shared / f"{PREFIX}{os.getuid()}"


def test_the_folder_of_the_memory_is_the_users(name):
    """Made once, and found again; whatever the umask."""
    before = os.umask(0)
    try:
        assert base_folder() == name == base_folder()
    finally:
        os.umask(before)
    assert name.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_a_stranger_is_refused(name, stranger):
    """Open to all, so that the user could write there."""
    made = stranger("import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", name)
    assert not made.returncode, made.stderr
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
        base_folder()


def test_a_link_of_a_stranger_is_refused(name, tmp_path, stranger):
    """It leads to a folder of the user's own, where everything else would be as it should."""
    (tmp_path / "own").mkdir(mode=0o700)
    made = stranger("import os, sys; os.symlink(*sys.argv[1:])", tmp_path / "own", name)
    assert not made.returncode, made.stderr
    with pytest.raises(ConfigError, match="it is a link"):
        base_folder()
    assert not list((tmp_path / "own").iterdir())


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_an_own_folder_that_is_open_is_refused(name, mode):
    """Others may have put something there, or read what is there."""
    name.mkdir()
    name.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"):
        base_folder()


def test_a_folder_of_the_users_choice_may_be_read_by_others(tmp_path):
    """And not be written by them."""
    (tmp_path / "disk").mkdir(mode=0o755)
    assert base_folder(tmp_path / "disk") == tmp_path / "disk"
    (tmp_path / "disk").chmod(0o775)
    with pytest.raises(ConfigError, match="mode 0775"):
        base_folder(tmp_path / "disk")


def test_what_a_stranger_has_left_is_not_removed(shared, stranger):
    """He may have put anything there; he removes it himself."""
    folder = shared / f"{PREFIX}abc"
    left = "import os, sys; os.umask(0); os.mkdir(sys.argv[1]); open(sys.argv[1] + '/owner', 'w')"
    assert not stranger(left, folder).returncode
    remove_leftovers(shared)
    assert (folder / "owner").exists()
    os.chown(folder, os.getuid(), os.getgid())
    remove_leftovers(shared)
    assert not folder.exists()


# ---- the user's key


def test_a_key_is_made_once(tmp_path, monkeypatch):
    """In a folder of the user's alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = user_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(user_key(folder)) == 64 and user_key(folder) == user_key(folder)
    assert (folder / "key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_a_link_is_refused(tmp_path):
    """Also one that leads nowhere yet."""
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    for text in None, "k" * 64:
        if text:
            (tmp_path / "elsewhere").write_text(text)
            (tmp_path / "elsewhere").chmod(0o600)
        with pytest.raises(PermissionError, match="no link: remove it"):
            user_key(tmp_path)


def test_a_key_of_a_stranger_is_refused(tmp_path):
    """He knows it."""
    user_key(tmp_path)
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(tmp_path / "key", STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
        user_key(tmp_path)


def test_a_key_that_others_may_read_or_that_is_short_is_refused(tmp_path):
    """Each with what to do; none counts as a secret."""
    (tmp_path / "key").write_text("short")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        user_key(tmp_path)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(DamagedFileError, match="5 of at least 32 bytes"):
        user_key(tmp_path)
