"""Trackers: lines that survive a kill, and errors that do not end a run."""

import logging
import math
from pathlib import Path

import pytest

from areal.trainer.trackers import JSONLTracker, Trackers, read_metrics


def test_lines_survive_a_kill_and_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    first = JSONLTracker(path)
    first.log(1, {"loss": 3.0})
    first.log(1, {"eval": 0.5})
    first.log(2, {"loss": 2.0})
    first.log(3, {"loss": math.nan})
    assert math.isnan(read_metrics(path)[3]["loss"])
    # No close: the process was killed while it wrote a line.
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    second = JSONLTracker(path)
    second.log(2, {"loss": 2.5})
    second.close()
    assert read_metrics(path) == {1: {"loss": 3.0, "eval": 0.5}, 2: {"loss": 2.5}}


class Broken:
    calls = 0

    def log(self, step: int, scalars: object) -> None:
        self.calls += 1
        raise ConnectionError("no server")

    def close(self) -> None:
        raise ConnectionError("no server")


def test_a_tracker_that_fails_is_named_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken, kept = Broken(), JSONLTracker(tmp_path / "metrics.jsonl")
    both = Trackers([broken, kept])
    with caplog.at_level(logging.WARNING):
        try:
            both.log(1, {"loss": 1.0})
            both.log(2, {"loss": 0.5})
            both.close()
        except ConnectionError:
            pytest.fail("the error of a tracker ended the run")
    assert broken.calls == 2
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"loss": 1.0}, 2: {"loss": 0.5}}
    assert [record.getMessage() for record in caplog.records] == [
        "Broken: step 1 was not recorded (ConnectionError: no server); the run goes on, and further errors are not shown"
    ]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from areal.trainer.trackers.wandb import WandB

    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):
        tracker = WandB(tmp_path, {"lr": 0.1}, project="p", mode="offline")
        tracker.log(step, {"loss": 1.0 / step})
        tracker.close()
    assert len({path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")}) == 1
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_mlflow_keeps_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    from areal.trainer.trackers.mlflow import MLflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for step in (1, 2):
        tracker = MLflow(tmp_path, {"lr": 0.1}, uri=uri, experiment="e", name="n")
        tracker.log(step, {"eval/pass@1": 1.0 / step})
        tracker.close()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "eval/pass_at_1")] == [1.0, 0.5]
    assert (run.data.params["lr"], run.info.status) == ("0.1", "FINISHED")
