"""Every command's help has examples, and each of them is a command line that it takes."""

import re
import shlex

import click
import pytest

from hpc_elastic.cli import options
from hpc_elastic.cli.main import program

NAMES = program.list_commands(click.Context(program))


def examples(name: str) -> list[list[str]]:
    """The arguments of a command's examples, without what a shell makes of their ends."""
    context = click.Context(program, info_name="hpc-elastic")
    command = program.get_command(context, name)
    assert command is not None
    text = command.get_help(click.Context(command, context, info_name=name))
    usage = f"hpc-elastic {name} "
    lines = [m[1] for m in re.finditer(rf"^  .*?({re.escape(usage)}.*)$", text, re.MULTILINE)]
    ends = re.compile(r" {2,}.*| \|.*| >.*|\)\"'.*")
    return [shlex.split(ends.sub("", line))[2:] for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_command_are_taken_by_it(name, tmp_path, monkeypatch):
    """Spelt right: options that there are, and arguments that fit."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_run", lambda name: tmp_path)
    monkeypatch.setenv("USER", "ada")
    found = examples(name)
    assert found, f"{name} --help has no example"
    context = click.Context(program, info_name="hpc-elastic")
    command = program.get_command(context, name)
    for arguments in found:
        given = [a for a in arguments if not a.startswith("/scratch")]
        if len(given) < len(arguments):
            given += ["."]
        command.make_context(name, given, parent=context)
