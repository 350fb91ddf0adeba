"""Rollouts on several ranks: every group is played once, and travels only to the ranks that train on it."""

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from areal.api import OptimizerConfig, ParallelDims
from areal.inference.protocol import Completion, Sampling
from areal.tests.dist.trainer.coordinates import COORDINATES
from areal.tests.grid.models import model_dir
from areal.tests.harness.rl import Curve, played
from areal.tests.harness.tiny import started
from areal.tests.harness.world import record, world
from areal.trainer.grpo import grpo_trainer
from areal.trainer.rollout.episodes import SingleTurn
from areal.trainer.rollout.exchange import RolloutExchange
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner
from areal.utils.distributed import init_default_group

TOKENS = 3000


class Client:
    """Gives long answers."""

    version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        return Completion((5,) * TOKENS, (-1.0,) * TOKENS, (0,) * TOKENS, "length")


class Received:
    """Counts the bytes that this rank receives from others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        gather, receive = dist.all_gather_object, dist.irecv

        def counted_gather(values: list[Any], value: Any, **options: Any) -> None:
            gather(values, value, **options)
            self.n += sum(len(pickle.dumps(each)) for each in values) - len(pickle.dumps(value))

        def counted_receive(tensor: Any, *args: Any, **options: Any) -> Any:
            self.n += tensor.nbytes
            return receive(tensor, *args, **options)

        monkeypatch.setattr(dist, "all_gather_object", counted_gather)
        monkeypatch.setattr(dist, "irecv", counted_receive)


class Hanging(Client):
    """Never answers."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(1e6)
        raise AssertionError


@contextmanager
def running(plan: Plan, *, plays: bool = True, client: type[Client] = Client, **place: int) -> Iterator[Runner]:
    episode = SingleTurn(lambda item: [item], lambda item, answer: 1.0, Sampling())
    runner = Runner(client() if plays else None, episode, range(100), plan, **place)
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.world(2, 4)
@pytest.mark.parametrize("players", ["all ranks", "one owner"])
@pytest.mark.parametrize("layout", sorted(COORDINATES))
def test_groups_go_to_their_coordinate_only(layout: str, players: str) -> None:
    """The bytes that a rank receives are those of the groups of its coordinate that others ran. Groups alternate between coordinates."""
    init_default_group()
    coordinates, plan = COORDINATES[layout][: world().size], Plan(groups=8, shuffle=False)
    mine, plays = coordinates[world().rank], players == "all ranks" or world().rank == 0
    with running(plan, plays=plays) as runner, pytest.MonkeyPatch.context() as monkeypatch:
        exchange = RolloutExchange(runner, mine)
        runner.advance(0)
        received = Received(monkeypatch)
        groups = exchange.next_groups(timeout=60)
    size = len(set(coordinates))
    assert [group.index for group in groups] == list(range(sorted(set(coordinates)).index(mine), 8, size))
    # An owner has run all groups, and the others none.
    own = len(groups) // coordinates.count(mine) if players == "all ranks" else len(groups) * plays
    of_others, one = len(groups) - own, len(pickle.dumps(groups[0]))
    everyones: list[Any] = [None] * world().size
    dist.all_gather_object(everyones, (received.n / one, of_others))
    most = {"bytes": f"{max(n for n, _ in everyones):.2f}", "groups": str(max(n for _, n in everyones))}
    record(f"bytes that a rank receives at most, by group: {players}", layout, **most)
    assert one > 5 * TOKENS
    assert of_others * one * 0.9 <= received.n <= of_others * one + 2000


@pytest.mark.world(2)
@pytest.mark.parametrize("place", [{"rank": 0, "size": 1}, {"rank": 0, "size": 2}], ids=["alone", "twice"])
def test_runners_that_play_the_same_groups_are_refused(place: dict[str, int]) -> None:
    init_default_group()
    given = f"Runner.rank and Runner.size are 0 of {place['size']}, 0 of {place['size']} on the 2 ranks"
    with running(Plan(groups=4), **place) as runner, pytest.raises(ValueError, match=given):
        RolloutExchange(runner, world().rank)


@pytest.mark.world(2)
def test_runner_without_trainer_plays_its_ranks_groups() -> None:
    init_default_group()
    with running(Plan(groups=4, shuffle=False)) as runner:
        runner.advance(0)
        assert [group.index for group in runner.next_batch(timeout=60)] == [world().rank, world().rank + 2]


@pytest.mark.world(2, 4)
def test_batch_has_the_groups_of_the_ranks_that_have_them() -> None:
    """Those of a rank that hangs are missing, and all coordinates have equally many. The last of four ranks plays none."""
    init_default_group()
    rank, size = world().rank, world().size
    plan = Plan(groups=8, max_staleness=2, in_order=False, shuffle=False)
    with running(plan, plays=rank < 3, client=Hanging if rank == 1 else Client) as runner:
        exchange = RolloutExchange(runner, rank)
        played = []
        for step in range(2):
            runner.advance(step)
            played.append([(group.index, group.position) for group in exchange.next_groups(timeout=60)])
    assert [sorted(position for _, position in its) for its in played] == [list(range(rank, 8, size))] * 2
    of_all: list[Any] = [None] * size
    dist.all_gather_object(of_all, [index for its in played for index, _ in its])
    indices = [index for its in of_all for index in its]
    assert len(set(indices)) == 16
    assert all(index % 8 % runner.size != 1 for index in indices)


@pytest.mark.world(2)
@pytest.mark.parametrize("in_order", [True, False])
def test_error_of_one_runner_is_raised_on_all_ranks(in_order: bool) -> None:
    init_default_group()
    with running(Plan(groups=4, max_staleness=1, in_order=in_order)) as runner:
        exchange = RolloutExchange(runner, world().rank)
        runner.advance(0)
        if world().rank == 1:
            runner._fault = KeyError("no item")
        with pytest.raises(RuntimeError, match=r"rank 1: .*no item"):
            exchange.next_groups(timeout=60)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.world(ParallelDims.parse(name).world_size), *marks])
        for name, marks in (("fsdp:d2", []), ("fsdp:c2", []), ("fsdp:d2c2", []))
    ],
)
def test_trainer_trains_on_each_sequence_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange objects over groups of their own: on the default group, a rank that is lost is not noticed."""
    curve, on_default, gather = Curve(), [], dist.all_gather_object

    def recorded(values: list[Any], value: Any, group: Any = None) -> None:
        on_default.extend([value] if group is None else [])
        gather(values, value, group=group)

    monkeypatch.setattr(dist, "all_gather_object", recorded)
    with (
        started(backend, path=model_dir("qwen3"), optimizer=OptimizerConfig(lr=1e-3)) as engine,
        played(engine, Plan(groups=4, group_size=2)) as rollout,
    ):
        grpo_trainer(engine, rollout.runner, rollout.sync, tracker=curve).train(1)
    assert curve["rollout/sequences"] == [4 * 2]
    assert not on_default
