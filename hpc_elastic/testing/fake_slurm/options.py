"""The options of the fake's commands: a table for each, and one reader for all. Pure.

What is not in a table is refused by name: a test that passes because an option was skipped over
would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_elastic.testing.fake_slurm.errors import Refusal, unknown

FLAG, VALUE, OPTIONAL = "flag", "value", "optional"
"""Takes no value; takes one; takes one only behind an equals sign."""


@dataclass(frozen=True)
class Table:
    """What one command takes.

    Attributes:
        kinds: By long name, whether it takes a value.
        short: The long name of each single letter.
        stops: Whether options end at the first argument that is none, as for srun and sbatch.
    """

    kinds: Mapping[str, str]
    short: Mapping[str, str] = field(default_factory=dict)
    stops: bool = False


@dataclass
class Parsed:
    """A command line, read.

    Attributes:
        options: By long name; flags are ``""``. The last one counts.
        rest: Other arguments.
    """

    options: dict[str, str] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.options

    def get(self, name: str) -> str | None:
        """Return an option's value, None if it was not given."""
        return self.options.get(name)


def parse(argv: Sequence[str], table: Table) -> Parsed:
    """Read a command line.

    Raises:
        Refusal: it has an option that the fake does not know, or one without its value.
    """
    parsed, words = Parsed(), list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            parsed.rest += words
            break
        if word.startswith("--"):
            _long(word, words, table, parsed)
        elif word.startswith("-") and len(word) > 1:
            _short(word, words, table, parsed)
        elif table.stops:
            parsed.rest += [word, *words]
            break
        else:
            parsed.rest.append(word)
    return parsed


def _long(word: str, words: list[str], table: Table, parsed: Parsed) -> None:
    name, equals, value = word[2:].partition("=")
    kind = table.kinds.get(name)
    if kind is None:
        raise unknown(f"--{name}")
    if kind == FLAG and equals:
        raise Refusal(f"option '--{name}' doesn't allow an argument")
    if kind == VALUE and not equals:
        value = _next(words, f"--{name}")
    parsed.options[name] = value


def _short(word: str, words: list[str], table: Table, parsed: Parsed) -> None:
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = table.short.get(letter)
        if name is None:
            raise unknown(f"-{letter}")
        if table.kinds[name] == FLAG:
            parsed.options[name] = ""
            continue
        takes_next = table.kinds[name] == VALUE and not letters
        parsed.options[name] = _next(words, f"-{letter}") if takes_next else letters
        return


def _next(words: list[str], name: str) -> str:
    if not words:
        raise Refusal(f"option '{name}' requires an argument")
    return words.pop(0)


def directives(script: str) -> list[str]:
    """Return the options in the #SBATCH lines of a script, up to its first command.

    Raises:
        Refusal: it is no script.
    """
    if not script.startswith("#!"):
        raise Refusal(
            "This does not look like a batch script.  The first line must start with #! followed "
            "by the path to an interpreter.\nFor instance: #!/bin/sh"
        )
    found: list[str] = []
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            found += _words(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def _words(text: str) -> Iterator[str]:
    """Yield the words of a line as sbatch reads them: a backslash escapes in quotes, too."""
    word, quote, characters = "", "", iter(text.strip())
    begun = False
    for c in characters:
        if c == "\\":
            word, begun = word + next(characters, ""), True
        elif c == quote:
            quote = ""
        elif not quote and c in "'\"":
            quote, begun = c, True
        elif not quote and c == "#" and not begun:
            return
        elif not quote and c.isspace():
            if begun:
                yield word
            word, begun = "", False
        else:
            word, begun = word + c, True
    if begun:
        yield word
