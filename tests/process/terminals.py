"""The command on a pseudo-terminal, as a person has it."""

import codecs
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from hpc_elastic._util import readable

PATIENCE_S = 60.0
CTRL_C = "\x03"

_START = """
import os, sys
os.login_tty(os.dup(0))  # in a session of its own, whose foreground Ctrl-C reaches
from hpc_elastic.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
_DECIDING = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""What the tests may have been started with, and tells programs whether to have colours."""


class Terminal:
    """`hpc-elastic ARGUMENT...` on a terminal; used as a context, it is over behind it.

    Args:
        arguments: Of the command.
        cwd: Where it works.
        environ: What is added to the environment.
    """

    def __init__(self, *arguments: str | Path, cwd: Path, environ: Mapping[str, str]) -> None:
        self._deadline = time.monotonic() + PATIENCE_S
        self._keyboard, screen = pty.openpty()
        termios.tcsetwinsize(screen, (40, 100))
        self._modes = termios.tcgetattr(screen)
        mine = {name: value for name, value in os.environ.items() if name not in _DECIDING}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, arguments)], cwd=cwd,
                stdin=screen, stdout=screen, stderr=screen,
                env={**mine, "TERM": "xterm-256color", **environ},
            )  # fmt: skip
        finally:
            os.close(screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.shown = ""
        """All that was printed so far."""

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, if it has not ended by itself."""
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)

    @property
    def is_restored(self) -> bool:
        """Whether the terminal is as before: its modes, and a cursor that can be seen."""
        is_hidden = self.shown.rfind("\x1b[?25l") > self.shown.rfind("\x1b[?25h")
        return termios.tcgetattr(self._keyboard) == self._modes and not is_hidden

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._keyboard, text.encode())

    def until(self, text: str) -> None:
        """Wait until something is printed."""
        while text not in self.shown:
            assert self._read(), f"it has ended before it said {text!r}:\n{self.shown}"

    def end(self) -> int:
        """Wait until it ends; return its exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Read what comes next; False: nobody has the terminal any more."""
        left_s = max(0.0, self._deadline - time.monotonic())
        assert readable(self._keyboard, timeout_s=left_s), f"it waits:\n{self.shown}"
        try:
            read = os.read(self._keyboard, 65_536)
        except OSError:
            return False
        self.shown += self._decoder.decode(read)
        return True
