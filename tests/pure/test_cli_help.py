"""Every command's help has examples, and each of them is a command line that it takes."""

import contextlib
import re
import shlex
from dataclasses import fields

import click
import pytest
from click.shell_completion import ShellComplete

from helps import command_names, help_of, named, not_in_help
from hpc_elastic.cli import options
from hpc_elastic.cli.checkpoints import CheckpointFinding
from hpc_elastic.cli.main import program
from hpc_elastic.cli.status import Listed
from hpc_elastic.cli.submit import SECTIONS
from hpc_elastic.data.audit import EpochProof, Proof
from hpc_elastic.run import registry
from hpc_elastic.run.directory import RunDir

NAMES = list(command_names())
NO_JSON = ("init", "lighthouse")


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
    ("words", "begin", "completions"),
    [
        ([], "che", ["checkpoints"]),
        (["checkpoints"], "", ["verify", "export", "prune"]),
        (["node"], "k", ["kill"]),
        (["node", "kill"], "digits", ["digits-1"]),
        (["node", "kill", "digits-1"], "n", ["n1", "n2"]),
        (["report", "--live"], "digits", ["digits-1"]),
        (["wait", "last", "--until"], "s", ["step="]),
        (["init", "--completion"], "f", ["fish"]),
        (["run"], "--part", ["--partition"]),
        (["run", "--nodes", "2", "--scale-up"], "im", ["immediate"]),
        (["doctor"], "part", ["partition="]),
    ],
)
def test_a_shell_completes(words, begin, completions, tmp_path, monkeypatch):
    """Commands of groups, options, runs by their ids, nodes of the run, and words."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = RunDir(tmp_path / "7")
    run.path.mkdir()
    run.spec.touch()
    run.status.write_text('{"members": [{"host": "n1"}, {"host": "n2"}]}')
    registry.add({"digits-1": run.path})
    found = ShellComplete(program, {}, "hpc-elastic", "X").get_completions(words, begin)
    assert [item.value for item in found] == completions


@pytest.mark.parametrize(
    "words",
    ["nodes=1:4", "--nodes 1:4", "--nodes=1:4", "launcher.nodes=1:4", "--launcher.nodes 1:4"],
)
def test_a_setting_is_spelt_in_either_way(words):
    """As Hydra's override, or as an option: `run` and `doctor` take both."""
    given = [*words.split(), "--preempt-grace-s", "-1", "agent.numa=node"]
    assert options.split_settings(given) == ["nodes=1:4", "preempt_grace_s=-1", "agent.numa=node"]
    for wrong in (["nodes"], ["--nodes"], ["-n", "2"]):
        with pytest.raises(click.UsageError, match="--KEY VALUE, or KEY=VALUE"):
            options.split_settings(wrong)


def test_every_setting_is_in_the_help_of_run():
    """Under its topic; the topics name no setting that is not there."""
    text, command = help_of("run"), named(["run"])[0]
    topics = [word for words in SECTIONS.values() for word in words.split()]
    assert set(topics) <= set(command.settings) and len(topics) == len(set(topics))
    assert all(option.opts[0] in text for option in command.settings.values())
    assert {"--agent.hang-timeout-s", "--run-dir", "--max-agents"} <= set(text.split())


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
