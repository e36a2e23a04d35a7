r"""From the bytes of a file of output to text that a terminal can show (pure).

Progress bars redraw their line with ``\r``: of such a line the last state is shown, as on a
terminal. What is no text, such as a tensor's bytes, becomes replacement characters. Control
characters and escape sequences are left out, colours too where nobody sees them: a log must not
clear the screen, nor set the window's title, of whoever reads it.
"""

from __future__ import annotations

import re

MAX_LINE = 1 << 16
"""Bytes; a longer line comes in pieces."""

_ESCAPES = (
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # strings: the window's title, links
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
_UNSHOWABLE = re.compile(_ESCAPES)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_PLAIN_AGAIN = "\x1b[0m"


def cleaned(text: str, *, colours: bool) -> str:
    """Return a line without what would disturb a terminal.

    Args:
        text: The line.
        colours: Keep what sets colours and styles; they end with the line.
    """
    if text.isprintable():
        return text

    def shown(m: re.Match[str]) -> str:
        return m[0] if colours and _COLOUR.fullmatch(m[0]) else ""

    found = _UNSHOWABLE.sub(shown, text)
    return found + _PLAIN_AGAIN if "\x1b" in found else found


class Splitter:
    """Takes the bytes of a file piece by piece, and gives its lines.

    Args:
        offset: Where in the file the first piece begins.
    """

    def __init__(self, offset: int = 0) -> None:
        self._held = b""
        self._end = offset
        self._is_redrawn = False

    def feed(self, data: bytes) -> list[tuple[int, str]]:
        """Return the lines that end in a piece, each with the byte at which it ends."""
        end = self._end
        self._end += len(data)
        *whole, rest = data.split(b"\n")
        found = []
        for part in whole:
            end += len(part) + 1
            found += self._pieces(self._held + part, end - 1)
            self._held, self._is_redrawn = b"", False
        self._held += rest
        self._is_redrawn = self._is_redrawn or b"\r" in rest
        return found + self._overlong()

    def state(self) -> str:
        """Return what a progress bar shows now that has no end of line yet; empty for others."""
        return _last_state(self._held).decode(errors="replace") if self._is_redrawn else ""

    def rest(self) -> list[tuple[int, str]]:
        """Return the last line, if it has no end: the file is over."""
        held, self._held = self._held, b""
        return self._pieces(held, self._end) if held else []

    def _overlong(self) -> list[tuple[int, str]]:
        """Return the beginning of a line of which too much is held; a redrawn one has none."""
        if len(self._held) <= MAX_LINE:
            return []
        drawn = self._held.rstrip(b"\r").rfind(b"\r")
        if drawn >= 0:
            self._held = self._held[drawn + 1 :]
        whole = len(self._held) // MAX_LINE * MAX_LINE
        begun, self._held = self._held[:whole], self._held[whole:]
        return self._pieces(begun, self._end - len(self._held)) if begun else []

    @staticmethod
    def _pieces(line: bytes, end: int) -> list[tuple[int, str]]:
        last = _last_state(line)
        starts = range(0, max(1, len(last)), MAX_LINE)
        return [(end, last[at : at + MAX_LINE].decode(errors="replace")) for at in starts]


def _last_state(line: bytes) -> bytes:
    r"""Return what a terminal shows of a line at its end; ``\r\n`` is an end of line, too."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1] if states else b""
