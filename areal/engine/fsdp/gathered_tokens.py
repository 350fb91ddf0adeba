"""Linear layers on tokens that are gathered over tensor-parallel ranks: their backward keeps this rank's tokens and gathers them again.

Saved inputs then take ``1 / size`` of the memory (Korthikanti et al., 2022, section 4.2.2), for one more all-gather per block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.utils.collectives import GatherRows, all_gather_rows
from areal.utils.functional.product import linear_product, matmul


class GatheredTokens:
    """Tokens at the input of a block, for the linear layers that read them.

    Args:
        group: ranks that divide the tokens.

    Attributes:
        recomputed: the backward recomputes the block. Its gathered input then exists for one layer at a time, and is not gathered a third
            time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.recomputed = False
        self._shard: Tensor | None = None
        self._gathered: Tensor | None = None
        self._again = _Again(group)

    def within(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's forward that gathers this rank's tokens ``[1, T / size, H]`` first."""

        def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            gathered = GatherRows.apply(hidden_states[0], self._group)[None]
            if torch.compiler.is_compiling():  # dynamo cannot trace the state
                return inner(gathered, *args, **options)
            self._shard, self._gathered, self._again = hidden_states[0].detach(), gathered, _Again(self._group)
            try:
                return inner(gathered, *args, **options)
            finally:
                self._shard = self._gathered = None

        return forward

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``. For the gathered tokens ``x`` of the current block, the backward keeps the shard alone."""
        # A frozen weight does not need its input.
        if not weight.requires_grad or self._keeps(x):
            return linear_product(x, weight, bias)
        return _GatheredLinear.apply(x, weight, bias, self._shard, self._again)

    def saved(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """Return this rank's shard of the gathered tokens ``x`` of the current block, and the function that gathers them again.

        A backward that reads ``x`` once keeps the shard. ``None`` if it keeps ``x``. For adapters: the weights of their layers are frozen.
        """
        if self._keeps(x) or self._shard is None:
            return None
        self._again.uses += 1
        return self._shard, self._again.gather

    def _keeps(self, x: Tensor) -> bool:
        """Return whether a backward keeps ``x``, or there is none."""
        # Dynamo cannot trace the state.
        plain = torch.compiler.is_compiling() or self.recomputed or not torch.is_grad_enabled()
        return plain or x is not self._gathered


def keep_gathered(layer: nn.Module) -> None:
    """Let the blocks of a layer that the backward recomputes keep their gathered tokens."""
    for module in layer.modules():
        tokens = getattr(module, "gathered_tokens", None)
        if isinstance(tokens, GatheredTokens):
            tokens.recomputed = True


class _Again:
    """The tokens of one forward of a block, gathered again for its backward: once for all of its linear layers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.uses = group, 0
        self._full: Tensor | None = None
        self._left = 0

    def gather(self, shard: Tensor) -> Tensor:
        """Return the gathered tokens. After the last use they are released."""
        if self._full is None:
            self._full, self._left = all_gather_rows(shard, self._group), self.uses
        full, self._left = self._full, self._left - 1
        if self._left == 0:
            self._full = None
        return full


class _GatheredLinear(torch.autograd.Function):
    """Linear layer of gathered tokens, which saves this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shard: Tensor, again: _Again) -> Tensor:
        ctx.save_for_backward(shard, weight)
        ctx.again = again
        again.uses += 1
        return linear_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (shard, weight), grad = ctx.saved_tensors, grads[0].flatten(0, -2)
        tokens = ctx.again.gather(shard)
        of_input = matmul(grad, weight).unflatten(0, grads[0].shape[:-1]) if ctx.needs_input_grad[0] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, matmul(grad.t(), tokens), of_bias, None, None
