"""The command ``hpc-elastic``: its commands are imported when they are called.

``--help`` answers in the time that Python takes to start, on a login node whose file system is
slow, too: what the list of commands says stands here, and nothing else does.

``hpc-elastic --help`` tells the exit codes (`_HELP`); each command's own, what they mean for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

import click

from hpc_elastic.cli import options
from hpc_elastic.errors import HpcElasticError, near_miss

INTERRUPTED = 130
_SIGNALLED = 128
"""And the number of the signal, as shells have it."""

_HELP = """
RUN is a run directory, a run's id as `hpc-elastic list` shows it, or `last`. Each command's --help
has examples, and the keys of its --json.

\b
Exit codes:
  0    it was done, and what was asked for holds
  1    it failed: standard error says why; so does, with --json, an object with
       the key error on standard output. Or what was asked for does not hold:
         wait; status --watch; logs, events --follow
                  a run has not succeeded
         logs     there is nothing to show
         cancel   it was not confirmed, or tasks are left
         preempt, kill
                  the node is still there
         prune    something could not be removed
         doctor   a check failed
         audit    a sample was left out or trained twice, or nobody can tell
         verify   a checkpoint is damaged
  2    the arguments are wrong: nothing was done
  130  it was interrupted; 0 of lighthouse, which is ended so

If SCRIPT fails, submit returns its exit code, or 128 plus the number of the signal that ended it;
standard output is empty then.
"""

_SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Submit": {
        "submit": ("submit", "Submit the runs of a script, or print their batch script."),
    },
    "Look": {
        "status": ("status", "Show a run: group, tasks, step, pace, where its time went."),
        "list": ("list", "List your runs, the newest first."),
        "wait": ("submit", "Wait for submitted runs and show their progress."),
        "logs": ("logs", "Show the output of all workers, in order of time; follow it."),
        "events": ("events", "Tell what happened to a run, and why, in plain sentences."),
        "report": ("report", "Write a page on a run: nodes, training, faults and their cost."),
    },
    "Steer": {
        "cancel": ("control", "End a run, its waiting tasks too."),
        "preempt": ("nodes", "Take a node from a run with notice; it saves and comes back."),
        "kill": ("nodes", "Let a run lose a node without notice."),
        "resume": ("control", "Let a run that stopped go on from its last checkpoint."),
        "prune": ("control", "Remove old checkpoints of a run."),
        "completion": ("main", "Print what completes commands and runs in your shell."),
    },
    "Prove": {
        "doctor": ("doctor", "Tell whether runs will work on this cluster."),
        "audit": ("verify", "Prove that every sample was trained exactly once an epoch."),
        "verify": ("verify", "Check the checkpoints of a run."),
        "export": ("verify", "Write a checkpoint as one file for torch.load."),
    },
    "Serve": {
        "lighthouse": ("lighthouse", "Coordinate fault-tolerant training without a launcher."),
    },
}
"""Name -> module of this package, which has `<name>_command`, and what ``--help`` says of it."""
_RENAMED = {"attach": "wait", "clean": "prune", "render": "submit --dry-run"}
"""Former name of a command -> its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the name of the program; None takes those of this process.

    Returns:
        The exit code.
    """
    _print_what_can_be_printed()
    try:
        code = program.main(argv, prog_name="hpc-elastic", standalone_mode=False)
    except HpcElasticError as e:
        click.echo(f"hpc-elastic: {e}", err=True)
        return 1
    except OSError as e:  # a file system that fails where nothing can be done about it
        click.echo(f"hpc-elastic: {_in_words(e)}", err=True)
        return 1
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt) as e:
        if str(e):
            click.echo(f"hpc-elastic: {e}", err=True)
        return INTERRUPTED
    if not isinstance(code, int):
        return 0
    return code if code >= 0 else _SIGNALLED - code


def _print_what_can_be_printed() -> None:
    """Let a character that the terminal has not (``LC_ALL=C``) be a question mark, no failure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _in_words(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"


def _print_no_more() -> None:
    """Let the interpreter's last flush not fail once more."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115


class _Program(click.Group):
    """The commands by section, without importing them."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; that nobody reads on (``| head``) is no failure."""
        try:
            return self._invoke(ctx)
        except BrokenPipeError:  # click itself would exit with 1
            _print_no_more()
            return 0

    def _invoke(self, ctx: click.Context) -> object:
        """Run the command; what it failed by is said as JSON too where that was asked for."""
        try:
            code = super().invoke(ctx)
        except (HpcElasticError, OSError) as e:
            if ctx.meta.get(options.JSON) and not isinstance(e, BrokenPipeError):
                text = str(e) if isinstance(e, HpcElasticError) else _in_words(e)
                click.echo(json.dumps({"error": text}))
            raise
        try:
            sys.stdout.flush()  # not at the interpreter's end, where a full disk is no exit code
        except OSError:
            _print_no_more()
            raise
        return code

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names."""
        return [name for section in _SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None: there is none of this name."""
        for section in _SECTIONS.values():
            if cmd_name in section:
                module = import_module(f"hpc_elastic.cli.{section[cmd_name][0]}")
                command: click.Command = getattr(module, f"{cmd_name}_command")
                return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; the error for an unknown name suggests one."""
        name = args[0]
        if name[:1] != "-" and name not in self.list_commands(ctx) and not ctx.resilient_parsing:
            if name in _RENAMED:
                ctx.fail(f"{name} is now called {_RENAMED[name]}")
            ctx.fail(f"no such command: {name}{near_miss(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        width = max(map(len, self.list_commands(ctx)))
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                rows = [(name.ljust(width), text) for name, (_, text) in section.items()]
                formatter.write_dl(rows)


@click.group(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_HELP,
)
@click.version_option(package_name="hpc_elastic", prog_name="hpc-elastic")
def program() -> None:
    """Elastic PyTorch runs on Slurm: submit, look, steer, prove."""


# ---- ``hpc-elastic completion``: what makes a shell complete the command's arguments


_VARIABLE = "_HPC_ELASTIC_COMPLETE"
"""click's: the shell asks by calling the program with it."""

_COMPLETION_EXAMPLES = """
\b
To install it, once:
  bash   echo 'eval "$(hpc-elastic completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(hpc-elastic completion zsh)"' >> ~/.zshrc
  fish   hpc-elastic completion fish > ~/.config/fish/completions/hpc-elastic.fish
"""


@click.command(epilog=_COMPLETION_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print a script that lets SHELL complete commands, options, and runs.

    A RUN is completed by the ids of your runs, newest first, and by folders.
    """
    print(source(shell))
    return 0


def source(shell: str) -> str:
    """Return the script for a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    complete = kind(program, {}, "hpc-elastic", _VARIABLE)
    # not .source(): it looks at the version of the bash that is first on PATH, and warns
    return complete.source_template % complete.source_vars()
