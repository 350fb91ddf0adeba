"""Optimizer steps on a batch of rollouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Updates:
    """Optimizer steps per batch of rollouts: ``epochs * minibatches``, each on the next slice of the batch's groups.

    A slice without a trained token on any rank is skipped, and ``actor/empty`` is logged.

    Attributes:
        epochs: passes over the batch.
        minibatches: optimizer steps per pass.
        recompute_logprobs: compute ``old_logprobs`` with the engine before the first step. Otherwise the rollout's log-probs are used. That
            saves a forward pass, but keeps the rollout's rounding (and staleness) in the ratio, and ``rollout/logprob_error`` is not
            measured. A correction of the mismatch then needs the log-probs of the update's own forward; see
            :class:`~areal.trainer.losses.MismatchCorrection`.
        max_tokens: longest sequence to train on; ``None`` for no limit. Longer ones are left out and counted; their rewards stay in the
            baseline of their group.
        mask_truncated: do not train on truncated answers, as DAPO's overlong filtering. Their rewards stay in the baseline of their group.
        skip_flat: do not train on groups whose rewards are all equal. Their group-relative advantages are 0, but they cost as much compute
            as other groups. They still count in the reported rewards; a KL penalty does not see them.
        max_empty_steps: number of steps in a row without a trained token, after which the run ends; ``None`` for no limit.
        max_error_growth: factor by which ``rollout/logprob_error`` may exceed that of the first batch, at staleness 0, while it grows in
            three steps in a row; more end the run: the rollout does not generate with the weights that it was sent. ``None`` for no limit.
        unreplayed: samples of each data-parallel rank with ``routed_experts`` whose log-probs are also computed without replay, for
            ``rollout/logprob_error_without_replay``; ``None`` for all. Each costs one more forward.

    Raises:
        ValueError: a number is out of range.
    """

    epochs: int = 1
    minibatches: int = 1
    recompute_logprobs: bool = True
    max_tokens: int | None = None
    skip_flat: bool = False
    mask_truncated: bool = False
    max_empty_steps: int | None = 10
    max_error_growth: float | None = 10.0
    unreplayed: int | None = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "max_tokens", "max_empty_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Updates.{name} = {value}: it must be at least 1")
        if self.unreplayed is not None and self.unreplayed < 0:
            raise ValueError(f"Updates.unreplayed = {self.unreplayed}: it must be at least 0, or None for all samples")
        if self.max_error_growth is not None and not self.max_error_growth > 1:
            raise ValueError(f"Updates.max_error_growth = {self.max_error_growth}: it must be above 1, or None")
