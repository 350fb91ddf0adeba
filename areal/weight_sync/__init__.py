"""Transports that send an engine's weights to inference, and the receivers that write them into a module."""

from areal.weight_sync.apply import ModuleSource, Replica, load_named
from areal.weight_sync.broadcast import BroadcastReceiver, BroadcastTransport
from areal.weight_sync.connection import PeerLostError
from areal.weight_sync.disk import DiskReceiver, DiskTransport
from areal.weight_sync.ipc import SharedMemoryReceiver, SharedMemoryTransport
from areal.weight_sync.transport import DirectTransport

__all__ = [
    "BroadcastReceiver",
    "BroadcastTransport",
    "DirectTransport",
    "DiskReceiver",
    "DiskTransport",
    "ModuleSource",
    "PeerLostError",
    "Replica",
    "SharedMemoryReceiver",
    "SharedMemoryTransport",
    "load_named",
]
