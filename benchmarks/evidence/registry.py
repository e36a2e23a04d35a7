"""Which benchmarks there are: how each is run, what it needs, how long it takes."""

import ast
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.needs import HOLES, KERNELS, LOOK_UP, NFS_CLIENTS, SANDBOX, SOURCES, Need, package

HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Benchmark:
    """One section of the results.

    `quick`: further arguments with which one sees in a short time that it works; `minutes`: about
    how long it takes; `repeats`: whether it knows ``--repeats``.
    """

    name: str
    script: str
    arguments: str
    quick: str
    minutes: float
    needs: tuple[Need, ...] = ()
    repeats: bool = True

    @property
    def question(self) -> str:
        """What it asks: the first line of the script's docstring, which is not run for it."""
        tree = ast.parse((HERE / self.script).read_text())
        return (ast.get_docstring(tree) or "").partition("\n")[0]

    def options(self, *, quick: bool, repeats: int | None) -> list[str]:
        found = shlex.split(self.arguments) + (shlex.split(self.quick) if quick else [])
        return [*found, "--repeats", str(repeats)] if repeats and self.repeats else found

    def missing(self) -> list[Need]:
        return [need for need in self.needs if not need.is_met()]


SUBMITIT_LAUNCHER, TORCHFT = package("hydra-submitit-launcher"), package("torchft")

BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("submit", "submit.py", "--repeats 3", "--repeats 1 --runs 4", 3,
              (*SANDBOX, SUBMITIT_LAUNCHER)),
    Benchmark("sweep", "sweep.py", "--repeats 1 --at-a-time 2",
              "--trials 8 --only ours-4,peer-4", 40,
              (*SANDBOX, package("optuna"))),
    Benchmark("full-cluster", "full_cluster.py", "",
              "--minutes 8 --loads 0.9 --only nobody,ours,rigid-4", 65,
              (*SANDBOX, SUBMITIT_LAUNCHER), repeats=False),
    Benchmark("start", "start.py", "--repeats 3", "--repeats 1", 5, SANDBOX),
    Benchmark("known-scripts", "known_scripts.py", "", "--only mnist,nanoGPT", 60,
              (SOURCES,), repeats=False),
    Benchmark("strangers", "strangers.py", "--repeats 3", "--repeats 1", 2),
    Benchmark("compile-cache", "compile_cache.py", "--repeats 3", "--repeats 1", 8),
    Benchmark("rendezvous-scale", "rendezvous_scale.py",
              "--repeats 3 --sizes 16,64,128,256,512,1024,4096,10000 --peer-max-n 256",
              "--repeats 1 --sizes 16,64 --peer-max-n 16", 12, (LOOK_UP,)),
    Benchmark("recovery", "recovery.py", "--repeats 3",
              "--repeats 1 --cases follower --peers ours --train-s 5", 80, SANDBOX),
    Benchmark("requeue", "requeue.py", "--repeats 5", "--repeats 1", 15, SANDBOX),
    Benchmark("goodput", "goodput.py", "--minutes 10", "--minutes 2 --peers ours", 40, SANDBOX,
              repeats=False),
    Benchmark("goodput-together", "goodput.py", "--minutes 10 --together",
              "--minutes 2 --peers ours,submitit", 15, SANDBOX, repeats=False),
    Benchmark("shared-folder", "shared_folder.py", "--repeats 3 --parts saves,ends,deaths",
              "--repeats 1 --parts ends", 40, (*SANDBOX, NFS_CLIENTS)),
    Benchmark("shared-folder-faults", "shared_folder.py", "--parts faults",
              "--parts faults --train-s 5", 20, (*SANDBOX, NFS_CLIENTS), repeats=False),
    Benchmark("shared-folder-operations", "shared_folder.py", "--parts operations",
              "--parts operations --agents 4", 22, (*SANDBOX, NFS_CLIENTS), repeats=False),
    Benchmark("shared-folder-goodput", "shared_folder.py", "--parts goodput",
              "--parts goodput --goodput-minutes 2", 25, (*SANDBOX, NFS_CLIENTS), repeats=False),
    Benchmark("checkpoint", "checkpoint.py", "--gib 1 --repeats 5 --steps",
              "--gib 0.1 --repeats 1 --rounds 1", 8),
    Benchmark("checkpoint-4gib", "checkpoint.py", "--gib 4 --repeats 2",
              "--gib 0.2 --repeats 1", 15),
    Benchmark("virtual-ranks", "virtual_ranks.py", "--repeats 25", "--repeats 1", 5),
    Benchmark("ft", "ft.py", "--repeats 5", "--quick", 40, (TORCHFT,)),
    Benchmark("ft-joins", "ft.py", "--parts j k --repeats 3", "--parts j k --quick", 30,
              (TORCHFT,)),
    Benchmark("islands", "islands.py", "--repeats 3", "--repeats 1 --seconds 10 --every-s 5", 12),
    Benchmark("operate", "operate.py", "--repeats 5", "--repeats 1 --faults 20", 5),
    Benchmark("scale", "scale.py", "--repeats 3", "--repeats 1 --rows runs", 8),
    Benchmark("scheduler-load", "scheduler_load.py", "--sizes 16,32", "--sizes 4 --runs 20 --quick",
              30, SANDBOX, repeats=False),
    Benchmark("kernel-nfs", "kernel_nfs.py", "", "--only primitives --mounts vers=4.2", 60,
              (*SANDBOX, KERNELS), repeats=False),
    Benchmark("harvest", "harvest.py", "", "--starts 2 --hours 0.2 --sizes 16", 10, repeats=False),
    Benchmark("harvest-map", "harvest.py", "--holes benchmarks/harvest/holes.npz",
              "--starts 2 --hours 0.2 --sizes 16", 10, (HOLES,), repeats=False),
    Benchmark("forecasts", "forecasts.py", "--idle benchmarks/harvest/holes.npz", "--number 2", 10,
              (HOLES,), repeats=False),
    Benchmark("simulate", "simulate.py", "--schedules 100000", "--schedules 500", 3,
              repeats=False),
    Benchmark("shared-nodes", "shared_nodes.py", "--seeds 3 --hours 3", "--seeds 1 --hours 0.2", 15,
              repeats=False),
    Benchmark("give-way", "give_way.py", "--repeats 3", "--sizes 16 --repeats 1", 5),
    Benchmark("simulate-ft", "simulate.py", "--ft --schedules 50000", "--schedules 500", 10,
              repeats=False),
)  # fmt: skip


def chosen(names: Sequence[str] | None) -> list[Benchmark]:
    """Return those of these names, in the order of the page; all if there are none."""
    known = [benchmark.name for benchmark in BENCHMARKS]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    return [b for b in BENCHMARKS if not names or b.name in names]


def unmet(benchmarks: Iterable[Benchmark]) -> dict[str, list[Need]]:
    """Return what is missing, by name of the benchmark; {}: nothing is."""
    found = {b.name: b.missing() for b in benchmarks}
    return {name: needs for name, needs in found.items() if needs}


def lines(missing: dict[str, list[Need]]) -> list[str]:
    return [
        f"{name} needs {need.name}: {need.remedy}"
        for name, needs in missing.items()
        for need in needs
    ]
