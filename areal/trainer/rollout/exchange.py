"""Exchange of rollouts between the ranks that ran them and the ranks that train on them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.runner import Runner


def next_groups(runner: Runner, dp_rank: int, timeout: float | None = None) -> list[Group]:
    """Return the next batch of this data-parallel coordinate: the groups of all its ranks, ordered by index. Collective over the world.

    Args:
        runner: runner of this rank.
        dp_rank: data-parallel coordinate of this rank. Ranks with the same one get the same groups.
        timeout: seconds to wait; ``None`` waits without limit.

    Raises:
        TimeoutError, RuntimeError: :meth:`~areal.trainer.rollout.runner.Runner.next_batch` failed on some rank. Raised on all ranks.
    """
    # An error takes part in the gather, so that all ranks raise and none waits.
    groups: list[Group] = []
    fault: Exception | None = None
    try:
        groups = runner.next_batch(timeout)
    except (TimeoutError, RuntimeError) as error:
        fault = error
    gathered = gather((dp_rank, groups, fault))
    for rank, (_, _, its_fault) in enumerate(gathered):
        if its_fault is not None:
            raise type(its_fault)(f"rank {rank}: {its_fault}") from fault
    return sorted((group for dp, played, _ in gathered if dp == dp_rank for group in played), key=lambda g: g.index)


def runner_state(runner: Runner) -> list[dict[str, Any]]:
    """Return the states of all ranks' runners, in rank order. Collective over the world."""
    return gather(runner.state_dict())


def set_runner_state(runner: Runner, states: list[dict[str, Any]]) -> None:
    """Restore every rank's runner from the result of :func:`runner_state`.

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
