"""Statistics of a batch of rollouts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.sampling_check import SamplingItems
from areal.trainer.rollout.sequence import Sequence as RolloutSequence

_SUMS = (
    "sequences",
    "failed",
    "played",
    "overlong",
    "truncated",
    "episodes",
    "reward",
    "reward_squared",
    "tokens",
    "staleness",
    "too_stale",
    "stale_tokens",
    "stale_sequences",
    "groups",
    "flat_groups",
    "groups_rejected",
    "rejected_reward",
    "groups_cancelled",
)


class RolloutReport:
    """Samples of a batch of rollouts, and statistics about it.

    Args:
        groups: groups of this data-parallel coordinate.
        max_tokens: longest sequence to train on; ``None`` for no limit.
        version: version of the weights to train.
        skip_flat: leave out groups whose rewards are all equal.
        mask_truncated: do not train on truncated answers.
        max_failed_share: fraction of the episodes that may have failed, over all ranks; ``None`` for no limit.
        max_staleness: number of updates since the oldest trained token of a sequence was generated; ``None`` for no limit.
        skip_stale: leave out the tokens that are older than ``max_staleness``, instead of refusing their sequences.
        temperature: of answers whose sampling parameters are unknown.

    Attributes:
        samples: samples for the engine, in the order of the groups.
        untrained: samples of the same groups that are not trained on, with the key ``untrained``. Their rewards belong to the group.
        error: traceback of the first exception of an episode, or its kind and text, or ``None``.
        samplings: sampling parameters of the trained answers, each a tuple of names and values. Of all ranks once :meth:`reduce` was called.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        max_tokens: int | None,
        version: int,
        *,
        skip_flat: bool = False,
        mask_truncated: bool = False,
        max_failed_share: float | None = None,
        max_staleness: int | None = None,
        skip_stale: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.samples: list[dict[str, Tensor]] = []
        self.untrained: list[dict[str, Tensor]] = []
        # One error is enough for a message; the counts are reduced over ranks.
        self.error = next((group.traceback or group.error for group in groups if group.error is not None), None)
        self._max_failed_share, self._max_staleness, self._version = max_failed_share, max_staleness, version
        # Tokens of earlier versions are left out.
        self._oldest = version - max_staleness if skip_stale and max_staleness is not None else None
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._stats: dict[str, tuple[float, int]] = {}
        self.samplings: set[SamplingItems] = set()
        for group in groups:
            # Nothing to compare: all rewards are equal, or there is one.
            flat = len({sequence.reward for sequence in group.sequences}) <= 1
            # A sequence without an episode is one by itself.
            episodes = [object() if each.episode is None else each.episode for each in group.sequences]
            self._add(groups=1, failed=group.failed, played=group.failed + len(set(episodes)), flat_groups=flat)
            known = [reward for reward in group.rejected if not math.isnan(reward)]
            self._add(groups_rejected=len(group.rejected), rejected_reward=sum(known), groups_cancelled=group.cancelled)
            rewards: defaultdict[object, list[float]] = defaultdict(list)
            for sequence, episode in zip(group.sequences, episodes, strict=True):
                # An episode's statistics count even if its sequence is not trained on.
                for name, value in sequence.stats.items():
                    total, count = self._stats.get(name, (0.0, 0))
                    self._stats[name] = (total + value, count + 1)
                # All samples of a batch have the same keys.
                sample = {"temperature": torch.tensor(float(temperature))} | sequence.sample(self._oldest)
                overlong = max_tokens is not None and len(sample["input_ids"]) > max_tokens
                # A flat group is reported, whether it is trained on or not.
                if not (flat and skip_flat):
                    if overlong or (mask_truncated and sequence.truncated) or not sample["output_mask"].any():
                        self.untrained.append(sample | {"untrained": torch.tensor(True)})
                    else:
                        self.samples.append(sample)
                        self.samplings |= {
                            tuple(s.sampling.items()) for s in sequence.segments if s.trainable and s.sampling
                        }
                if overlong:
                    self._add(overlong=1)
                    continue
                self._add_sequence(sequence, sample)
                rewards[episode].append(sequence.reward)
            # An episode counts once, as in the baseline of its group.
            for reward in map(fmean, rewards.values()):
                self._add(episodes=1, reward=reward, reward_squared=reward**2)

    def _add_sequence(self, sequence: RolloutSequence, sample: Mapping[str, Tensor]) -> None:
        """Add a sequence to the sums."""
        staleness = self._version - sequence.oldest_version(self._version, self._oldest)
        trained = int(sample["output_mask"].count_nonzero())
        self._add(
            sequences=1,
            truncated=sequence.truncated,
            tokens=sequence.trained_tokens,
            staleness=staleness,
            too_stale=self._max_staleness is not None and staleness > self._max_staleness,
            stale_tokens=sequence.trained_tokens - trained,
            stale_sequences=not trained,
        )

    def _add(self, **numbers: float) -> None:
        """Add numbers to the sums of the same names."""
        for name, number in numbers.items():
            self._sums[name] += number

    def reduce(
        self,
        sum_over_ranks: Callable[[Tensor], Tensor],
        gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> dict[str, float]:
        """Return statistics of the global batch, with names ``rollout/...``; equal on all ranks. Collective.

        - ``reward``, ``reward_std``: mean and standard deviation over episodes. The reward of an episode is the mean of its sequences.
        - ``tokens``: mean number of sampled tokens of a sequence.
        - ``staleness``: mean number of updates since the oldest trained token of a sequence was generated.
        - ``stale_tokens``: with ``skip_stale``, fraction of the sampled tokens that are too old to train on.
        - ``truncated``, ``flat_groups``: fractions of sequences and groups.
        - ``sequences``, ``failed`` (episodes), ``overlong``, ``groups_rejected`` (by ``keep``), ``groups_cancelled`` (beyond the bound):
          counts.
        - ``rejected_reward``: mean reward of the rejected groups, if there are any. All other numbers are without these groups.
        - each name in ``Sequence.stats``: mean over the sequences that have it.

        Args:
            sum_over_ranks: ``engine.global_sum``.
            gather: returns the values of all ranks. By default there is this rank only.

        Raises:
            RuntimeError: more episodes failed than may, no rank has a sequence, or sequences are older than they may be.
        """
        totals = sum_over_ranks(torch.tensor([self._sums[name] for name in _SUMS], dtype=torch.float64))
        total = dict(zip(_SUMS, totals.tolist(), strict=True))
        self._check_failures(total["failed"], total["played"], gather)
        n = total["sequences"]
        if not n:
            raise RuntimeError(
                f"no episode of this batch gave a sequence: {total['failed']:.0f} failed, {total['overlong']:.0f} were too long"
                f"{self._first_errors(gather)}"
            )
        if total["too_stale"]:
            raise RuntimeError(
                f"{total['too_stale']:.0f} of {n:.0f} sequences are of weights more than Plan.max_staleness = {self._max_staleness} "
                f"updates before version {self._version}: sync= did not send the weights, or the rollout does not tell their version"
            )
        # A variance from sums may be slightly negative by rounding.
        episodes = total["episodes"]
        reward = total["reward"] / episodes
        rejected = total["groups_rejected"]
        of_rejected = {"rollout/rejected_reward": total["rejected_reward"] / rejected} if rejected else {}
        stale = {} if self._oldest is None else {"rollout/stale_tokens": total["stale_tokens"] / total["tokens"]}
        return (
            self._mean_stats(gather)
            | of_rejected
            | stale
            | {
                "rollout/reward": reward,
                "rollout/reward_std": max(0.0, total["reward_squared"] / episodes - reward**2) ** 0.5,
                "rollout/tokens": total["tokens"] / n,
                "rollout/staleness": total["staleness"] / max(1.0, n - total["stale_sequences"]),
                "rollout/truncated": total["truncated"] / n,
                "rollout/flat_groups": total["flat_groups"] / max(1.0, total["groups"]),
                "rollout/sequences": n,
                "rollout/failed": total["failed"],
                "rollout/overlong": total["overlong"],
                "rollout/groups_rejected": total["groups_rejected"],
                "rollout/groups_cancelled": total["groups_cancelled"],
            }
        )

    def _check_failures(self, failed: float, played: float, gather: Callable[[Any], list[Any]]) -> None:
        """Raise on all ranks if more episodes failed than may."""
        limit = self._max_failed_share
        if limit is not None and failed > limit * played:
            raise RuntimeError(
                f"{failed:.0f} of {played:.0f} episodes of this batch failed, more than Plan.max_failed_share = {limit:g}: mend the episode or "
                f"its reward, or raise the limit{self._first_errors(gather)}"
            )

    def _first_errors(self, gather: Callable[[Any], list[Any]]) -> str:
        """Return the end of a message: the first error of each rank that has one."""
        errors = dict.fromkeys(error for error in gather(self.error) if error is not None)
        return ". The first errors of the ranks:\n" + "\n".join(errors) if errors else ""

    def _mean_stats(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return the mean of each name in ``Sequence.stats`` over the world, and collect the sampling parameters of all ranks.

        Every data-parallel coordinate has the same number of ranks, which have the same sequences, so the repetition does not change a mean.
        """
        # Gathered as objects: ranks may have different names.
        gathered = gather((self._stats, self.samplings))
        self.samplings = set().union(*(samplings for _, samplings in gathered))
        all_stats: list[dict[str, tuple[float, int]]] = [stats for stats, _ in gathered]
        names = sorted({name for stats in all_stats for name in stats})
        sums = {name: [stats[name] for stats in all_stats if name in stats] for name in names}
        return {f"rollout/{name}": sum(t for t, _ in each) / sum(n for _, n in each) for name, each in sums.items()}
