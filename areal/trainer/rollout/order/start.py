"""Batches of groups in the order in which they began."""

from __future__ import annotations

from areal.trainer.rollout.order.group_order import GroupOrder
from areal.trainer.rollout.plan import Group


class StartOrder(GroupOrder):
    """Consumes groups in the order in which they began, so that what is trained on does not depend on how long an answer takes.

    Batch ``b`` has groups ``b * B`` to ``(b + 1) * B - 1``, if none is rejected. Group ``j`` begins once ``j < (t + k + 1) * B``. So none is
    trained on more than ``k`` updates after it began.
    """

    def select(self, count: int) -> list[int] | None:
        """Return the first groups that are not done, until enough of them are kept."""
        numbers: list[int] = []
        kept, number = 0, self._floor
        while kept < count:
            if number not in self._ahead:
                if number not in self.waiting:
                    return None
                numbers.append(number)
                kept += isinstance(self.waiting[number].played, Group)
            number += 1
        return numbers
