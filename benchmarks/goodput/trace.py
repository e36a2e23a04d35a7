"""Which nodes are taken when, how that is done, and the record of what really happened.

A job of the sandbox's `high` partition takes the nodes, from whoever has them: Slurm sends his
steps SIGTERM, and the taker starts when he has gone, or has been killed. The taker itself writes
when it starts and ends. So a node counts as taken for exactly as long as somebody else had it; the
grace in which it is being left belongs to the training.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.slurm.nodelist import expand
from slurm_sandbox import SlurmSandbox

NUM_NODES = 4
PARTITION = "high"


@dataclass(frozen=True)
class Taking:
    """Some nodes are taken for a while; seconds since the trace began."""

    start_s: float
    end_s: float
    nodes: tuple[str, ...]


TRACE_S = 600.0
TRACE = (
    Taking(20, 60, ("node3", "node4")),
    Taking(100, 115, ("node2",)),
    Taking(150, 210, ("node1", "node2", "node3")),
    Taking(250, 290, ("node1", "node2", "node3", "node4")),
    Taking(330, 345, ("node4",)),
    Taking(380, 440, ("node1", "node2")),
    Taking(420, 460, ("node3",)),
)
"""What was taken last comes back early enough for Slurm's two minutes to pass before the end."""


@dataclass(frozen=True)
class Held:
    """A taker had these nodes; Unix seconds."""

    start: float
    end: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """Who had which node at one moment (Unix seconds): the name of a partition."""

    time: float
    holders: dict[str, str]


def scaled(trace: Iterable[Taking], length_s: float) -> list[Taking]:
    by = length_s / TRACE_S
    return [Taking(t.start_s * by, t.end_s * by, t.nodes) for t in trace]


def play(
    trace: Sequence[Taking], length_s: float, sandbox: SlurmSandbox, folder: Path, poll_s: float
) -> list[Sample]:
    """Take the nodes and give them back as the trace says; return what was seen at each look.

    The takers write into ``folder``, an empty one.
    """
    begin = time.time()
    todo, samples = list(trace), []
    while (now_s := time.time() - begin) < length_s:
        while todo and todo[0].start_s <= now_s:
            taking = todo.pop(0)
            _take(taking.nodes, begin + taking.end_s, sandbox, folder / f"taker-{len(todo)}")
        samples.append(Sample(time.time(), holders(sandbox)))
        coming_s = todo[0].start_s if todo else length_s
        time.sleep(max(0.0, min(poll_s, begin + coming_s - time.time())))
    return samples


def holders(sandbox: SlurmSandbox) -> dict[str, str]:
    """Return the partition of the job that has each node; nodes that nobody has are left out."""
    argv = ["squeue", "-h", "-r", "-t", "RUNNING,COMPLETING", "-o", "%P %N"]
    lines = [line.split() for line in sandbox.run(argv).stdout.splitlines()]
    pairs = [(node, line[0]) for line in lines if len(line) == 2 for node in expand(line[1])]
    return dict(sorted(pairs, key=lambda pair: pair[1] == PARTITION))


def _take(nodes: Sequence[str], end: float, sandbox: SlurmSandbox, record: Path) -> None:
    """Submit a job that takes whole nodes until a moment (Unix seconds), or not at all."""
    options = [f"--partition={PARTITION}", "--exclusive", "--no-requeue", "--job-name=taker"]
    options += [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
    options += ["--output=/dev/null", "--chdir=/"]
    left = f'$(date +%s.%N | awk "{{ print ({end} > \\$1) ? {end} - \\$1 : 0 }}")'
    script = f"echo {' '.join(nodes)} > {record}; date +%s.%N >> {record}; "
    script += f"sleep {left}; date +%s.%N >> {record}"
    sandbox.run(["sbatch", *options, f"--wrap={script}"])


def read_held(folder: Path) -> list[Held]:
    """Return what the takers have written; one that has not ended has its nodes still."""
    found = []
    for path in sorted(folder.glob("taker-*")):
        lines = path.read_text().splitlines()
        moments = [float(line) for line in lines[1:]]
        if moments:
            end = moments[1] if len(moments) > 1 else time.time()
            found.append(Held(moments[0], end, tuple(lines[0].split())))
    return sorted(found, key=lambda h: h.start)
