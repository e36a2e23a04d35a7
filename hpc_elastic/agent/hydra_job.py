"""What Hydra does around a job, done for a worker: frozen config, logging, directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from hydra import version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, env_override, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hpc_elastic.config import frozen
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import read_json

_EARLIER: dict[str, Any] = {
    "config": {"flags": {"struct": True}}, "hydra": {"object": "hydra.conf:HydraConf"}, "calls": [],
}  # fmt: skip
"""What is taken for a run of an earlier release, which had no such file."""


class _Composer:
    """The Hydra that `hydra.compose` finds in a function; made when used, since it loads plugins.

    Its parts are private (tests/conformance/hydra fails if they change).
    """

    def __init__(self, whole: DictConfig) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
        from hydra._internal.hydra import Hydra
        from hydra.core.plugins import Plugins

        Plugins.instance()
        search_path = ConfigSearchPathImpl()
        for source in self._whole.hydra.runtime.config_sources:
            search_path.append(source.provider, f"{source.schema}://{source.path}")
        made = Hydra(self._whole.hydra.job.name, ConfigLoaderImpl(search_path))
        GlobalHydra.instance().hydra = made
        return getattr(made, name)


@contextmanager
def hydra_job(run: RunDir) -> Iterator[DictConfig]:
    """Give the task's config, with ``HydraConfig`` and logging as inside a Hydra job.

    Rank 0 alone writes the job's log files; every rank logs to its console, which its agent
    captures. The working directory changes to the run directory if ``hydra.job.chdir`` is set, or
    if it is not and the script asks for the behaviour of Hydra before 1.2 (``version_base``).
    """
    setup_globals()
    record: dict[str, Any] = read_json(run.hydra / frozen.FROZEN_FILE) or _EARLIER
    config, hydra = (
        OmegaConf.to_container(OmegaConf.load(run.hydra / name))
        for name in ("config.yaml", "hydra.yaml")
    )
    own = frozen.Frozen(config, record["config"])
    task = frozen.decode(own)
    whole = frozen.whole_config(own, frozen.Frozen(cast(Any, hydra)["hydra"], record["hydra"]))
    calls = [frozen.Call(**{**call, "args": tuple(call["args"])}) for call in record["calls"]]
    with frozen.answer_calls(calls, [task, whole]):
        HydraConfig.instance().set_config(whole)
        GlobalHydra.instance().hydra = cast(Any, _Composer(whole))
        job = whole.hydra.job
        logs = whole.hydra.job_logging
        if os.environ["RANK"] != "0" and logs and logs.get("handlers"):
            with read_write(logs), open_dict(logs):  # any logger may name a handler
                for name, handler in logs.handlers.items():
                    if "filename" in (handler or {}):
                        logs.handlers[name] = {"class": "logging.NullHandler"}
        configure_log(logs, whole.hydra.verbose)
        chdir = not version.base_at_least("1.2") if job.chdir is None else job.chdir
        if chdir:
            os.chdir(run.path)
        with env_override(dict(job.env_set)):
            yield task
