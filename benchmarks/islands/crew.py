"""Processes of islands or replicas, and random faults at them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
NAMES = ("a", "b", "c", "d")


class Crew:
    """Four processes, each started again as soon as it has been killed."""

    def __init__(self, mode: str, folder: Path, env: dict[str, str]) -> None:
        self._mode = mode
        self._folder = folder
        self._env = {**os.environ, **env, "PYTHONPATH": f"{HERE.parent}:{HERE}"}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_started = 0
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process; its output is ``<name>.<number>.out``."""
        self._num_started += 1
        with (
            (self._folder / f"{name}.{self._num_started:03d}.out").open("wb") as out,
            (self._folder / f"{name}.{self._num_started:03d}.err").open("wb") as err,
        ):
            argv = [sys.executable, "-m", "islands.worker", self._mode, str(self._folder), name]
            self._processes[name] = subprocess.Popen(argv, stdout=out, stderr=err, env=self._env)

    def lines(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return the lines of each process so far, with its island's name."""
        found = []
        for path in sorted(self._folder.glob("*.out")):
            lines = []
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the end of one that was killed
                    lines.append(json.loads(line))
            found.append((path.name.partition(".")[0], lines))
        return found

    def wait_until_started(self, timeout_s: float = 120.0) -> None:
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            started = {name for name, lines in self.lines() if lines}
            if started == set(NAMES):
                return
            time.sleep(0.1)
        raise TimeoutError(f"only {sorted(started)} started; see {self._folder}")

    def inject_faults(self, until: float, every_s: float, seed: int) -> int:
        """Kill (and start again) or pause one at a time until a time; return how many faults."""
        rng = random.Random(seed)
        num = 0
        while (rest_s := until - time.time()) > 0:
            time.sleep(min(rest_s, every_s * rng.uniform(0.5, 1.5)))
            if time.time() >= until:
                break
            name, num = rng.choice(NAMES), num + 1
            process = self._processes[name]
            if rng.random() < 0.5:
                process.kill()
                process.wait()
                self.start(name)
            else:
                process.send_signal(signal.SIGSTOP)
                time.sleep(min(rng.uniform(1, 5), max(0.0, until - time.time())))
                process.send_signal(signal.SIGCONT)
        return num

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
