"""Batches of groups that are complete."""

from __future__ import annotations

from areal.trainer.rollout.order.group_order import GroupOrder
from areal.trainer.rollout.plan import Group


class CompletionOrder(GroupOrder):
    """Consumes the groups that are complete, those that began first before others, so that a long answer holds up no batch.

    A group that began with ``s`` batches trained on may be in batches up to ``s + k``. When batch ``s + k`` is complete without it, it is
    given up, and another one begins. With ``Plan.partial_answers`` it goes on instead, and may be in any batch.
    """

    def select(self, count: int) -> list[int] | None:
        """Return the complete groups that began first."""
        kept = self.complete()[:count]
        if len(kept) < count:
            return None
        last = kept[-1] if kept else -1
        before = [
            number for number, each in self.waiting.items() if number < last and not isinstance(each.played, Group)
        ]
        return sorted(kept + before)

    def too_late(self, batch: int) -> list[int]:
        """Return the groups that began ``Plan.max_staleness`` updates before ``batch``, or earlier."""
        if self._plan.partial_answers:
            return []
        latest = batch - self._plan.max_staleness
        complete = {
            number: each.begun
            for number, each in self.waiting.items()
            if isinstance(each.played, Group)  # one that was rejected is counted with its reward
        }
        return [number for number, begun in (complete | self.running).items() if begun <= latest]
