"""Transports that send an engine's weights to inference, and the receivers that write them into a module."""

from areal.weight_sync.apply import ModuleSource, Replica, load_named
from areal.weight_sync.disk import DiskReceiver, DiskTransport
from areal.weight_sync.slice_receiver import SliceReceiver
from areal.weight_sync.slice_transport import SliceTransport
from areal.weight_sync.transport import DirectTransport

__all__ = [
    "DirectTransport",
    "DiskReceiver",
    "DiskTransport",
    "ModuleSource",
    "Replica",
    "SliceReceiver",
    "SliceTransport",
    "load_named",
]
