"""Trackers: where the numbers of each step go. Those that need a package of their own are in modules of their names."""

from areal.trainer.trackers.console import ConsoleTracker
from areal.trainer.trackers.jsonl import JSONLTracker, read_metrics
from areal.trainer.trackers.tracker import Tracker, Trackers

__all__ = ["ConsoleTracker", "JSONLTracker", "Tracker", "Trackers", "read_metrics"]
