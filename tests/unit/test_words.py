"""The words of the project: plain technical English, and names that contain their object."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpc_elastic

ROOT = Path(hpc_elastic.__file__).parents[1]
CODE = ("hpc_elastic", "hydra_plugins", "tools", "examples", "tests/simulation")
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"))

VERBS_WITHOUT_OBJECT = frozenset(
    (
        "ask",
        "asked",
        "begin",
        "came",
        "come",
        "end",
        "go",
        "goes",
        "gone",
        "hear",
        "heard",
        "keep",
        "left",
        "look",
        "note",
        "said",
        "say",
        "see",
        "seen",
        "stand",
        "take",
        "taken",
        "tell",
        "told",
    )
)
OLD_WORDS = re.compile(
    r"attendance|candidacy|chronicle|comeback|farewell|inquest|muster|onlooker|slurms_word"
    r"|steadfast|surroundings|(?<![a-z])(office|patience|patient|roster|stranger|strangers|victims"
    r"|withstand|leaving|fruitless|excused)(?![a-z])"
)
PATTERNS = re.compile(
    r"\b(can not|whom|of which|so many|but for|in vain|nobody|whoever|he|him|his"
    r"|tells?|told|says?|said|hears?|heard|learns? of|knows? of|wonder|riddle)\b",
    re.IGNORECASE,
)


def sources() -> list[Path]:
    """All Python files whose names and texts are held."""
    return [p for folder in CODE for p in sorted((ROOT / folder).rglob("*.py"))]


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The functions, classes, arguments and variables that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def functions_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The functions and methods that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def texts_in(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The docstrings, messages and comments of a module, by line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.splitlines()):
                yield node.lineno + number, line
    with tokenize.open(path) as f:
        for token in tokenize.generate_tokens(f.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def complaints(path: Path) -> list[str]:
    """What a module's names and texts have that they may not have."""
    tree = ast.parse(path.read_text())
    found = {(n, name) for n, name in functions_in(tree) if name.strip("_") in VERBS_WITHOUT_OBJECT}
    found |= {(n, name) for n, name in names_in(tree) if OLD_WORDS.search(name.lower())}
    found |= {(n, m.group()) for n, t in texts_in(path, tree) for m in PATTERNS.finditer(t)}
    return [f"{path}:{number}: {word}" for number, word in sorted(found)]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_uses_the_words_of_the_field(path):
    """A function's name contains its object; texts name the subject and what it does."""
    assert complaints(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_is_plain_technical_english(path):
    """Outside of code blocks, which may show what a program prints."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    assert [m.group() for m in PATTERNS.finditer(text)] == []
