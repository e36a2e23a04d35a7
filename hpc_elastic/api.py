"""`launch`: an elastic run from a program, in the spirit of torch's elastic_launch.

    from hpc_elastic import launch

    def train(lr):
        ...
        return accuracy

    if __name__ == "__main__":
        results = launch(train, 0.1, nodes="1:4", nproc_per_node=2)
        print(results[0])

Nothing is pickled: the function must be at module level, its arguments and its return value JSON.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_elastic.config.schema import Nproc
from hpc_elastic.errors import ConfigError


@dataclass(frozen=True)
class LaunchResult(Mapping[int, Any]):
    """What a run came to: a mapping from global rank to return value.

    Attributes:
        by_rank: The return values by global rank; empty if the run was not waited for.
        run_dir: The run directory, with all logs.
        restarts: Restarts that were spent on workers' failures.
    """

    by_rank: dict[int, Any]
    run_dir: Path
    restarts: int = 0

    def __getitem__(self, rank: int) -> Any:
        """Return what the worker with this global rank returned."""
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the global ranks."""
        return iter(self.by_rank)

    def __len__(self) -> int:
        """Return the world size of the last round."""
        return len(self.by_rank)


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int | str = 1,
    nproc_per_node: Nproc = "auto",
    launcher: Literal["local", "slurm"] = "local",
    ft: bool = False,
    run_dir: str | Path | None = None,
    **settings: Any,
) -> LaunchResult:
    """Run a function as an elastic worker group, and wait for it.

    Args:
        fn: Called with ``args`` in every worker; at module level of a script or module.
        *args: JSON values.
        nodes: How many, such as ``4`` or ``"1:4"``.
        nproc_per_node: Workers of each node.
        launcher: Processes on this machine, or a Slurm job array.
        ft: Each node is a replica group of its own, whose workers outlive the other nodes'; for
            functions that train with `hpc_elastic.ft`.
        run_dir: An empty or new folder, on the shared file system; None makes one in ``runs/``.
        **settings: ``launcher.*`` as in the config: ``partition="gpu"``, ``max_restarts=0``,
            ``rendezvous={"join_timeout_s": 60}``.

    Returns:
        The return values by global rank. With ``wait=False`` or ``dry_run=True`` there are none.

    Raises:
        ConfigError: a setting, the function or an argument can not work.
        SubmissionError: Slurm refused the job.
        WorkerGroupError: the training failed; holds the first failure.
        SystemExit: Ctrl-C or SIGTERM; what has become of the run was printed.
    """
    from hpc_elastic.config.resolve import resolve
    from hpc_elastic.launcher import session
    from hpc_elastic.launcher.plan import PlannedRun
    from hpc_elastic.launcher.prepare import entry_of
    from hpc_elastic.launcher.sweep import require_writable

    config = {
        "nodes": nodes,
        "nproc_per_node": nproc_per_node,
        "ft": ft,
        "launcher": {**settings, "backend": launcher},
    }
    checked = resolve(config, overrides=["nodes="])
    entry = entry_of(fn, "function", _json_arguments(args))
    path = Path(run_dir).absolute() if run_dir else _new_run_dir(fn.__name__)
    require_writable(path)
    source = Path(entry.script).parent if entry.script else Path(entry.cwd)
    with session.ended_by_interrupt():
        prepared = session.prepare_runs(
            [PlannedRun(path, checked)], entry, sweep=path, name=fn.__name__, source=source
        )
        if checked.launcher.dry_run:
            session.announce(prepared)
            return LaunchResult({}, path)
        submitted = session.submit(prepared)
        if not checked.launcher.wait:
            session.announce(prepared, submitted)
            return LaunchResult({}, path)
        (outcome,) = session.wait(submitted)
    if outcome.error is not None:
        raise outcome.error
    return LaunchResult(outcome.values, path, outcome.restarts)


def _json_arguments(args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments as JSON gives them back, which must be what was given."""
    try:
        back: list[Any] = json.loads(json.dumps(args, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise ConfigError(
            "args", args, f"arguments of the function must be JSON values: {e}"
        ) from e
    return back


def _new_run_dir(name: str) -> Path:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    return Path("runs", f"{name}_{stamp}_{secrets.token_hex(2)}").absolute()
