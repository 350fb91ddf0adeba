"""Bugs of the output head's products and passes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

_PASSES = "unit/logprobs/test_head_passes.py::"


@mutant("areal.utils.functional.product:product", f"{_PASSES}test_bf16_logits_are_not_rounded")
def products_rounded_to_operands(right: Function) -> Function:
    """A product is rounded to the dtype of its operands."""

    def wrong(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
        result: Tensor = right(a, b, *args, **options)
        return result.copy_(result.bfloat16()) if result.dtype.itemsize == 4 else result

    return wrong


@mutant("areal.utils.functional.product:add_product", f"{_PASSES}test_sums_of_gradients_are_not_rounded[False]")
def gradients_rounded_before_they_are_added(right: Function) -> Function:
    """The product of a chunk is rounded before it is added to the gradient of the weight."""
    return lambda total, a, b: total.add_((a.to(total.dtype) @ b.to(total.dtype)).bfloat16())


@mutant(
    "areal.utils.functional.chunked_head:_Gradients._rounded",
    f"{_PASSES}test_16_bit_products_give_the_gradients[extra0-False-3-0]",
)
def repeated_targets_count_once(right: Function) -> Function:
    """With 16-bit operands, a token that is a target several times gets the gradient of one of them."""

    def wrong(self: Any, chunks: Any, rows: slice, p: Tensor, scale: Tensor, local: Tensor) -> Tensor:
        ids = self.ids[rows]
        values = p.gather(1, ids) * scale + local
        return p.mul_(scale).scatter_(1, ids, values).to(chunks.dtypes.results)

    return wrong


@mutant(
    "areal.utils.functional.chunked_head:_Chunks._write",
    f"{_PASSES}test_passes_over_a_chunk_are_bounded[number-None-0-dtype0]",
)
def temperature_in_a_pass_of_its_own(right: Function) -> Function:
    """Logits are scaled after their product."""
    return lambda self, rows, *buffer: right(self, rows, *buffer).mul_(1.0)


@mutant(
    "areal.utils.functional.vocab_parallel:VocabShard.merge",
    "dist/parallel/test_vocab_parallel.py::test_vocab_parallel_head_equals_full_head[w2-*]",
)
def shard_without_its_probability(right: Function) -> Function:
    """The backward takes the softmax over the rows of one rank for that over the vocabulary."""

    def wrong(self: Any, *args: Any) -> Any:
        lse, _, entropy, picked = right(self, *args)
        return lse, None, entropy, picked

    return wrong
