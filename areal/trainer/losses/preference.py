"""Losses on pairs: DPO and IPO with a reference, and the Bradley-Terry loss of a reward model.

Sequences ``2i`` and ``2i + 1`` of a batch are the chosen and the rejected one of pair ``i``. ``MicroBatchSpec(granularity=2)`` keeps them in
one micro-batch. A micro-batch with an odd number of sequences raises. With the per-sequence key ``pair_ids`` (integers ``[n]``, equal within
a pair), a micro-batch that splits a pair raises too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.trainer.losses.aggregate import loss_mask, trained_sequences
from areal.trainer.losses.inputs import refuse, required_like, required_output
from areal.trainer.losses.masked import at_trained, log_ratio, mean_where, to_compute_dtype
from areal.trainer.losses.objective import Objective
from areal.utils.data import segment_mean, segment_sum


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Return ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, with ``h = chosen - rejected`` and ``e`` the label smoothing.

    DPO (Rafailov et al., 2023), equation 7; smoothed as conservative DPO (Mitchell, 2023).

    Args:
        chosen, rejected: ``[p]``. Log-ratio of the policy to the reference, summed over each sequence's trained tokens.
        beta: above 0. Strength of the constraint to the reference.
        label_smoothing: from 0 to 0.5. Assumed fraction of wrong labels.

    Returns:
        ``[p]``.
    """
    h = beta * (to_compute_dtype(chosen) - to_compute_dtype(rejected))
    return -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return ``(h - 1 / (2 beta))**2`` with ``h = chosen - rejected``: IPO (Azar et al., 2023), equation 17, whose ``tau`` is ``beta``.

    Args:
        chosen, rejected: ``[p]``. Log-ratio of the policy to the reference: the mean over each sequence's trained tokens, as in the paper's
            experiments, or the sum.
        beta: above 0.

    Returns:
        ``[p]``.
    """
    return (to_compute_dtype(chosen) - to_compute_dtype(rejected) - 1 / (2 * beta)).square()


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, *, center_coef: float = 0.0) -> Tensor:
    """Return ``-log sigmoid(chosen - rejected) + center_coef * (chosen + rejected)**2``.

    The pairwise loss of reward models (Bradley and Terry, 1952; Ouyang et al., 2022, equation 1); the second term, which keeps
    rewards near 0, is from Eisenstein et al. (2023).

    Args:
        chosen, rejected: ``[p]``. Rewards.
        center_coef: at least 0.

    Returns:
        ``[p]``.
    """
    chosen, rejected = to_compute_dtype(chosen), to_compute_dtype(rejected)
    return -F.logsigmoid(chosen - rejected) + center_coef * (chosen + rejected).square()


def last_token(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the value at the last token of each sequence: from ``[T]`` to ``[n]``, differentiable."""
    return x[cu_seqlens[1:].long() - 1]


def sequence_log_ratios(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, *, average: bool = False
) -> Tensor:
    """Return ``sum_t m_t (log p - log p_ref)`` of each sequence, with ``average`` over ``sum_t m_t``: from ``[T]`` to ``[n]``."""
    # Difference first: the sums of long sequences are large, and their difference would lose digits.
    ratios, weights = log_ratio(logprobs, ref_logprobs, mask), to_compute_dtype(mask)
    return segment_mean(ratios, cu_seqlens, weights=weights) if average else segment_sum(ratios * weights, cu_seqlens)


def split_pairs(per_sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``[n]`` into chosen and rejected, each ``[n / 2]``.

    Raises:
        ValueError: ``n`` is odd.
    """
    if len(per_sequence) % 2:
        raise ValueError(
            f"a micro-batch has {len(per_sequence)} sequences, which are no pairs: set MicroBatchSpec.granularity = 2, and pass chosen and "
            "rejected sequences as neighbours"
        )
    return per_sequence[0::2], per_sequence[1::2]


def check_pairs(batch: Batch) -> None:
    """Raise if a micro-batch splits a pair. Without ``pair_ids`` only their number is checked; with them, one host read.

    Raises:
        ValueError: the number of sequences is odd, or neighbours have different ``pair_ids``.
    """
    # Without pair_ids any tensor [n] checks that the number of sequences is even.
    chosen, rejected = split_pairs(batch["pair_ids"] if "pair_ids" in batch else batch.cu_seqlens[1:])
    if "pair_ids" in batch and not torch.equal(chosen, rejected):
        raise ValueError(
            f"a micro-batch splits a pair: its pair_ids are {batch['pair_ids'].tolist()}: set MicroBatchSpec.granularity = 2, "
            "and pass chosen and rejected sequences as neighbours"
        )


def trained_pairs(batch: Batch) -> Tensor:
    """Return bool ``[n / 2]``: True for pairs in which both sequences have a trained token."""
    chosen, rejected = split_pairs(trained_sequences(batch))
    return chosen & rejected


def _trained_pair_count(batch: Batch) -> Tensor:
    """Weight of DPO and IPO: the number of pairs with trained tokens in both sequences."""
    check_pairs(batch)
    return trained_pairs(batch).sum().to(torch.float32)


def _pair_count(batch: Batch) -> Tensor:
    """Weight of a reward model: the number of pairs."""
    check_pairs(batch)
    return torch.full((), (len(batch.cu_seqlens) - 1) // 2, dtype=torch.float32, device=batch.cu_seqlens.device)


def _pair_metrics(chosen: Tensor, rejected: Tensor, keep: Tensor) -> dict[str, Metric]:
    """Return the metrics over pairs of two rewards ``[p]``; pairs that are False in ``keep`` do not count."""
    return {
        "preference/accuracy": mean_where(chosen > rejected, keep),
        "preference/margin": mean_where(chosen - rejected, keep),
        "preference/chosen_reward": mean_where(chosen, keep),
        "preference/rejected_reward": mean_where(rejected, keep),
    }


def dpo_objective(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Objective:
    """Return the objective of DPO: the mean over pairs of :func:`dpo_loss`. Needs ``ref_logprobs``; ``loss_mask`` marks the answers.

    A pair with no trained token in one of its sequences does not count. Metrics are means over pairs, of rewards ``beta`` times the log-ratio:
    ``preference/accuracy``, ``margin``, ``chosen_reward``, ``rejected_reward``.

    Raises:
        ValueError: an option is out of range. When called: the batch lacks ``ref_logprobs``, or splits a pair.
    """
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        refuse("label_smoothing", label_smoothing, "give a share of at least 0 and below 0.5")
    return _reference_objective(lambda c, r: dpo_loss(c, r, beta=beta, label_smoothing=label_smoothing), beta)


def ipo_objective(*, beta: float = 0.1, average: bool = True) -> Objective:
    """Return the objective of IPO: the mean over pairs of :func:`ipo_loss`. Keys, weights and metrics as :func:`dpo_objective`.

    Args:
        beta: above 0; the paper's ``tau``.
        average: take the mean log-ratio over a sequence's trained tokens. The paper writes a sum; its authors confirmed to TRL that its results
            are of the mean, which makes ``beta`` independent of the length. False takes the sum. Metrics are of the same log-ratios.

    Raises:
        ValueError: ``beta`` is out of range. When called: as :func:`dpo_objective`.
    """
    _check_beta(beta)
    return _reference_objective(lambda c, r: ipo_loss(c, r, beta=beta), beta, average=average)


def reward_objective(*, center_coef: float = 0.0) -> Objective:
    """Return the objective of a reward model: the mean over pairs of :func:`bradley_terry_loss`.

    The reward of a sequence is the output ``values`` at its last token; ``loss_mask`` is not used. Metrics are means over pairs:
    ``preference/accuracy``, ``margin``, ``chosen_reward``, ``rejected_reward``.

    Raises:
        ValueError: ``center_coef`` is out of range. When called: the batch splits a pair.
    """
    if not 0 <= center_coef < math.inf:
        refuse("center_coef", center_coef, "give a finite number of at least 0")

    def loss_fn(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        # The reward of a sequence is the value after its last token was read.
        chosen, rejected = split_pairs(last_token(required_output(outputs, "values"), batch.cu_seqlens))
        loss = bradley_terry_loss(chosen, rejected, center_coef=center_coef).sum()
        return loss, _pair_metrics(chosen, rejected, torch.ones_like(chosen, dtype=torch.bool))

    return Objective(loss_fn, _pair_count, ("values",))


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        refuse("beta", beta, "give a finite number above 0")


def _reference_objective(
    pair_loss: Callable[[Tensor, Tensor], Tensor], beta: float, *, average: bool = False
) -> Objective:
    """Return the objective of a loss of two log-ratios ``[p]`` to a reference, sums or averages over tokens."""

    def loss_fn(outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs, mask = required_output(outputs, "logprobs"), loss_mask(batch)
        ref = required_like(batch, "ref_logprobs", logprobs)
        # One log-ratio per sequence, split into those of the chosen and the rejected sequences.
        ratios = sequence_log_ratios(logprobs, ref, mask, batch.cu_seqlens, average=average)
        chosen, rejected = split_pairs(ratios)
        keep = trained_pairs(batch)
        # Pairs without a trained token in both sequences count neither here nor in the weight.
        loss = at_trained(pair_loss(chosen, rejected), keep).sum()
        return loss, _pair_metrics(beta * chosen, beta * rejected, keep)

    return Objective(loss_fn, _trained_pair_count)
