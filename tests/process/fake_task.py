"""A stand-in for hpc_elastic.agent: writes what a leader would, from the array file."""

import json
import os
import sys
import time
from pathlib import Path

from hpc_elastic.run.directory import RunDir


def main() -> None:
    """Play the task that SLURM_ARRAY_TASK_ID names; its run's config says what happens."""
    run = Path(_runs()[int(os.environ["SLURM_ARRAY_TASK_ID"])]["dir"])
    spec = RunDir(run).load()
    RunDir(run).complete(spec)
    plot = spec.settings.launcher.env.get("PLOT", "succeed")
    print(f"task {os.environ['SLURM_ARRAY_TASK_ID']} plays {plot}", flush=True)
    if plot == "die":
        sys.exit("the interpreter is broken")
    if plot == "hang":
        time.sleep(600)
    deadline = time.monotonic() + 60.0
    while plot == "wait" and not (run.parent / "go").exists():
        if time.monotonic() > deadline:
            sys.exit("the file was not written within the time-out")
        time.sleep(0.05)
    results = run / "results" / "round-0"
    results.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        _replace(results / f"rank-{rank}.json", rank + 0.5)
    _replace(run / "status.json", {"phase": "training", "nodes": 1, "step": 7, "restarts": 0})
    _replace(run / "result.json", _result(plot))


def _result(plot: str) -> dict:
    if plot in ("succeed", "wait"):
        return {"status": "succeeded", "restarts": 1, "results": "results/round-0"}
    failure = {"host": "n3", "rank": 3, "local_rank": 1, "exit_code": 1, "exception": "ValueError"}
    failure |= {"message": "no", "traceback": "Traceback...\nValueError: no"}
    return {"status": "failed", "restarts": 0, "failure": failure, "secondary_failures": []}


def _replace(path: Path, value: object) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(value))
    staged.replace(path)


def _runs() -> list[dict]:
    return json.loads(Path(sys.argv[1]).read_text())["runs"]


if __name__ == "__main__":
    main()
