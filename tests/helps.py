"""What the commands' ``--help`` says."""

import re
from collections.abc import Mapping

import click

from hpc_elastic.cli.main import program


def help_of(name: str) -> str:
    """Return what `hpc-elastic NAME --help` prints."""
    context = click.Context(program, info_name="hpc-elastic", **program.context_settings)
    command = program.get_command(context, name)
    assert command is not None
    return command.get_help(click.Context(command, context, info_name=name))


def not_in_help(name: str, printed: Mapping[str, object]) -> set[str]:
    """Return the keys of an object that a command has printed which its help does not name."""
    return set(printed) - set(re.findall(r"\w+", help_of(name)))
