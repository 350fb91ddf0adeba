"""From per-token losses to one number: what is summed over a micro-batch, and what it is divided by in the end.

An aggregation has two halves that fit together: ``total`` is the sum over a micro-batch, ``weight`` what the micro-batch adds to the
global weight. ``sum(total) / sum(weight)`` over micro-batches and data-parallel ranks is the mean that the name says, however a batch
was cut.

====================================  ==================================  ==============================================================
here                                  value                               called elsewhere
====================================  ==================================  ==============================================================
``TokenMean()``                       ``sum_t / tokens``                  verl ``token-mean``; TRL ``dapo`` (and ``bnpo``, on each local
                                                                          batch); AReaL and prime-rl by default
``SequenceMean()``                    mean of sequences' token means      verl ``seq-mean-token-mean``; TRL ``grpo``
``SequenceMeanOfSums()``              mean of sequences' token sums       verl ``seq-mean-token-sum``; TRL ``luspo``, with a sequence ratio
``FixedLength(length)``               mean of token sums, ``/ length``    verl ``seq-mean-token-sum-norm``; TRL ``dr_grpo``
``GroupTokenMean()``                  mean of groups' token means         DAPO's equation for each prompt; ScaleRL prompt average
====================================  ==================================  ==============================================================

A plain sum, as Tinker has it, is ``TokenMean()`` with ``normalization="sum"``. The mask counts as a weight: a position of ``loss_mask`` 0.5
adds half its loss. A sequence without a trained token weighs nothing, in any denominator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from areal.api import Batch
from areal.trainer.losses.inputs import refuse, required
from areal.trainer.losses.masked import at_trained, spread, to_compute_dtype, trained_positions
from areal.utils.data import segment_mean, segment_sum


class Aggregation(Protocol):
    """How per-token losses become a sum over a micro-batch, and what the micro-batch weighs."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """The sum over a micro-batch: from ``[T]`` to a scalar. What stands where ``loss_mask`` is 0 does not matter."""
        ...

    def weight(self, batch: Batch) -> Tensor:
        """What the micro-batch adds to the global weight: a scalar."""
        ...


def loss_mask(batch: Batch) -> Tensor:
    """``batch["loss_mask"]``, or 1 at every position with a target where there is none: float32 or float64 ``[T]``."""
    if "loss_mask" in batch:
        return to_compute_dtype(batch["loss_mask"])
    targets = batch["target_ids"] >= 0
    return (targets if targets.dim() == 1 else targets.any(-1)).float()


def trained_sequences(batch: Batch) -> Tensor:
    """Which sequences have a trained token: bool ``[n]``."""
    return segment_sum(trained_positions(loss_mask(batch)), batch.cu_seqlens) > 0


def _sequence_count(batch: Batch) -> Tensor:
    return trained_sequences(batch).sum().to(torch.float32)


def _weighted(per_token: Tensor, batch: Batch) -> Tensor:
    mask = loss_mask(batch)
    return at_trained(per_token, mask) * mask


@dataclass(frozen=True)
class TokenMean:
    """Every trained token of the global batch counts the same: ``sum_t m_t l_t / sum_t m_t``. As in DAPO (Yu et al., 2025), over the batch."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t``."""
        return _weighted(per_token, batch).sum()

    def weight(self, batch: Batch) -> Tensor:
        """``sum_t m_t``."""
        return loss_mask(batch).sum()


@dataclass(frozen=True)
class SequenceMean:
    """Every sequence counts the same, and within it every token: the mean of sequences' token means. As in GRPO (Shao et al., 2024)."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """The sum over sequences of ``sum_t m_t l_t / sum_t m_t``."""
        mask = loss_mask(batch)
        return segment_mean(at_trained(per_token, mask), batch.cu_seqlens, weights=mask).sum()

    def weight(self, batch: Batch) -> Tensor:
        """Sequences with a trained token."""
        return _sequence_count(batch)


@dataclass(frozen=True)
class SequenceMeanOfSums:
    """The mean over sequences of their token sums: a long sequence counts for more."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t``."""
        return _weighted(per_token, batch).sum()

    def weight(self, batch: Batch) -> Tensor:
        """Sequences with a trained token."""
        return _sequence_count(batch)


@dataclass(frozen=True)
class FixedLength:
    """The mean over sequences of their token sums over a constant, such as the longest response: no length is favoured.

    Of Dr.GRPO (Liu et al., 2025).

    Attributes:
        length: in tokens; constant throughout training.

    Raises:
        ValueError: it is not a positive number.
    """

    length: float

    def __post_init__(self) -> None:
        if not 0 < self.length < math.inf:
            refuse("FixedLength.length", self.length, "give a positive number of tokens, such as the longest response")

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t / length``."""
        return _weighted(per_token, batch).sum() / self.length

    def weight(self, batch: Batch) -> Tensor:
        """Sequences with a trained token."""
        return _sequence_count(batch)


@dataclass(frozen=True)
class GroupTokenMean:
    """Every group (the responses to one prompt) counts the same, and within it every token: the mean of groups' token means.

    A group may lie in several micro-batches or ranks: the batch key ``group_tokens`` ``[n]`` has the sum of ``loss_mask`` over the whole
    group of each sequence. Of DAPO (Yu et al., 2025), equation 8.
    """

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t / g_t``, where ``g_t`` is the weight of the group of ``t``."""
        return (_weighted(per_token, batch) * self._inverse(batch)).sum()

    def weight(self, batch: Batch) -> Tensor:
        """``sum_t m_t / g_t``: over the global batch, the number of groups with a trained token."""
        return (loss_mask(batch) * self._inverse(batch)).sum()

    def _inverse(self, batch: Batch) -> Tensor:
        mask = loss_mask(batch)
        tokens = to_compute_dtype(required(batch, "group_tokens"))
        return at_trained(1 / spread(tokens, batch.cu_seqlens, len(mask)), mask)
