"""Models that generate: a local one, or servers of vLLM or SGLang, behind one interface.

The names below are imported when they are first used: what a trainer needs of this package is small, the local model is not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.inference.http.rollout import HTTPRollout as HTTPRollout
    from areal.inference.http.servers.dialect import Dialect as Dialect
    from areal.inference.http.servers.sglang import SGLang as SGLang
    from areal.inference.http.servers.vllm import VLLM as VLLM
    from areal.inference.local.rollout import LocalRollout as LocalRollout
    from areal.inference.protocol import Completion as Completion
    from areal.inference.protocol import FinishReason as FinishReason
    from areal.inference.protocol import RolloutClient as RolloutClient
    from areal.inference.protocol import Sampling as Sampling
    from areal.inference.protocol import TopTokens as TopTokens
    from areal.utils.data.image_prompt import ImagePrompt as ImagePrompt

_HOMES = {
    "Completion": "areal.inference.protocol",
    "Dialect": "areal.inference.http.servers.dialect",
    "FinishReason": "areal.inference.protocol",
    "HTTPRollout": "areal.inference.http.rollout",
    "ImagePrompt": "areal.utils.data.image_prompt",
    "LocalRollout": "areal.inference.local.rollout",
    "RolloutClient": "areal.inference.protocol",
    "SGLang": "areal.inference.http.servers.sglang",
    "Sampling": "areal.inference.protocol",
    "TopTokens": "areal.inference.protocol",
    "VLLM": "areal.inference.http.servers.vllm",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.inference' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
