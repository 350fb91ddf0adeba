"""Objectives of the grid: summed losses, their weights and required outputs.

All are smooth, so that rounding cannot flip a branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.api import Batch, LossFn, LossWeightFn, Metric, TokenOutputs, default_loss_weight


@dataclass(frozen=True)
class Objective:
    """A loss with its weight.

    Attributes:
        outputs: fields of :class:`TokenOutputs` that the loss reads.
        top_targets: True if the batch needs ``target_ids`` of ``[S, K]`` and ``teacher_probs``.
    """

    name: str
    loss_fn: LossFn
    weight_fn: LossWeightFn = default_loss_weight
    outputs: tuple[str, ...] = ("logprobs",)
    top_targets: bool = False

    @property
    def value_head(self) -> bool:
        """True if the model needs a value head."""
        return "values" in self.outputs


def of_sequence(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the sequence index of each of ``tokens`` packed tokens."""
    return torch.bucketize(torch.arange(tokens, device=cu_seqlens.device), cu_seqlens[1:].long(), right=True)


def per_sequence(values: Tensor, batch: Batch) -> Tensor:
    """Sum ``[T]`` to ``[n]``."""
    n = len(batch.cu_seqlens) - 1
    return values.new_zeros(n).index_add(0, of_sequence(batch.cu_seqlens, len(values)), values)


def nll(out: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
    """Weighted negative log-likelihood, with metrics of every kind."""
    mask, logprobs = batch["loss_mask"], out.logprobs
    kept = logprobs.detach()[mask > 0]
    metrics = {}
    if len(kept):
        metrics = {
            "mean_logprob": Metric((kept * mask[mask > 0]).sum() / mask.sum(), mask.sum()),
            "trained_tokens": Metric((mask > 0).sum(), reduce="sum"),
            "least": Metric(kept.min(), reduce="min"),
            "most": Metric(kept.max(), reduce="max"),
        }
    return -(logprobs * mask).sum(), metrics


def policy(out: TokenOutputs, batch: Batch) -> Tensor:
    """Policy gradient with importance ratio and entropy bonus."""
    ratio = torch.exp(out.logprobs - batch["old_logprobs"])
    return -((ratio * batch["advantages"] + 0.05 * out.entropy) * batch["loss_mask"]).sum()


def sequence_reward(out: TokenOutputs, batch: Batch) -> Tensor:
    """Sum of each sequence's mean log-prob times its reward."""
    lengths = batch.cu_seqlens.diff()
    return -(per_sequence(out.logprobs, batch) / lengths * batch["reward"]).sum()


def sequences(batch: Batch) -> Tensor:
    """Number of sequences."""
    return torch.tensor(float(len(batch.cu_seqlens) - 1), device=batch.cu_seqlens.device)


def several_terms(out: TokenOutputs, batch: Batch) -> dict[str, Tensor]:
    """Three terms with different denominators."""
    mask = batch["loss_mask"]
    return {
        "policy": -(out.logprobs * batch["advantages"] * mask).sum(),
        "drift": ((out.logprobs - batch["old_logprobs"]).square() * (batch["target_ids"] >= 0)).sum(),
        "length": (per_sequence(out.entropy, batch) * batch["reward"]).sum(),
    }


def several_weights(batch: Batch) -> dict[str, Tensor]:
    """Weights of these terms: masked tokens, targets, sequences."""
    return {"policy": batch["loss_mask"].sum(), "drift": (batch["target_ids"] >= 0).sum(), "length": sequences(batch)}


def distill(out: TokenOutputs, batch: Batch) -> Tensor:
    """Cross-entropy with a teacher's probabilities of ``K`` tokens; log-probs are ``[T, K]``."""
    return -(out.logprobs * batch["teacher_probs"] * batch["loss_mask"][:, None]).sum()


def value_regression(out: TokenOutputs, batch: Batch) -> Tensor:
    """Squared error of a critic."""
    return ((out.values - batch["returns"]).square() * batch["loss_mask"]).sum()


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective("nll", nll),
        Objective("policy", policy, outputs=("logprobs", "entropy")),
        Objective("terms", several_terms, several_weights, outputs=("logprobs", "entropy")),
        Objective("sequence", sequence_reward, sequences),
        Objective("distill", distill, top_targets=True),
        Objective("value", value_regression, outputs=("values",)),
    )
}
