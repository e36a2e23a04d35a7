"""Every command serves a program: findings and errors as JSON, and no question without a terminal.

The commands are those that `hpc-elastic` has, in groups of any depth: a new one is tested here too.
"""

import ast
import io
import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import hpc_elastic
from hpc_elastic import errors
from hpc_elastic.cli import options
from hpc_elastic.cli.main import main, program

NO_FINDINGS = {
    ("init",): "writes files",
    ("lighthouse",): "serves until it is interrupted",
    ("run",): "passes on the output of a command, and prints JSON with --detach only",
}
"""Commands that are not called with --json here, each with the reason."""
ASKS = {"confirm", "prompt", "pause", "edit", "echo_via_pager", "pager", "input", "getpass", "ask"}
"""Names of functions of click, Rich and Python that wait for a person."""


def leaves(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield all commands below a group by their names on the command line."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(program))
SPEAKING = [path for path in COMMANDS if path not in NO_FINDINGS]
each = pytest.mark.parametrize("path", SPEAKING, ids=" ".join)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder without runs, a machine without Slurm, and nobody at the terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    (tmp_path / "file").touch()
    return tmp_path


def arguments(command: click.Command) -> list[str]:
    """Return values for all arguments and required options of a command, as far as types go."""
    given = []
    for param in command.params:
        if isinstance(param, click.Argument):
            given.append("file" if isinstance(param.type, click.Path) else "nowhere")
        elif param.required:
            number = isinstance(param.type, (click.types.IntParamType, click.types.FloatParamType))
            given += [param.opts[0], "1" if number else "x"]
    return given


def error_in(output: str) -> dict[str, str | None]:
    """Return the error that a command has printed as JSON, once it has all of its keys."""
    error = json.loads(output)["error"]
    assert set(error) == {"code", "message", "key", "remedy"}
    assert error["code"] and error["message"] and error["remedy"]
    return error


def test_only_commands_without_findings_have_no_json():
    """The list of exceptions names no command that there is not."""
    without = {
        path for path, command in COMMANDS.items()
        if not any("--json" in param.opts for param in command.params)
    }  # fmt: skip
    assert without <= set(NO_FINDINGS) <= set(COMMANDS)


@each
def test_wrong_arguments_are_an_error_in_json(path, alone, capsys):
    """An option that there is not, an argument that is missing, and a run that there is not."""
    command = COMMANDS[path]
    takes_any = command.context_settings.get("ignore_unknown_options", False)
    if not takes_any:
        assert main([*path, "--no-such-option", "--json"]) == 2
        assert error_in(capsys.readouterr().out)["code"] == "usage-error"
    if any(param.required for param in command.params):
        assert main([*path, "--json"]) == 2
        assert error_in(capsys.readouterr().out)["code"] == "usage-error"
    if any(isinstance(p.type, options.RunName) for p in command.params):
        assert main([*path, "--json", *arguments(command)]) == 1
        error = error_in(capsys.readouterr().out)
        assert "nowhere" in error["message"] and "hpc-elastic list" in error["remedy"]


@each
@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("nodes", 0, "give one or more"),
        errors.SlurmCommandError(["squeue"], 1, "down"),
        errors.ScriptError("train.py", 1, None),
        PermissionError(13, "denied", "f"),
        click.UsageError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_command_that_fails_prints_its_error_as_json(path, error, alone, monkeypatch, capsys):
    """Whatever its function raises."""

    def fail(**_arguments: object) -> None:
        raise error

    command = COMMANDS[path]
    monkeypatch.setattr(command, "callback", fail)
    monkeypatch.setattr(options, "find_run", lambda *_, **__: alone)
    code = getattr(error, "exit_code", 1)
    assert main([*path, "--json", *arguments(command)]) == code
    assert error_in(capsys.readouterr().out)["code"]


def test_every_error_has_a_remedy():
    """Each class of errors; of a setting, the one that is raised."""
    classes = [errors.HpcElasticError]
    for cls in classes:
        classes += cls.__subclasses__()
        assert cls.remedy, cls
    assert len(classes) > 15


def questions(tree: ast.AST) -> Iterator[tuple[int, bool]]:
    """Yield the line of each call that waits for a person, and whether its function looks first."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
            for call, name in zip(calls, names, strict=True):
                if name in ASKS:
                    yield call.lineno, "isatty" in names


def test_nothing_is_asked_where_nobody_answers():
    """What asks looks for a terminal in the same function; no option asks for its value."""
    package = Path(hpc_elastic.__file__).parent
    asking = {
        f"{file.relative_to(package)}:{line}": looks
        for file in sorted((package / "cli").rglob("*.py"))
        for line, looks in questions(ast.parse(file.read_text()))
    }
    assert asking, "the question of `cancel` is found"
    assert all(asking.values()), asking
    for path, command in COMMANDS.items():
        for param in command.params:
            assert getattr(param, "prompt", None) is None, (path, param.name)
