"""Bugs of attention with sinks, and of the choice of its kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

_TESTS = "unit/attention/test_sinks.py::"
_EXACT = f"{_TESTS}test_corrected_kernel_equals_attention_with_sinks[0.0-None-dims0-gqa-same]"


@mutant("areal.engine.attention.sinks:SinkAttention.forward", _EXACT)
def sinks_missing_in_the_result(right: Function) -> Function:
    """The kernel's result is not scaled by the share of the softmax that the sinks leave."""

    def wrong(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Any) -> Tensor:
        right(ctx, q, k, v, sinks, kernel)
        out: Tensor = kernel.forward(q, k, v)[0]
        return out

    return wrong


@mutant("areal.engine.attention.sinks:SinkAttention.backward", _EXACT)
def backward_without_sinks(right: Function) -> Function:
    """The kernel's backward gets the log-sum-exp without the sinks."""

    def wrong(ctx: Any, grad: Tensor) -> Any:
        q, k, v, _, out, _, state = ctx.saved_tensors
        _, lse, _ = ctx.kernel.forward(q, k, v)
        return (*ctx.kernel.backward(grad, q, k, v, out, lse, state), right(ctx, grad)[3], None)

    return wrong


@mutant("areal.engine.attention.sinks:SinkAttention.backward", _EXACT)
def gradient_of_sinks_of_the_kernels_result(right: Function) -> Function:
    """The gradient of the sinks is that of the kernel's result, before it is scaled."""

    def wrong(ctx: Any, grad: Tensor) -> Any:
        q, k, v, sinks, _, total, _ = ctx.saved_tensors
        out, _, _ = ctx.kernel.forward(q, k, v)
        weight = (sinks.unsqueeze(1) - total).exp()
        return (*right(ctx, grad)[:3], -(weight * (grad * out).sum(2).t()).sum(1), None)

    return wrong


@mutant(
    "areal.engine.attention.capability:compute_capability",
    f"{_TESTS}test_amd_gpus_have_no_compute_capability",
)
def capability_of_any_gpu(right: Function) -> Function:
    """The version of an AMD GPU is taken for a compute capability."""
    return lambda device: torch.cuda.get_device_capability(device)


@mutant(
    "areal.engine.attention.capability:runs_varlen",
    f"{_TESTS}test_unsupported_gpus_fall_back_with_one_warning[cc0-dtype0-64-compute capability 7.5]",
)
def capability_not_checked(right: Function) -> Function:
    """Flash attention is called on a GPU that it has no kernels for."""
    return lambda device, dtype, head_dim: device.type == "cuda"
