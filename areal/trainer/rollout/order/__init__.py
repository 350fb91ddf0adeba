"""Order in which the groups of a run begin, wait and are trained on."""

from __future__ import annotations

from areal.trainer.rollout.order.completion import CompletionOrder
from areal.trainer.rollout.order.group_order import NOTHING_PLAYED, GroupOrder
from areal.trainer.rollout.order.resharding import resharded
from areal.trainer.rollout.order.shares import Share, counts_of_complete, equal_counts, position_of
from areal.trainer.rollout.order.start import StartOrder
from areal.trainer.rollout.plan import Plan

__all__ = [
    "NOTHING_PLAYED",
    "GroupOrder",
    "Share",
    "counts_of_complete",
    "equal_counts",
    "order_of",
    "position_of",
    "resharded",
]


def order_of(plan: Plan) -> GroupOrder:
    """Return an empty order of the groups of one rank."""
    return StartOrder(plan) if plan.in_order else CompletionOrder(plan)
