"""What a batch of rollouts was like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from areal.trainer.losses import kl_k1, kl_k3
from areal.trainer.rollout.exchange import gather
from areal.trainer.rollout.plan import Group

SUMS = (
    "sequences",
    "failed",
    "overlong",
    "truncated",
    "reward",
    "reward_squared",
    "tokens",
    "staleness",
    "groups",
    "flat_groups",
)


class RolloutReport:
    """Samples of a batch, and numbers about it.

    Args:
        groups: of this data-parallel coordinate.
        max_tokens: sequences that are longer are left out.
        version: of the weights that are to be trained.
        skip_flat: leave out groups whose rewards are all the same.

    Attributes:
        samples: for the engine, in the order of the groups.
        error: what an episode raised, if one did.
    """

    def __init__(
        self, groups: Sequence[Group], max_tokens: int | None, version: int, *, skip_flat: bool = False
    ) -> None:
        self.samples: list[dict[str, Tensor]] = []
        self.error = next((group.error for group in groups if group.error is not None), None)
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._stats: dict[str, tuple[float, int]] = {}
        for group in groups:
            flat = len({sequence.reward for sequence in group.sequences}) <= 1
            self._add(groups=1, failed=group.failed, flat_groups=flat)
            for sequence in group.sequences:
                for name, value in sequence.stats.items():
                    total, count = self._stats.get(name, (0.0, 0))
                    self._stats[name] = (total + value, count + 1)
                sample = sequence.sample()
                if max_tokens is not None and len(sample["input_ids"]) > max_tokens:
                    self._add(overlong=1)
                    continue
                if not (flat and skip_flat):
                    self.samples.append(sample)
                self._add(
                    sequences=1,
                    truncated=sequence.truncated,
                    reward=sequence.reward,
                    reward_squared=sequence.reward**2,
                    tokens=sequence.trained_tokens,
                    staleness=version - sequence.oldest_version(version),
                )

    def _add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self._sums[name] += number

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means and counts over the global batch, under ``rollout/...``; the same on every rank. Collective.

        ``reward`` and ``reward_std`` over sequences; ``tokens``, sampled ones to a sequence; ``staleness``, updates since the oldest token of a
        sequence was made; ``truncated`` and ``flat_groups``, shares; ``sequences``, ``failed`` (episodes) and ``overlong``, counts.

        What episodes noted in ``Sequence.stats`` is there as its mean.

        Raises:
            RuntimeError: there is no sequence on any rank.
        """
        totals = sum_over_ranks(torch.tensor([self._sums[name] for name in SUMS], dtype=torch.float64))
        found = dict(zip(SUMS, totals.tolist(), strict=True))
        n = found["sequences"]
        if not n:
            raise RuntimeError(
                f"no episode of this batch gave a sequence: {found['failed']:.0f} failed, {found['overlong']:.0f} were too long; "
                f"on this rank the first error was {self.error}"
            )
        reward = found["reward"] / n
        return self._mean_stats() | {
            "rollout/reward": reward,
            "rollout/reward_std": max(0.0, found["reward_squared"] / n - reward**2) ** 0.5,
            "rollout/tokens": found["tokens"] / n,
            "rollout/staleness": found["staleness"] / n,
            "rollout/truncated": found["truncated"] / n,
            "rollout/flat_groups": found["flat_groups"] / max(1.0, found["groups"]),
            "rollout/sequences": n,
            "rollout/failed": found["failed"],
            "rollout/overlong": found["overlong"],
        }

    def _mean_stats(self) -> dict[str, float]:
        """Ranks that share a data-parallel coordinate have the same sequences, each coordinate as many of them: a mean counts them right."""
        everything: list[dict[str, tuple[float, int]]] = gather(self._stats)
        names = sorted({name for stats in everything for name in stats})
        found = {name: [stats[name] for stats in everything if name in stats] for name in names}
        return {f"rollout/{name}": sum(t for t, _ in each) / sum(n for _, n in each) for name, each in found.items()}


def disagreement(
    samples: Sequence[Mapping[str, Tensor]], sum_over_ranks: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """How far the trainer's ``old_logprobs`` are from the ``rollout_logprobs`` of the same tokens, over the global batch. Collective.

    Returns:
        ``rollout/logprob_error``, the mean absolute difference in nats, and ``rollout/logprob_k3``, an estimate of KL(rollout || trainer)
        (k3; Schulman, "Approximating KL Divergence", 2020).
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for sample in samples:
        mask, old, rollout = (sample[key].double().cpu() for key in ("loss_mask", "old_logprobs", "rollout_logprobs"))
        error, k3 = kl_k1(old, rollout, mask).abs(), kl_k3(rollout, old, mask)
        sums += torch.stack([error.sum(), k3.sum(), mask.count_nonzero()])
    *found, tokens = sum_over_ranks(sums).tolist()
    names = ("rollout/logprob_error", "rollout/logprob_k3")
    return {name: total / max(1.0, tokens) for name, total in zip(names, found, strict=True)}
