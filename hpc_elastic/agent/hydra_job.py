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
    if os.environ["RANK"] != "0":
        _log_to_console_only(hydra)
    configure_log(hydra.hydra.job_logging, hydra.hydra.verbose)
    if hydra.hydra.job.chdir:
        os.chdir(run.path)
    OmegaConf.set_struct(task, True)
    with env_override(dict(hydra.hydra.job.env_set)):
        yield task


def _log_to_console_only(hydra: DictConfig) -> None:
    logging_ = hydra.hydra.job_logging
    if not logging_ or "root" not in logging_:
        return
    with read_write(logging_), open_dict(logging_):
        handlers = logging_.root.get("handlers") or []
        logging_.root.handlers = [h for h in handlers if h != "file"]
        if "handlers" in logging_:
            logging_.handlers.pop("file", None)
