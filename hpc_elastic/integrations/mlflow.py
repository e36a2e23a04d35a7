"""MLflow in an elastic run: one MLflow run, each step once.

    from hpc_elastic.integrations.mlflow import start_run

    with start_run("digits") as tracked:
        tracked.log_metrics({"loss": loss}, step)

MLflow chooses the ids of its runs, so a restart finds the run by a tag, which is created with it.
A run whose worker was stopped stays RUNNING, and is continued. See `tracking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from hpc_elastic.integrations import tracking

try:
    import mlflow
except ImportError as e:
    raise ImportError("hpc_elastic.integrations.mlflow needs MLflow: pip install mlflow") from e

RUN_TAG = "hpc_elastic.run_id"
"""Tag of MLflow's run with the id of the run."""
_EVENTS_TAG = tracking.EVENTS.replace("/", ".")
_TAG_CHARS = 5000
"""Longest value of a tag that all stores accept."""


def start_run(
    experiment: str | None = None, *, tracking_uri: str | None = None, **options: Any
) -> MlflowRun:
    """Start or continue MLflow's run of this training; every rank calls it, once.

    Outside of a run each call starts a new one, on rank 0.

    Args:
        experiment: Name of the experiment, which is created if need be; None: MLflow's present one.
        tracking_uri: Of the store, which all nodes reach; None: as MLflow is configured.
        options: As of ``mlflow.start_run`` (``run_name``, ``tags`` and others) for a new run.

    Raises:
        MlflowException: The store does not answer, or refuses.
    """
    if not tracking.is_logger():
        return MlflowRun(None, None)
    if tracking_uri is not None:
        mlflow.set_tracking_uri(tracking_uri)
    if experiment is not None:
        mlflow.set_experiment(experiment)
    own = tracking.own_run()
    if own is None:
        return MlflowRun(mlflow.start_run(**options), None)
    found = mlflow.search_runs(
        filter_string=f"tags.`{RUN_TAG}` = '{own.run_id}'", output_format="list", max_results=1
    )
    if found:
        return MlflowRun(mlflow.start_run(run_id=found[0].info.run_id), own)
    tags = {**(options.pop("tags", None) or {}), RUN_TAG: own.run_id}
    return MlflowRun(mlflow.start_run(tags=tags, **options), own)


class MlflowRun:
    """MLflow's run of a training; on ranks that do not log it does nothing.

    Attributes:
        run_id: MLflow's id, for its other functions; None on ranks that do not log.
    """

    def __init__(self, active: Any, own: tracking.OwnRun | None) -> None:
        self._active, self._own = active, own
        self.run_id: str | None = None if active is None else active.info.run_id
        last = dict[str, int]()
        if own is not None:
            # the last one of each key; get_metric_history would transfer all of them
            metrics = mlflow.get_run(self.run_id).data._metric_objs
            last = {metric.key: metric.step for metric in metrics}
        self._steps = tracking.LastSteps(last, self._annotate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """End it: FINISHED, or FAILED because of an error."""
        if self._active is not None:
            self._active.__exit__(*error)

    def log_metric(self, key: str, value: float, step: int) -> None:
        """Log a value, unless its step was logged before the last restart."""
        self.log_metrics({key: value}, step)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log values, except those whose step was logged before the last restart."""
        if self._active is None:
            return
        new = {key: float(v) for key, v in values.items() if self._steps.is_new(key, step)}
        if new:
            mlflow.log_metrics(new, step=step, run_id=self.run_id, synchronous=True)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters. MLflow refuses one that has another value after a restart."""
        if self._active is not None:
            mlflow.log_params(dict(params), run_id=self.run_id)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags."""
        if self._active is not None:
            mlflow.MlflowClient().log_batch(
                self.run_id, tags=[mlflow.entities.RunTag(k, str(v)) for k, v in tags.items()]
            )

    def _annotate(self, _: int) -> None:
        if self._own is not None:
            self.set_tags({_EVENTS_TAG: self._own.describe_events()[-_TAG_CHARS:]})
