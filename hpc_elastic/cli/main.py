"""The command ``hpc-elastic``: its commands are imported when they are called.

``--help`` starts as fast as Python itself, also on a slow file system: this module holds the list
of commands with their summaries, and imports none of them.
"""

from __future__ import annotations

import difflib
import gc
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from hpc_elastic._util import cleaned_output
from hpc_elastic.cli import options
from hpc_elastic.errors import HpcElasticError

INTERRUPTED = 130

_HELP = """
RUN is a run directory, the id of a run in `hpc-elastic list` or its unique beginning, or `last`:
the newest run; for commands that change a run (cancel, resume, node, checkpoints prune), the newest
that was submitted in this directory or below it. The --help of a command shows examples and the
keys of its --json. Commands that change a run act only on one that is yours and that no other user
may write, unless --trust is given.

\b
Exit codes: 0, the command has done what it was called for, and what it checks or waits for is as
it should be; 1, it is not, or could not be done; 2, nothing was done, as the arguments are wrong.
  0    success; also of report --live and lighthouse at Ctrl-C, until which they serve
  1    an error: the message is on standard error, and with --json also on
       standard output: {"error": {"code", "message", "key", "remedy"}}. Or:
         wait; status --watch; logs, events --follow
                  a run has not succeeded, or with --until not reached the state
         logs     there is no output
         cancel   it was not confirmed, or tasks are left
         node     the node is still in the run
         doctor   a check failed
         audit    a sample was left out or trained twice, or that is unknown
         checkpoints
                  one is damaged, or could not be removed
  2    the arguments are wrong, and nothing was done
  130  interrupted: Ctrl-C or SIGTERM
"""

Section = dict[str, tuple[str, str]]
"""Command -> module of this package with `<command>_command`, and the summary; a group has none."""
_GROUPS: dict[str, Section] = {
    "node": {
        "preempt": ("control", "Preempt a node of a run: it saves, leaves and is requeued."),
        "kill": ("control", "Kill the processes of a node of a run, without notice."),
    },
    "checkpoints": {
        "verify": ("checkpoints", "Check the checkpoints of a run."),
        "export": ("checkpoints", "Write a checkpoint as one file for torch.load."),
        "prune": ("checkpoints", "Remove old checkpoints of a run."),
    },
}
_SECTIONS: dict[str, Section] = {
    "Submit": {
        "init": ("init", "Write a cluster file, and a script to start from."),
        "submit": ("submit", "Submit the runs of a script, or forecast when they would start."),
        "run": ("submit", "Run a command elastically, as torchrun runs a script."),
    },
    "Observe": {
        "status": ("status", "Show a run: group, tasks, step, pace, and where its time went."),
        "list": ("status", "List your runs, the newest first."),
        "wait": ("submit", "Wait for submitted runs and show their progress."),
        "logs": ("logs", "Show or follow the output of all workers, in order of time."),
        "events": ("report", "Show what happened to a run, and why."),
        "report": ("report", "Write a page on a run, or show runs live in a browser."),
    },
    "Control": {
        "cancel": ("control", "End a run and its pending tasks."),
        "resume": ("control", "Restart a run that has stopped from its last checkpoint."),
        "node": ("", "Take a node from a run, with notice or without: preempt, kill."),
    },
    "Check": {
        "doctor": ("check", "Check whether runs will work on this cluster."),
        "audit": ("check", "Check that every sample was trained exactly once per epoch."),
        "checkpoints": ("", "Check, export or remove checkpoints: verify, export, prune."),
    },
    "Serve": {
        "lighthouse": ("lighthouse", "Coordinate fault-tolerant training without this launcher.")
    },
}
_ELSEWHERE = {
    **{name: f"{group} {name}" for group, names in _GROUPS.items() for name in names},
    "attach": "wait", "clean": "checkpoints prune", "completion": "init --completion",
    "render": "submit --dry-run", "watch": "report --live", "when": "submit --test-only",
}  # fmt: skip
"""Word that is no command -> the command that does it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a question mark for what LC_ALL=C cannot encode
            stream.reconfigure(errors="replace")
    gc.set_threshold(100_000, 50, 100)  # a long run is a million values, which all stay
    with cleaned_output():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = program.main(argv, prog_name="hpc-elastic", standalone_mode=False)
    except (HpcElasticError, OSError) as e:
        options.print_message(_message(e))
        return 1
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt) as e:
        if str(e):
            options.print_message(str(e))
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _error_json(error: Exception) -> dict[str, Any]:
    """Return an error as JSON, a usage error as its cause; else ``os-error``, ``usage-error``."""
    if isinstance(error, click.ClickException) and isinstance(error.__cause__, HpcElasticError):
        error = error.__cause__
    if isinstance(error, HpcElasticError):
        return {"error": error.to_json()}
    if isinstance(error, OSError):
        code, message, remedy = "os-error", _message(error), "check the path and its permissions"
    else:
        assert isinstance(error, click.ClickException)
        code, message = "usage-error", error.format_message()
        remedy = "the --help of the command describes its arguments"
    return {"error": {"code": code, "message": message, "key": None, "remedy": remedy}}


def _message(error: HpcElasticError | OSError) -> str:
    if isinstance(error, HpcElasticError):
        return str(error)
    text = error.strerror or str(error) or type(error).__name__
    return text if error.filename is None else f"{error.filename}: {text}"


def _discard_output() -> None:
    """Discard further output: the interpreter's last flush would fail again."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


class _Commands(click.Group):
    """Commands by section; a command is imported when it is called."""

    def __init__(self, *args: Any, sections: dict[str, Section], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in self._sections.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of this name."""
        for section in self._sections.values():
            if cmd_name not in section:
                continue
            module, summary = section[cmd_name]
            if not module:
                return _Commands(cmd_name, help=summary, sections={"Commands": _GROUPS[cmd_name]})
            found = import_module(f"hpc_elastic.cli.{module}")
            command: click.Command = getattr(found, f"{cmd_name}_command")
            return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; the error for an unknown name suggests one."""
        name, known = args[0], self.list_commands(ctx)
        if name[:1] != "-" and name not in known and not ctx.resilient_parsing:
            meant = {word: word for word in known} | (_ELSEWHERE if ctx.parent is None else {})
            close = difflib.get_close_matches(name, meant, n=1)
            near = "".join(f". Did you mean `{ctx.command_path} {meant[word]}`?" for word in close)
            ctx.fail(f"no such command: {name}{near}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, section in self._sections.items():
            with formatter.section(title):
                rows = [(name.ljust(width), text) for name, (_, text) in section.items()]
                formatter.write_dl(rows)


class _Program(_Commands):
    """The whole program: errors as JSON, and the end of the output."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether --json was given, before an argument is refused."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[options.JSON] = "--json" in args[:end]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a closed pipe (``| head``) is no error."""
        try:
            return self._invoke(ctx)
        except BrokenPipeError:  # click itself would exit with 1
            _discard_output()
            return 0

    def _invoke(self, ctx: click.Context) -> object:
        """Run the command; with ``--json`` an error is printed as JSON too."""
        try:
            code = super().invoke(ctx)
        except (HpcElasticError, OSError, click.ClickException) as e:
            if ctx.meta.get(options.JSON) and not isinstance(e, BrokenPipeError):
                click.echo(json.dumps(_error_json(e)))
            raise
        try:
            sys.stdout.flush()  # a full disk fails here, where it has an exit code
        except OSError:
            _discard_output()
            raise
        return code


@click.group(
    cls=_Program,
    sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_HELP,
)
@click.version_option(package_name="hpc_elastic", prog_name="hpc-elastic")
def program() -> None:
    """Elastic PyTorch runs on Slurm: submit, observe, control, check."""
