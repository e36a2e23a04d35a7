"""Every command's help has examples, and each of them is a command line that it takes."""

import contextlib
import re
import shlex
from dataclasses import fields

import click
import pytest

from helps import command_names, help_of, named, not_in_help
from hpc_elastic.cli import options
from hpc_elastic.cli.checkpoints import CheckpointFinding
from hpc_elastic.cli.status import Listed
from hpc_elastic.data.audit import EpochProof, Proof

NAMES = list(command_names())
NO_JSON = ("init", "lighthouse", "run")


def examples(name: str) -> list[list[str]]:
    """The arguments of a command's examples, without what a shell makes of their ends."""
    usage = f"hpc-elastic {name} "
    found = re.finditer(rf"^  .*?({re.escape(usage)}.*)$", help_of(name), re.MULTILINE)
    lines = [m[1] for m in found]
    ends = re.compile(r" {2,}.*| \|.*| >.*|\)\"'.*")
    return [shlex.split(ends.sub("", line))[1:] for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_command_are_taken_by_it(name, tmp_path, monkeypatch):
    """Spelt right: options that there are, and arguments that fit."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_run", lambda name, **_: tmp_path)
    monkeypatch.setenv("USER", "ada")
    found = examples(name)
    assert found, f"{name} --help has no example"
    for words in found:
        command, context, arguments = named(words)
        given = [a for a in arguments if not a.startswith("/scratch")]
        if len(given) < len(arguments):
            given += ["."]
        with contextlib.suppress(click.exceptions.Exit):  # --completion
            command.make_context(name, given, parent=context)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NO_JSON])
def test_every_command_that_tells_something_tells_it_to_scripts(name):
    """With --json; the help says what is printed then, besides that there is the option."""
    text = help_of(name)
    assert re.search(r"^  --json  ", text, re.MULTILINE)
    described = r"--json (prints|says)|With --json,?\s+(one|a\s+list|each)|[Kk]eys of --json"
    assert re.search(described, text)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("audit", (Proof, EpochProof)),
        ("checkpoints verify", (CheckpointFinding,)),
        ("list", (Listed,)),
    ],
)
def test_the_help_names_the_keys_of_json(name, kinds):
    """All of them."""
    assert not not_in_help(name, {field.name: None for kind in kinds for field in fields(kind)})
