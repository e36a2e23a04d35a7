"""Descriptions of runs, by the names of their settings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpc_elastic.config.schema import BACKENDS, NodeRange, Nproc, RunSettings
from hpc_elastic.run.directory import Entry, PoolTerms, RunDir, RunSpec

_TERMS = {"preempt_grace_s": 30.0, "kill_wait_s": 30.0, "whole_nodes": False}
_OF_RUN = ("file_env", "provenance", "generation")


def started_run(run: RunDir, spec: RunSpec) -> None:
    """Make the directory of a run as its first task leaves it."""
    run.create(spec)
    run.complete(spec)


def spec_of(
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    nproc_per_node: Nproc,
    max_restarts: int,
    entry: Entry,
    submission: str,
    tasks: Sequence[tuple[int, int]],
    *,
    launcher: str = "slurm",
    ft: bool = False,
    **fields: Any,
) -> RunSpec:
    """The description of a run without pools.

    Other fields are those of run.json, what the site gives (`PoolTerms`), and settings of the
    launcher.
    """
    of_run = {name: fields.pop(name) for name in _OF_RUN if name in fields}
    terms = PoolTerms(**{name: fields.pop(name, value) for name, value in _TERMS.items()})
    settings = RunSettings(
        NodeRange(min_nodes, max_nodes),
        nproc_per_node,
        BACKENDS[launcher](max_restarts=max_restarts, **fields),
        ft,
    )
    return RunSpec(run_id, submission, list(tasks), entry, settings, [terms], **of_run)


def set_launcher(run: RunDir, launcher: str) -> None:
    """Let the description of a run have another launcher, with its defaults."""
    spec = run.load()
    settings = replace(spec.settings, launcher=BACKENDS[launcher]())
    run.spec.write_text(replace(spec, settings=settings).to_json())
