"""Rollout engine on servers of vLLM or SGLang, over HTTP."""

from areal.inference.http.rollout import HTTPRollout
from areal.inference.http.servers.dialect import Dialect
from areal.inference.http.servers.sglang import SGLang
from areal.inference.http.servers.vllm import VLLM

__all__ = ["VLLM", "Dialect", "HTTPRollout", "SGLang"]
