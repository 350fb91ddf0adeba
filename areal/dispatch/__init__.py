"""Dispatch: the ranks of an engine in other processes, behind one handle that is itself an engine."""

from areal.dispatch.executor import Executor, Handle
from areal.dispatch.group import WorkerGroup
from areal.dispatch.in_process import InProcess
from areal.dispatch.shared_devices import Need, Placement, SharedDevices, Use

__all__ = ["Executor", "Handle", "InProcess", "Need", "Placement", "SharedDevices", "Use", "WorkerGroup"]
