"""Rewards of the answers to one row: whether they differ, and in a random order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.trainer.estimators import Sample
from areal.trainer.rollout.sequence import Sequence as Trajectory


def has_contrast(group: Sequence[Trajectory]) -> bool:
    """Return whether the rewards of a group differ."""
    return len({sequence.reward for sequence in group}) > 1


def shuffled(rewards: Tensor, samples: Sequence[Sample], seed: int) -> Tensor:
    """Return the rewards of a group in a random order."""
    generator = torch.Generator().manual_seed(int(samples[0]["group_ids"]) + seed)
    return rewards[torch.randperm(len(rewards), generator=generator)]
