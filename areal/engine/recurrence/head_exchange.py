"""Context parallelism of recurrent layers: each rank computes some heads over the whole stream, so that no state passes between ranks.

After Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509), whose attention exchanges tokens for heads in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from areal.api.parallel import ParallelDims
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.gather_kv import zigzag_restore, zigzag_shard
from areal.utils.collectives import ExchangeRows


class HeadExchange:
    """Exchanges this rank's tokens of all heads for all tokens of this rank's heads, and back. Heads may be channels.

    Args:
        cp: the ranks that the stream is split over.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp

    def whole(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return ``[T / size, N, ...]`` as ``[T, N / size, ...]``, with one collective for each dtype.

        A tensor whose number of heads the size does not divide has each head repeated, so that the other heads still find theirs.
        """
        size = self._cp.size
        if size == 1:
            return list(xs)
        xs = [x.repeat_interleave(size // math.gcd(size, x.shape[1]), 1) if x.shape[1] % size else x for x in xs]
        out: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in xs):
            some = [i for i, x in enumerate(xs) if x.dtype == dtype]
            # Row j of each block has the heads of rank j: [size, T / size, features].
            blocks = [xs[i].reshape(len(xs[i]), size, -1).transpose(0, 1) for i in some]
            stream = self._swap(torch.cat(blocks, -1)).flatten(0, 1)
            stream = zigzag_restore(stream, size) if self._cp.mode == "gather_kv" else stream
            columns = stream.split([block.shape[-1] for block in blocks], -1)
            out |= {i: x.unflatten(1, (-1, *xs[i].shape[2:])) for i, x in zip(some, columns, strict=True)}
        return [out[i] for i in range(len(xs))]

    def own(self, x: Tensor) -> Tensor:
        """Return ``[T, N / size, ...]`` as ``[T / size, N, ...]``."""
        size = self._cp.size
        if size == 1:
            return x
        if self._cp.mode == "gather_kv":
            x = torch.cat([zigzag_shard(x, rank, size) for rank in range(size)])
        return self._swap(x.unflatten(0, (size, -1))).transpose(0, 1).flatten(1, 2)

    def part(self, weight: Tensor) -> Tensor:
        """Return the rows of this rank's heads of a weight ``[N, ...]``."""
        return weight.chunk(self._cp.size)[self._cp.rank]

    def _swap(self, blocks: Tensor) -> Tensor:
        if self._cp.group is None:
            return blocks
        one_each = [1] * self._cp.size
        return ExchangeRows.apply(blocks.contiguous(), one_each, one_each, self._cp.group)


def check_heads(model: nn.Module, model_type: str, dims: ParallelDims) -> None:
    """Check that the heads and channels of all recurrent layers divide over context-parallel ranks, and before over tensor-parallel ones.

    Raises:
        ValueError: some do not.
    """
    ranks = f"c{dims.cp}" if dims.tp == 1 else f"c{dims.cp}t{dims.tp}"
    for name, module in model.named_modules():
        numbers = {"channels of its convolution": module.out_channels} if isinstance(module, nn.Conv1d) else {}
        decay = getattr(module, "A_log", None)
        if isinstance(decay, Tensor):
            numbers["heads (or channels)"] = decay.shape[-1] if decay.ndim == 1 else decay.shape[-2]
        for what, number in numbers.items():
            if number % (dims.cp * dims.tp):
                raise ValueError(
                    f"model_type = {model_type!r} with {ranks}: the {number} {what} in {name} do not divide over "
                    f"{dims.cp * dims.tp} ranks, each of which computes some in recurrent layers: choose a layout that divides them"
                )
