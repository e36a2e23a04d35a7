"""The pages of the documentation, and the blocks of code and the command lines in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")]
PAGES += sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)
PAGES += [*sorted((ROOT / "tools").rglob("*.md")), ROOT / "tests" / "README.md"]
PAGES += [ROOT / "examples" / "README.md", ROOT / "examples" / "start" / "SKILL.md"]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]

FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The page that has it, from the root of the clone.
        language: What stands behind its fence; empty if nothing does.
        number: Its place among the page's blocks of that language, from 1.
        text: What it holds.
    """

    page: str
    language: str
    number: int
    text: str


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page."""
    counts: dict[str, int] = {}
    for language, text in FENCED.findall((ROOT / page).read_text()):
        counts[language] = counts.get(language, 0) + 1
        yield Block(page, language, counts[language], text)


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [body for found, body in FENCED.findall(text) if found == language]


def typed_lines(console: str) -> list[str]:
    """Return what is typed in a console block: the lines with a prompt, each a whole one."""
    lines = console.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
