"""Record what a command shows on a terminal as an SVG: how status.svg and events.svg were made.

    eval "$(scripts/slurm_sandbox.py up | tail -n 1)"
    python train.py -m launcher=slurm nodes=1:2 epochs=80 pause_s=0.1 lr=0.1,0.001 &
    scripts/slurm_sandbox.py preempt 3 --for-s 8       # and, when it is back,
    scripts/slurm_sandbox.py kill-node 3               # start-node 3 some seconds later
    RUN=$(hpc-elastic list --json | jq -r '.[0].directory')
    python docs/images/record.py docs/images/status.svg 12 hpc-elastic status "$RUN" --watch
    python docs/images/record.py docs/images/events.svg 0 hpc-elastic events "$RUN"

The number is how many seconds the command is given before Ctrl-C; 0 waits for its end. The command
runs on a real terminal of 110 columns, and the SVG has its last frame, colours and all.
"""

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 110, 50
_REDRAWN = re.compile(r"(?:\r?\x1b\[2K(?:\x1b\[1A)?|\x1b\[1A)+")


def output(argv: list[str], seconds: float) -> str:
    """Return all that the command writes to its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        if seconds:
            threading.Timer(seconds, process.send_signal, [signal.SIGINT]).start()
        written = b""
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # the other end is closed: that is how Linux says it
            pass
    os.close(ours)
    return written.decode()


def picture(text: str, command: str) -> str:
    """Return the last frame, below the command line, as an SVG that fetches nothing."""
    frame = _REDRAWN.split(text.replace("\r\n", "\n"))[-1].strip("\n").removesuffix("^C")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(frame))
    svg = console.export_svg(title="hpc-elastic", unique_id="hpc-elastic")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())


if __name__ == "__main__":
    target, seconds, *argv = sys.argv[1:]
    shown = " ".join("last" if Path(word).is_dir() else word for word in argv)
    Path(target).write_text(picture(output(argv, float(seconds)), shown))
