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
    """Result of a run: a mapping from global rank to return value.

    Attributes:
        by_rank: The return values by global rank; empty if the run was not waited for.
        run_dir: The run directory, with all logs.
        restarts: Number of restarts spent on workers' failures.
    """

    by_rank: dict[int, Any]
    run_dir: Path
    restarts: int = 0

    def __getitem__(self, rank: int) -> Any:
        """Return the return value of the worker with this global rank."""
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
        nodes: Number of nodes, such as ``4``, or a range, such as ``"1:4"``; at least 1.
        nproc_per_node: Workers of each node: a number of at least 1, ``"gpu"`` (one per GPU),
            ``"cpu"`` or ``"auto"``.
        launcher: Processes on this machine, or a Slurm job array.
        ft: Each node is a replica group of its own, whose workers outlive those of the other nodes;
            for functions that train with `hpc_elastic.ft`.
        run_dir: An empty or new folder on the shared file system; None makes one in ``runs/``.
        **settings: ``launcher.*`` as in the config: ``partition="gpu"``, ``max_restarts=0``,
            ``rendezvous={"join_timeout_s": 60}``.

    Returns:
        The return values by global rank; none with ``wait=False`` or ``dry_run=True``.

    Raises:
        ConfigError: A setting, the function or an argument cannot work; names the remedy.
        RunDirectoryError: ``run_dir`` cannot be written, or holds another run.
        SubmissionError: Slurm refused the job, or does not answer.
        WorkerGroupError: The training failed; holds the first failure.
        SystemExit: Ctrl-C or SIGTERM; what has become of the run was printed.
    """
    from hpc_elastic.config.resolve import resolve
    from hpc_elastic.launcher.plan import RunRequest
    from hpc_elastic.launcher.submit import ended_by_interrupt, is_awaited, require_writable, submit
    from hpc_elastic.launcher.user_code import entry_of
    from hpc_elastic.launcher.wait import wait

    config = {
        "nodes": nodes,
        "nproc_per_node": nproc_per_node,
        "ft": ft,
        "launcher": {**settings, "backend": launcher},
    }
    checked = resolve(config, overrides=["nodes="])
    try:
        arguments = json.loads(json.dumps(args, allow_nan=False))
    except (TypeError, ValueError) as e:
        why = f"arguments of the function must be JSON values: {e}"
        raise ConfigError("args", args, why) from e
    entry = entry_of(fn, "function", arguments)
    stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"
    path = Path(run_dir or f"runs/{fn.__name__}_{stamp}").absolute()
    require_writable(path)
    with ended_by_interrupt():
        runs = submit([RunRequest(path, checked, entry)], sweep=path, name=fn.__name__)
        if not is_awaited(checked.launcher):
            return LaunchResult({}, path)
        (outcome,) = wait(runs, poll_interval_s=checked.launcher.poll_interval_s)
    if outcome.error is not None:
        raise outcome.error
    return LaunchResult(outcome.values, path, outcome.restarts)
