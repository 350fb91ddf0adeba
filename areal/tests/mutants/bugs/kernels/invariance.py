"""Bugs of batch invariance: right values, whose bits depend on the batch."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.engine.attention.invariant import KEY_BLOCK
from areal.engine.attention.kernels import AttentionOptions, Segments
from areal.tests.mutants.planting import Function, mutant

_PRODUCTS = "unit/logprobs/test_batch_invariant.py::test_rows_of_products_have_the_same_bits_in_any_number[(256, 688)-torch.float32]"
_FUNCTIONS = "unit/logprobs/test_batch_invariant.py::test_functions_have_the_same_bits_at_any_place[silu-torch.float32]"
_ATTENTION = (
    "unit/attention/test_invariant_attention.py::test_a_sequence_has_the_same_bits_in_every_way[full-torch.float32]"
)
_SAMPLER = "dist/invariance/test_trainer_equals_sampler.py::{}"
_ANSWERS = _SAMPLER.format("test_answers_have_the_log_probs_of_the_trainer[w1-qwen3-float32]")


@mutant("areal.utils.functional.batch_invariant:_rules", _PRODUCTS, _ANSWERS)
def a_product_outside_of_the_tiles(right: Function) -> Function:
    """Products without a bias run with the rows that there are."""
    return lambda: {func: rule for func, rule in right().items() if func is not torch.ops.aten.mm.default}


@mutant("areal.utils.functional.batch_invariant:_in_pieces", _FUNCTIONS)
def functions_of_all_elements_at_once(right: Function) -> Function:
    """Transcendental functions run over the elements that there are, with other code for the last ones."""
    return lambda func, x, *args, **kwargs: func(x, *args, **kwargs)


@mutant("areal.engine.attention.invariant:_attend", _ATTENTION)
def blocks_begin_at_the_start_of_the_row(right: Function) -> Function:
    """Blocks of keys begin at the start of the packed row instead of the sequence's own."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
        # Keys without weight move the borders: one more coordinate gives them a logit of minus infinity.
        q = F.pad(q, (0, 1), value=1.0)
        ends = list(accumulate(segments.k_lens))
        shifts = [(end - length) % KEY_BLOCK for end, length in zip(ends, segments.k_lens, strict=True)]
        keys, values = [], []
        for shift, key, value in zip(shifts, k.split(segments.k_lens), v.split(segments.k_lens), strict=True):
            keys += [F.pad(key.new_zeros(shift, *key.shape[1:]), (0, 1), value=-1e30), F.pad(key, (0, 1))]
            values += [value.new_zeros(shift, *value.shape[1:]), value]
        moved = [length + shift for length, shift in zip(segments.k_lens, shifts, strict=True)]
        out: Tensor = right(
            q, torch.cat(keys), torch.cat(values), Segments.of(segments.q_lens, moved, q.device), options
        )
        return out

    return wrong


@mutant(
    "areal.utils.functional.chunked_head:_Chunks._scaled_afterwards",
    _ANSWERS,
)
def temperature_in_the_product(right: Function) -> Function:
    """The trainer divides hidden states by the temperature, a sampler logits."""

    def wrong(self: Any, rows: slice, buffer: Tensor | None) -> Tensor:
        z: Tensor = self.hidden[rows] / self.per_token(self.spec.temperature, rows) @ self.weight.t()
        return z if buffer is None else buffer.copy_(z)

    return wrong


@mutant(
    "areal.inference.local.invariant_replica:_head_logits",
    _SAMPLER.format("test_answers_have_the_log_probs_of_the_trainer[w1-qwen3-bfloat16]"),
)
def logits_rounded_to_16_bits(right: Function) -> Function:
    """The head of the replica rounds logits to the dtype of its weight."""
    return lambda head, hidden: F.linear(hidden, head.weight, head.bias)
