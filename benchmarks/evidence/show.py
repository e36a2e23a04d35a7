"""Shows a result on a terminal, and writes it where the command line says."""

import argparse
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from rich import markup
from rich.console import Console
from rich.table import Table as RichTable

from evidence.result import About, Result, Table

METHODS = Path(__file__).parents[1] / "METHODS.md"
WIDTH = 190
_COLOUR = {True: "green", False: "red", None: "yellow"}


def about(title: str) -> About:
    """Return what METHODS.md says of a benchmark."""
    text = METHODS.read_text().split(f"\n## {title}\n", 1)[1].partition("\n## ")[0]
    measured, *limits = text.strip().split("\n- ")
    return About(title, measured.strip(), tuple(map(str.strip, limits)))


def options(docstring: str | None, *, repeats: int | None = None) -> argparse.ArgumentParser:
    """Return a benchmark's parser, with the options that all have; None: it does not repeat."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--width", type=int, help=f"of the tables; default: {WIDTH} in a file")
    return parser


def among(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of ``A,B,C``, each one of these names."""

    def chosen(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)} in {', '.join(names)}")
        return text.split(",")

    return chosen


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def say(text: str) -> None:
    """Print how far it is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def present(result: Result, given: argparse.Namespace) -> None:
    """Print the tables and the verdicts; write the result as JSON if that was asked for."""
    wide = Console(highlight=False, width=given.width)
    if given.width is None and not wide.is_terminal:
        wide = Console(highlight=False, width=WIDTH)
    for table in result.tables:
        wide.print(rich_table(table))
    for target in result.targets:
        aim = f"{markup.escape(target.what)}, {target.aim}: {target.measured}".rstrip(": ")
        wide.print(f"{aim}: [{_COLOUR[target.met]}]{markup.escape(target.verdict)}[/]")
    for note in (*(peer.text for peer in result.peers if peer.version is None), *result.notes):
        wide.print(f"- {markup.escape(note)}")
    if given.json:
        given.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")


def rich_table(table: Table) -> RichTable:
    made = RichTable(title=table.caption)
    for number, column in enumerate(table.columns):
        made.add_column(column.name, justify="right" if table.is_figures(number) else "left")
    for row in table.texts():
        made.add_row(*map(markup.escape, row))
    return made
