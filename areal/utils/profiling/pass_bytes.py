"""Bytes that a pass needs, by the tokens of its largest micro-batch: measured at the peaks of passes that have run."""

from __future__ import annotations

import torch

from areal.utils import platform

_APART = 1.5
"""Least ratio of the tokens of two measured passes. Closer ones would tell the slope from noise."""


class PassBytes:
    """Bytes of passes of one kind, on a rank or on the fullest of several.

    The peak of a pass is a maximum of moments, each linear in tokens. Above the larger of two measured passes it is therefore at least their
    line. With one measured pass, its bytes per token count, which include what does not depend on tokens, such as gathered weights.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[int, int]] = []  # tokens and bytes of at most two passes, the larger one last

    @property
    def largest(self) -> int:
        """Tokens of the largest measured pass. 0 without one."""
        return self._measured[-1][0] if self._measured else 0

    def due(self, tokens: int) -> bool:
        """Return whether a pass of so many tokens should be measured."""
        if not self._measured:
            return True
        return tokens > _APART * self.largest or (len(self._measured) == 1 and tokens * _APART < self.largest)

    def add(self, tokens: int, nbytes: int) -> None:
        """Add a pass that was measured."""
        self._measured = sorted([*self._measured, (tokens, max(0, nbytes))])[-2:]

    def reach(self, times: int) -> int:
        """Return the most tokens that can be estimated, with one measured pass ``times`` its tokens. 0 without a measured pass."""
        if not self._measured:
            return 0
        return times * self._measured[0][0] if len(self._measured) == 1 else 2**62

    def in_proportion(self, tokens: int) -> int:
        """Return bytes in proportion to the largest measured pass; 0 without one. A larger pass needs at most these."""
        if not self._measured:
            return 0
        large, many = self._measured[-1]
        return round(many * tokens / large)

    def needed(self, tokens: int) -> int:
        """Return the bytes that a pass of so many tokens needs, by what was measured. A larger one than these needs at least this."""
        if not self._measured:
            return 0
        (small, few), (large, many) = self._measured[0], self._measured[-1]
        proportion = self.in_proportion(tokens)
        if not tokens > large > small:
            return proportion
        return min(proportion, round(many + max(0, many - few) / (large - small) * (tokens - large)))


def start_peak(device: torch.device) -> int:
    """Begin to measure a pass on this rank. Returns the bytes in use."""
    platform.give_back(device)
    platform.forget_peak(device)
    return platform.used_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of the bytes in use since :func:`start_peak`."""
    return platform.used_bytes(device, peak=True)
