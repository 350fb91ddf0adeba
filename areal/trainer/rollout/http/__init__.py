"""Rollout engine on servers of vLLM or SGLang, over HTTP."""

from areal.trainer.rollout.http.client import HTTPRollout
from areal.trainer.rollout.http.dialects.dialect import Dialect
from areal.trainer.rollout.http.dialects.sglang import SGLang
from areal.trainer.rollout.http.dialects.vllm import VLLM

__all__ = ["VLLM", "Dialect", "HTTPRollout", "SGLang"]
