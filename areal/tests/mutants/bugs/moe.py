"""Bugs of balancing losses that the suite must catch, as in :mod:`areal.tests.mutants.bugs.step`."""

from __future__ import annotations

from typing import Any

import torch

from areal.tests.mutants.planting import Function, mutant

BALANCING = "dist/parallel/test_moe.py::test_balancing_losses_are_loss_terms[{}]"


@mutant("areal.engine.moe.routing:_AddLoss.backward", BALANCING.format("fsdp:d1--whole"))
def balancing_gradient_twice(right: Function) -> Function:
    """The gradient of a balancing loss is attached twice."""

    def wrong(ctx: Any, *grads: Any) -> Any:
        grad, loss = right(ctx, *grads)
        return grad, 2 * loss

    return wrong


@mutant("areal.engine.moe.routing:Tally.add", BALANCING.format("fsdp:d1--cut"))
def recomputed_layer_counted_twice(right: Function) -> Function:
    """A layer that is recomputed is counted twice."""

    def wrong(self: Any, mb: Any, layer: int, *args: Any) -> Any:
        before = self._values.get((mb.index, layer), {})
        total = right(self, mb, layer, *args)
        values = self._values[mb.index, layer]
        self._values[mb.index, layer] = {name: value + before.get(name, 0) for name, value in values.items()}
        return total

    return wrong


@mutant("areal.engine.moe.routing:ExpertRouting.with_terms", BALANCING.format("fsdp:d1--cut"))
def balancing_divided_by_tokens(right: Function) -> Function:
    """The balancing loss is divided by tokens instead of sequences."""
    return lambda self, totals, sequences, tokens: right(self, totals, tokens, tokens)


@mutant("areal.engine.moe.routing:ExpertRouting.of", BALANCING.format("fsdp:d2c2-*"))
def fillers_balanced(right: Function) -> Function:
    """Routers count the single token of a filler."""

    def wrong(self: Any, mb: Any, *args: Any, **options: Any) -> Any:
        routing = right(self, mb, *args, **options)
        if routing is not None and mb.filler:
            object.__setattr__(routing, "tally", self._tally)
        return routing

    return wrong


@mutant("areal.engine.moe.routing:Routing._all_tokens", BALANCING.format("fsdp:c2-*"))
def balanced_by_ranks_own_tokens(right: Function) -> Function:
    """Each context-parallel rank balances its local tokens only, multiplied by the number of ranks."""

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        copies = -(-self.mb.n_tokens // len(x))
        return torch.cat([x] * copies)[: self.mb.n_tokens]

    return wrong
