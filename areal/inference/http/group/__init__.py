"""Weights over a process group into inference servers: the trainer is rank 0, the workers of all servers are the others."""

from areal.inference.http.group.carrier import Carrier
from areal.inference.http.group.gloo_carrier import GlooCarrier
from areal.inference.http.group.nccl_carrier import NCCLCarrier
from areal.inference.http.group.torch_carrier import TorchCarrier

__all__ = ["Carrier", "GlooCarrier", "NCCLCarrier", "TorchCarrier"]
