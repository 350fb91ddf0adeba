"""Bugs of shared prefixes that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.tests.mutants.planting import Function, mutant

OUTPUTS = "dist/step/test_shared_prefixes.py::test_shared_prefixes_give_equal_outputs_and_gradients[{}]"
TREE = "unit/data/test_prefixes.py::test_stream_contains_every_prefix_once"
EXPERTS = "dist/parallel/test_moe_layouts.py::test_shared_prefix_counts_per_sequence_in_routers[{}-{}]"


@mutant("areal.utils.data.prefixes:Prefixes.shared", TREE, OUTPUTS.format("fsdp:d1"))
def one_token_too_many(right: Function) -> Function:
    """Sequences share their first different token too."""

    def wrong(self: Any, a: int, b: int) -> int:
        return min(right(self, a, b) + 1, len(self._rows[a]), len(self._rows[b]))

    return wrong


@mutant(
    "areal.engine.attention.token_stream:TokenStream.positions",
    OUTPUTS.format("fsdp:d1"),
    OUTPUTS.format("megatron:d1"),
)
def branches_begin_at_0(right: Function) -> Function:
    """A branch attends to its local tokens only, as if it were a complete sequence."""
    return lambda self: right(type(self)(self.lengths, self.lengths))


@mutant("areal.engine.attention.kernels:TakeRows.backward", OUTPUTS.format("fsdp:d1"))
def the_last_sequence_wins(right: Function) -> Function:
    """A shared row gets the gradient of one of its readers instead of all."""

    def wrong(ctx: Any, *grads: Any) -> Any:
        shape, dtype = ctx.like
        total = grads[0].new_zeros(shape, dtype=dtype)
        total[ctx.index] = grads[0]
        return total, None

    return wrong


@mutant("areal.engine.attention.context_parallel:ContextParallel.gathered_index", OUTPUTS.format("fsdp:c2-gather_kv"))
def rows_of_another_rank(right: Function) -> Function:
    """Outputs of a zig-zag slice are looked up at the positions of a contiguous one."""
    return lambda self, positions, length: positions


@mutant("areal.utils.data.prefixes:Prefixes.tree", OUTPUTS.format("fsdp:d1"))
def one_answer_for_all(right: Function) -> Function:
    """Sequences that share a token get the same output even if they request different ones."""

    def wrong(self: Any, samples: Any, asked: Any) -> Any:
        return right(self, samples, [torch.zeros_like(x) for x in asked])

    return wrong


@mutant(
    "areal.engine.moe.routing:Routing._all_tokens", EXPERTS.format("fsdp:d1", ""), EXPERTS.format("megatron:d1", "")
)
def a_shared_token_counts_once(right: Function) -> Function:
    """The gradient of the balancing loss counts a shared token only once."""

    def wrong(self: Any, x: Tensor) -> Tensor:
        all_tokens = right(self, x)
        tree = self.mb.tree
        if tree is None:
            return all_tokens
        first = torch.zeros(len(all_tokens), dtype=torch.bool).index_fill(0, tree.tokens, True)
        return torch.where(first[:, None], all_tokens, all_tokens.detach())

    return wrong


@mutant("areal.utils.data.prefixes:_integers", EXPERTS.format("fsdp:d1", ""))
def routing_is_not_told_apart(right: Function) -> Function:
    """Tokens that are routed to different experts are shared."""
    return lambda tensors: right(tensors[:1])
