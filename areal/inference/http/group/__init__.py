"""Weights over a process group into inference servers: the trainer is rank 0, the workers of all servers are the others."""

from areal.inference.http.group.carrier import Carrier
from areal.inference.http.group.gloo_carrier import GlooCarrier
from areal.inference.http.group.nccl_carrier import NCCLCarrier
from areal.inference.http.group.servers import Servers
from areal.inference.http.group.torch_carrier import TorchCarrier
from areal.inference.http.group.transport import ProcessGroupTransport, SGLangGroupTransport, VLLMGroupTransport
from areal.inference.http.servers.sglang_group import SGLangGroupRoutes
from areal.inference.http.servers.vllm_group import VLLMGroupRoutes

__all__ = [
    "Carrier",
    "GlooCarrier",
    "NCCLCarrier",
    "ProcessGroupTransport",
    "SGLangGroupRoutes",
    "SGLangGroupTransport",
    "Servers",
    "TorchCarrier",
    "VLLMGroupRoutes",
    "VLLMGroupTransport",
]
