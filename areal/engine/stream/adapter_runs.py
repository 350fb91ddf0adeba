"""Runs of tokens with one adapter, in a micro-batch whose samples name several adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Runs = tuple[tuple[str, int], ...]
"""Name of an adapter and number of consecutive rows, end to end."""


@dataclass(frozen=True, eq=False)
class AdapterRuns:
    """The adapter of each row that one rank's model computes, as runs. On the host.

    Attributes:
        layers: runs of the rows of linear layers, padding included.
        outputs: runs of the rows with outputs.
        wanted: runs of the rows with log-probs, entropy and top-k.
    """

    layers: Runs
    outputs: Runs
    wanted: Runs

    @classmethod
    def of(cls, names: Sequence[str], layers: Tensor, outputs: Tensor, wanted: Tensor | None) -> AdapterRuns:
        """Return the runs of rows.

        Args:
            names: names of adapters, by index.
            layers: int64. Index of the adapter of each row of linear layers, on the host.
            outputs: the same of each row with outputs.
            wanted: int64. Rows among those with outputs that are wanted; ``None`` for all.
        """
        rows = _runs(names, outputs)
        return cls(_runs(names, layers), rows, rows if wanted is None else _runs(names, outputs[wanted]))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters of linear layers, in the order of their first rows."""
        return tuple(dict.fromkeys(name for name, _ in self.layers))

    @cached_property
    def n_rows(self) -> int:
        """Number of rows of linear layers."""
        return sum(length for _, length in self.layers)

    def slices(self, n_rows: int, rank: int) -> Iterator[tuple[str, slice]]:
        """Yield the adapter and the rows of each run in a layer's input or output.

        Args:
            n_rows: number of its rows: all, or those of one of the ranks that split the tokens again.
            rank: index of this rank among them.

        Raises:
            ValueError: a layer does not compute one row per token.
        """
        if n_rows == 0 or self.n_rows % n_rows:
            raise ValueError(
                f"a layer with an adapter computes {n_rows} rows of {self.n_rows} tokens: samples of one call cannot name several adapters for "
                "this model; make one call for each adapter"
            )
        # Rows of this rank begin at ``offset``.
        offset = 0 if n_rows == self.n_rows else rank * n_rows
        start = 0
        for name, length in self.layers:
            first, last = max(start, offset) - offset, min(start + length, offset + n_rows) - offset
            if first < last:
                yield name, slice(first, last)
            start += length


def _runs(names: Sequence[str], index: Tensor) -> Runs:
    values, counts = torch.unique_consecutive(index, return_counts=True)
    return tuple((names[k], n) for k, n in zip(values.tolist(), counts.tolist(), strict=True))
