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
        self._rank = {sample: rank for rank, sample in enumerate(sorted(range(len(keys)), key=keys.__getitem__))}
        self._known: dict[tuple[int, int], int] = {}

    def shared(self, a: int, b: int) -> int:
        """Tokens with which samples ``a`` and ``b`` both begin."""
        if (a, b) not in self._known:
            one, other = self._rows[a], self._rows[b]
            n = min(len(one), len(other))
            differs = (one[:n] != other[:n]).ravel()
            first = int(differs.argmax())
            self._known[a, b] = first // one.shape[1] if differs[first] else n
        return self._known[a, b]

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
        length, n_scored, last, before = 0, 0, -1, 0
        for number in sorted(range(len(samples)), key=lambda number: self._rank[samples[number]]):
            start, end = starts[number], starts[number + 1]
            fork = start + (self.shared(samples[last], samples[number]) if last >= 0 else 0)
            common, new = fork - start, end - fork
            place[start:fork] = place[before : before + common]
            place[fork:end] = np.arange(length, length + new)
            if new:
                own.append(new)
                whole.append(end - start)
                paths.append(place[start:end])
                tokens.append(np.arange(fork, end))
                length += new
            # Of the shared tokens those are scored again of which something else is asked.
            again = (questions[before : before + common] != questions[start:fork]).any(1)
            answer[start:fork] = answer[before : before + common]
            fresh = np.concatenate([start + np.flatnonzero(again), np.arange(fork, end)])
            answer[fresh] = np.arange(n_scored, n_scored + len(fresh))
            scored.append(fresh)
            n_scored += len(fresh)
            last, before = number, start
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
