"""Memory of passes: how many bytes a token needs on a rank, measured in passes that have run, and whether a pass fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from areal.api import TrainEngine
from areal.dispatch import WorkerGroup
from areal.tinker.backends.errors import UserError
from areal.tinker.backends.training.adapter_memory import RankMemory, rank_memory
from areal.utils import platform
from areal.utils.profiling.pass_bytes import PassBytes, peak_bytes, start_peak

_R = TypeVar("_R")

FEW_TOKENS = 256
"""Tokens up to which a pass runs without a question: its bytes are few next to those of the model."""

PROBE_TOKENS = 512
"""Tokens of the pass that is measured before the first one that asks."""

_STEP = 1.25
"""Least ratio of the tokens of a probe to those of the one before."""

_NOT_MEASURED = ("jax",)
"""Engines whose peak this process cannot see: it has that of the compiler, or the memory is of a device that torch does not know."""

_RETURNED_BYTES = 64 * 2**20
"""Bytes of a pass from which its memory is returned to the system afterwards."""


class PassMemory:
    """Memory of passes of one kind, with gradients or without, on all ranks.

    Args:
        group: the engine.
        max_tokens_per_mb: most tokens of a micro-batch; a longer sample is one by itself.
        probe: runs a pass with micro-batches of so many tokens on each rank.
    """

    def __init__(self, group: WorkerGroup, max_tokens_per_mb: int, probe: Callable[[int], None]) -> None:
        self._group, self._max, self._probe = group, max_tokens_per_mb, probe
        self._nbytes = PassBytes()

    def run(self, lengths: Sequence[int], work: Callable[[], _R]) -> _R:
        """Run a pass if it fits.

        Args:
            lengths: tokens of each sample.
            work: the pass.

        Raises:
            UserError: memory is short on some rank. Nothing has run.
        """
        tokens = self.tokens_at_once(lengths)
        if tokens <= FEW_TOKENS or self._group.dims.backend in _NOT_MEASURED:
            return work()
        if not self._nbytes.largest:
            self._probe(FEW_TOKENS)  # allocates what only the first pass does
            self._measure_probe(min(tokens, PROBE_TOKENS))
        needed = self._admit(tokens, max(lengths))
        dims = self._group.dims
        # With several shards, a rank may have fewer tokens, and a stage of a pipeline fewer micro-batches than in other passes.
        exact = dims.dp == dims.pp == 1
        try:
            return self._measure(tokens, work) if exact and self._nbytes.due(tokens) else work()
        finally:
            if needed >= _RETURNED_BYTES:
                self._group.run(_give_back)

    def tokens_at_once(self, lengths: Sequence[int]) -> int:
        """Return the tokens of the largest micro-batch of a rank, at most: samples are divided over data-parallel ranks."""
        dims, longest, total = self._group.dims, max(lengths), sum(lengths)
        share = min(total, math.ceil(total / dims.dp) + longest) if dims.dp > 1 else total
        return math.ceil(min(share, max(longest, self._max)) / dims.cp)

    def _admit(self, tokens: int, longest: int) -> int:
        """Return the bytes that a pass needs at most, in proportion to the largest one that was measured.

        If they are not free, larger probes are measured as far as they fit: a larger part of their bytes depends on tokens.
        """
        while True:
            needed = self._nbytes.in_proportion(tokens)
            ranks: list[RankMemory] = self._group.run(rank_memory)
            # Gradients and states of other adapters, which do not exist yet, have a claim on free memory.
            rank, free = min(enumerate(each.free - each.missing for each in ranks), key=lambda pair: pair[1])
            if needed <= free:
                return needed
            largest = self._nbytes.largest
            probed = min(2 * largest, tokens * free // max(1, needed))
            if probed < _STEP * largest:
                raise UserError(
                    f"memory is short for a pass with {tokens} tokens in one micro-batch, the longest sample having {longest}: it needs "
                    f"{needed / 2**20:.0f} MiB, by measured {needed / tokens / 2**10:.0f} KiB per token, and {max(0, free) / 2**20:.0f} MiB "
                    f"are free on rank {rank}: send {'shorter' if longest == tokens else 'fewer'} samples at once, or release a model"
                )
            self._measure_probe(probed)

    def _measure_probe(self, tokens: int) -> None:
        self._measure(tokens, lambda: self._probe(tokens))
        self._group.run(_give_back)

    def _measure(self, tokens: int, work: Callable[[], _R]) -> _R:
        """Run a pass, and estimate later ones by its bytes."""
        before: list[int] = self._group.run(_begin)
        result = work()
        peaks: list[int] = self._group.run(_peak)
        self._nbytes.add(tokens, max(peak - base for peak, base in zip(peaks, before, strict=True)))
        return result


def _begin(engine: TrainEngine, _: Any) -> int:
    return start_peak(engine.device)


def _peak(engine: TrainEngine, _: Any) -> int:
    return peak_bytes(engine.device)


def _give_back(engine: TrainEngine, _: Any) -> None:
    platform.give_back(engine.device)
