"""Memory of an engine's passes: measured on each rank, and compared with what is free before a larger pass runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from areal.api.memory import EngineMemory
from areal.utils import platform
from areal.utils.profiling.pass_bytes import PassBytes, peak_bytes, start_peak

Kind = tuple[Any, ...]
"""Kind of a pass: whether it is without gradients, and the outputs that it computes."""

_REACH = 8
"""Tokens up to which one measured pass is extrapolated, in times of its own. Beyond that, its constant bytes would dominate."""


class Claim(NamedTuple):
    """What a rank tells the others of its memory before a pass.

    Attributes:
        largest: tokens of the largest micro-batch of earlier passes of this kind.
        nbytes: bytes of earlier passes of this kind.
        free: bytes that a pass can use.
        limit_mb: the option ``memory_limit_mb``.
    """

    largest: int
    nbytes: PassBytes
    free: int
    limit_mb: int

    def shortage(self, tokens: int) -> int:
        """Return the bytes that a micro-batch of so many tokens lacks, by what was measured; 0 if it fits or cannot be estimated."""
        if not self.largest < tokens <= self.nbytes.reach(_REACH):
            return 0
        return max(0, self.nbytes.needed(tokens) - self.free)


@dataclass
class _Passes:
    """Passes of one kind that have run on this rank."""

    largest: int = 0
    nbytes: PassBytes = field(default_factory=PassBytes)


class MemoryLimit:
    """Limit of the memory of this rank's passes.

    Most calls only compare two integers: a pass is measured if it is the second of its kind (the first allocates what no other one does) or
    of another size than those that were, and free memory is read if a micro-batch is larger than all earlier ones.

    Args:
        limit_mb: the option ``memory_limit_mb``.
        memory: returns what the engine has, on the device and offloaded; ``None`` if what is offloaded stays so.
    """

    def __init__(self, device: torch.device, limit_mb: int, memory: Callable[[], list[EngineMemory]] | None) -> None:
        self._device, self._limit_mb, self._memory = device, limit_mb, memory
        self._passes: dict[Kind, _Passes] = {}

    def claim(self, kind: Kind | None, tokens: int, *, always: bool) -> Claim | None:
        """Return what the other ranks should know before a pass; ``None`` if it runs without a check.

        Args:
            kind: kind of the pass; ``None`` if it is unknown.
            tokens: tokens of the largest micro-batch of this rank.
            always: the micro-batches of other ranks decide on those of this rank.
        """
        passes = None if kind is None else self._passes.get(kind)
        if kind is None or passes is None or not (always or tokens > passes.largest):
            return None
        free = platform.free_memory(self._device)
        if self._limit_mb:
            free = min(free, self._limit_mb * 2**20 - platform.used_bytes(self._device))
        # What comes back before the pass takes its memory first.
        if self._memory is not None:
            held, forward_only = self._memory()[0], kind[0]
            free -= held.params.offloaded + (0 if forward_only else held.grads.offloaded)
        return Claim(passes.largest, passes.nbytes, free, self._limit_mb)

    @contextlib.contextmanager
    def measuring(self, kind: Kind, tokens: int) -> Iterator[None]:
        """Measure the pass inside if that is due. A pass that raises does not count.

        Args:
            tokens: tokens of the largest micro-batch of this rank.
        """
        passes = self._passes.setdefault(kind, _Passes())
        due = passes.largest > 0 and passes.nbytes.due(tokens)
        before = start_peak(self._device) if due else 0
        yield
        if due:
            passes.nbytes.add(tokens, peak_bytes(self._device) - before)
        passes.largest = max(passes.largest, tokens)


def check_claims(claims: Sequence[Claim | None], tokens: Sequence[int], longest: Sequence[int]) -> None:
    """Raise if a pass does not fit on some rank. All ranks raise the same error.

    Args:
        claims: claim of each rank.
        tokens: tokens of the largest micro-batch of each rank, as its model computes it.
        longest: length of the longest sequence of each rank, in tokens.

    Raises:
        ValueError: names the rank with the largest shortage, the tokens, the bytes and the way out.
    """
    short = [0 if claim is None else claim.shortage(n) for claim, n in zip(claims, tokens, strict=True)]
    rank = max(range(len(short)), key=short.__getitem__)
    claim = claims[rank]
    if claim is None or not short[rank]:
        return
    needed = claim.nbytes.needed(tokens[rank])
    raise ValueError(
        f"memory is short on rank {rank} for a micro-batch of {tokens[rank]} tokens, the longest sequence having {longest[rank]}: by earlier "
        f"passes it needs {needed / 2**20:.0f} MiB ({needed / tokens[rank] / 2**10:.0f} KiB per token), and {max(0, claim.free) / 2**20:.0f} "
        f"MiB are free (memory_limit_mb = {claim.limit_mb}). Nothing has run: lower mb_spec.max_tokens_per_mb, shorten the sequences, set "
        "activation_checkpointing = 'full', choose a larger c, or raise memory_limit_mb"
    )
