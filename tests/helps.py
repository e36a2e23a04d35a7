"""What the commands' ``--help`` says."""

import re
from collections.abc import Iterator, Mapping, Sequence

import click

from hpc_elastic.cli.main import program


def named(words: Sequence[str]) -> tuple[click.Command | None, click.Context, list[str]]:
    """Return the command that words name, the context of its group, and the words behind it."""
    context = click.Context(program, info_name="hpc-elastic", **program.context_settings)
    group: click.Group = program
    for i, word in enumerate(words):
        command = group.get_command(context, word)
        if not isinstance(command, click.Group):
            return command, context, list(words[i + 1 :])
        group, context = command, click.Context(command, context, info_name=word)
    return group, context.parent or context, []


def command_names() -> Iterator[str]:
    """Yield the name of each command that is no group, such as ``node kill``."""
    for name in program.list_commands(click.Context(program)):
        command, context, _ = named([name])
        if isinstance(command, click.Group):
            yield from (f"{name} {inner}" for inner in command.list_commands(context))
        else:
            yield name


def help_of(name: str) -> str:
    """Return what `hpc-elastic NAME --help` prints."""
    command, context, _ = named(name.split())
    assert command is not None
    return command.get_help(click.Context(command, context, info_name=name.split()[-1]))


def not_in_help(name: str, printed: Mapping[str, object]) -> set[str]:
    """Return the keys of an object that a command has printed which its help does not name."""
    return set(printed) - set(re.findall(r"\w+", help_of(name)))
