"""Exchange of rollouts between the ranks that ran them and the ranks that train on them."""

from __future__ import annotations

import math
import pickle
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from areal.trainer.rollout.order import counts_of_complete
from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.runner import Runner
from areal.utils.distributed import ControlPlane

ROUND_SECONDS = 0.05
"""Longest time between two exchanges of the ranks about the groups that are complete."""


class RolloutExchange:
    """Exchange of rollouts between the ranks of a trainer. Groups go only to the ranks that train on them.

    Ranks whose runner has a client run the groups of a batch: all ranks, some, or a single one. Ranks of one data-parallel coordinate train
    on the same groups. The coordinate depends on the position of a group in the batch, and not on the rank that ran the group. The
    constructor and the methods are collective over the world.

    Args:
        runner: runner of this rank. Without a rank and size it gets them here, such that consecutive groups go to different data-parallel
            coordinates.
        dp_rank: data-parallel coordinate of this rank.

    Raises:
        ValueError: the runners of all ranks together do not run every group once, or no rank has a client.
    """

    def __init__(self, runner: Runner, dp_rank: int) -> None:
        self._runner, self._dp_rank = runner, dp_rank
        self._control = ControlPlane(alone=not dist.is_initialized())
        runner.at_close(self._close)
        coordinates, plays, places = zip(*self._control.gather((dp_rank, runner.plays, runner.place)), strict=True)
        # The first rank of every coordinate, then the second of every one, and so on.
        order = sorted(
            range(len(coordinates)), key=lambda rank: (coordinates[:rank].count(coordinates[rank]), coordinates[rank])
        )
        players = [rank for rank in order if plays[rank]]
        if not players:
            raise ValueError(
                f"Runner: client = None on all {len(order)} ranks of the trainer, so that no rank would run episodes: pass the rollout on at "
                "least one rank"
            )
        # Places that were passed are kept. A rank without a client needs to know the number of those with one.
        if any(place is not None for place in places):
            _check_places(places, plays)
            order = sorted(order, key=lambda rank: places[rank]) if all(plays) else order
        elif runner.plays:
            runner.set_place(players.index(self._control.rank), len(players))
        if not runner.plays:
            runner.set_place(-1, len(players))
        # Coordinates that train on consecutive positions of a batch: those of the ranks that would run them if all ranks had a client.
        self._coordinates = [coordinates[rank] for rank in order]
        # Other ranks of each coordinate.
        self._receivers: defaultdict[int, list[int]] = defaultdict(list)
        for rank, coordinate in enumerate(coordinates):
            if rank != self._control.rank:
                self._receivers[coordinate].append(rank)

    def next_groups(self, timeout: float | None = None) -> list[Group]:
        """Return the next batch of this data-parallel coordinate, ordered by index.

        Args:
            timeout: seconds to wait; ``None`` waits without limit.

        Raises:
            TimeoutError, RuntimeError: :meth:`~areal.trainer.rollout.runner.Runner.next_batch` failed on some rank. Raised on all ranks.
        """
        counts = self._agree_on_counts(timeout)
        groups: list[Group] = []
        fault: Exception | None = None
        try:
            groups = self._runner.next_batch(timeout, counts)
        except (TimeoutError, RuntimeError) as error:
            fault = error
        by_coordinate: defaultdict[int, list[Group]] = defaultdict(list)
        for group in groups:
            by_coordinate[self._coordinates[group.position % len(self._coordinates)]].append(group)
        # 1. All ranks learn sizes and errors, so that all raise and none waits.
        packed = {
            coordinate: pickle.dumps(its) for coordinate, its in by_coordinate.items() if self._receivers[coordinate]
        }
        heads = self._gather_unless({coordinate: len(data) for coordinate, data in packed.items()}, fault)
        # 2. Every rank receives only the groups of its coordinate.
        sends = []
        for coordinate, data in packed.items():
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            sends += [(tensor, rank) for rank in self._receivers[coordinate]]
        receives = [
            (torch.empty(sizes[self._dp_rank], dtype=torch.uint8), rank)
            for rank, sizes in enumerate(heads)
            if self._dp_rank in sizes and rank != self._control.rank
        ]
        self._control.exchange(sends, receives)
        mine = by_coordinate[self._dp_rank]
        for buffer, _ in receives:
            mine += pickle.loads(buffer.numpy().tobytes())
        return sorted(mine, key=lambda group: group.index)

    def _agree_on_counts(self, timeout: float | None) -> list[int] | None:
        """Wait until the ranks together have the groups of a batch. Collective.

        Returns:
            How many of them each rank that plays gives; ``None`` if these are :attr:`~areal.trainer.rollout.runner.Runner.per_batch`.
        """
        plan = self._runner.plan
        if plan.in_order or self._runner.size == 1 or not plan.max_staleness + plan.oversample:
            return None
        end = math.inf if timeout is None else time.monotonic() + timeout
        seconds = 0.0
        while True:
            complete: list[tuple[int, int]] = []
            fault: Exception | None = None
            try:
                complete = self._runner.complete_groups(seconds)
            except RuntimeError as error:
                fault = error
            told = self._gather_unless((self._runner.rank, complete, time.monotonic() >= end), fault)
            groups_of = {rank: its for rank, its, _ in told if rank >= 0}
            counts = counts_of_complete([groups_of[rank] for rank in sorted(groups_of)], plan.groups)
            if counts is not None:
                return counts
            if any(is_late for _, _, is_late in told):
                number = sum(map(len, groups_of.values()))
                raise TimeoutError(f"no batch after {timeout} s: {number} of {plan.groups} groups are complete")
            seconds = ROUND_SECONDS

    def _gather_unless(self, value: Any, fault: Exception | None) -> list[Any]:
        """Return the values of all ranks, or raise the first rank's ``fault`` on all. Collective."""
        told = self._control.gather((value, fault))
        for rank, (_, its_fault) in enumerate(told):
            if its_fault is not None:
                raise type(its_fault)(f"rank {rank}: {its_fault}") from fault
        return [its for its, _ in told]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the world, in rank order. Collective."""
        return self._control.gather(value)

    def _close(self) -> None:
        """Close the process groups, unless the world was closed before."""
        if dist.is_initialized():
            self._control.close()

    def runner_state(self) -> list[dict[str, Any]]:
        """Return the states of all runners with a client, in the order of their ranks among these; equal on all ranks."""
        states = self._control.gather((self._runner.rank, self._runner.state_dict()) if self._runner.plays else None)
        return [state for _, state in sorted(filter(None, states), key=lambda item: item[0])]


def _check_places(places: Sequence[tuple[int, int] | None], plays: Sequence[bool]) -> None:
    """Raise unless the places of the ranks with a client are ``(0, n)`` to ``(n - 1, n)``. On other ranks: ``None`` or ``(-1, n)``."""
    size = sum(plays)
    wanted = [(rank, size) for rank in range(size)]
    of_players = [place for place, played in zip(places, plays, strict=True) if played]
    of_others = {place for place, played in zip(places, plays, strict=True) if not played}
    if sorted(place or (-1, 0) for place in of_players) != wanted or not of_others <= {None, (-1, size)}:
        given = ", ".join("none" if place is None else f"{place[0]} of {place[1]}" for place in places)
        raise ValueError(
            f"Runner.rank and Runner.size are {given} on the {len(places)} ranks of the trainer, so that groups would be played several times "
            "or not at all: leave both out, and the trainer sets them"
        )


def set_runner_state(runner: Runner, states: list[dict[str, Any]]) -> None:
    """Restore this rank's runner from the result of :meth:`RolloutExchange.runner_state`.

    On another number of ranks that run episodes, groups not trained on yet are assigned to the ranks that own their index now.

    Args:
        runner: runner of this rank.
        states: one state per rank that ran episodes in the run that saved them.

    Raises:
        ValueError: the run has another order of groups.
    """
    for state in states:
        runner.check_state(state)
    if not runner.plays:
        runner.load_state_dict(Runner.NOTHING_PLAYED | {"trained": states[0]["trained"]})
    elif len(states) == runner.size:
        runner.load_state_dict(dict(states[runner.rank]))
    else:
        runner.load_state_dict(runner.resharded_state(states))
