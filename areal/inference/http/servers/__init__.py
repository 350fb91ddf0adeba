"""Kinds of inference servers: their requests and replies."""

from areal.inference.http.servers.dialect import Dialect
from areal.inference.http.servers.sglang import SGLang
from areal.inference.http.servers.vllm import VLLM

__all__ = ["VLLM", "Dialect", "SGLang"]
