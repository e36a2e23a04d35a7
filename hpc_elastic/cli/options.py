"""What several commands share: runs by name, settings, and how they print."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_elastic.errors import RunDirectoryError, near_miss

if TYPE_CHECKING:
    from hpc_elastic.report.run_view import RunView

JSON = "hpc_elastic.json"
"""Key in the context of a command: whether --json was given, also if an argument is wrong."""
NAMED_LAST = "hpc_elastic.named_last"
"""Key in the context of a command: whether its run was given as ``last``."""
LAST = "last"
"""Names the run that was submitted last."""


def find_run(name: str, *, here: bool = False) -> Path:
    """Return the absolute directory of a run by its name.

    The name is a run directory; a sweep directory of a single run; a run's id, or a beginning that
    only this id has; or ``last``: the newest run, with ``here`` of those submitted in this
    directory or below it. Raises RunDirectoryError if there is no such run.
    """
    from hpc_elastic.run import registry

    path = Path(name)
    if path.is_dir():
        return _run_below(path.absolute())
    known = list(registry.newest_first())
    if name == LAST:
        cwd = Path.cwd()
        chosen = [r for r in known if not here or (r.cwd is not None and r.cwd.is_relative_to(cwd))]
    else:
        chosen = [run for run in known if run.run_id == name]
        chosen = chosen or [run for run in known if name and run.run_id.startswith(name)]
    ids = list(dict.fromkeys(run.run_id for run in chosen))
    if chosen and (name == LAST or len(ids) == 1):
        return chosen[0].path
    if ids:
        what = f"{name}: {len(ids)} runs begin so: {', '.join(ids[:5])}"
    elif name == LAST and known:
        what = f"no run was submitted from here or below; the newest is {known[0].run_id}"
    elif name == LAST:
        what = "no run was submitted yet"
    elif Path(name).exists():
        what = f"{name} is not a directory"
    else:
        near = near_miss(name, [LAST, *(run.run_id for run in known)])
        what = f"{name}: no such directory or id{near}"
    remedy = "give a run directory, or an id of `hpc-elastic list`"
    raise RunDirectoryError(f"{what}; {remedy}", remedy=remedy)


def is_sweep(folder: Path) -> bool:
    """Return whether a directory is that of a sweep, and not of a run."""
    from hpc_elastic.run.directory import SUBMISSION, RunDir
    from hpc_elastic.shared_files import is_there

    return (folder / SUBMISSION).is_dir() and not is_there(RunDir(folder).spec)


def runs_below(sweep: Path) -> Iterator[Path]:
    """Yield the runs of a sweep directory, however deep ``hydra.sweep.subdir`` has them."""
    from hpc_elastic.run.directory import SUBMISSION, RunDir

    for folder, below, files in os.walk(sweep):
        if is_run := RunDir(Path(folder)).spec.name in files:
            yield Path(folder)
        below[:] = [] if is_run else [name for name in below if name != SUBMISSION]


def _run_below(folder: Path) -> Path:
    if not is_sweep(folder):
        return folder  # its reader reports what is missing
    runs = sorted(runs_below(folder))
    if not runs:
        remedy = "give the directory of a run, or an id of `hpc-elastic list`"
        what = f"{folder} is a sweep directory without a run"
        raise RunDirectoryError(f"{what}: {remedy}", remedy=remedy)
    if len(runs) > 1:
        names = ", ".join(str(run.relative_to(folder)) for run in runs[:5])
        names += ", ..." if len(runs) > 5 else ""
        remedy = f"give one of them: {names}"
        raise RunDirectoryError(f"{folder} holds {len(runs)} runs; {remedy}", remedy=remedy)
    return runs[0]


class RunName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A run, as `find_run` finds it."""

    name = "run"

    def __init__(self, *, or_folder: bool = False, is_changed: bool = False) -> None:
        """Make the type.

        ``or_folder`` accepts any other directory too, such as one checkpoint. ``is_changed``: the
        command changes the run, so that ``last`` is one of this directory tree.
        """
        self._or_folder = or_folder
        self._is_changed = is_changed

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the run directory."""
        from hpc_elastic.run.directory import SUBMISSION

        if self._or_folder and Path(value).exists() and not (Path(value) / SUBMISSION).is_dir():
            return Path(value)
        if ctx is not None:
            ctx.meta[NAMED_LAST] = value == LAST
        return find_run(str(value), here=self._is_changed)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the ids that begin with `incomplete`, or let the shell complete directories."""
        from click.shell_completion import CompletionItem

        from hpc_elastic.run import registry

        ids = [LAST, *(run.run_id for run in registry.newest_first())]
        found = [CompletionItem(i) for i in ids if i.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="dir")]


class SweepName(RunName):
    """A sweep directory, or one of its runs as `find_run` finds it."""

    name = "sweep"

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the absolute directory."""
        folder = Path(value).absolute()
        return folder if folder.is_dir() else find_run(str(value))


def _note_trust(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Trust the run until the command ends."""
    if value:
        from hpc_elastic.run import ownership

        ctx.with_resource(ownership.trusting())


run = click.argument("run", type=RunName(), metavar="RUN")
changed_run = click.argument("run", type=RunName(is_changed=True), metavar="RUN")
checkpoints = click.argument("run", type=RunName(or_folder=True), metavar="RUN")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
trust = click.option(
    "--trust", is_flag=True, is_eager=True, expose_value=False, callback=_note_trust,
    help="Act on a run of another user, or that others may write, all the same.",
)  # fmt: skip


def split_settings(words: Sequence[str]) -> list[str]:
    """Return settings as ``key=value``, given so, with ``launcher.``, or as ``--key value``.

    Raises UsageError for a word that is no setting.
    """
    found, rest = list[str](), list(words)
    while rest:
        given = rest.pop(0)
        key, equals, value = given.removeprefix("--").partition("=")
        if not equals:
            if not given.startswith("--") or not rest:
                raise click.UsageError(f"{given}: give settings as --KEY VALUE, or KEY=VALUE")
            value = rest.pop(0)
        found.append(f"{key.replace('-', '_').removeprefix('launcher.')}={value}")
    return found


def print_json(value: Any) -> None:
    """Print the one value of ``--json``."""
    print(json.dumps(value, indent=2))


def print_message(text: str) -> None:
    """Print what is no output of the command, such as an error."""
    click.echo(f"hpc-elastic: {text}", err=True)


def print_end(view: RunView) -> int:
    """Print how a run that was followed has ended; return the command's exit code."""
    print_message(view.describe())
    return view.ended.exit_code if view.ended is not None else 1
