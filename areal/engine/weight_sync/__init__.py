"""Weights from an engine to whoever generates with them: what is sent apart from how."""

from areal.engine.weight_sync.apply import ModuleSource, Replica, load_named
from areal.engine.weight_sync.broadcast import BroadcastReceiver, BroadcastTransport
from areal.engine.weight_sync.disk import DiskReceiver, DiskTransport
from areal.engine.weight_sync.ipc import SharedMemoryReceiver, SharedMemoryTransport
from areal.engine.weight_sync.lines import PeerLostError
from areal.engine.weight_sync.transport import DirectTransport

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
