"""What the ranks of a layout played, brought to where it is trained on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from areal.trainer.rollout.plan import Group
from areal.trainer.rollout.runner import Runner


def next_groups(runner: Runner, dp_rank: int, timeout: float | None = None) -> list[Group]:
    """The next batch of this data-parallel coordinate: what its ranks played of it, in order, the same on all of them. Collective over
    the world.

    Raises:
        TimeoutError, RuntimeError: some rank has none, as :meth:`~areal.trainer.rollout.runner.Runner.next_batch`; on every rank.
    """
    groups: list[Group] = []
    fault: Exception | None = None
    try:
        groups = runner.next_batch(timeout)
    except (TimeoutError, RuntimeError) as error:
        fault = error
    everything = gather((dp_rank, groups, fault))
    for rank, (_, _, found) in enumerate(everything):
        if found is not None:
            raise type(found)(f"rank {rank}: {found}") from fault
    return sorted((group for dp, played, _ in everything if dp == dp_rank for group in played), key=lambda g: g.index)


def runner_state(runner: Runner) -> list[dict[str, Any]]:
    """The states of all ranks' runners, in order. Collective over the world."""
    return gather(runner.state_dict())


def set_runner_state(runner: Runner, states: list[dict[str, Any]]) -> None:
    """Let every rank's runner go on from what :func:`runner_state` returned.

    On another number of ranks what was played and not consumed goes to the ranks whose it is now; where groups had been replaced, that
    cannot be told.

    Raises:
        ValueError: groups were replaced, and the number of ranks is another.
    """
    if len(states) == runner.size:
        runner.load_state_dict(states[runner.rank])
        return
    if any(state["rejected"] for state in states):
        raise ValueError(
            f"the run was saved on {len(states)} ranks, which had replaced groups that were not kept, and this one has {runner.size}: "
            f"go on with {len(states)} ranks"
        )
    played = {group["index"]: group for state in states for group in state["waiting"]}
    runner.load_state_dict(runner.resharded_state(states[0]["trained"], played))


def gather(mine: Any) -> list[Any]:
    """What every rank of the world has, in order. Collective."""
    if not dist.is_initialized():
        return [mine]
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    return everything
