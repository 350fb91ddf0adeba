"""Bugs of tensor parallelism on the FSDP engine that the suite must catch, as in :mod:`areal.tests.mutants.step`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

LOOP = "dist/step/test_steps.py::test_custom_loop_equals_train_batch[fsdp:t2]"
BITS = "dist/parallel/test_tensor_parallel.py::test_replicated_weights_stay_bitwise_equal[fsdp:t2]"


@mutant("areal.utils.dtensor:local_part", BITS)
def norms_of_own_tokens(right: Function) -> Function:
    """The gradient of a norm is not reduced over ranks."""
    return lambda tensor, gradient=None: right(tensor)


@mutant("areal.utils.collectives:GatherRows.backward", LOOP)
def own_columns_gradient(right: Function) -> Function:
    """The gradient of gathered tokens covers this rank's columns only."""

    def wrong(ctx: Any, *grads: Any) -> Any:
        rank, size = ctx.group.rank(), ctx.group.size()
        return grads[0].chunk(size)[rank].contiguous(), None

    return wrong


@mutant("areal.engine.fsdp.gradients:_shard_groups", LOOP)
def norm_of_half_the_weights(right: Function) -> Function:
    """The gradient norm omits the shards of other tensor-parallel ranks."""
    return lambda grad: right(grad)[:-1]


@mutant("areal.engine.fsdp.tensor_parallel:split_tensors", LOOP)
def head_gradient_summed(right: Function) -> Function:
    """The gradient of the last hidden state, which is complete on every rank, is summed over ranks."""

    def wrong(model: Any, mesh: Any) -> None:
        right(model, mesh)
        norm, size = model.hf.model.norm, mesh.size()
        inner = norm.forward

        def forward(x: Tensor) -> Tensor:
            out: Tensor = inner(x)
            return out + (size - 1) * (out - out.detach())

        norm.forward = forward

    return wrong


@mutant("areal.engine.fsdp.tensor_parallel:split_tensors", LOOP)
def first_rows_only(right: Function) -> Function:
    """Every rank looks up tokens as if it had the first rows of the vocabulary."""

    def wrong(model: Any, mesh: Any) -> None:
        right(model, mesh)
        table = model.hf.model.embed_tokens
        inner, offset = table.forward, mesh.get_local_rank() * table.weight.to_local().shape[0]
        table.forward = lambda ids: inner(ids + offset)

    return wrong
