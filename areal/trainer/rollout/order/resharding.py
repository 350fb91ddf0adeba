"""State of a run for another number of ranks that run episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.trainer.rollout.order.group_order import NOTHING_PLAYED, batches_of, begun_of, numbers_of
from areal.trainer.rollout.order.shares import Share
from areal.trainer.rollout.plan import Plan


def resharded(states: Sequence[Mapping[str, Any]], share: Share, plan: Plan) -> dict[str, Any]:
    """Return the state of one rank in a run that another number of ranks has saved.

    Groups belong to ranks by their index in the run. Those that the saved run had consumed, rejected or cancelled on any rank are not played
    again, and those that wait are taken over, but for those whose new rank would train on them beyond the bound: they are played again.

    Args:
        states: of all ranks of the saved run, in order.
        share: groups of the rank of the new run.
        plan: order and bound of the run.
    """
    trained = states[0]["trained"]
    done: set[int] = set()  # indices
    waiting: dict[int, tuple[Any, int]] = {}
    batches = 0
    for rank, state in enumerate(states):
        old = Share(rank, len(states), share.groups)
        if not old.per_batch:
            continue
        ahead, numbers = state.get("ahead", ()), numbers_of(state)
        done.update(old.index(number) for number in (*range(state["consumed"]), *ahead))
        for number, played, its in zip(numbers, state["waiting"], begun_of(state), strict=True):
            waiting[old.index(number)] = played, its
        batches = batches_of(state, old)
    if not share.per_batch:
        return NOTHING_PLAYED | {"trained": trained}
    # This rank's groups up to the last one that is known.
    end = (max(done | waiting.keys(), default=-1) // share.groups + 1) * share.per_batch
    finished = {number for number in range(end) if share.index(number) in done}
    floor = next(number for number in range(end + 1) if number not in finished)
    mine, place = [], 0  # place of a group among those of the next batches
    for number in (number for number in range(floor, end) if number not in finished):
        found = waiting.get(share.index(number))
        if found is None:
            place += 1  # it is played again
            continue
        played, begun = found
        is_group = isinstance(played, dict)
        # Before it there may be groups that begin now, as many as its new rank had not begun.
        if not is_group or not plan.in_order or batches + place // share.per_batch <= begun + plan.max_staleness:
            mine.append(number)
        place += is_group
    known = [waiting[share.index(number)] for number in mine]
    return {
        "trained": trained,
        "consumed": floor,
        "batches": batches,
        "waiting": [played for played, _ in known],
        "numbers": mine,
        "begun": [begun for _, begun in known],
        "ahead": sorted(number for number in finished if number > floor),
    }
