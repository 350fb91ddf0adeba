"""Bugs of recurrent layers that the suite must catch: states and convolutions that pass over borders, or stop at others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from areal.engine.recurrence import functions
from areal.tests.mutants.planting import Function, mutant
from areal.utils.dtensor import local_part

ALONE = "dist/parallel/test_recurrent_layers.py::test_packed_sequences_are_those_of_transformers[w1-{}]"
REFUSED = "dist/parallel/test_recurrent_layers.py::test_layouts_that_cannot_carry_the_state_are_refused[w2-chain]"
KERNEL = "unit/engine/recurrence/test_recurrent_kernels.py::test_{}"
SPLIT = "dist/parallel/test_recurrent_layers.py::test_tensor_parallel_ranks_compute_the_same[{}]"
LAYOUT = "dist/parallel/test_recurrent_layers.py::test_layouts_compute_the_same[{}]"


@mutant(
    "areal.engine.recurrence.chunks:_before",
    ALONE.format("qwen3_next"),
    ALONE.format("nemotron_h"),
    ALONE.format("mamba"),
    ALONE.format("lfm2"),
)
def state_leaks_over_a_border(right: Function) -> Function:
    """States and convolutions go on into the next sequence."""
    return lambda stream: torch.arange(-1, len(stream) - 1)


@mutant("areal.engine.recurrence.chunks:_contexts", ALONE.format("qwen3_next"), ALONE.format("kimi_linear"))
def borders_reach_one_of_two_operations(right: Function) -> Function:
    """The state begins anew with a sequence, and the convolution before it does not."""
    return lambda before, context: right(torch.arange(-1, len(before) - 1), context)


@mutant("areal.engine.recurrence.chunks:RunChunks.scan", ALONE.format("qwen3_next"), ALONE.format("mamba2"))
def every_chunk_begins_anew(right: Function) -> Function:
    """No state passes from a chunk to the next one."""
    return lambda self, step, start: start.expand(sum(self.counts), *start.shape)


@mutant(
    "areal.engine.recurrence.chunks:_before", LAYOUT.format("qwen3_next-d1-shared"), LAYOUT.format("lfm2-d1-shared")
)
def branch_starts_from_the_wrong_run(right: Function) -> Function:
    """A branch goes on from the end of the run in front of it, instead of from its prefix."""

    def wrong(stream: Any) -> Tensor:
        before = right(stream)
        return torch.where(before < 0, before, torch.arange(-1, len(before) - 1))

    return wrong


@mutant(
    "areal.engine.recurrence.functions:_Replaced.__call__",
    LAYOUT.format("qwen3_next-c2-ulysses"),
    LAYOUT.format("lfm2-c2-ulysses"),
)
def convolution_restarts_at_a_border_of_ranks(right: Function) -> Function:
    """Each rank convolves its own tokens, as if they were all."""

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        layout = functions._running.get()
        if layout is not None and layout.cp.size > 1 and self.__name__ == "causal_conv1d_fn":
            return self._original(*args, **options)
        return right(self, *args, **options)

    return wrong


@mutant("areal.engine.recurrence.head_exchange:zigzag_restore", LAYOUT.format("qwen3_next-c2-gather_kv"))
def stream_of_heads_in_the_order_of_ranks(right: Function) -> Function:
    """Recurrent layers see the tokens in the order of the ranks, not of the stream."""
    return lambda stream, size: stream


@mutant("areal.engine.recurrence.head_exchange:HeadExchange.part", LAYOUT.format("nemotron_h-c2-ulysses"))
def decay_of_other_heads(right: Function) -> Function:
    """Every rank takes the weights of the first rank's heads."""
    return lambda self, weight: weight.chunk(self._cp.size)[0]


@mutant(
    "areal.engine.torch.pipeline_split:_is_equal",
    REFUSED,
)
def later_stages_lack_the_embedding(right: Function) -> Function:
    """A decoder whose layers see its input is cut into stages."""
    return lambda value, x: False


@mutant(
    "areal.engine.recurrence.functions:running_layout",
    ALONE.format("minimax"),
    ALONE.format("recurrent_gemma"),
    ALONE.format("rwkv"),
    ALONE.format("xlstm"),
)
def layers_do_not_see_the_rows(right: Function) -> Function:
    """Layers without a function that could be replaced run the packed stream as one sequence."""
    return lambda: None


@mutant("areal.engine.recurrence.chunks:RunChunks.join", ALONE.format("minimax"), ALONE.format("rwkv"))
def rows_are_joined_one_place_late(right: Function) -> Function:
    """A token gets the result of the token after it."""
    return lambda self, chunks: right(self, chunks.roll(-1, 1))


@mutant(
    "areal.engine.fsdp.tensor_parallel:TensorParallel.rows_of_each",
    SPLIT.format("qwen3_5_text-t2"),
    SPLIT.format("lfm2-t2"),
)
def rows_of_the_whole_stack(right: Function) -> Function:
    """A rank computes consecutive rows of a weight that is several matrices, as if it were one."""

    def wrong(self: Any, sizes: Any) -> list[slice]:
        n = sum(sizes) // self.size
        return [slice(self.rank * n, (self.rank + 1) * n)]

    return wrong


@mutant("areal.engine.fsdp.tensor_parallel:TensorParallel.replicate", SPLIT.format("nemotron_h-t2"))
def kernel_gradient_of_one_rank(right: Function) -> Function:
    """The gradient of a kernel, of which each rank computes some channels, is not summed over ranks."""

    def wrong(self: Any, module: Any) -> Any:
        local = right(self, module)
        return local_part if isinstance(module, nn.Conv1d) else local

    return wrong


@mutant(
    "areal.engine.recurrence.kernels:_delta_rule",
    KERNEL.format("delta_rule_of_flash_linear_attention[gated-sequences]"),
)
def borders_reach_the_convolution_alone(right: Function) -> Function:
    """The kernel of a convolution gets the borders of sequences, and that of the delta rule does not."""

    def wrong(packages: Any, chunks: Any, q: Tensor, *args: Any, **options: Any) -> Any:
        return right(packages, dataclasses.replace(chunks, cu_seqlens=torch.tensor([0, len(q)])), q, *args, **options)

    return wrong


@mutant("areal.engine.recurrence.chunks:_borders", KERNEL.format("scan_of_mamba_ssm[branches]"))
def branches_begin_anew_in_kernels(right: Function) -> Function:
    """Kernels compute streams with shared prefixes, too: a branch begins without the state of its prefix."""

    def wrong(before: Tensor) -> Any:
        anew = before.clone()
        anew[before != torch.arange(len(before)) - 1] = -1
        return right(anew)

    return wrong
