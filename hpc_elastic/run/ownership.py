"""Whether this process may act on a run: all that it acts on is the user's own.

The files of a run decide what a command does: which processes and jobs are ended, which folders are
removed, and which program is started. So whatever changes something or executes something from a
run first calls `require_own` or `load_own` (commands, launchers, agents and workers). What only
reads a run does not: runs of other users may be shown.

- The run directory, the sweep's ``.hpc_elastic``, and each file and folder on the way from there to
  what is acted on belong to this user or to root.
- Group and others may not write them. Where a folder or file has a POSIX ACL, only its owner can
  have set it up: the ACL decides on the group's permission, and only others are refused.
- A link belongs to this user or to root as well, and so does what it leads to, which may lie
  elsewhere (``checkpoints`` on a scratch file system).

A check is not repeated: other users may not write these folders, so they cannot change what was
found in them. The folders around the run directory are not examined: a user who may write one of
those can put another directory in the place of the run, but none that belongs to this user.

A file server may give files another owner than their writer (root_squash, all_squash). So an owner
that is neither this user nor root is compared with that of a new file in the same folder.

The user may trust a run all the same, with ``--trust`` or the environment variable
HPC_ELASTIC_TRUST=1, for example where a group shares its runs on purpose. The tasks of a run that
is submitted or resumed so are started so, too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_elastic.errors import UntrustedRunError
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.shared_files import has_acl, make_folder, status_of

TRUST_VARIABLE = "HPC_ELASTIC_TRUST"  # 1: this user trusts the runs of others

_MAX_LINKS = 40
_NOBODY_ELSE = 0o002
_NO_GROUP_EITHER = 0o022


def is_trusting() -> bool:
    """Return whether this process acts on any run, as its user has asked for."""
    return os.environ.get(TRUST_VARIABLE, "0") not in ("", "0")


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """Act on any run, in this process and in those that it starts."""
    before = os.environ.get(TRUST_VARIABLE)
    os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TRUST_VARIABLE, None)
        else:
            os.environ[TRUST_VARIABLE] = before


def load_own(run: RunDir, *used: Path) -> RunSpec:
    """Return the description of a run that this process is to act on, or to execute.

    ``used`` is what is acted on in the run directory, or elsewhere, beside run.json, the submission
    and the code in it; it need not exist. Raises UntrustedRunError as `require_own`, and
    RunDirectoryError if it is no run directory.
    """
    require_own(run.path, run.spec, run.settings, run.secret, *used)
    spec = run.load()
    submission, script = Path(spec.submission), spec.entry.script
    code = [*spec.entry.sys_path, *([str(Path(script).parent)] if script else [])]
    copied = (Path(path) for path in code if Path(path).is_relative_to(submission))
    require_own(submission, spec.texts, *copied)  # see launcher.code_snapshot
    return spec


def claim(folder: Path, *inside: Path) -> None:
    """Take a folder for a run that is submitted; make it if needed (login node).

    Write permissions of group and others are taken away from what this user has made under another
    umask, unless the user trusts them. ``inside`` are folders of the run in it, which may be there
    already. Raises UntrustedRunError as `require_own`.
    """
    make_folder(folder, parents=True, closed=not is_trusting())
    for path in inside:
        if path.is_dir():
            make_folder(path, closed=not is_trusting())
    require_own(folder, *inside)


def require_own(folder: Path, *used: Path) -> None:
    """Refuse a folder that is not this user's alone, or has something in it that is not.

    Each file or folder on the way to what is ``used`` is checked, if it exists. Of a path
    elsewhere, only its end is. Raises UntrustedRunError, which names the path, its owner, its mode
    and the remedy.
    """
    if is_trusting():
        return
    steps = (step for one in used for step in _steps(folder, one))
    for path in dict.fromkeys([folder, *steps]):
        try:
            try:
                _require_own(path)
            except UntrustedRunError:
                with contextlib.suppress(OSError):
                    if path.is_dir() or path.is_file():
                        status_of(path)  # the user may just have changed the mode on another host
                _require_own(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # its reader reports that


def _steps(folder: Path, path: Path) -> list[Path]:
    if not path.is_relative_to(folder):
        return [path]
    parts = path.relative_to(folder).parts
    return [folder.joinpath(*parts[: n + 1]) for n in range(len(parts))]


def _require_own(path: Path) -> None:
    """Check a file or folder, and all links that lead from its name to it."""
    for _ in range(_MAX_LINKS):
        found = path.lstat()
        if found.st_uid not in (0, os.geteuid()) and found.st_uid != _own_uid_in(path, found):
            raise _refusal(path, found, "belongs to another user")
        if not stat.S_ISLNK(found.st_mode):
            break
        path = path.parent / path.readlink()
    forbidden = _NOBODY_ELSE if has_acl(path) else _NO_GROUP_EITHER
    if found.st_mode & forbidden:
        raise _refusal(path, found, "may be written by others")


def _own_uid_in(path: Path, found: os.stat_result) -> int | None:
    """Return the owner that new files of this process have there; None if it can make none."""
    import tempfile  # seldom needed

    folder = path if stat.S_ISDIR(found.st_mode) else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def _refusal(path: Path, found: os.stat_result, why: str) -> UntrustedRunError:
    import pwd

    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    what = f"{path} {why} (owner {owner}, mode {stat.S_IMODE(found.st_mode):04o})"
    risk = "another user could decide what is ended, removed or started in your name"
    folder = path if stat.S_ISDIR(found.st_mode) else path.parent
    is_own = found.st_uid == os.geteuid()
    cure = f"if only you should write it: chmod -R go-w {folder}; " if is_own else ""
    trust = f"if you trust them: --trust, or {TRUST_VARIABLE}=1 in the environment"
    return UntrustedRunError(f"{what}: {risk}; {cure}{trust}")
