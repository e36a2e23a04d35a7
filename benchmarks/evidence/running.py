"""Runs benchmarks, one process after the other, keeps their results and writes the page."""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from evidence import machine, record, registry
from evidence.page import Section, page
from evidence.record import Failure, Record, Taken
from evidence.registry import HERE, Benchmark
from evidence.result import Result

RESULTS, PAGE = HERE / "results", HERE / "RESULTS.md"
FAILED, MISSING = 1, 2
_PATH = re.compile(r"(?<![\w.])(?:/[\w.+@-]+)+/")
_TOLD_CHARS = 300
_REMEMBERED = 50
"""Lines of standard error."""


def run(benchmark: Benchmark, options: Sequence[str], folder: Path) -> Record:
    before = record.read(benchmark.name, folder)
    with tempfile.TemporaryDirectory(prefix="run-all-") as name:
        file = Path(name, "result.json")
        load, begin = machine.load(), time.monotonic()
        argv = [sys.executable, str(HERE / benchmark.script), *options, "--json", str(file)]
        code, errors = shown(argv)
        taken = Taken(
            date=_now(),
            command=shlex.join(["python", f"benchmarks/{benchmark.script}", *options]),
            machine=machine.machine(),
            versions=machine.versions(),
            load_before=load,
            load_after=machine.load(),
            took_s=round(time.monotonic() - begin, 1),
        )
        after = judged(before, code, errors, file, taken)
    record.write(after, folder)
    return after


def shown(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command that may take long; return its exit code and what it wrote on standard error.

    Both outputs are shown as they come.
    """
    lines: deque[str] = deque(maxlen=_REMEMBERED)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    return process.returncode, "".join(lines)


def judged(before: Record, code: int, errors: str, file: Path, taken: Taken) -> Record:
    """Return the record of an attempt: its result, or what was known before and why it failed."""
    if code:
        return before.failed(Failure(taken.date, f"exit code {code}: {last_words(errors)}"))
    try:
        result = Result.from_json(json.loads(file.read_text()))
    except (OSError, ValueError) as e:
        return before.failed(Failure(taken.date, f"it wrote no result: {last_words(str(e))}"))
    return replace(before, result=result, taken=taken, failure=None)


def last_words(errors: str) -> str:
    """Return the last line of what was written on standard error, without folders."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return _PATH.sub("", lines[-1])[:_TOLD_CHARS] if lines else "it said nothing"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="minutes").replace("+00:00", "Z")


def write_page(folder: Path, file: Path) -> None:
    sections = [Section(record.read(b.name, folder), b.question) for b in registry.BENCHMARKS]
    file.write_text(page(sections))


def listing(benchmarks: Iterable[Benchmark]) -> str:
    """Return all benchmarks, how long each takes, and what it needs that is not there."""
    lines = []
    for b in benchmarks:
        lines.append(f"{b.name:17} about {b.minutes:3g} min  {b.question}")
        lines += [f"{'':17} missing: {need.name}: {need.remedy}" for need in b.missing()]
    return "\n".join(lines)


def measure(given: argparse.Namespace, folder: Path, file: Path) -> int:
    benchmarks = registry.chosen(given.only)
    missing = registry.unmet(benchmarks)
    for line in registry.lines(missing):
        print(line, file=sys.stderr)
    if missing and not given.rest:
        print("nothing was run; --rest runs the others", file=sys.stderr)
        return MISSING
    failed = []
    for b in benchmarks:
        if b.name in missing:
            why = "; ".join(f"it needs {n.name} ({n.remedy})" for n in missing[b.name])
            after = record.read(b.name, folder).failed(Failure(_now(), why))
            record.write(after, folder)
        else:
            print(f"== {b.name}, about {b.minutes:g} min", file=sys.stderr, flush=True)
            options = b.options(quick=given.quick, repeats=given.repeats)
            after = run(b, options, folder)
        write_page(folder, file)
        failed += [b.name] if after.failure else []
    print(f"{file}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return FAILED if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run all benchmarks, one after the other, and write benchmarks/RESULTS.md.",
        epilog="Exit codes: 0 all were measured; 1 some failed; 2 something that is needed is "
        "missing, and nothing was run. On a quiet machine, please: nothing else may run beside it.",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, not all; see --list")
    parser.add_argument("--list", action="store_true", help="print which there are, and stop")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--quick", action="store_true",
        help="see that they work; what comes out goes into a folder of its own",
    )  # fmt: skip
    how.add_argument("--repeats", type=int, metavar="N", help="of each, where it has repeats")
    how.add_argument(
        "--from", dest="page", type=Path, nargs="?", const=RESULTS, metavar="FOLDER",
        help="measure nothing, write the page from this folder's files "
        "(default: benchmarks/results)",
    )  # fmt: skip
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="write files and page there, not into benchmarks/",
    )
    parser.add_argument(
        "--rest", action="store_true",
        help="run the others where something is missing, and write down what is",
    )  # fmt: skip
    given = parser.parse_args(argv)
    if given.list:
        print(listing(registry.chosen(given.only)))
        return 0
    folder, file = (given.into, given.into / PAGE.name) if given.into else (RESULTS, PAGE)
    if given.page:
        write_page(given.page, file)
        return 0
    if given.quick and not given.into:
        folder = Path(tempfile.mkdtemp(prefix="quick-results-"))
        file = folder / PAGE.name
    folder.mkdir(parents=True, exist_ok=True)
    return measure(given, folder, file)
