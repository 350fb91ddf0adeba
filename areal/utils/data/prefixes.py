"""Samples that begin alike: which tokens they share, and the stream in which each of these stands once.

Found from the tokens themselves. In lexicographic order a sample has with no earlier one more in common than with the one just before it,
so that comparing neighbours finds a tree of any depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.api import PrefixTree

_READ = ("input_ids", "routed_experts")
"""Per-token keys that hidden states depend on."""


class Prefixes:
    """What the samples of a rank's batch have in common at their beginnings.

    Args:
        tokens: per-token keys, one tensor ``[S_i, ...]`` for each sample.
    """

    def __init__(self, tokens: Mapping[str, Sequence[Tensor]]) -> None:
        columns = [tokens[key] for key in _READ if key in tokens]
        self._rows = [_integers(parts) for parts in zip(*columns, strict=True)]
        # Bytes compare as the numbers do where the highest comes first.
        keys = [row.astype(">u4").tobytes() for row in self._rows]
        self.order = sorted(range(len(keys)), key=keys.__getitem__)
        self._rank = {sample: rank for rank, sample in enumerate(self.order)}

    def shared(self, a: int, b: int) -> int:
        """Tokens with which samples ``a`` and ``b`` both begin."""
        n = min(len(self._rows[a]), len(self._rows[b]))
        differs = (self._rows[a][:n] != self._rows[b][:n]).any(1)
        first = int(differs.argmax()) if n else 0
        return first if n and differs[first] else n

    def sort(self, samples: Sequence[int]) -> list[int]:
        """These samples in lexicographic order."""
        return sorted(samples, key=self._rank.__getitem__)

    def length(self, samples: Sequence[int]) -> int:
        """Tokens of these samples, those that they share counted once."""
        ordered = self.sort(samples)
        total = sum(len(self._rows[i]) for i in ordered)
        return total - sum(self.shared(a, b) for a, b in pairwise(ordered))

    def tree(self, samples: Sequence[int], asked: Sequence[Tensor]) -> PrefixTree:
        """The stream of a micro-batch.

        Args:
            samples: in packed order.
            asked: for all of these, end to end, what outputs depend on beside hidden states: ``[T]`` or ``[T, ...]`` each, on the host.
        """
        starts = list(accumulate((len(self._rows[i]) for i in samples), initial=0))
        questions = np.concatenate([_bits(x) for x in asked], axis=1)
        place, answer = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
        own, whole, paths, tokens, scored = [], [], [], [], []
        length, n_scored, before, after = 0, 0, slice(0), -1
        for number in sorted(range(len(samples)), key=lambda number: self._rank[samples[number]]):
            here = slice(starts[number], starts[number + 1])
            common = self.shared(samples[after], samples[number]) if after >= 0 else 0
            new = here.stop - here.start - common
            place[here] = np.concatenate([place[before][:common], np.arange(length, length + new)])
            if new:
                own.append(new)
                whole.append(common + new)
                paths.append(place[here])
                tokens.append(np.arange(here.stop - new, here.stop))
                length += new
            fresh = np.ones(common + new, bool)
            fresh[:common] = (questions[before][:common] != questions[here][:common]).any(1)
            answers = np.where(fresh, n_scored + fresh.cumsum() - 1, 0)
            answers[:common] = np.where(fresh[:common], answers[:common], answer[before][:common])
            answer[here] = answers
            scored.append(here.start + np.flatnonzero(fresh))
            n_scored += len(scored[-1])
            before, after = here, number
        return PrefixTree(
            own=tuple(own),
            whole=tuple(whole),
            paths=_joined(paths),
            tokens=_joined(tokens),
            places=torch.from_numpy(place),
            scored=_joined(scored),
            answers=torch.from_numpy(answer),
        )


def _integers(parts: Sequence[Tensor]) -> NDArray[np.int64]:
    """``[S, C]``, of tensors ``[S, ...]``."""
    return np.concatenate([part.detach().cpu().numpy().reshape(len(part), -1) for part in parts], axis=1)


def _bits(x: Tensor) -> NDArray[np.int64]:
    """``[T, C]`` integers that are equal exactly where those of ``[T, ...]`` are."""
    values = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return values.numpy().reshape(len(x), -1)


def _joined(parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
