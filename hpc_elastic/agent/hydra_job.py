"""What Hydra does around a job, done for a worker: frozen config, logging, directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, env_override, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hpc_elastic.run.directory import RunDir


@contextmanager
def hydra_job(run: RunDir) -> Iterator[DictConfig]:
    """Give the task's config, with ``HydraConfig`` and logging as inside a Hydra job.

    Rank 0 alone writes the job's log file; every rank logs to its console, which its agent
    captures. The working directory changes to the run directory if ``hydra.job.chdir`` is set.
    """
    setup_globals()
    task = OmegaConf.load(run.hydra / "config.yaml")
    hydra = OmegaConf.load(run.hydra / "hydra.yaml")
    assert isinstance(task, DictConfig) and isinstance(hydra, DictConfig)
    schema = OmegaConf.structured(HydraConf, flags={"struct": False})  # groups may add to it
    whole = OmegaConf.merge({"hydra": schema}, task, hydra)
    assert isinstance(whole, DictConfig)
    HydraConfig.instance().set_config(whole)
    logs = hydra.hydra.job_logging
    if os.environ["RANK"] != "0" and logs and "root" in logs:
        with read_write(logs), open_dict(logs):
            logs.root.handlers = [h for h in logs.root.get("handlers") or [] if h != "file"]
            if "handlers" in logs:
                logs.handlers.pop("file", None)
    configure_log(logs, hydra.hydra.verbose)
    if hydra.hydra.job.chdir:
        os.chdir(run.path)
    OmegaConf.set_struct(task, True)
    with env_override(dict(hydra.hydra.job.env_set)):
        yield task
