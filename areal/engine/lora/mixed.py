"""Contributions of several adapters to one layer: each run of rows has the factors of its adapter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal.engine.lora.low_rank import LowRank
from areal.engine.lora.row_products import Down, Spans, Up
from areal.engine.stream.layout import AdapterRuns


class MixedLowRank:
    """The factors of one layer for a micro-batch with several adapters. Applied like :class:`LowRank`.

    Args:
        pairs: factors of the layer by adapter. An adapter without factors of this layer is missing.
        runs: runs of rows with one adapter.
    """

    def __init__(self, pairs: Mapping[str, LowRank], runs: AdapterRuns) -> None:
        self._pairs, self._runs = pairs, runs
        # All adapters are split over ranks as the layer is.
        any_pair = next(iter(pairs.values()))
        self._split, self._tp_rank = any_pair.split, any_pair.tp_rank
        self._width = max(pair.target.rank for pair in pairs.values())

    # Runs differ between micro-batches: a graph would contain their lengths.
    @torch.compiler.disable
    def apply(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output plus the contribution of each run's adapter. Arguments as for :meth:`LowRank.apply`."""
        # Down to the ranks, in a matrix as wide as the largest.
        rows = self._split.before_down(x.flatten(0, -2))
        spans, pairs = self._spans(len(rows))
        saved = self._split.saved_input(x) if spans else None
        low = Down.apply(rows, self._width, spans, saved, *(pair.down.parameter.to(x.dtype) for pair in pairs))
        # Communication of the layer: the tokens may be others afterwards.
        low, rows = self._split.before_up(low), out.flatten(0, -2)
        spans, pairs = self._spans(len(rows))
        scales = [pair.scale for pair in pairs]
        added = Up.apply(rows, low, spans, scales, *(pair.local_up().to(x.dtype) for pair in pairs))
        return added.view(out.shape)

    def _spans(self, n_rows: int) -> tuple[Spans, list[LowRank]]:
        """Return the runs with factors of this layer, and their factors."""
        found = [(rows, self._pairs.get(name)) for name, rows in self._runs.slices(n_rows, self._tp_rank)]
        present = [(rows, pair) for rows, pair in found if pair is not None]
        return [(rows.start, rows.stop) for rows, _ in present], [pair for _, pair in present]


def mixed_pairs(adapters: Mapping[str, Mapping[str, LowRank]], runs: AdapterRuns) -> dict[str, MixedLowRank]:
    """Return the factors of each layer that one of several adapters has.

    Args:
        adapters: factors by layer, of each adapter.
        runs: runs of rows with one adapter.
    """
    layers: dict[str, dict[str, LowRank]] = {}
    for name, pairs in adapters.items():
        for layer, pair in pairs.items():
            layers.setdefault(layer, {})[name] = pair
    return {layer: MixedLowRank(pairs, runs) for layer, pairs in layers.items()}
