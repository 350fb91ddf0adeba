"""Dispatch: the ranks of an engine in other processes, behind one handle that is itself an engine."""

from areal.dispatch.executor import Executor, Handle, InProcess
from areal.dispatch.group import WorkerGroup
from areal.dispatch.shared_devices import Need, Placement, SharedDevices, Use

__all__ = ["Executor", "Handle", "InProcess", "Need", "Placement", "SharedDevices", "Use", "WorkerGroup"]
