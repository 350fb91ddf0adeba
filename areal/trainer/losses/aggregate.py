"""Aggregations of per-token losses: a sum over a micro-batch, and the micro-batch's contribution to the denominator.

``total`` is the numerator of a micro-batch and ``weight`` its denominator. ``sum(total) / sum(weight)`` over micro-batches and data-parallel
ranks is the mean that the class is named after. It does not depend on how the batch was cut into micro-batches.

====================================  ==================================  ==============================================================
here                                  value                               called elsewhere
====================================  ==================================  ==============================================================
``TokenMean()``                       ``sum_t / tokens``                  verl ``token-mean``; TRL ``dapo`` (and ``bnpo``, on each local
                                                                          batch); AReaL and prime-rl by default
``SequenceMean()``                    mean of sequences' token means      verl ``seq-mean-token-mean``; TRL ``grpo``
``SequenceMeanOfSums()``              mean of sequences' token sums       verl ``seq-mean-token-sum``; TRL ``luspo``, with a sequence ratio
``FixedLength(length)``               mean of token sums, ``/ length``    verl ``seq-mean-token-sum-norm`` since 0.9 (before, a sum
                                                                          ``/ length``, not a mean); TRL ``dr_grpo``
``GroupTokenMean()``                  mean of groups' token means         DAPO's equation for each prompt; ScaleRL prompt average
====================================  ==================================  ==============================================================

A plain sum, as in Tinker, is ``TokenMean()`` with ``normalization="sum"``. The mask is a weight: a position with ``loss_mask`` 0.5 adds half
of its loss. A sequence without a trained token counts in no denominator.
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
    """Numerator and denominator of a mean over the global batch, computed one micro-batch at a time."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """Return the numerator of a micro-batch, a scalar, from losses ``[T]``. Values where ``loss_mask`` is 0 are ignored."""
        ...

    def weight(self, batch: Batch) -> Tensor:
        """Return the denominator of a micro-batch, a scalar. The engine adds these up to the global weight."""
        ...


def loss_mask(batch: Batch) -> Tensor:
    """Return ``batch["loss_mask"]``, or 1 at every position with a target if the batch lacks that key: float32 or float64 ``[T]``."""
    if "loss_mask" in batch:
        return to_compute_dtype(batch["loss_mask"])
    # [T, K] targets: a position counts if any of its K entries is a target.
    targets = batch["target_ids"] >= 0
    return (targets if targets.dim() == 1 else targets.any(-1)).float()


def trained_sequences(batch: Batch) -> Tensor:
    """Return bool ``[n]``: True for sequences with a trained token."""
    return segment_sum(trained_positions(loss_mask(batch)), batch.cu_seqlens) > 0


def _sequence_count(batch: Batch) -> Tensor:
    """Count the sequences with a trained token: a float32 scalar."""
    return trained_sequences(batch).sum().to(torch.float32)


def _weighted(per_token: Tensor, batch: Batch) -> Tensor:
    """Multiply losses by the mask, with exactly 0 where the mask is 0."""
    mask = loss_mask(batch)
    return at_trained(per_token, mask) * mask


@dataclass(frozen=True)
class TokenMean:
    """Mean over the trained tokens of the global batch: ``sum_t m_t l_t / sum_t m_t``. As in DAPO (Yu et al., 2025), over the batch."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t``."""
        return _weighted(per_token, batch).sum()

    def weight(self, batch: Batch) -> Tensor:
        """``sum_t m_t``, a float64 scalar."""
        return loss_mask(batch).sum(dtype=torch.float64)


@dataclass(frozen=True)
class SequenceMean:
    """Mean over sequences of their token means. As in GRPO (Shao et al., 2024)."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """Sum over sequences of ``sum_t m_t l_t / sum_t m_t``."""
        mask = loss_mask(batch)
        return segment_mean(at_trained(per_token, mask), batch.cu_seqlens, weights=mask).sum()

    def weight(self, batch: Batch) -> Tensor:
        """Number of sequences with a trained token."""
        return _sequence_count(batch)


@dataclass(frozen=True)
class SequenceMeanOfSums:
    """Mean over sequences of their token sums: a long sequence counts for more."""

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t``."""
        return _weighted(per_token, batch).sum()

    def weight(self, batch: Batch) -> Tensor:
        """Number of sequences with a trained token."""
        return _sequence_count(batch)


@dataclass(frozen=True)
class FixedLength:
    """Mean over sequences of their token sums divided by a constant, so that no length is favoured. Dr.GRPO (Liu et al., 2025).

    Attributes:
        length: the constant in tokens, such as the longest response. It must not change during training.

    Raises:
        ValueError: ``length`` is not a positive number.
    """

    length: float

    def __post_init__(self) -> None:
        if not 0 < self.length < math.inf:
            refuse("FixedLength.length", self.length, "give a positive number of tokens, such as the longest response")

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t / length``."""
        return _weighted(per_token, batch).sum() / self.length

    def weight(self, batch: Batch) -> Tensor:
        """Number of sequences with a trained token."""
        return _sequence_count(batch)


@dataclass(frozen=True)
class GroupTokenMean:
    """Mean over groups (the responses to one prompt) of their token means. DAPO (Yu et al., 2025), equation 8.

    A group may be spread over several micro-batches or ranks. The batch key ``group_tokens`` ``[n]`` therefore gives, for each sequence, the
    sum of ``loss_mask`` over its entire group.
    """

    def total(self, per_token: Tensor, batch: Batch) -> Tensor:
        """``sum_t m_t l_t / g_t``, where ``g_t`` is ``group_tokens`` of the sequence of ``t``."""
        return (_weighted(per_token, batch) * self._inverse_tokens(batch).to(per_token.dtype)).sum()

    def weight(self, batch: Batch) -> Tensor:
        """``sum_t m_t / g_t``, which sums to the number of groups with a trained token over the global batch: a float64 scalar."""
        return (loss_mask(batch) * self._inverse_tokens(batch)).sum()

    def _inverse_tokens(self, batch: Batch) -> Tensor:
        """Return ``1 / g_t`` at trained positions and 0 elsewhere: float64 ``[T]``."""
        mask = loss_mask(batch)
        # Per sequence from the batch, because other members of the group may be in other micro-batches or on other ranks.
        tokens = required(batch, "group_tokens").double()
        return at_trained(1 / spread(tokens, batch.cu_seqlens, len(mask)), mask)
