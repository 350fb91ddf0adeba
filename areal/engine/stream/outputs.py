"""Output rows of a prefix-shared stream: packed tokens may map to the same stream index, but have different targets there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.batch import TokenOutputs
from areal.api.microbatch import PrefixTree
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.kernels import TakeRows
from areal.engine.faults import map_outputs


@dataclass(frozen=True, eq=False)
class OutputRows:
    """The rows that one context-parallel rank computes outputs of.

    Every rank has the same number of rows, because an all-gather needs equal sizes: ranks with fewer rows repeat one.

    Attributes:
        local_index: int64 ``[R]``. Index of each row's token in this rank's slice of the stream.
        packed_index: int64 ``[R]``. Packed token whose target and temperature each row uses.
        output_index: int64 ``[T]``. For each packed token, the index of its outputs in the ranks' rows end to end.
    """

    local_index: Tensor
    packed_index: Tensor
    output_index: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> OutputRows:
        """Apply ``fn`` to every tensor."""
        return OutputRows(fn(self.local_index), fn(self.packed_index), fn(self.output_index))

    @classmethod
    def of(cls, tree: PrefixTree, padded_length: int, cp: ContextParallel) -> OutputRows:
        """Assign each output token of a tree to the rank that has its hidden state, and return the rows of this rank."""
        if cp.size == 1:
            return cls(tree.stream_index[tree.output_tokens], tree.output_tokens, tree.output_index)
        # The rank of each output token, and how many each rank has.
        slice_length = padded_length // cp.size
        gathered = cp.gathered_index(tree.stream_index[tree.output_tokens], padded_length)
        owner = gathered // slice_length
        counts = owner.bincount(minlength=cp.size)
        most = int(counts.max())

        # Number the rows rank by rank, with room for ``most`` rows on each: rank r begins at row r * most.
        by_owner = owner.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        row = torch.empty_like(gathered)
        row[by_owner] = torch.arange(len(gathered)) + (torch.arange(cp.size) * most - starts)[owner[by_owner]]

        # This rank's rows, filled up to ``most``. Nothing reads the additional rows, so that any token will do.
        local = by_owner[starts[cp.rank] : starts[cp.rank] + counts[cp.rank]]
        local = torch.cat([local, by_owner[:1].expand(most - len(local))])
        local_index = (gathered[local] - cp.rank * slice_length) % slice_length
        return cls(local_index, tree.output_tokens[local], row[tree.output_index])


def gather_outputs(
    local: TokenOutputs, cp: ContextParallel, n_tokens: int, output_index: Tensor | None = None
) -> TokenOutputs:
    """Return outputs in canonical form: of all packed tokens, ``[T, ...]``, gathered over context-parallel ranks.

    Args:
        local: outputs of this rank's tokens or rows.
        cp: the ranks that the token stream is split over.
        n_tokens: number of packed tokens ``T``.
        output_index: :attr:`OutputRows.output_index` on the device, with shared prefixes.
    """
    if output_index is None:
        return map_outputs(lambda x: cp.gather(x, n_tokens), local)
    # Tokens with equal outputs read the same row; TakeRows sums their gradients.
    return map_outputs(lambda x: TakeRows.apply(cp.gather_rows(x), output_index), local)
