"""Weights into the workers of inference servers without files: over a process group, through memory of the same GPUs, or as shards."""

from areal.inference.http.group.carrier import Carrier, GlooCarrier, NCCLCarrier, TorchCarrier
from areal.inference.http.group.ipc import IPCCarrier
from areal.inference.http.group.reshard_carrier import ReshardCarrier

__all__ = ["Carrier", "GlooCarrier", "IPCCarrier", "NCCLCarrier", "ReshardCarrier", "TorchCarrier"]
