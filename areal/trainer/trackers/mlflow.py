"""Tracker of MLflow. Needs the package mlflow or mlflow-skinny."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient


class MLflow:
    """A :class:`~areal.trainer.trackers.Tracker` that writes to a run of MLflow.

    A run that is resumed goes on under its id, which is kept in the file ``mlflow-run-id`` of ``folder``.

    Args:
        folder: directory of the run's id.
        config: settings to show with the run, as parameters.
        uri: tracking server or store; ``None`` takes MLFLOW_TRACKING_URI, or MLflow's default.
        experiment: name of the experiment, which is made if there is none.
        name: name of the run.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        uri: str | None = None,
        experiment: str = "Default",
        name: str | None = None,
    ) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        known = Path(folder) / "mlflow-run-id"
        if known.exists():
            self._id = known.read_text().strip()
            self._client.set_terminated(self._id, "RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(number, run_name=name).info.run_id
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(self._id + "\n")
        for key, value in (config or {}).items():
            self._client.log_param(self._id, key, value)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the scalars of one step."""
        for name, value in scalars.items():
            # MLflow does not allow the @ of pass@1 in a name.
            self._client.log_metric(self._id, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
