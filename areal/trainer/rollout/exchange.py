"""Exchange of rollouts between the ranks that ran them and the ranks that train on them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.runner import Runner
from areal.utils.distributed import ControlPlane


class RolloutExchange:
    """Exchange of rollouts between the ranks of a trainer. Groups go only to the ranks that train on them.

    Every rank runs some of the groups of a batch. Ranks of one data-parallel coordinate train on the groups of all of them. The constructor
    and the methods are collective over the world.

    Args:
        runner: runner of this rank. Without a rank and size it gets them here, such that consecutive groups go to different data-parallel
            coordinates.
        dp_rank: data-parallel coordinate of this rank.

    Raises:
        ValueError: the runners of all ranks together do not run every group once.
    """

    def __init__(self, runner: Runner, dp_rank: int) -> None:
        self._runner = runner
        self._control = ControlPlane(alone=not dist.is_initialized())
        runner.at_close(self._close)
        coordinates, places = zip(*self._control.gather((dp_rank, runner.place)), strict=True)
        self._peers = [
            rank for rank, other in enumerate(coordinates) if other == dp_rank and rank != self._control.rank
        ]
        if any(place is not None for place in places):
            _check_places(places)
            return
        # The first rank of every coordinate, then the second of every one, and so on.
        order = sorted(
            range(len(coordinates)), key=lambda rank: (coordinates[:rank].count(coordinates[rank]), coordinates[rank])
        )
        runner.set_place(order.index(self._control.rank), len(order))

    def next_groups(self, timeout: float | None = None) -> list[Group]:
        """Return the next batch of this data-parallel coordinate: the groups of all its ranks, ordered by index.

        Args:
            timeout: seconds to wait; ``None`` waits without limit.

        Raises:
            TimeoutError, RuntimeError: :meth:`~areal.trainer.rollout.runner.Runner.next_batch` failed on some rank. Raised on all ranks.
        """
        groups: list[Group] = []
        fault: Exception | None = None
        try:
            groups = self._runner.next_batch(timeout)
        except (TimeoutError, RuntimeError) as error:
            fault = error
        # 1. All ranks learn sizes and errors, so that all raise and none waits.
        packed = pickle.dumps(groups)
        heads = self._control.gather((len(packed), fault))
        for rank, (_, its_fault) in enumerate(heads):
            if its_fault is not None:
                raise type(its_fault)(f"rank {rank}: {its_fault}") from fault
        # 2. Groups travel between the ranks of one coordinate only.
        mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        theirs = [(torch.empty(heads[rank][0], dtype=torch.uint8), rank) for rank in self._peers]
        self._control.exchange([(mine, rank) for rank in self._peers], theirs)
        for buffer, _ in theirs:
            groups += pickle.loads(buffer.numpy().tobytes())
        return sorted(groups, key=lambda group: group.index)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the world, in rank order. Collective."""
        return self._control.gather(value)

    def _close(self) -> None:
        """Close the process groups, unless the world was closed before."""
        if dist.is_initialized():
            self._control.close()

    def runner_state(self) -> list[dict[str, Any]]:
        """Return the states of all runners, in the order of their ranks among the runners; equal on all ranks."""
        states = self._control.gather((self._runner.rank, self._runner.state_dict()))
        return [state for _, state in sorted(states, key=lambda item: item[0])]


def _check_places(places: Sequence[tuple[int, int] | None]) -> None:
    """Raise unless the places of all ranks' runners are ``(0, n)`` to ``(n - 1, n)``, for ``n`` ranks."""
    world = len(places)
    if sorted(place for place in places if place is not None) != [(rank, world) for rank in range(world)]:
        given = ", ".join("none" if place is None else f"{place[0]} of {place[1]}" for place in places)
        raise ValueError(
            f"Runner.rank and Runner.size are {given} on the {world} ranks of the trainer, so that groups would be played several times or "
            "not at all: leave both out, and the trainer sets them"
        )


def set_runner_state(runner: Runner, states: list[dict[str, Any]]) -> None:
    """Restore this rank's runner from the result of :meth:`RolloutExchange.runner_state`.

    On another number of ranks, groups not trained on yet are assigned to the ranks that own their index now. That is impossible if groups
    were replaced, because indices then differ between ranks.

    Args:
        runner: runner of this rank.
        states: one state per rank of the run that saved them.

    Raises:
        ValueError: groups were replaced, and the number of ranks differs.
    """
    # The same number of ranks: every rank continues with its state.
    if len(states) == runner.size:
        runner.load_state_dict(states[runner.rank])
        return
    if any(state["rejected"] for state in states):
        raise ValueError(
            f"the run was saved on {len(states)} ranks, which had replaced groups that were not kept, and this one has {runner.size}: "
            f"go on with {len(states)} ranks"
        )
    # Otherwise, by index in the run: every rank takes the groups that it would have run.
    played = {group["index"]: group for state in states for group in state["waiting"]}
    runner.load_state_dict(runner.resharded_state(states[0]["trained"], played))


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the world, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
