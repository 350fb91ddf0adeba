"""Bugs of layers with a hand-written backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.engine.model import fused_layers
from areal.tests.mutants.planting import Function, mutant

LAYERS = "unit/engine/layers/test_layer_functions.py::"
PARITY = LAYERS + "test_fused_models_agree_with_transformers_in_float64[qwen3]"


@mutant("areal.engine.model.fused_layers:_inverse_rms", LAYERS + "test_gradient_of_the_norm*", PARITY)
def eps_outside_of_the_root(right: Function) -> Function:
    """The norm adds its eps to the root of the mean instead of the mean."""

    def wrong(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        return 1 / (x.to(dtype).square().mean(-1, keepdim=True).sqrt() + eps)

    return wrong


@mutant("areal.engine.model.fused_layers:rms_norm", LAYERS + "test_norm_of_a_gpu_agrees_with_transformers*")
def eps_of_the_kernel(right: Function) -> Function:
    """On a GPU the norm runs with the default eps of PyTorch's kernel instead of the model's."""

    def wrong(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        return right(x, weight, torch.finfo(x.dtype).eps if fused_layers._has_kernel(x, weight) else eps, **options)

    return wrong


@mutant("areal.engine.model.fused_layers:_grad_x", LAYERS + "test_gradient_of_the_norm*", PARITY)
def norm_backward_without_the_mean(right: Function) -> Function:
    """The norm's backward treats the root mean square as a constant."""
    return lambda grad_normed, normed, sums, rstd: grad_normed * rstd


@mutant("areal.engine.model.fused_layers:silu_product", LAYERS + "test_gradient_of_the_gate", PARITY)
def gate_and_up_exchanged(right: Function) -> Function:
    """The activation is applied to the wrong projection."""
    return lambda gate, up: right(up, gate)


@mutant("areal.engine.model.fused_layers:_rotate", LAYERS + "test_gradient_of_the_rotation*", PARITY)
def rotation_backward_in_the_same_direction(right: Function) -> Function:
    """The backward of the rotary embedding rotates as the forward."""
    return lambda x, cos, sin, sign, *out: right(x, cos, sin, 1, *out)


@mutant(
    "areal.engine.model.fused_layers:fuse_layers", LAYERS + "test_layer_runs_few_operations_on_a_gpu[qwen3]", PARITY
)
def layers_of_transformers_kept(right: Function) -> Function:
    """No layer is replaced."""
    return lambda model, model_type: 0


@mutant(
    "areal.engine.fsdp.compile:_recomputing",
    "unit/engine/test_activation_checkpointing.py::test_compiled_layers_recompute_all_but_products",
)
def compiled_layers_keep_cheap_results(right: Function) -> Function:
    """Selective checkpointing changes nothing in compiled layers."""
    return lambda backend: backend


@mutant(
    "areal.engine.fsdp.parallelize:_gather_ahead",
    "dist/parallel/test_expert_parallel.py::test_weights_of_the_next_layer_are_gathered_before_a_layer_computes[*]",
)
def layers_gathered_when_they_begin(right: Function) -> Function:
    """Weights of a layer are gathered when it begins, while the device has nothing to compute."""
    return lambda layers: None
