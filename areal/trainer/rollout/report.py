"""Statistics of a batch of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from areal.trainer.losses import kl_k1, kl_k3
from areal.trainer.rollout.exchange import gather
from areal.trainer.rollout.plan import Group

_SUMS = (
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
    """Samples of a batch of rollouts, and statistics about it.

    Args:
        groups: groups of this data-parallel coordinate.
        max_tokens: longest sequence to train on; ``None`` for no limit.
        version: version of the weights to train.
        skip_flat: leave out groups whose rewards are all equal.

    Attributes:
        samples: samples for the engine, in the order of the groups.
        error: text of the first exception of an episode, or ``None``.
    """

    def __init__(
        self, groups: Sequence[Group], max_tokens: int | None, version: int, *, skip_flat: bool = False
    ) -> None:
        self.samples: list[dict[str, Tensor]] = []
        # One error is enough for a message; the counts are reduced over ranks.
        self.error = next((group.error for group in groups if group.error is not None), None)
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._stats: dict[str, tuple[float, int]] = {}
        for group in groups:
            # Nothing to compare: all rewards are equal, or there is one.
            flat = len({sequence.reward for sequence in group.sequences}) <= 1
            self._add(groups=1, failed=group.failed, flat_groups=flat)
            for sequence in group.sequences:
                # An episode's statistics count even if its sequence is not trained on.
                for name, value in sequence.stats.items():
                    total, count = self._stats.get(name, (0.0, 0))
                    self._stats[name] = (total + value, count + 1)
                sample = sequence.sample()
                if max_tokens is not None and len(sample["input_ids"]) > max_tokens:
                    self._add(overlong=1)
                    continue
                # A flat group is reported, whether it is trained on or not.
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
        """Add numbers to the sums of the same names."""
        for name, number in numbers.items():
            self._sums[name] += number

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return statistics of the global batch, with names ``rollout/...``; equal on all ranks. Collective.

        - ``reward``, ``reward_std``: mean and standard deviation over sequences.
        - ``tokens``: mean number of sampled tokens of a sequence.
        - ``staleness``: mean number of updates since the oldest token of a sequence was generated.
        - ``truncated``, ``flat_groups``: fractions of sequences and groups.
        - ``sequences``, ``failed`` (episodes), ``overlong``: counts.
        - each name in ``Sequence.stats``: mean over the sequences that have it.

        Raises:
            RuntimeError: no rank has a sequence.
        """
        totals = sum_over_ranks(torch.tensor([self._sums[name] for name in _SUMS], dtype=torch.float64))
        total = dict(zip(_SUMS, totals.tolist(), strict=True))
        n = total["sequences"]
        if not n:
            raise RuntimeError(
                f"no episode of this batch gave a sequence: {total['failed']:.0f} failed, {total['overlong']:.0f} were too long; "
                f"on this rank the first error was {self.error}"
            )
        # A variance from sums may be slightly negative by rounding.
        reward = total["reward"] / n
        return self._mean_stats() | {
            "rollout/reward": reward,
            "rollout/reward_std": max(0.0, total["reward_squared"] / n - reward**2) ** 0.5,
            "rollout/tokens": total["tokens"] / n,
            "rollout/staleness": total["staleness"] / n,
            "rollout/truncated": total["truncated"] / n,
            "rollout/flat_groups": total["flat_groups"] / max(1.0, total["groups"]),
            "rollout/sequences": n,
            "rollout/failed": total["failed"],
            "rollout/overlong": total["overlong"],
        }

    def _mean_stats(self) -> dict[str, float]:
        """Return the mean of each name in ``Sequence.stats`` over the world.

        Every data-parallel coordinate has the same number of ranks, which have the same sequences, so the repetition does not change a mean.
        """
        # Gathered as objects: ranks may have different names.
        all_stats: list[dict[str, tuple[float, int]]] = gather(self._stats)
        names = sorted({name for stats in all_stats for name in stats})
        sums = {name: [stats[name] for stats in all_stats if name in stats] for name in names}
        return {f"rollout/{name}": sum(t for t, _ in each) / sum(n for _, n in each) for name, each in sums.items()}


def disagreement(
    samples: Sequence[Mapping[str, Tensor]], sum_over_ranks: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Return the difference of ``old_logprobs`` (trainer) and ``rollout_logprobs`` over the trained tokens of the global batch. Collective.

    Returns:
        ``rollout/logprob_error``, the mean absolute difference in nats, and ``rollout/logprob_k3``, an estimate of KL(rollout || trainer)
        (k3; Schulman, "Approximating KL Divergence", 2020). Empty if no rank has a trained token.
    """
    # Sums on the CPU in float64; one collective for all three.
    sums = torch.zeros(3, dtype=torch.float64)
    for sample in samples:
        mask, old, rollout = (sample[key].double().cpu() for key in ("loss_mask", "old_logprobs", "rollout_logprobs"))
        error, k3 = kl_k1(old, rollout, mask).abs(), kl_k3(rollout, old, mask)
        sums += torch.stack([error.sum(), k3.sum(), mask.count_nonzero()])
    *totals, tokens = sum_over_ranks(sums).tolist()
    if not tokens:
        return {}
    names = ("rollout/logprob_error", "rollout/logprob_k3")
    return {name: total / tokens for name, total in zip(names, totals, strict=True)}
