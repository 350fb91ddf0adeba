"""Which rows of a shared stream have outputs, where several packed tokens may stand at one place, and ask different things there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api.batch import TokenOutputs
from areal.api.microbatch import MicroBatch, PrefixTree
from areal.engine.attention.context_parallel import ContextParallel
from areal.engine.attention.kernels import TakeRows
from areal.engine.faults import map_outputs


@dataclass(frozen=True, eq=False)
class OutputRows:
    """What one context-parallel rank computes outputs of: as many rows on each, some of which may be there for that alone. On the host.

    Attributes:
        places: int64 ``[R]``, in this rank's slice of the stream.
        packed: int64 ``[R]``, the packed token that each row answers for.
        answers: int64 ``[T]``, which of the ranks' rows, end to end, has the outputs of each packed token.
    """

    places: Tensor
    packed: Tensor
    answers: Tensor

    @classmethod
    def of(cls, tree: PrefixTree, padded_length: int, cp: ContextParallel) -> OutputRows:
        """Each row is scored where its token stands."""
        if cp.size == 1:
            return cls(tree.places[tree.scored], tree.scored, tree.answers)
        width = padded_length // cp.size
        where = cp.places(tree.places[tree.scored], padded_length)
        owner = where // width
        counts = owner.bincount(minlength=cp.size)
        most = int(counts.max())
        by_owner = owner.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        row = torch.empty_like(where)
        row[by_owner] = torch.arange(len(where)) + (torch.arange(cp.size) * most - starts)[owner[by_owner]]
        mine = by_owner[starts[cp.rank] : starts[cp.rank] + counts[cp.rank]]
        mine = torch.cat([mine, by_owner[:1].expand(most - len(mine))])
        return cls((where[mine] - cp.rank * width) % width, tree.scored[mine], row[tree.answers])


def gather_outputs(local: TokenOutputs, cp: ContextParallel, mb: MicroBatch) -> TokenOutputs:
    """Outputs in canonical form: of all packed tokens ``[T, ...]``, gathered over context-parallel ranks."""
    if mb.tree is None:
        return map_outputs(lambda x: cp.gather(x, mb.n_tokens), local)
    answers = OutputRows.of(mb.tree, mb.padded_length, cp).answers.to(mb.cu_seqlens.device)
    return map_outputs(lambda x: TakeRows.apply(cp.gather_rows(x), answers), local)
