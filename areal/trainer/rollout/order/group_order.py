"""Groups of one rank: which may begin, which run or wait, and which are trained on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from areal.trainer.rollout.order.shares import Share
from areal.trainer.rollout.plan import Group, Plan

NOTHING_PLAYED: dict[str, Any] = {
    "trained": 0,
    "consumed": 0,
    "batches": 0,
    "waiting": [],
    "numbers": [],
    "begun": [],
    "ahead": [],
}
"""State of a run before its first batch."""


class Waiting(NamedTuple):
    """A group that has ended.

    Attributes:
        played: the group, or the mean reward of one that ``keep`` rejected.
        begun: number of batches that were trained on when it began.
    """

    played: Group | float
    begun: int


class GroupOrder(ABC):
    """Groups of one rank, by number: their order of beginning. Not safe for threads.

    With ``B`` groups per batch, a maximum staleness of ``k``, ``t`` batches trained on and ``c`` batches consumed, at most
    ``(t + k + 1 - c) * B`` groups run or wait, so that no more begin than batches within the bound can have. A group that is rejected or
    cancelled makes room for another one.

    Args:
        plan: size of a batch and limits.

    Attributes:
        running: number of batches trained on when it began, of each group that runs.
        waiting: groups that have ended and are not consumed.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.running: dict[int, int] = {}
        self.waiting: dict[int, Waiting] = {}
        self._floor = 0  # groups below it are done: consumed, rejected or cancelled
        self._ahead: set[int] = set()  # groups that are done, from there on
        self._next = 0  # the next group to begin, after those that begin again
        self._again: list[int] = []  # groups that a loaded run had begun and that had not ended, the last one first
        self._batches = 0  # batches consumed, over all ranks
        self._given_up = 0  # groups given up since this rank's last group of a batch

    # ---- the run

    def begin(self, trained: int, share: Share) -> int | None:
        """Return the number of a group that begins now, or ``None`` if none may.

        Args:
            trained: number of batches trained on, whose weights generate.
            share: groups of this rank.
        """
        batches = trained + self._plan.max_staleness + 1 - self._batches
        if batches <= 0:
            return None  # the next batch would be trained on more updates later than the bound
        # Also if the rank gave more or fewer groups than that to earlier batches.
        room = batches * share.per_batch + share.of(self._plan.oversample) if share.per_batch else 0
        if len(self.running) + len(self.waiting) - self.rejected >= room:
            return None
        if self._again:
            number = self._again.pop()
        else:
            number, self._next = self._next, self._next + 1
        self.running[number] = trained
        return number

    def end(self, number: int, played: Group | float) -> bool:
        """Record a group that has ended. Returns False if it does not run any more: it was cancelled."""
        if number not in self.running:
            return False
        self.waiting[number] = Waiting(played, self.running.pop(number))
        return True

    @property
    def rejected(self) -> int:
        """Number of groups among those that wait that ``keep`` rejected."""
        return sum(not isinstance(each.played, Group) for each in self.waiting.values())

    def complete(self) -> list[int]:
        """Return the numbers of the groups that wait and were not rejected, ascending."""
        return sorted(number for number, each in self.waiting.items() if isinstance(each.played, Group))

    @abstractmethod
    def select(self, count: int) -> list[int] | None:
        """Return the numbers that the next batch consumes, ascending and with those rejected before them, or ``None`` if it is not complete.

        Args:
            count: number of groups that this rank gives to the batch.
        """

    def too_late(self, batch: int) -> list[int]:
        """Return the numbers of groups that may not be in a batch after ``batch``. Called when that one was consumed."""
        return []

    def take(self, count: int) -> tuple[list[Group], list[int]] | None:
        """Consume the next batch.

        Args:
            count: number of groups that this rank gives to it.

        Returns:
            These groups in order, with rewards of those that were rejected before them, the first with the number of those that were given up;
            and the numbers of groups to cancel. ``None`` if the batch is not complete.
        """
        numbers = self.select(count)
        if numbers is None:
            return None
        groups: list[Group] = []
        rejected: list[float] = []
        for number in numbers:
            played = self.waiting.pop(number).played
            if isinstance(played, Group):
                groups.append(replace(played, rejected=tuple(rejected)))
                rejected = []
            else:
                rejected.append(played)
        late = self.too_late(self._batches)
        self._batches += 1
        self._finish(numbers + late)
        cancelled = [number for number in late if self.running.pop(number, None) is not None]
        for number in late:
            self.waiting.pop(number, None)
        self._given_up += len(late)
        if groups:
            groups[0] = replace(groups[0], cancelled=self._given_up)
            self._given_up = 0
        return groups, cancelled

    def _finish(self, numbers: list[int]) -> None:
        """Mark groups as done."""
        self._ahead.update(numbers)
        while self._floor in self._ahead:
            self._ahead.remove(self._floor)
            self._floor += 1

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return the state without copying groups: ``waiting`` has them. Groups that run are not in it, and begin again."""
        numbers = sorted(self.waiting)
        return {
            "consumed": self._floor,
            "batches": self._batches,
            "waiting": [self.waiting[number].played for number in numbers],
            "numbers": numbers,
            "begun": [self.waiting[number].begun for number in numbers],
            "ahead": sorted(self._ahead),
        }

    def load(self, state: Mapping[str, Any], share: Share) -> None:
        """Continue from a state whose ``waiting`` has the states of groups. Groups that ran when it was saved are the first to begin.

        Args:
            state: state of this rank.
            share: groups of this rank.
        """
        # Earlier releases saved None for a replaced group, and consecutive groups only.
        played = [
            Group.of_state(each) if isinstance(each, dict) else math.nan if each is None else each
            for each in state["waiting"]
        ]
        numbers = numbers_of(state)
        begun = begun_of(state)
        self.waiting = {
            number: Waiting(each, trained) for number, each, trained in zip(numbers, played, begun, strict=True)
        }
        self.running, self._floor, self._ahead = {}, state["consumed"], set(state.get("ahead", ()))
        self._batches, self._given_up = batches_of(state, share), 0
        known = self._ahead | set(numbers)
        self._next = max(known, default=self._floor - 1) + 1
        self._again = [number for number in reversed(range(self._floor, self._next)) if number not in known]


def numbers_of(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the groups that wait in a state. In states of earlier releases they are consecutive."""
    first = state["consumed"]
    return list(state.get("numbers") or range(first, first + len(state["waiting"])))


def begun_of(state: Mapping[str, Any]) -> list[int]:
    """Return the number of batches trained on when each group that waits began; 0 if an earlier release saved the state, which has none."""
    return list(state.get("begun") or [0] * len(state["waiting"]))


def batches_of(state: Mapping[str, Any], share: Share) -> int:
    """Return the number of batches that a rank's state has consumed. In states of earlier releases each has the same number of its groups."""
    if "batches" in state or not share.per_batch:
        return state.get("batches", state["trained"])
    rejected = sum(not isinstance(played, dict) for played in state["waiting"])
    return (state["consumed"] + len(state.get("ahead", ())) - state["rejected"] + rejected) // share.per_batch
