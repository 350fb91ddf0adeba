"""Bugs of pipelines and expert parallelism on the FSDP engine that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

FILE = "dist/parallel/test_pipeline.py::"
LOOK = FILE + "test_reading_gradients_then_accumulating_counts_each_once[{}]"
COPIES = FILE + "test_copies_of_tied_embedding_stay_bitwise_equal[float32-{}]"
ONCE = FILE + "test_pipeline_call_reduces_each_group_once[{}]"
NO_TOKEN = "dist/parallel/test_expert_parallel.py::test_expert_parallel_rank_without_tokens[e2]"
SIGMOID = "dist/parallel/test_moe.py::test_deepseek_routers_are_recorded[{}]"


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


@mutant("areal.engine.fsdp.pipeline.model_chunks:ModelChunks.copies", LOOK.format("1F1B"))
def copies_count(right: Function) -> Function:
    """The second copy of a tied embedding is counted in the norm."""
    return lambda self: []


@mutant("areal.engine.fsdp.gradients:global_norm", LOOK.format("1F1B"))
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
