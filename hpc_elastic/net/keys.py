"""The secrets under which processes of one user, or of one run, sign what they tell each other.

A run has its own, in its directory. Where there is none (torchrun, a lighthouse), it is derived
from the user's key: ``~/.config/hpc_elastic/key`` (0600, made on first use), which all nodes see
where they share the home directory, and which is to be copied where they do not.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from hpc_elastic.fence import own_record
from hpc_elastic.net.wire import sign


def user_folder() -> Path:
    """Return the folder of the user's key; make it if need be (0700)."""
    folder = Path.home() / ".config" / "hpc_elastic"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def user_key(folder: Path) -> bytes:
    """Return the key in a folder; make it if there is none. Two may do so at once.

    Raises:
        PermissionError: others than the owner may read it.
    """
    path = folder / "key"
    if not path.exists():
        _create_key(path)
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"{path} must be readable by its owner only: chmod 600 {path}")
    return path.read_bytes()


def user_secret(purpose: str) -> bytes:
    """Return the secret of this user's processes for one purpose.

    Raises:
        PermissionError: others than the owner may read the key.
    """
    return sign(user_key(user_folder()), purpose).encode()


def peers_secret() -> bytes:
    """Return what a worker has in common with the workers of its other replica groups.

    That is the run's secret inside of a run, else one of the user's.

    Raises:
        OSError: it can not be read.
        PermissionError: others than the owner may read the user's key.
    """
    record = own_record()
    if record is None:
        return user_secret("peers")
    from hpc_elastic.rundir import RunDir  # not in an attendant, which is to start fast

    return sign(RunDir(record.parent.parent).secret.read_bytes(), "peers").encode()


def _create_key(path: Path) -> None:
    from hpc_elastic.files import create_atomic  # the first time only

    create_atomic(path, secrets.token_hex(32), mode=0o600)


def of_generation(secret: bytes, generation: int) -> bytes:
    """Return the secret of a run's agents since it was resumed for the n-th time.

    So that no agent of an earlier generation is let in any more. Generation 0 has the run's own.
    """
    return secret if generation == 0 else sign(secret, f"generation|{generation}").encode()
