"""Bugs of layers that call Liger's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from areal.engine.model.fused_layers import LayerFunctions
from areal.tests.mutants.planting import Function, mutant

LIGER = "unit/engine/layers/test_liger.py::"
FORMULAS = LIGER + "test_model_calls_liger_with_the_formula_of_its_family*"


@mutant("areal.engine.model.liger:layer_functions", LIGER + "test_rotation_does_not_change_its_inputs")
def liger_rotates_the_projections_in_place(right: Function) -> Function:
    """Queries and keys are rotated in the memory of the projections, which selective checkpointing keeps."""

    def wrong(ops: Any) -> LayerFunctions:
        return replace(
            right(ops), apply_rotary_pos_emb=lambda q, k, cos, sin, *_: ops.LigerRopeFunction.apply(q, k, cos, sin)
        )

    return wrong


@mutant("areal.engine.model.liger:layer_functions", FORMULAS.replace("*", "[gemma3_text-norm1]"))
def liger_norm_without_its_offset(right: Function) -> Function:
    """The norm of Gemma multiplies by the weight instead of one plus the weight."""

    def wrong(ops: Any) -> LayerFunctions:
        functions = right(ops)

        def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, **options: Any) -> torch.Tensor:
            return functions.rms_norm(x, weight, eps, **{**options, "offset": 0.0})

        return replace(functions, rms_norm=norm)

    return wrong


@mutant(
    "areal.engine.model.liger:liger_functions", LIGER + "test_refusals_name_the_way_out", LIGER + "test_engine_ref*"
)
def liger_runs_on_any_device(right: Function) -> Function:
    """A CPU is taken for a GPU, and a family without known formulas for one with them."""
    return lambda model_type, device: right("llama", torch.device("cuda"))


@mutant("areal.engine.model.fused_layers:fuse_layers", LIGER + "test_engine_trains_with_liger_if_asked*", FORMULAS)
def chosen_kernels_are_ignored(right: Function) -> Function:
    """Layers always call the functions of torch."""
    return lambda model, model_type, functions=None: right(model, model_type)
