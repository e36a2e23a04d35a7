"""The secrets behind authenticated connections: a run's, and one that is derived from a user's key.

A run has its own, in its directory. Without a run (torchrun, a lighthouse), it is derived from the
user's key: ``~/.config/hpc_elastic/key`` (0600, made on first use). All nodes see it where they
share the home directory; elsewhere the user copies it.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from hpc_elastic.errors import DamagedFileError
from hpc_elastic.transport.auth import sign

_MIN_KEY_BYTES = 32


def user_folder() -> Path:
    """Return the folder of the user's key; make it if needed (0700)."""
    from hpc_elastic.shared_files import make_folder  # not in each process of a run

    folder = Path.home() / ".config" / "hpc_elastic"
    make_folder(folder, parents=True, mode=0o700)
    return folder


def user_key(folder: Path) -> bytes:
    """Return the key in a folder; make it if missing. Several processes may do so at once.

    Raises:
        PermissionError: Other users may read it or have made it, or it is no regular file. It names
            the remedy.
        DamagedFileError: It is too short for a secret.
    """
    path = folder / "key"
    try:
        found = path.lstat()
    except FileNotFoundError:
        from hpc_elastic.shared_files import create_atomic  # the first time only

        create_atomic(path, secrets.token_hex(32), mode=0o600)
        found = path.lstat()
    anew = f"remove it on all nodes (rm {path}), and another one is made"
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{path} must be a regular file, and no link: {anew}")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}, who knows it: {anew}")
    if found.st_mode & 0o077:
        raise PermissionError(f"{path} must be readable by its owner only: chmod 600 {path}")
    key = path.read_bytes()
    if len(key) < _MIN_KEY_BYTES:
        raise DamagedFileError(f"{path} has {len(key)} of at least {_MIN_KEY_BYTES} bytes: {anew}")
    return key


def user_secret(purpose: str) -> bytes:
    """Return the secret of this user's processes for one purpose.

    Raises:
        PermissionError: Other users may read the key.
    """
    return sign(user_key(user_folder()), purpose).encode()


def peers_secret() -> bytes:
    """Return the secret that a worker shares with the workers of its other replica groups.

    It is derived from the run's secret, and outside of a run from the user's.

    Raises:
        OSError: It cannot be read.
        PermissionError: Other users may read the user's key.
    """
    from hpc_elastic.run.fencing import own_entry  # not in a manager server process

    entry = own_entry()
    if entry is None:
        return user_secret("peers")
    from hpc_elastic.run.directory import RunDir
    from hpc_elastic.shared_files import read_bytes

    return sign(read_bytes(RunDir(entry.parent.parent).secret), "peers").encode()


def of_generation(secret: bytes, generation: int) -> bytes:
    """Return the secret of a run's agents after its n-th resume, which excludes earlier agents.

    Generation 0 has the run's own.
    """
    return secret if generation == 0 else sign(secret, f"generation|{generation}").encode()
