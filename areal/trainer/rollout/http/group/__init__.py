"""Weights over a process group into inference servers: the trainer is rank 0, the workers of all servers are the others."""

from areal.trainer.rollout.http.dialects.sglang_group import SGLangGroupRoutes
from areal.trainer.rollout.http.dialects.vllm_group import VLLMGroupRoutes
from areal.trainer.rollout.http.group.carrier import Carrier
from areal.trainer.rollout.http.group.gloo_carrier import GlooCarrier
from areal.trainer.rollout.http.group.nccl_carrier import NCCLCarrier
from areal.trainer.rollout.http.group.servers import Servers
from areal.trainer.rollout.http.group.torch_carrier import TorchCarrier
from areal.trainer.rollout.http.group.transport import ProcessGroupTransport, SGLangGroupTransport, VLLMGroupTransport

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
