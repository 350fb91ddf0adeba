"""Common prefixes of samples: find them, and build the token stream in which each shared token occurs once.

Prefixes are found from the tokens themselves. In lexicographic order, no earlier sample has a longer common prefix with a
sample than the one directly before it. So comparing neighbours is enough to find a tree of any depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.api import PrefixTree

IMAGE_ROWS = "image_rows"
"""Name among the keys of :class:`Prefixes` of the parts of images that tokens stand for."""

HIDDEN_STATE_KEYS = ("input_ids", "routed_experts", IMAGE_ROWS)
"""Per-token keys that hidden states depend on. Only tokens that agree in all of them are shared."""


class Prefixes:
    """The common prefixes of the samples of one rank's batch.

    Args:
        tokens: per-token keys, one tensor ``[S_i, ...]`` for each sample.
        adapters: adapter of each sample, or ``None``. Samples of different adapters have no common prefix.
    """

    def __init__(self, tokens: Mapping[str, Sequence[Tensor]], adapters: Sequence[int] | None = None) -> None:
        # One integer matrix [S_i, C] for each sample: a token is a row of all values that its hidden state depends on.
        columns = [tokens[key] for key in HIDDEN_STATE_KEYS if key in tokens]
        if adapters is not None:
            # In the first column, so that samples are ordered by their adapters.
            ids = tokens["input_ids"]
            columns.insert(0, [x.new_full((len(x),), index) for x, index in zip(ids, adapters, strict=True)])
        self._rows = [_integers(tensors) for tensors in zip(*columns, strict=True)]
        # Big-endian bytes compare like the (non-negative) numbers they encode, and much faster than lists.
        keys = [row.astype(">u4").tobytes() for row in self._rows]
        self._rank = {sample: rank for rank, sample in enumerate(sorted(range(len(keys)), key=keys.__getitem__))}
        self._shared_cache: dict[tuple[int, int], int] = {}

    def shared(self, a: int, b: int) -> int:
        """Return the length of the longest common prefix of samples ``a`` and ``b``."""
        if (a, b) not in self._shared_cache:
            first, second = self._rows[a], self._rows[b]
            n = min(len(first), len(second))
            # Index of the first difference; argmax is 0 without any, hence the check.
            differs = (first[:n] != second[:n]).ravel()
            index = int(differs.argmax())
            self._shared_cache[a, b] = index // first.shape[1] if differs[index] else n
        return self._shared_cache[a, b]

    def sort(self, samples: Sequence[int]) -> list[int]:
        """Return these samples in lexicographic order."""
        return sorted(samples, key=self._rank.__getitem__)

    def length(self, samples: Sequence[int]) -> int:
        """Return the number of tokens of these samples, with shared tokens counted once."""
        ordered = self.sort(samples)
        total = sum(len(self._rows[i]) for i in ordered)
        return total - sum(self.shared(a, b) for a, b in pairwise(ordered))

    def tree(self, samples: Sequence[int], output_keys: Sequence[Tensor]) -> PrefixTree:
        """Return the prefix tree of a micro-batch.

        Args:
            samples: samples of the micro-batch, in packed order.
            output_keys: packed keys that outputs depend on in addition to hidden states (such as targets), ``[T]`` or
                ``[T, ...]`` each, on the host.
        """
        starts = list(accumulate((len(self._rows[i]) for i in samples), initial=0))
        key_bits = np.concatenate([_bits(x) for x in output_keys], axis=1)
        # For each packed token: its index in the stream, and the index of its outputs.
        stream_index, output_index = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
        lengths, context_lengths, contexts, tokens, output_tokens = [], [], [], [], []
        stream_length, n_outputs, previous, previous_start = 0, 0, -1, 0

        # Visit the samples in lexicographic order, each compared with the one before it.
        for number in sorted(range(len(samples)), key=lambda number: self._rank[samples[number]]):
            # Packed tokens [start, fork) are shared with the previous sample; [fork, end) are new.
            start, end = starts[number], starts[number + 1]
            fork = start + (self.shared(samples[previous], samples[number]) if previous >= 0 else 0)
            common, new = fork - start, end - fork

            # Shared tokens have the stream indices that they got in the previous sample; new ones extend the stream.
            stream_index[start:fork] = stream_index[previous_start : previous_start + common]
            stream_index[fork:end] = np.arange(stream_length, stream_length + new)
            if new:
                lengths.append(new)
                context_lengths.append(end - start)
                contexts.append(stream_index[start:end])
                tokens.append(np.arange(fork, end))
                stream_length += new

            # A shared token has the outputs of the previous sample, too, unless another key (its target, say) differs.
            differs = (key_bits[previous_start : previous_start + common] != key_bits[start:fork]).any(1)
            output_index[start:fork] = output_index[previous_start : previous_start + common]
            # Additional outputs: of shared tokens whose keys differ, and of all new tokens.
            computed = np.concatenate([start + np.flatnonzero(differs), np.arange(fork, end)])
            output_index[computed] = np.arange(n_outputs, n_outputs + len(computed))
            output_tokens.append(computed)
            n_outputs += len(computed)
            previous, previous_start = number, start
        return PrefixTree(
            lengths=tuple(lengths),
            context_lengths=tuple(context_lengths),
            context_index=_concatenated(contexts),
            tokens=_concatenated(tokens),
            stream_index=torch.from_numpy(stream_index),
            output_tokens=_concatenated(output_tokens),
            output_index=torch.from_numpy(output_index),
        )


def _integers(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Flatten and concatenate tensors ``[S, ...]`` to one matrix ``[S, C]``."""
    return np.concatenate([x.detach().cpu().numpy().reshape(len(x), -1) for x in tensors], axis=1)


def _bits(x: Tensor) -> NDArray[np.int64]:
    """Return integers ``[T, C]`` that are equal exactly if the values of ``x`` ``[T, ...]`` are equal."""
    values = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return values.numpy().reshape(len(x), -1)


def _concatenated(arrays: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
