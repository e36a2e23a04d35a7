"""The stranger of these tests is one."""

from strangers import STRANGER


def test_a_stranger_has_his_own_uid_and_may_not_write(stranger, open_folder):
    """Otherwise no test here would show anything."""
    done = stranger(
        "import os, sys; print(os.getuid()); open(sys.argv[1] + '/x', 'w')", open_folder
    )
    assert done.stdout.strip() == str(STRANGER)
    assert "PermissionError" in done.stderr and done.returncode
