"""What the documentation says exists: commands, flags, settings, names, files."""

import ast
import importlib
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import click
import pytest
from omegaconf import OmegaConf

from doc_pages import FENCED, NAMES, ROOT, blocks, typed_lines
from hpc_elastic.cli.main import program
from hpc_elastic.config.schema import LocalSettings, SlurmSettings
from hpc_elastic.run import directory
from slurm_sandbox import cli as sandbox_cli

sys.path.append(str(ROOT / "docs"))

from generate import cli_page, settings_page

_INLINE = re.compile(r"`([^`\n]+)`")
_FOLDERS = ("scripts", "tests", "benchmarks", "docs", "examples", "tools")


def commands(text: str) -> list[list[str]]:
    """Every command line: behind a prompt, in a script, or between backticks in a sentence."""
    typed = [line for body in blocks(text, "console") for line in typed_lines(body)]
    typed += [line for body in blocks(text, "bash") for line in body.splitlines()]
    found = []
    for line in [*typed, *_INLINE.findall(FENCED.sub("", text))]:
        for part in re.split(r"\$\(|&&|\||;", re.sub(r"\s#.*", "", line)):
            try:
                words = shlex.split(part.rstrip(')" &'))
            except ValueError:  # the half of a quotation
                continue
            if words:
                found.append(words)
    return found


def keys(cls: type, path: str = "launcher") -> Iterator[str]:
    """Every key of a group of settings, and of the groups in it."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        yield f"{path}.{field.name}"
        if is_dataclass(inner := hints[field.name]):
            yield from keys(inner, f"{path}.{field.name}")


KEYS = {*keys(SlurmSettings), *keys(LocalSettings)}
OF_THE_RUN = {"nodes", "nproc_per_node", "ft", "launcher"}
SCRIPTS = {"train.py", *(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/**/*.py"))}


def test_commands_are_found():
    """What is looked for is there: behind prompts, in sentences, over two lines, in a `$(...)`."""
    text = """In `hpc-elastic events RUN --raw`:

```console
$ python train.py -m launcher=slurm nodes=1:4 \\
    launcher.time=60
$ eval "$(hpc-elastic completion bash)"   # once
output, which is no command
```
"""
    sentence, training, *completion = commands(text)[-1:] + commands(text)[:-1]
    assert sentence == ["hpc-elastic", "events", "RUN", "--raw"]
    assert training[-1] == "launcher.time=60"
    assert ["hpc-elastic", "completion", "bash"] in completion
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/tutorial").glob("*.md"))
    of_tutorial = {words[1] for words in commands(pages) if words[1:]}
    assert {"doctor", "status", "events", "cancel", "resume"} <= of_tutorial


def before_command(words: list[str]) -> list[str]:
    """Return the settings of `hpc-elastic run`; the command follows behind ``--``."""
    return [w for w in itertools.takewhile(lambda w: w != "--", words[2:]) if w.startswith("--")]


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist_with_their_flags(name):
    """`hpc-elastic ...` in every page."""
    for words in commands((ROOT / name).read_text()):
        if words[0] != "hpc-elastic" or len(words) == 1 or words[1].startswith("-"):
            continue
        if words[1] == "run":
            given = {word.removeprefix("--").replace("-", "_") for word in before_command(words)}
            assert given <= {*OF_THE_RUN, *(key.removeprefix("launcher.") for key in KEYS)}, words
            continue
        command = program.get_command(click.Context(program), words[1])
        assert command is not None, words
        flags = [(*parameter.opts, *parameter.secondary_opts) for parameter in command.params]
        known = {"--help", "-h"}.union(*flags)
        given = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
        assert given <= known, words


@pytest.mark.parametrize("name", NAMES)
def test_settings_exist(name):
    """`launcher.key` in every page, and what the example scripts are started with."""
    text = (ROOT / name).read_text()
    refused = set(re.findall(r"^(launcher\.[\w.]+)=.*: no such key", text, re.MULTILINE))
    for key in re.findall(r"(?<![\w./])launcher\.[a-z_]+(?:\.[a-z_]+)*", text):
        group = ".".join(key.split(".")[:2])
        assert key in KEYS | refused or group in ("launcher.sbatch", "launcher.env"), key
    for words in commands(text):
        script = next((w for w in words if w in SCRIPTS), None)
        if script is None or words[0] == "srun" or "\n$ cd " in text:
            continue  # test_docs_blocks.py composes the config of a folder that a page enters
        known = OmegaConf.to_container(OmegaConf.load(ROOT / script.replace(".py", ".yaml")))
        for word in words[words.index(script) + 1 :]:
            key, given, _ = word.lstrip("+").partition("=")
            allowed = (
                key in known or key in OF_THE_RUN or key in KEYS or re.match(r"hydra[./]", key)
            )
            assert allowed or not given, word


@pytest.mark.parametrize("name", NAMES)
def test_python_compiles_and_imports(name):
    """Every block of Python is valid, and what it imports from here is there."""
    for body in blocks((ROOT / name).read_text(), "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpc_elastic"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@pytest.mark.parametrize("name", NAMES)
def test_files_exist(name):
    """Paths of this clone in commands and between backticks."""
    for words in commands((ROOT / name).read_text()):
        for word in words:
            path = word.removeprefix("./").rstrip(":,")
            if path.split("/")[0] in _FOLDERS and re.fullmatch(r"[\w./-]+/[\w./-]+", path):
                assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), word


@pytest.mark.parametrize("name", NAMES)
def test_sandbox_commands_exist(name):
    """`scripts/slurm_sandbox.py ...` and `slurm-sandbox ...` are parsed by their own parser."""
    for words in commands((ROOT / name).read_text()):
        if words[0].endswith(("slurm_sandbox.py", "slurm-sandbox")) and len(words) > 1:
            help_only = words[1] == "--help"
            assert help_only or sandbox_cli.parser().parse_args(words[1:]), words


@pytest.mark.parametrize(("name", "page"), [("settings", settings_page), ("cli", cli_page)])
def test_a_generated_page_is_fresh(name, page):
    """`python docs/generate.py` writes it."""
    assert (ROOT / f"docs/reference/{name}.md").read_text() == page()


def test_the_page_of_files_has_every_path():
    """That `run.directory` describes, of a run and of a submission."""
    text = (ROOT / "docs/reference/files.md").read_text()
    rows = re.findall(r"^    <(run|sweep)>/(?:\.hpc_elastic/)?(\S+)", directory.__doc__, re.M)
    paths = [path for _, path in rows]
    assert len(paths) > 20
    missing = [path for path in paths if path.split("/")[0] not in text]
    assert not missing


def test_the_settings_page_has_every_key_with_a_meaning():
    """No key is left out, and none stands there without a word."""
    rows = re.findall(r"^\| `(launcher\.[\w.]+)` \|.*\| (.*) \|$", settings_page(), re.MULTILINE)
    groups = {key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)}
    assert {key for key, _ in rows} == KEYS - groups
    assert [key for key, meaning in rows if not meaning] == []


def test_the_api_reference_has_all_that_is_public():
    """The names that the packages export."""
    text = "\n".join(path.read_text() for path in (ROOT / "docs/reference/api").glob("*.md"))
    for package in ("", ".data", ".checkpoint", ".testing.fake_slurm"):
        module = importlib.import_module(f"hpc_elastic{package}")
        for name in module.__all__:
            is_error = name == "HpcElasticError"
            assert is_error or re.search(rf"auto\w+:: (\w+\.)*{name}\b", text), name
    for package in ("ft", "errors"):
        assert re.search(rf"automodule:: hpc_elastic\.{package}\n +:members:", text)
