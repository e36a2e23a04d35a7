"""Writes the page of all results from their records (pure but for the template's file)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from evidence.record import Record
from evidence.result import Table, Target

TEMPLATE = Path(__file__).with_name("page.md.j2")
_WORDS = {True: "met", False: "**missed**", None: "not known"}


@dataclass(frozen=True)
class Section:
    """One benchmark on the page; its question is shown if it was never measured."""

    record: Record
    question: str

    @property
    def title(self) -> str:
        result = self.record.result
        return result.about.title if result else self.record.name

    @property
    def anchor(self) -> str:
        """What GitHub makes of the heading in a link."""
        kept = [c for c in self.title.lower() if c.isalnum() or c in " -_"]
        return "".join(kept).replace(" ", "-")

    @property
    def state(self) -> str:
        """What came of it, in a few words."""
        if self.record.result is None:
            return "**failed**" if self.record.failure else "**not measured**"
        said = standing(self.record.result.targets)
        return f"{said}; **the last attempt failed**" if self.record.failure else said


def standing(targets: Sequence[Target]) -> str:
    counts = {met: sum(t.met is met for t in targets) for met in (True, False, None)}
    said = [f"{num} {_WORDS[met]}" for met, num in counts.items() if num]
    return ", ".join(said) or "no target"


def as_markdown(table: Table) -> str:
    names = [_escaped(column.name) for column in table.columns]
    rows = [[_escaped(text) for text in row] for row in table.texts()]
    rule = ["---:" if table.is_figures(n) else "---" for n in range(len(names))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, rule, *rows))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def spoken(facts: dict[str, str]) -> str:
    """Return facts one after the other: ``torch 2.13.0, Slurm 22.05.8``."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def of_machine(facts: dict[str, str]) -> str:
    told = [f"{value} cores" if name == "cores" else value for name, value in facts.items()]
    return ", ".join(told)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def page(sections: Sequence[Section]) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {
        "as_markdown": as_markdown, "spoken": spoken, "of_machine": of_machine,
        "minutes": minutes, "cell": _escaped,
    }  # fmt: skip
    return environment.from_string(TEMPLATE.read_text()).render(sections=sections)
