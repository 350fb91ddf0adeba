"""Weights over a process group into inference servers: the trainer is rank 0, the workers of all servers are the others."""

from areal.inference.http.group.carrier import Carrier, GlooCarrier, NCCLCarrier, TorchCarrier

__all__ = ["Carrier", "GlooCarrier", "NCCLCarrier", "TorchCarrier"]
