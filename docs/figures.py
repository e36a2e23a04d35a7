"""The figures of the pages that compare and promise: each has a source, or the page is refused.

Between ``<!-- figures NAME -->`` and ``<!-- figures end -->`` a page has what a function here makes
of benchmarks/results and of the code's constants (`BLOCKS`). Outside of these blocks, a line with a
figure links to the page of another project or to the reference, whose figures are the code's.

    python docs/generate.py      writes the blocks, with the pages of the reference
    python docs/figures.py       ends with 1 if a block is stale or a figure has no source
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from evidence import record as records
from evidence.page import Section
from evidence.result import Cell, Figure

from hpc_elastic.agent import metrics, task_main
from hpc_elastic.site import limits, neighbours
from hpc_elastic.transport import auth, connection
from hpc_elastic_watch import live_server

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/explanation/peers.md",
    "docs/howto/full-clusters.md",
    "docs/security.md",
)
"""The pages whose figures need a source."""

_BLOCK = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- figures end -->)", re.DOTALL)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_UNITS = "%|per cent|times|ms|s|min|h|seconds|minutes|hours|days|[KMG]i?B(?:/s)?"
_FIGURE = re.compile(rf"(?<![\w.:/-])\d[\d.,]*(?: (?:to|and|or) \d[\d.,]*)*[ -](?:{_UNITS})(?!\w)")
_SOURCE = re.compile(r"\]\((?:https?://|[./\w-]*reference/)")


@dataclass(frozen=True)
class Measured:
    """A cell of a table of a benchmark: its record, the first cells of its row, its column."""

    record: str
    row: tuple[str, ...]
    column: str
    caption: str = ""

    def cell(self) -> Cell:
        """Return the figure, or the text that stands in its place.

        Raises:
            LookupError: there is no such row or column.
        """
        result = _record(self.record).result
        assert result is not None, self.record
        for table in result.tables:
            names = [column.name for column in table.columns]
            if not table.caption.startswith(self.caption) or self.column not in names:
                continue
            for row in table.rows:
                if row[: len(self.row)] == self.row:
                    place = names.index(self.column)
                    return row[place] if place < len(row) else ""
        raise LookupError(f"{self}: there is no such cell")

    @property
    def value(self) -> float | None:
        """The median; None if there is none, since what was to happen did not."""
        cell = self.cell()
        if isinstance(cell, Figure):
            return cell.median
        number = re.match(r"\d[\d.]*", cell)
        return float(number[0]) if number else None

    @property
    def failures(self) -> str:
        """How often it did not happen, such as ``1 of 3 never``."""
        cell = self.cell()
        found = None if isinstance(cell, Figure) else re.search(r"\d+ of \d+ never", cell)
        return found[0] if found else ""


@cache
def _record(name: str) -> records.Record:
    return records.read(name, ROOT / "benchmarks" / "results")


def _link(record: str, page: str) -> str:
    """Return the address of a record's section, from a page."""
    results = os.path.relpath("benchmarks/RESULTS.md", Path(page).parent)
    return f"{results}#{Section(_record(record), '').anchor}"


def short(value: float, unit: str = "") -> str:
    """Return a number with two digits, or as many as it has before the point."""
    if unit == "%" and 10 <= value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:#.2g}"


# ---- the comparison with peers


@dataclass(frozen=True)
class Comparison:
    """A row of the comparison.

    Attributes:
        what: What was measured.
        unit: Of all figures.
        ours: Of this package.
        peers: Of others, by their names.
        more_is_better: Whether the largest figure is the best.
        factor: What the figures are multiplied by.
        in_short: Whether the README has the row.
    """

    what: str
    unit: str
    ours: Measured
    peers: Mapping[str, Measured]
    more_is_better: bool = False
    factor: float = 1.0
    in_short: bool = False

    def is_ahead(self, peer: Measured) -> bool:
        """Whether a peer has a better figure."""
        ours, its = self.ours.value, peer.value
        assert ours is not None, self.what
        return its is not None and (its > ours if self.more_is_better else its < ours)

    @property
    def is_behind(self) -> bool:
        """Whether any peer has a better figure."""
        return any(map(self.is_ahead, self.peers.values()))

    def cells(self, page: str) -> tuple[str, str, str]:
        """Return what was measured, ours, and those of the peers; the best ones are bold."""
        ours = self._text(self.ours)
        names: dict[str, str] = {}
        for name, measured in self.peers.items():
            text = self._text(measured)
            text = f"**{text}**" if self.is_ahead(measured) else text
            names[text] = f"{names[text]}, {name}" if text in names else name
        peers = "; ".join(f"{name}: {text}" for text, name in names.items())
        link = f"[{self.what}]({_link(self.ours.record, page)})"
        return link, ours if self.is_behind else f"**{ours}**", peers

    def _text(self, measured: Measured) -> str:
        if measured.value is None:
            return NO_NUMBER[measured.record]
        text = f"{short(measured.value * self.factor, self.unit)} {self.unit}"
        return f"{text}, {measured.failures}" if measured.failures else text


NO_NUMBER = {"recovery": "all agents end", "ft": "never", "ft-joins": "never"}
"""What stands where the thing to be measured did not happen."""


def comparison(page: str, *, in_short: bool) -> str:
    """Return the table of measured figures; rows in which a peer is ahead stand first."""
    rows = [row for row in COMPARISONS if row.in_short or not in_short]
    rows.sort(key=lambda row: not row.is_behind)
    head = ["| measured | hpc_elastic | others |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row.cells(page))} |" for row in rows)])


def _hour(load: int, who: str, column: str) -> Measured:
    caption = {70: "73 other jobs", 90: "92 other jobs"}[load]
    return Measured("full-cluster", (who,), column, caption)


def _hours(
    what: str, unit: str, column: str, *peers: str, more_is_better: bool = False,
    in_short: tuple[int, ...] = (),
) -> Iterator[Comparison]:  # fmt: skip
    """Yield a row for each load of the full cluster."""
    for load in (70, 90):
        yield Comparison(
            f"{what}, on a cluster that is {load} % full", unit, _hour(load, OURS_ON_16, column),
            {_HOUR_PEERS[peer]: _hour(load, peer, column) for peer in peers},
            more_is_better=more_is_better, in_short=load in in_short,
        )  # fmt: skip


OURS_ON_16 = "hpc_elastic, 1 to 16 nodes"
_HOUR_PEERS = {
    "nobody": "without the training",
    "one job of 4 nodes": "one job of 4 nodes",
    "one job of 8 nodes": "of 8",
    "hydra-submitit-launcher, 4 nodes": "hydra-submitit-launcher, 4 nodes",
    "torchrun, chain of 4 nodes": "torchrun, chain of jobs of 4 nodes",
}


def _recovery(what: str, fault: str, *, in_short: bool = False) -> Comparison:
    rows = {
        "torchrun": "torchrun c10d", "torchrun tuned": "torchrun c10d, tuned",
        "NVRx's ft_launcher 0.4.1": "NVRx ft_launcher",
    }  # fmt: skip
    peers = {name: Measured("recovery", (fault, row), "total") for name, row in rows.items()}
    ours = Measured("recovery", (fault, "hpc_elastic"), "total")
    return Comparison(what, "s", ours, peers, in_short=in_short)


def _ft(what: str, unit: str, part: str, row: str, *, more_is_better: bool = False) -> Comparison:
    ours, peer = (Measured("ft", (part, row), column) for column in ("ours", "torchft"))
    return Comparison(what, unit, ours, {"torchft": peer}, more_is_better=more_is_better)


def _rows(
    what: str, unit: str, record: str, column: str, ours: str, peers: Mapping[str, str],
    *, caption: str = "", more_is_better: bool = False, factor: float = 1.0, in_short: bool = False,
) -> Comparison:  # fmt: skip
    """Return a row whose figures stand below each other in a record."""
    by_name = {name: Measured(record, (row,), column, caption) for name, row in peers.items()}
    own = Measured(record, (ours,), column, caption)
    return Comparison(what, unit, own, by_name, more_is_better, factor, in_short)


_OPTUNA = "hydra-optuna-sweeper, n_jobs="
_SUBMITIT = "submitit + torchrun, "

COMPARISONS = (
    _rows(
        "submit a sweep of 200 runs of four nodes", "s", "submit", "whole command, s",
        "hpc_elastic",
        {"bare sbatch": "bare sbatch --array",
         "hydra-submitit-launcher": "hydra-submitit-launcher"},
        in_short=True,
    ),
    _rows(
        "a study of 64 trials on four nodes, 4 in flight", "s", "sweep", "all done, s",
        "hpc_elastic, n_jobs=4",
        {"hydra-optuna-sweeper in batches of 4": f"{_OPTUNA}4", "of 16": f"{_OPTUNA}16"},
        in_short=True,
    ),
    _rows(
        "a study of 64 trials on four nodes, 8 in flight", "s", "sweep", "all done, s",
        "hpc_elastic, n_jobs=8",
        {"hydra-optuna-sweeper in batches of 8": f"{_OPTUNA}8", "of 16": f"{_OPTUNA}16"},
    ),
    *_hours(
        "the other jobs' mean wait", "s", "others wait, s",
        "nobody", "one job of 4 nodes", *list(_HOUR_PEERS)[3:], in_short=(90,),
    ),
    *_hours(
        "used node time that trains", "%", "of these trained, %", *list(_HOUR_PEERS)[1:],
        more_is_better=True,
    ),
    *_hours(
        "half an hour of one node's work is done after", "s", "done, s", *list(_HOUR_PEERS)[1:],
        in_short=(90,),
    ),
    _rows(
        "from the command to the first line, two of four nodes free", "s", "start", "s",
        "hpc_elastic",
        {"torchrun": "torchrun c10d", "torchrun tuned": "torchrun c10d, last_call_timeout=1"},
        in_short=True,
    ),
    _rows(
        "a preempted task runs again, once its node is free", "s", "requeue", "runs, s",
        "hpc_elastic",
        {"submitit's `checkpoint()`": "submitit checkpoint()",
         "`sbatch --requeue`": "sbatch --requeue"},
        in_short=True,
    ),
    _recovery("a node is killed, to the next step of the others", "follower", in_short=True),
    _recovery("the leader's node is killed, to the next step", "leader-node", in_short=True),
    _recovery("a node joins, from its task's start to a step with it", "join"),
    _rows(
        "work in ten minutes with seven preemptions, of that of undisturbed nodes", "%",
        "goodput", "of undisturbed", "hpc_elastic",
        {"submitit and torchrun, a job a node": f"{_SUBMITIT}a job a node",
         "as one job": f"{_SUBMITIT}one job"},
        more_is_better=True, factor=100.0, in_short=True,
    ),
    _rows(
        "a save of 1 GiB holds up the training", "s", "checkpoint", "blocked", "ours",
        {"DCP `async_save`": "DCP async_save",
         "with its DefaultStager": "DCP async_save, DefaultStager"},
    ),
    _rows(
        "a save of 1 GiB is complete, beside a training on all cores", "s", "checkpoint",
        "a save takes, s", "ours", {"DCP `async_save`": "DCP async_save"}, caption="a training",
        in_short=True,
    ),
    _rows(
        "a save of 1 GiB beside a training on all cores slows its steps by", "%", "checkpoint",
        "slower by, %", "ours", {"DCP `async_save`": "DCP async_save"}, caption="a training",
        in_short=True,
    ),
    *(
        _ft(f"one of {n} replicas is killed, to the slowest survivor's step (`ft=true`)", "s",
            "b SIGKILL", f"to the next commit, n = {n}, Python defaults, slowest survivor")
        for n in (2, 3, 4)
    ),
    _ft("the coordinator of four replicas is killed, longest gap", "s",
        "c coordinator", "lighthouse killed, not back, n = 4: longest gap"),
    *(
        _ft(f"a replica of {size} MB comes back, to its first step", "s",
            "d return", f"restarted, {size} MB, n = 4: imports to first commit")
        for size in (10, 100)
    ),
    _ft("a replica of 10 MB on two ranks comes back, to its first step", "s",
        "h HSDP", "restarted, 10 MB, n = 2 groups of 2 ranks: imports to first commit"),
    _ft("a state of 1 GB is fetched from a replica, in place", "GB/s",
        "e heal", "1 GB, http in place, one source", more_is_better=True),
)  # fmt: skip
"""What was measured beside peers."""


# ---- sentences


def others_wait(page: str) -> str:
    """Return how long other jobs wait beside a run."""
    head = ["| load by other jobs | without the run | with it | with one job of 4 nodes |"]
    rows = []
    for load in (70, 90):
        alone, *beside = (
            _hour(load, who, "others wait, s").value or 0.0
            for who in ("nobody", OURS_ON_16, "one job of 4 nodes")
        )
        cells = [f"{s:.0f} s ({100 * (s / alone - 1):.0f} % longer)" for s in beside]
        rows.append(f"| {load} % | {alone:.0f} s | {' | '.join(cells)} |")
    link = _link("full-cluster", page)
    text = f"Other jobs wait longer for it. Their mean wait in [an hour on 16 nodes]({link}):\n"
    return "\n".join([text, *head, "|---|---|---|---|", *rows])


def ladder(page: str) -> str:
    """Return the sentence about the lengths of limits that the run tries."""
    minutes = [f"{seconds / 60:g}" for seconds in limits.LADDER_S]
    return f"The *ladder* of time limits is {', '.join(minutes[:-1])} and {minutes[-1]} minutes."


def neighbour_queries(page: str) -> str:
    """Return the sentences about what a run that gives way asks of Slurm."""
    return (
        f"While others wait, the leader lists the jobs of the cluster every {neighbours.CHECK_S:g} "
        "seconds (`scontrol show job`), and the nodes and the reservations every "
        f"{neighbours.NODES_S:g} seconds (`sinfo`, `scontrol`). These are at most four calls a "
        "minute more than without `give_way`. While none waits, it lists the jobs every "
        f"{neighbours.CHECK_SELDOM_S:g} seconds, in place of two other calls of `squeue` a minute."
    )


def queries(page: str) -> str:
    """Return the sentence about what the run asks of Slurm."""
    cells = [
        Measured("scheduler-load", (f"{nodes} nodes: waits for gaps",), "commands a minute")
        for nodes in (16, 32)
    ]
    most = math.ceil(max(cell.value or 0.0 for cell in cells))
    return (
        f"While tasks wait, the leader checks gaps and limits every {limits.CHECK_S:g} seconds. "
        f"While none waits, it does so every {limits.CHECK_SELDOM_S:g} seconds. A run that waited "
        f"for gaps called Slurm's commands at most {most} times a minute, launcher and agents "
        f"together ([measured]({_link('scheduler-load', page)})). At most {limits._MOST} tasks "
        "have a limit of their own, because Slurm keeps a record for each of them."
    )


def strangers(page: str) -> str:
    """Return the sentence about a flood of silent connections."""
    ports = ("leader", "lighthouse", "healing", "copies")

    def most(column: str) -> float:
        cells = [Measured("strangers", (port,), column).cell() for port in ports]
        return max(c.highest or c.median for c in cells if isinstance(c, Figure))

    return (
        "Under a flood of silent connections that never ends, a server that may open 1,024 files "
        f"has at most {most('files open'):.0f} open, and its own peers connect within "
        f"{short(most('longest in a flood, s'))} s ([measured]({_link('strangers', page)}))."
    )


def ports(page: str) -> str:
    """Return the table of a run's ports."""
    unproved, handshake_s = connection._MOST_UNPROVED, auth.HANDSHAKE_TIMEOUT_S
    files = f"{task_main._OPEN_FILES:,}"
    return _PORTS.format(
        unproved=f"{unproved:,}", handshake_s=f"{handshake_s:g}", files=files,
        scrapes=metrics._Server._MOST, scrape_s=f"{metrics._Handler.timeout:g}",
        silent=live_server._MOST_SILENT, silent_s=f"{live_server.REQUEST_S:g}",
    )  # fmt: skip


_PORTS = """| port | process | allowed peers | what a stranger can do |
|---|---|---|---|
| leader | agent | agents of the run | be one of at most {unproved} connections (or a quarter of the descriptors) without a proof; the oldest makes room for the next, each ends after {handshake_s} s |
| probes, one for each address of gloo and NCCL | agent | agents of the run | the same |
| relays of a replica (`ft=true`, several nodes) | agent | agents of the replica | the same |
| lighthouse outside of a run | `hpc-elastic lighthouse` | replicas of the user | the same |
| states for healing (`ft=true`) | worker | replicas of the run | the same |
| copies of checkpoints in memory | worker | workers of the run | the same |
| torch's TCPStore, one a round | agent | **everybody** | read and change its keys, such as the addresses of gloo: end or stall the round; take file descriptors |
| gloo | worker | **everybody** | take file descriptors: gloo aborts the worker when it has none left (of {files}, or the hard limit) |
| NCCL | worker | **everybody** | connect while a communicator is made: stall it |
| metrics (`launcher.agent.metrics_port`) | agent, 127.0.0.1 | every user of the node | read the metrics; hold {scrapes} connections for {scrape_s} s |
| live page (`hpc-elastic report --live`) | 127.0.0.1 | a holder of its token, from the page itself (Host, Origin and Sec-Fetch-Site are checked); commands also need `--control` | hold {silent} silent connections for {silent_s} s |
| probe of `hpc-elastic doctor` | all interfaces, for a minute | the probe's tasks | as for the leader |
| local runs (`launcher=local`) | 127.0.0.1 | as above | as above, for users of the machine |
| server of a replica group | Unix socket, 0600 in a folder of 0700 | the user | nothing |
| shared pages and checkpoints in memory | `/dev/shm`, folder of 0700 | the user | nothing |
| srun, slurmd | Slurm's | Slurm's own authentication | as for every job |"""  # noqa: E501


BLOCKS: dict[str, Callable[[str], str]] = {
    "comparison": lambda page: comparison(page, in_short=True),
    "measurements": lambda page: comparison(page, in_short=False),
    "ladder": ladder,
    "others": others_wait,
    "ports": ports,
    "neighbours": neighbour_queries,
    "queries": queries,
    "strangers": strangers,
}
"""What makes each block, from the page that has it."""


def written(page: str, text: str) -> str:
    """Return a page with its blocks written anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]](page)}\n{m[3]}", text)


def without_source(text: str) -> Iterator[str]:
    """Yield the lines that have a figure and no source of it."""
    plain = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", _BLOCK.sub("", text)))
    for line in plain.splitlines():
        if _FIGURE.search(re.sub(r"\]\([^)]*\)", "]", line)) and not _SOURCE.search(line):
            yield line


def problems() -> Iterator[str]:
    """Yield what is wrong with the pages."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        if written(page, text) != text:
            yield f"{page}: a block of figures is stale: python docs/generate.py"
        yield from (f"{page}: a figure without a source: {line}" for line in without_source(text))


def write() -> None:
    """Write the blocks of all pages anew."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(page, path.read_text()))


if __name__ == "__main__":
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
