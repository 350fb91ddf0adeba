"""Kinds of inference servers: their requests and replies."""

from areal.trainer.rollout.http.dialects.dialect import Dialect
from areal.trainer.rollout.http.dialects.sglang import SGLang
from areal.trainer.rollout.http.dialects.vllm import VLLM

__all__ = ["VLLM", "Dialect", "SGLang"]
