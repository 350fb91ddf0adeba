"""Rollout engine on servers of vLLM or SGLang, over HTTP. Its names are imported when they are first used: client processes need few."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.inference.http.rollout import HTTPRollout as HTTPRollout
    from areal.inference.http.servers.dialect import Dialect as Dialect
    from areal.inference.http.servers.sglang import SGLang as SGLang
    from areal.inference.http.servers.vllm import VLLM as VLLM

_HOMES = {
    "Dialect": "areal.inference.http.servers.dialect",
    "HTTPRollout": "areal.inference.http.rollout",
    "SGLang": "areal.inference.http.servers.sglang",
    "VLLM": "areal.inference.http.servers.vllm",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'areal.inference.http' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
