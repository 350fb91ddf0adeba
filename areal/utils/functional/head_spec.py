"""Settings and dtypes of an output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from areal.utils.functional.product import operand_dtype
from areal.utils.functional.vocab_parallel import VocabShard


@dataclass(frozen=True)
class HeadSpec:
    """Settings of a head: how logits are computed from hidden states, and which results are requested.

    Attributes:
        temperature: number, or ``[T]``.
        logit_scale: factor of the model on its logits.
        softcap: bound of the model on its logits, or ``None``.
        fp32: whether not to round any operand of a product, gradients included.
        scale_logits: whether scale and temperature are applied to the logits, as a sampler does. Otherwise factors of a product scale its
            operands where that is faster.
        entropy: whether to compute the entropy.
        topk: number of most likely tokens to return; 0 for none.
        chunk_size: number of tokens whose logits exist at a time.
        keep_bytes: memory for logits that are kept for the backward.
        shard: rows of the vocabulary on this rank.
    """

    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    fp32: bool
    scale_logits: bool
    entropy: bool
    topk: int
    chunk_size: int
    keep_bytes: int
    shard: VocabShard

    def dtypes(self, hidden: Tensor, weight: Tensor) -> HeadDtypes:
        """Return the dtypes of the head's products and statistics."""
        return head_dtypes(hidden, weight, fp32=self.fp32)


class HeadDtypes(NamedTuple):
    """Dtypes of a head.

    Attributes:
        inputs: of hidden states and weight where they are multiplied. Both are exact in it.
        results: of computed operands of a product: projections of an update, gradients of logits. Rounds unless it is ``stats``.
        stats: of logits and everything computed from them: float32 or float64.
    """

    inputs: torch.dtype
    results: torch.dtype
    stats: torch.dtype


def head_dtypes(hidden: Tensor, weight: Tensor, *, fp32: bool) -> HeadDtypes:
    """Return the dtypes of a head with these inputs. ``fp32``: round no operand of a product."""
    compute = torch.promote_types(hidden.dtype, weight.dtype)
    stats = torch.promote_types(compute, torch.float32)
    inputs = operand_dtype(compute, stats, hidden.device)
    return HeadDtypes(inputs, stats if fp32 else inputs, stats)
