"""Trackers: where the numbers of each step go. The modules tensorboard, wandb and mlflow need the packages of these names."""

from areal.trainer.trackers.console import ConsoleTracker
from areal.trainer.trackers.jsonl import JSONLTracker, read_metrics
from areal.trainer.trackers.tracker import Tracker, Trackers

__all__ = ["ConsoleTracker", "JSONLTracker", "Tracker", "Trackers", "read_metrics"]
