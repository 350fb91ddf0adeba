"""Global batches of the grid, their distribution over data-parallel ranks, and their split into micro-batches.

Losses and weights are computed from numbers with few binary digits, so that their sums are exact in float32 in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal.api import IGNORE_INDEX, MicroBatchSpec
from areal.tests.grid.models import VOCAB

TOP = 3
"""Targets at each position in distillation."""


@dataclass(frozen=True)
class Case:
    """A global batch.

    Attributes:
        lengths: number of tokens per sequence.
        weightless: indices of sequences whose ``loss_mask`` is all 0.
        last_rank: indices of the last data-parallel rank's sequences; the other ranks get the rest.
        own_temperature: if True, each sequence has a ``temperature``.
        temperature: temperature of the engine's configuration.
        form: ``"padded"`` or ``"list"``, the form in which the caller passes the batch.
        begins_like: sequence -> (earlier sequence, length of their common prefix).
    """

    name: str
    lengths: tuple[int, ...]
    weightless: tuple[int, ...] = ()
    last_rank: tuple[int, ...] = ()
    own_temperature: bool = False
    temperature: float = 1.0
    form: str = "padded"
    seed: int = 0
    begins_like: Mapping[int, tuple[int, int]] = field(default_factory=dict)


CASES = {
    case.name: case
    for case in (
        Case("ragged", (7, 1, 23, 12, 1, 38, 5, 17, 9), weightless=(3,), last_rank=(1, 5, 6)),
        Case(
            "zero_rank",
            (11, 6, 1, 19, 30, 8, 3, 14, 10),
            weightless=(0, 2, 4),
            last_rank=(0, 2, 4),
            own_temperature=True,
            form="list",
        ),
        Case("starved", (4, 15, 27, 9, 21, 2, 13, 10), last_rank=(0,), temperature=0.75),
        # A tree of prefixes: equal sequences, a prefix of another sequence, and sequences without a common prefix.
        Case(
            "family",
            (22, 17, 22, 19, 6, 31, 22, 8, 11, 1),
            weightless=(1,),
            last_rank=(2, 3, 8, 9),
            own_temperature=True,
            begins_like={1: (0, 9), 2: (0, 22), 3: (1, 14), 4: (0, 6), 5: (3, 18), 6: (0, 21), 8: (7, 7), 9: (0, 1)},
        ),
    )
}

CUTS = {
    "whole": MicroBatchSpec(),
    "tokens24": MicroBatchSpec(max_tokens_per_mb=24, overlong="alone"),
    "tokens64": MicroBatchSpec(max_tokens_per_mb=64),
    "mbs3": MicroBatchSpec(n_mbs=3),
    "shared": MicroBatchSpec(share_prefixes=True),
    "shared40": MicroBatchSpec(max_tokens_per_mb=40, share_prefixes=True),
}


def samples(case: Case, *, top_targets: bool = False, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return the sequences of the global batch.

    Args:
        top_targets: bool. Adds ``target_ids`` ``[S, TOP]`` (some of them missing) and ``teacher_probs``.
        seed: int. Seed of another batch of the same shape.
    """
    generator = torch.Generator().manual_seed(1000 * case.seed + seed)
    made = [
        _sample(length, i in case.weightless, case.own_temperature, top_targets, generator)
        for i, length in enumerate(case.lengths)
    ]
    for i, (other, shared) in case.begins_like.items():
        made[i]["input_ids"][:shared] = made[other]["input_ids"][:shared]
    return made


def _sample(
    length: int, weightless: bool, own_temperature: bool, top_targets: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    def eighths(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator) / 8

    mask = eighths(1, 12, length) * (torch.rand(length, generator=generator) < 0.7)
    sample = {
        "input_ids": torch.randint(0, VOCAB, (length,), generator=generator),
        "loss_mask": torch.zeros(length) if weightless else mask,
        "advantages": eighths(-16, 16, length),
        "old_logprobs": -eighths(24, 48, length),
        "returns": eighths(-8, 8, length),
        "reward": eighths(-8, 8),
    }
    if own_temperature:
        sample["temperature"] = eighths(4, 12)
    if top_targets:
        targets = torch.randint(0, VOCAB, (length, TOP), generator=generator)
        targets[torch.rand(length, TOP, generator=generator) < 0.15] = IGNORE_INDEX
        sample["target_ids"] = targets
        sample["teacher_probs"] = eighths(0, 4, length, TOP)
    return sample


EMPTY_RANKS = ("none", "first", "last")
"""Data-parallel ranks without sequences. The others have the whole global batch."""


def dp_shard_indices(case: Case, dp_rank: int, dp_size: int, empty_rank: str = "none") -> list[int]:
    """Return the indices of a data-parallel rank's sequences: an uneven split, in shuffled order.

    Args:
        empty_rank: str. One of :data:`EMPTY_RANKS`.
    """
    if empty_rank != "none":
        idle = 0 if empty_rank == "first" else dp_size - 1
        if dp_rank == idle:
            return []
        # The ranks that are left split the global batch as if there were no other.
        dp_rank, dp_size = dp_rank - (dp_rank > idle), dp_size - 1
    order = torch.randperm(len(case.lengths), generator=torch.Generator().manual_seed(case.seed + dp_size)).tolist()
    if dp_size == 1:
        return order
    last = [i for i in order if i in case.last_rank]
    if dp_rank == dp_size - 1:
        return last
    rest = [i for i in order if i not in case.last_rank]
    bounds = [len(rest) * rank * (rank + 1) // (dp_size * (dp_size - 1)) for rank in range(dp_size)]
    return rest[bounds[dp_rank] : bounds[dp_rank + 1]]


def as_input(chosen: Sequence[dict[str, Tensor]], form: str, like: Mapping[str, Tensor] | None = None) -> Any:
    """Convert sequences to an engine's input: a list of dicts, or a padded dict whose padding is 1 and must have no effect.

    Args:
        like: dict. Any sequence, whose keys a padded dict gets if there are no sequences.
    """
    if form == "list":
        return [dict(sample) for sample in chosen]
    lengths = [len(sample["input_ids"]) for sample in chosen]
    width = max(lengths, default=0) + 2
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    batch: dict[str, Tensor] = {"attention_mask": mask.long()}
    for key, first in (like or chosen[0]).items():
        if first.dim() == 0:
            batch[key] = first.new_tensor([sample[key].item() for sample in chosen])
            continue
        batch[key] = first.new_ones((len(chosen), width, *first.shape[1:]))
        for row, sample in zip(batch[key], chosen, strict=True):
            row[: len(sample[key])] = sample[key]
    return batch


def rows(restored: Any, lengths: Sequence[int]) -> list[Tensor]:
    """Convert an output of ``forward_batch``, padded or a list, to one tensor per sequence.

    Raises:
        AssertionError: padding is not zero.
    """
    per_sequence = []
    for row, length in zip(restored, lengths, strict=True):
        assert not row[length:].any(), "outputs at padding must be 0"
        per_sequence.append(row[:length])
    return per_sequence
