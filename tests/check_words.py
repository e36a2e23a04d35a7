"""The loop of `scripts/check` over words: what no reader of one file has to look for.

A function's name contains its object, and a few words that have one plain replacement do not occur.
A sentence of the documentation has at most `MOST_WORDS`. Whether a text is good is for its reader
to judge (CONTRIBUTING.md).
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from doc_pages import PAGES, ROOT

CODE = ("hpc_elastic", "hydra_plugins", "tools", "examples", "tests/simulation")
VERBS_WITHOUT_OBJECT = re.compile(
    r"ask|asked|begin|came|come|end|go|goes|gone|hear|heard|keep|left|look|note|said|say|see|seen"
    r"|stand|take|taken|tell|told"
)
REPLACED = re.compile(
    r"\b(can not|whom|whoever|of which|so many|but for|in vain|nobody|he|him|his)\b", re.IGNORECASE
)

MOST_WORDS = 30
"""Of a sentence; about 20 read well."""
COUNTED = re.compile(r"docs/(architecture|explanation/|howto/|reference/glossary)")
"""The pages whose sentences are counted."""
NO_SENTENCE = re.compile(
    r"```.*?```|^ {4}.*?$|^[|#<!].*?$|^\s*[-*] \*\*.*?\*\*|^\*\*.*?\*\*", re.DOTALL | re.MULTILINE
)
"""Code, tables, titles, pictures, and the bold words that begin an item as its title."""


def functions_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The functions and methods that a module defines, by line."""
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


def of_module(path: Path) -> Iterator[tuple[int, str]]:
    """The names and words of a module that have to be replaced, by line."""
    tree = ast.parse(path.read_text())
    for number, name in functions_in(tree):
        if VERBS_WITHOUT_OBJECT.fullmatch(name.strip("_")):
            yield number, f"{name}: a name contains its object"
    for number, text in texts_in(path, tree):
        yield from ((number, match.group()) for match in REPLACED.finditer(text))


def of_page(path: Path) -> Iterator[tuple[int, str]]:
    """The same of a page, outside of code, which may show what a program prints."""
    text = re.sub(
        r"```.*?```|`[^`\n]*`", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.DOTALL
    )
    for match in REPLACED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group()


def long_sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The sentences of a page that have too many words, by line; code and links count as a word."""
    text = NO_SENTENCE.sub(lambda m: "\0" + "\n" * m[0].count("\n"), path.read_text())
    text = re.sub(r"`[^`\n]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    end = r"\0|[.!?][)\"*]*\s|\n\s*(?:[-*]|\d+\.)\s|\n\s*\n"
    line = 1
    for sentence in re.split(f"({end})", text):
        if (number := len(re.findall(r"\S*\w\S*", sentence))) > MOST_WORDS:
            yield line, f"{number} words: {' '.join(sentence.split())[:60]}..."
        line += sentence.count("\n")


def main() -> int:
    """Print all that is found; return the exit code."""
    modules = [p for folder in CODE for p in sorted((ROOT / folder).rglob("*.py"))]
    pages = [p for p in PAGES if p.name != "CONTRIBUTING.md"]  # it names the words
    found = [(path, *f) for path in modules for f in of_module(path)]
    found += [(path, *f) for path in pages for f in of_page(path)]
    counted = [p for p in pages if COUNTED.match(str(p.relative_to(ROOT)))]
    found += [(path, *f) for path in counted for f in long_sentences(path)]
    for path, number, word in found:
        print(f"{path.relative_to(ROOT)}:{number}: {word}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
