"""The loop of `scripts/check` over the documentation: what its pages name exists.

Commands, flags, settings, imports, paths. What the pages show is run by tests
(`tests/process/test_docs_blocks.py`, `tests/process/test_docs_transcripts.py`).
"""

import ast
import functools
import itertools
import re
import shlex
import symtable
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from omegaconf import OmegaConf

from doc_pages import FENCED, NAMES, ROOT, blocks, typed_lines
from helps import named
from hpc_elastic.config.schema import LocalSettings, SlurmSettings
from slurm_sandbox import cli as sandbox_cli

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


def before_command(words: list[str]) -> list[str]:
    """Return the settings of `hpc-elastic run`; the command follows behind ``--``."""
    return [w for w in itertools.takewhile(lambda w: w != "--", words[2:]) if w.startswith("--")]


def unknown_commands(text: str) -> Iterator[str]:
    """`hpc-elastic ...`: commands and flags that there are not."""
    for words in commands(text):
        if words[0] != "hpc-elastic" or len(words) == 1 or words[1].startswith("-"):
            continue
        if words[1] == "run":
            given = {word.removeprefix("--").replace("-", "_") for word in before_command(words)}
            unknown = given - {
                "detach",
                "json",
                *OF_THE_RUN,
                *(key.removeprefix("launcher.") for key in KEYS),
            }
        elif (found := named(words[1:]))[0] is None:
            unknown = {words[2] if found[1].parent else words[1]}
        else:
            command, _, rest = found
            flags = [(*parameter.opts, *parameter.secondary_opts) for parameter in command.params]
            given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
            unknown = given - {"--help", "-h"}.union(*flags)
        yield from (f"{word} in {shlex.join(words)}" for word in sorted(unknown))


def unknown_settings(text: str) -> Iterator[str]:
    """`launcher.key`, and what the example scripts are started with."""
    refused = set(re.findall(r"^(launcher\.[\w.]+)=.*: no such key", text, re.MULTILINE))
    for key in re.findall(r"(?<![\w./])launcher\.[a-z_]+(?:\.[a-z_]+)*", text):
        group = ".".join(key.split(".")[:2])
        if key not in KEYS | refused and group not in ("launcher.sbatch", "launcher.env"):
            yield key
    for words in commands(text):
        script = next((w for w in words if w in SCRIPTS), None)
        if script is None or words[0] == "srun" or "\n$ cd " in text:
            continue  # test_docs_blocks.py composes the config of a folder that a page enters
        named = ROOT / script
        configs = (named.with_suffix(".yaml"), named.parent / "conf" / "config.yaml")
        config = next((path for path in configs if path.exists()), None)
        if config is None:
            continue  # it is not Hydra's
        known = {*OmegaConf.load(config), *OF_THE_RUN, *KEYS}
        for word in words[words.index(script) + 1 :]:
            key, given, _ = word.lstrip("+").partition("=")
            if given and key not in known and not re.match(r"hydra[./]", key):
                yield word


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """What a module has, read and not imported: it may need an extra that is not installed."""
    folder = ROOT / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text())
    table = symtable.symtable(file.read_text(), str(file), "exec")
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
    names |= {s.get_name() for s in table.get_symbols() if s.is_imported() or s.is_namespace()}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    return frozenset(names | {path.stem for path in folder.glob("*")})


def unknown_imports(text: str) -> Iterator[str]:
    """Python that does not compile, and what it imports from here that is not there."""
    for body in blocks(text, "python"):
        try:
            tree = ast.parse(body)
        except SyntaxError as e:
            yield f"{e}: {body}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpc_elastic"):
                known = names_of(str(node.module))
                yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in known)


def unknown_paths(text: str) -> Iterator[str]:
    """Paths of this clone in commands and between backticks."""
    for word in itertools.chain.from_iterable(commands(text)):
        path = word.removeprefix("./").rstrip(":,")
        is_path = path.split("/")[0] in _FOLDERS and re.fullmatch(r"[\w./-]+/[\w./-]+", path)
        if is_path and not any((ROOT / name).exists() for name in (path, f"{path}.py")):
            yield word


def unknown_sandbox_commands(text: str) -> Iterator[str]:
    """`scripts/slurm_sandbox.py ...` and `slurm-sandbox ...`, which their own parser refuses."""
    for words in commands(text):
        if words[0].endswith(("slurm_sandbox.py", "slurm-sandbox")) and words[1:] != ["--help"]:
            try:
                assert len(words) == 1 or sandbox_cli.parser().parse_args(words[1:])
            except SystemExit:
                yield shlex.join(words)


_LINK = re.compile(r"\]\(([^)#\s:]+\.md)[^)\s]*\)")
MAX_CLICKS = 5


def unreachable_pages() -> set[str]:
    """Pages that are more than `MAX_CLICKS` links away from the README."""
    reached = front = {ROOT / "README.md"}
    for _ in range(MAX_CLICKS):
        found = {
            (page.parent / link).resolve()
            for page in front
            if page.exists()
            for link in _LINK.findall(FENCED.sub("", page.read_text()))
        }
        front = found - reached
        reached = reached | front
    return {name for name in NAMES if (ROOT / name).resolve() not in reached}


LOOPS: tuple[Callable[[str], Iterator[str]], ...] = (
    unknown_commands,
    unknown_settings,
    unknown_imports,
    unknown_paths,
    unknown_sandbox_commands,
)


def main() -> int:
    """Print all that is named and not there; return the exit code."""
    found = [
        f"{name}: {loop.__name__.replace('_', ' ')}: {what}"
        for name in NAMES
        for loop in LOOPS
        for what in loop((ROOT / name).read_text())
    ]
    found += [
        f"{name}: no way of {MAX_CLICKS} links from the README" for name in unreachable_pages()
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
