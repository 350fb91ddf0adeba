"""What is known of gradients between calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PendingGradients:
    """Whether gradients wait for an optimizer step, and whether nothing more is owed to them."""

    there: bool = False
    final: bool = False

    def set(self, *, there: bool, final: bool = False) -> None:
        """Note both."""
        self.there, self.final = there, final
