"""Rollout engine on servers of vLLM or SGLang, over HTTP."""

from areal.trainer.rollout.http.client import HTTPRollout
from areal.trainer.rollout.http.dialects import VLLM, Dialect, SGLang

__all__ = ["VLLM", "Dialect", "HTTPRollout", "SGLang"]
