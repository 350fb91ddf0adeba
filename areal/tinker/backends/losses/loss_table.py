"""The losses of the protocol, and their table by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from areal.api import Batch, Metric, TokenOutputs
from areal.tinker.backends.losses.loss_interface import (
    CLIP_KEYS,
    RATIO_KEYS,
    ProtocolLoss,
    config_numbers,
    sampling_ratio_metrics,
    target_logprobs,
)
from areal.utils.data.segments import segment_sum


@dataclass(frozen=True)
class CrossEntropy:
    """``sum(-logprobs * weights)``, with weights of any sign.

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``cross_entropy``. With targets ``[T, K]`` the sum is over all ``K`` targets
    of a position, so that weights of a distribution give the cross-entropy with it. Without weights, all are 1.
    """

    inputs: ClassVar[frozenset[str]] = frozenset({"target_tokens"})
    optional: ClassVar[frozenset[str]] = frozenset({"weights"})

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        return (-target_logprobs(outputs) * batch.get("weights", 1.0)).sum(), {}


@dataclass(frozen=True)
class ImportanceWeighted:
    """``-sum(p / q * A)`` with ``p / q = exp(logprobs of the model - logprobs of the sampler)``.

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``importance_sampling``.
    """

    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = target_logprobs(outputs)
        ratio = torch.exp(logprobs - batch["logprobs"])
        return -(ratio * batch["advantages"]).sum(), sampling_ratio_metrics(logprobs, batch)


@dataclass(frozen=True)
class _Clipped:
    """A loss whose ratio is clipped.

    Attributes:
        name: name of the loss in the protocol.
        clip_low_threshold, clip_high_threshold: bounds of the ratio, which keys of a datum with these names replace for each token.
    """

    name: ClassVar[str]
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = CLIP_KEYS
    clip_low_threshold: float
    clip_high_threshold: float

    def __post_init__(self) -> None:
        low, high = self.clip_low_threshold, self.clip_high_threshold
        if math.isnan(low) or math.isnan(high) or not 0 <= low <= high:
            raise ValueError(
                f"loss_fn_config of {self.name!r}: clip_low_threshold = {low} and clip_high_threshold = {high}: they are bounds of a ratio of "
                "probabilities, with 0 <= low <= high"
            )

    def clamped(self, ratio: Tensor, batch: Batch) -> Tensor:
        """Return the ratio, clamped to the thresholds of each target."""
        low = batch.get("clip_low_threshold", self.clip_low_threshold)
        high = batch.get("clip_high_threshold", self.clip_high_threshold)
        return ratio.clamp(min=low).clamp(max=high)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ClippedSurrogate(_Clipped):
    """``-sum(min(r A, clamp(r, low, high) A))`` with the ratio ``r = p / q`` (Schulman et al., 2017).

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``ppo``. The thresholds are ratios; the default 0.8 and 1.2 is an epsilon of
    0.2. Thresholds of each token are accepted under the same names as keys of a datum; the source does not describe them.
    """

    name: ClassVar[str] = "ppo"
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs, advantages = target_logprobs(outputs), batch["advantages"]
        ratio = torch.exp(logprobs - batch["logprobs"])
        unclipped, bounded = ratio * advantages, self.clamped(ratio, batch) * advantages
        # A target is clipped where the bound decides the minimum, and removes the gradient.
        return -torch.minimum(unclipped, bounded).sum(), sampling_ratio_metrics(logprobs, batch, bounded < unclipped)


@dataclass(frozen=True)
class ClippedWeight(_Clipped):
    """``-sum(sg(clamp(r, low, high)) * logprobs * A)`` with the ratio ``r = p / q``, where ``sg`` stops the gradient (MiniMax-M1, 2025).

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``cispo``. The thresholds are ratios. The source states no default: 0 and 4
    is its recommendation for off-policy training, a bound on one side only (ScaleRL, 2025, is insensitive to 4, 5 or 8). Thresholds of each
    token are accepted under the same names as keys of a datum.
    """

    name: ClassVar[str] = "cispo"
    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = target_logprobs(outputs)
        ratio = torch.exp(logprobs.detach() - batch["logprobs"])
        weight = self.clamped(ratio, batch)
        return -(weight * logprobs * batch["advantages"]).sum(), sampling_ratio_metrics(
            logprobs, batch, weight != ratio
        )


@dataclass(frozen=True)
class SequenceRatio(_Clipped):
    """``-sum(min(s_t A, clamp(s_t, low, high) A))`` with ``s_t = exp(mean_M(log p - log q) + log p_t - sg(log p_t))`` (Zheng et al., 2025).

    The mean is over the targets of the sequence that ``sequence_ratio_mask`` marks (not 0), without a gradient. The ratio of each target equals
    that of its sequence and has the gradient of the target's own log-prob (GSPO-token of the paper).

    Source: https://tinker-docs.thinkingmachines.ai/tinker/losses/gspo. Defaults of the thresholds are not known to us: 1 - 3e-4 and 1 + 4e-4
    are the paper's.
    """

    name: ClassVar[str] = "gspo"
    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS | {"sequence_ratio_mask"}

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs, advantages = target_logprobs(outputs), batch["advantages"]
        # The mean of each sequence, repeated for its tokens. Without marked targets it is 0.
        marked = (batch["sequence_ratio_mask"] != 0).to(logprobs.dtype)
        difference = (logprobs.detach() - batch["logprobs"]) * marked
        sums = [segment_sum(x.flatten(1).sum(1) if x.dim() > 1 else x, batch.cu_seqlens) for x in (difference, marked)]
        lengths = batch.cu_seqlens.diff().long()
        means = (sums[0] / sums[1].clamp(min=1)).repeat_interleave(lengths, output_size=len(logprobs))
        means = means.reshape(-1, *[1] * (logprobs.dim() - 1))
        # The clipped objective of PPO, with the ratio of the sequence.
        ratio = torch.exp(means + logprobs - logprobs.detach())
        unclipped, bounded = ratio * advantages, self.clamped(ratio, batch) * advantages
        return -torch.minimum(unclipped, bounded).sum(), sampling_ratio_metrics(logprobs, batch, bounded < unclipped)


@dataclass(frozen=True)
class QuadraticPenalty:
    """``-sum(logprobs * A - beta / 2 * (log p - log q) ** 2)`` (Richemond et al., 2024).

    Source: https://tinker-docs.thinkingmachines.ai/losses, section ``dro``. The source states no default; 0.05 is the value of its example.
    """

    beta: float = 0.05
    inputs: ClassVar[frozenset[str]] = RATIO_KEYS
    optional: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"loss_fn_config of 'dro': beta = {self.beta}: it must be finite and at least 0")

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logprobs = target_logprobs(outputs)
        penalty = (logprobs - batch["logprobs"]).square()
        objective = logprobs * batch["advantages"] - 0.5 * self.beta * penalty
        return -objective.sum(), sampling_ratio_metrics(logprobs, batch)


LOSSES: dict[str, Callable[..., ProtocolLoss]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceWeighted,
    "ppo": ClippedSurrogate,
    "cispo": ClippedWeight,
    "dro": QuadraticPenalty,
    "gspo": SequenceRatio,
}
"""Class of each loss. Its fields are the keys of the configuration."""


def loss_keys() -> dict[str, dict[str, frozenset[str]]]:
    """Return the keys of each loss: ``inputs``, ``optional`` and ``config``."""
    return {
        name: {"inputs": kind.inputs, "optional": kind.optional, "config": _config_keys(kind)}  # type: ignore[attr-defined]
        for name, kind in LOSSES.items()
    }


def make_loss(name: str, config: Mapping[str, float | str]) -> ProtocolLoss:
    """Return a loss with its configuration.

    Raises:
        ValueError: the loss or a key is unknown, or a value is out of range.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn = {name!r}: choose one of {', '.join(LOSSES)}")
    kind, known = LOSSES[name], _config_keys(LOSSES[name])
    for key in config:
        if key not in known:
            raise ValueError(
                f"loss_fn_config of {name!r} has the key {key!r}: known keys are {', '.join(sorted(known)) or 'none'}"
            )
    return kind(**config_numbers(name, config))


def _config_keys(kind: Callable[..., ProtocolLoss]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
