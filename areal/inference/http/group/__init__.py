"""Weights into the workers of inference servers without files: over a process group, or through memory of the same GPUs."""

from areal.inference.http.group.carrier import Carrier, GlooCarrier, NCCLCarrier, TorchCarrier
from areal.inference.http.group.ipc import IPCCarrier

__all__ = ["Carrier", "GlooCarrier", "IPCCarrier", "NCCLCarrier", "TorchCarrier"]
