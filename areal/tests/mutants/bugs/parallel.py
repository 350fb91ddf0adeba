"""Bugs of tensor, pipeline and expert parallelism on the FSDP engine, of numbers that ranks do not divide, and of weights that files store
in another order, that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial

from areal.tests.mutants.planting import Function, mutant
from areal.utils.dtensor import local_part

LOOP = "dist/step/test_steps.py::test_custom_loop_equals_train_batch[fsdp:t2]"
BITS = "dist/parallel/test_tensor_parallel.py::test_replicated_weights_stay_bitwise_equal[fsdp:t2]"
TENSOR_PARALLEL = "dist/parallel/test_tensor_parallel.py::"
OUTPUTS = TENSOR_PARALLEL + "test_uneven_vocabulary_computes_every_output*"
KEY_HEADS = TENSOR_PARALLEL + "test_fewer_key_heads_than_ranks*"


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


@mutant("areal.engine.optimizer:_shard_groups", LOOP)
def norm_of_half_the_weights(right: Function) -> Function:
    """The gradient norm omits the shards of other tensor-parallel ranks."""
    return lambda grad: right(grad)[:-1]


@mutant("areal.engine.fsdp.tensor_plans:split_tensors", LOOP)
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


@mutant("areal.engine.fsdp.tensor_plans:split_tensors", LOOP)
def first_rows_only(right: Function) -> Function:
    """Every rank looks up tokens as if it had the first rows of the vocabulary."""

    def wrong(model: Any, mesh: Any) -> None:
        right(model, mesh)
        table = model.hf.model.embed_tokens
        inner, offset = table.forward, mesh.get_local_rank() * table.weight.to_local().shape[0]
        table.forward = lambda ids: inner(ids + offset)

    return wrong


@mutant("areal.utils.functional.vocab_parallel:VocabShard.localize", OUTPUTS)
def last_offset_of_even_vocabulary(right: Function) -> Function:
    """The first token id of the last rank is computed from its own number of rows."""

    def wrong(self: Any, ids: Tensor) -> Any:
        return right(dataclasses.replace(self, start=dist.get_rank(self.group) * self.rows), ids)

    return wrong


@mutant("areal.engine.fsdp.tensor_plans:split_tensors", OUTPUTS)
def last_embedding_of_even_vocabulary(right: Function) -> Function:
    """The first token id in the last rank's embedding is computed from its own number of rows."""

    def wrong(model: Any, mesh: Any) -> None:
        right(model, mesh)
        table, rank = model.hf.model.embed_tokens, mesh.get_local_rank()
        inner, size = table.forward, table.weight.shape[0]
        off = rank * (-(-size // mesh.size()) - table.weight.to_local().shape[0])
        table.forward = lambda ids: inner((ids + off).clamp(max=size - 1))

    return wrong


@mutant("areal.utils.functional.chunked_head:_largest", OUTPUTS)
def filler_among_the_largest(right: Function) -> Function:
    """A rank with fewer rows than k fills its largest logits with a large number."""

    def wrong(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, columns = right(z, k)
        return values.nan_to_num(neginf=values.max().item()), columns

    return wrong


@mutant(
    "areal.engine.fsdp.parallelize:_evenly",
    TENSOR_PARALLEL + "test_uneven_vocabulary_loads_streams_and_saves[llama-fsdp:t2]",
)
def uneven_rows_divided_again(right: Function) -> Function:
    """FSDP shards rows that tensor-parallel ranks have in different numbers."""
    return lambda parameter: None


def _replicated_heads(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "computed_rows")]


@mutant("areal.engine.fsdp.tensor_plans:split_tensors", KEY_HEADS)
def key_head_gradient_of_one_rank(right: Function) -> Function:
    """The gradient of a key head is not summed over the ranks that compute it."""

    def wrong(model: Any, mesh: Any) -> None:
        right(model, mesh)
        for module in _replicated_heads(model):
            module.forward = lambda x, module=module: F.linear(x, local_part(module.weight)[module.computed_rows[0]])

    return wrong


@mutant("areal.engine.fsdp.tensor_plans:split_tensors", KEY_HEADS)
def neighbours_key_head(right: Function) -> Function:
    """Neighbouring ranks compute different key heads."""

    def wrong(model: Any, mesh: Any) -> None:
        right(model, mesh)
        for module in _replicated_heads(model):
            width = module.computed_rows[0].stop - module.computed_rows[0].start
            start = mesh.get_local_rank() % (len(module.weight) // width) * width
            rows = slice(start, start + width)
            module.forward = lambda x, module=module, rows=rows: F.linear(x, local_part(module.weight, Partial())[rows])

    return wrong


@mutant("areal.engine.optimizer:_shard_groups", KEY_HEADS)
def norm_of_every_copy(right: Function) -> Function:
    """The gradient norm counts a replicated key head once for each rank."""

    def wrong(grad: Any) -> Any:
        mesh = grad.device_mesh
        copies = [mesh.get_group(axis) for axis, place in enumerate(grad.placements) if place.is_replicate()]
        return (*right(grad), *(copies if grad.dim() == 2 else ()))

    return wrong


@mutant("areal.engine.fsdp.lora:_tensor_parallel_split", {"layout": "fsdp:t2", "options": "lora"})
def adapter_gradient_of_one_rank(right: Function) -> Function:
    """The gradient of an adapter on a replicated key head is not summed over ranks."""

    def wrong(linear: Any, tp: Any) -> Any:
        split = right(linear, tp)
        return split if split.up_rows is None else dataclasses.replace(split, up_summed=False)

    return wrong


@mutant(
    "areal.engine.fsdp.expert_parallel:_DispatchedExperts._compute",
    "dist/parallel/test_expert_parallel.py::test_uneven_experts_agree_with_the_reference*deepseek_v3*float64*",
)
def first_expert_of_even_experts(right: Function) -> Function:
    """The first expert of the last rank is computed from its own number of experts."""

    def wrong(self: Any, rows: Tensor, local: Tensor) -> Any:
        off = dist.get_rank(self._group) * (self._per_rank - self._experts.num_experts)
        return right(self, rows, (local + off).clamp(max=self._experts.num_experts - 1))

    return wrong


REARRANGED = (
    "dist/checkpoint/test_rearranged_weights.py::test_weights_gradients_and_files_equal_those_of_transformers[{}]"
)


@mutant("areal.engine.checkpoint.tensor_layout:_subslice", REARRANGED.format("fsdp:e2-inkling2_text"))
def interleaved_rows_read_in_order(right: Function) -> Function:
    """Interleaved rows of a file are read as if they followed each other."""
    return lambda outer, inner: right(slice(outer.start, outer.stop), inner)


@mutant("areal.engine.checkpoint.tensor_layout:DiskTensor.overlap", REARRANGED.format("fsdp:d2-hrm_text"))
def merged_weight_read_from_the_start(right: Function) -> Function:
    """All weights that a tensor on disk is merged from are read from its first rows."""
    return lambda self, box: right(dataclasses.replace(self, index=None), box)


# ---- pipelines and experts

PIPELINE = "dist/parallel/test_pipeline.py::"
LOOK = PIPELINE + "test_reading_gradients_then_accumulating_counts_each_once[{}]"
COPIES = PIPELINE + "test_copies_of_tied_embedding_stay_bitwise_equal[float32-{}]"
ONCE = PIPELINE + "test_pipeline_call_reduces_each_group_once[{}]"
NO_TOKEN = "dist/parallel/test_expert_parallel.py::test_expert_parallel_rank_without_tokens[e2]"
SIGMOID = "dist/parallel/test_moe_layouts.py::test_deepseek_routers_are_recorded[{}]"


@mutant("areal.engine.fsdp.pipeline.schedule:_Stage._post_metadata_inference_cleanup", LOOK.format("1F1B"))
def a_call_drops_earlier_gradients(right: Function) -> Function:
    """A call discards the gradients of earlier calls, as torch's shape inference does."""

    def wrong(self: Any) -> None:
        for parameter in self.submod.parameters():
            parameter.grad = None

    return wrong


@mutant(
    "areal.engine.fsdp.pipeline.tied_embedding:TiedGradients.sum", LOOK.format("1F1B"), COPIES.format("ZBVZeroBubble")
)
def two_embeddings(right: Function) -> Function:
    """The copies of a tied embedding are not reduced over stages."""
    return lambda self: None


@mutant("areal.engine.fsdp.pipeline.tied_embedding:TiedGradients.before_backward", LOOK.format("ZBVZeroBubble"))
def a_tied_sum_is_summed_again(right: Function) -> Function:
    """A gradient that both stages have reduced is reduced again."""
    return lambda self: None


@mutant("areal.engine.torch.model_chunks:ModelChunks.copies", LOOK.format("1F1B"))
def copies_count(right: Function) -> Function:
    """The second copy of a tied embedding is counted in the norm."""
    return lambda self: []


@mutant("areal.engine.optimizer:global_norm", LOOK.format("1F1B"))
def the_norm_of_a_stage(right: Function) -> Function:
    """Each pipeline stage clips by its local gradient norm."""
    return lambda parameters, stages=None: right(parameters)


@mutant("areal.engine.fsdp.pipeline.schedule:_Stage.perform_reduce_grad", ONCE.format("1F1B"))
def never_reduced(right: Function) -> Function:
    """Deferred gradient reductions are never done."""
    return lambda self, factor: None


@mutant("areal.engine.fsdp.expert_parallel:Dispatch.combine", NO_TOKEN)
def results_in_another_order(right: Function) -> Function:
    """Results are returned in the order of arrival, last first."""
    return lambda self, rows: right(self, rows).flip(0)


@mutant("areal.engine.fsdp.expert_parallel:_DispatchedExperts.__call__", NO_TOKEN)
def unweighted_experts(right: Function) -> Function:
    """All experts of a token have equal weights."""

    def wrong(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return right(self, hidden, index, torch.full_like(weights, 1 / weights.shape[1]))

    return wrong


@mutant("areal.engine.moe.routing:Tally.add", SIGMOID.format("fsdp:e2"))
def softmax_of_sigmoid_routers(right: Function) -> Function:
    """Sigmoid routers are balanced as if their scores were a softmax."""

    def wrong(self: Any, *args: Any) -> Any:
        self._sigmoid = False
        return right(self, *args)

    return wrong
