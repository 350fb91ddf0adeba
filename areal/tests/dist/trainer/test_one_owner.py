"""One rank generates for all: the others get their groups from it, and the run is that in which every rank generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal.api import OptimizerConfig, TensorSource, TrainEngine
from areal.inference.http import VLLM, HTTPRollout
from areal.inference.http.updates import WeightUpdates
from areal.inference.local.rollout import LocalRollout
from areal.tests.dist.dispatch.shared import OneByOne
from areal.tests.dist.dispatch.trainer_runs import TIMES
from areal.tests.dist.faults.twins import raised
from areal.tests.dist.trainer.coordinates import COORDINATES
from areal.tests.grid.models import model_dir
from areal.tests.harness.limits import wait_until
from areal.tests.harness.rl import EPISODE, Curve, Prompts
from areal.tests.harness.servers.rollout_http import Process
from areal.tests.harness.tiny import chosen, same_bits, started, weights_of
from areal.tests.harness.world import record, world
from areal.tests.unit.rollout.runs import ITEMS, Client, episode, tokens
from areal.trainer.checkpoints import Checkpoints
from areal.trainer.grpo import grpo_trainer
from areal.trainer.ppo import Sync
from areal.trainer.rollout.exchange import RolloutExchange, set_runner_state
from areal.trainer.rollout.plan import Plan
from areal.trainer.rollout.runner import Runner
from areal.trainer.rollout.sequence import Sequence
from areal.trainer.updates import Updates
from areal.utils.distributed import ControlPlane, init_default_group

Players = Callable[[int, int], bool]
"""Returns True for a rank that generates, of a rank and the number of ranks."""

PLAYERS: dict[str, Players] = {
    "all": lambda rank, size: True,
    "first": lambda rank, size: rank == 0,
    "last": lambda rank, size: rank == size - 1,
    "all but one": lambda rank, size: rank != 1,
}


def plays(players: str) -> bool:
    return PLAYERS[players](world().rank, world().size)


# ---- groups


@contextmanager
def exchanging(players: str, plan: Plan, dp_rank: int, **options: Any) -> Iterator[tuple[Runner, RolloutExchange]]:
    """Yield the runner of this rank, and the exchange with those of the others."""
    init_default_group()
    runner = Runner(Client() if plays(players) else None, episode(), ITEMS, plan, **options)
    try:
        yield runner, RolloutExchange(runner, dp_rank)
    finally:
        runner.close()


def batches(players: str, plan: Plan, dp_rank: int, steps: range, state: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return the groups of this rank in some steps, each with its position, and the state of all runners after these."""
    with exchanging(players, plan, dp_rank, **options) as (runner, exchange):
        if state is not None:
            set_runner_state(runner, state)
        groups = []
        for step in steps:
            runner.advance(step)
            batch = exchange.next_groups(timeout=30)
            groups.append([(group.position, *each) for group, each in zip(batch, tokens(batch), strict=True)])
        runner.advance(steps.stop)
        # A state is right at any moment. Here it has the groups that are played ahead, which the generating thread may not have begun yet.
        ahead = plan.max_staleness * runner.per_batch
        wait_until(lambda: len(runner.state_dict()["waiting"]) >= ahead, "the groups of the next batches wait")
        return groups, exchange.runner_state()


@pytest.mark.world(2, 4)
@pytest.mark.parametrize(
    ("layout", "players"),
    [("apart", "first"), ("pairs", "last"), ("apart in pairs", "all but one"), ("together", "last")],
)
def test_groups_are_those_of_a_run_in_which_all_ranks_generate(layout: str, players: str) -> None:
    """Also where a batch has fewer groups than there are coordinates."""
    mine = COORDINATES[layout][world().rank]
    for count in (1, 7):
        plan = Plan(groups=count, group_size=2, seed=5)
        expected, _ = batches("all", plan, mine, range(3))
        actual, _ = batches(players, plan, mine, range(3))
        assert actual == expected
        assert count == 1 or all(actual)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("all", "first", marks=pytest.mark.world(2)),
        pytest.param("first", "all", marks=pytest.mark.world(2)),
        pytest.param("first", "last", marks=pytest.mark.world(2)),
        pytest.param("all but one", "first", marks=pytest.mark.world(4)),
    ],
)
def test_run_resumes_with_other_ranks_that_generate(before: str, after: str) -> None:
    """The groups that wait are trained by the coordinate that would have had them, and none is played twice or left out."""
    plan, mine = Plan(groups=5, group_size=2, max_staleness=1), COORDINATES["apart in pairs"][world().rank]
    expected, _ = batches("all", plan, mine, range(5))
    first, state = batches(before, plan, mine, range(2))
    assert len(state) == sum(PLAYERS[before](rank, world().size) for rank in range(world().size))
    assert sum(len(each["waiting"]) for each in state) >= plan.groups
    rest, _ = batches(after, plan, mine, range(2, 5), state)
    assert [*first, *rest] == expected


def is_kept(group: list[Sequence]) -> bool:
    return group[0].group % 3 != 0


@pytest.mark.world(2)
def test_owner_replaces_groups_that_are_not_kept() -> None:
    """Positions decide who trains on a replacement. The state resumes with one owner, and with several."""
    plan, mine = Plan(groups=4, shuffle=False), world().rank
    groups, _ = batches("first", plan, mine, range(4), keep=is_kept)
    first, state = batches("first", plan, mine, range(2), keep=is_kept)
    rest, _ = batches("last", plan, mine, range(2, 4), state, keep=is_kept)
    kept = [index for index in range(30) if index % 3]
    assert [[index for _, index, _ in batch] for batch in groups] == [
        kept[4 * step : 4 * step + 4][mine::2] for step in range(4)
    ]
    assert [*first, *rest] == groups
    more, _ = batches("all", plan, mine, range(2, 4), state, keep=is_kept)
    indices = [index for batch in (*first, *more) for _, index, _ in batch]
    assert len(indices) == len(set(indices)) == 8
    assert all(index % 3 for index in indices)


@pytest.mark.world(2)
def test_error_of_the_owner_is_raised_on_all_ranks() -> None:
    with exchanging("last", Plan(groups=4), 0) as (runner, exchange):
        with pytest.raises(TimeoutError, match="rank 1: no batch after"):
            exchange.next_groups(timeout=0.1)
        if runner.plays:
            runner._fault = KeyError("no item")
        with pytest.raises(RuntimeError, match=r"rank 1: .*no item"):
            exchange.next_groups(timeout=30)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("passed", "error"),
    [
        ([(0, 2), None], r"are 0 of 2, none on the 2 ranks"),
        ([(0, 2), (1, 2)], r"are 0 of 2, 1 of 2 on the 2 ranks"),
        ([None, (-1, 2)], r"are none, -1 of 2 on the 2 ranks"),
    ],
    ids=["of two", "of another", "of none"],
)
def test_places_that_leave_out_groups_are_refused(passed: list[tuple[int, int] | None], error: str) -> None:
    place = passed[world().rank]
    options = {} if place is None else {"rank": place[0], "size": place[1]}
    with pytest.raises(ValueError, match=error), exchanging("first", Plan(groups=4), 0, **options):
        """The constructor raises."""


@pytest.mark.world(1, 2)
def test_run_in_which_no_rank_generates_is_refused() -> None:
    init_default_group()
    runner = Runner(None, episode(), ITEMS, Plan(groups=4))
    with pytest.raises(ValueError, match=rf"client = None on all {world().size} ranks.*pass the rollout on at least"):
        RolloutExchange(runner, world().rank)
    runner.close()


@pytest.mark.world(2)
def test_places_are_kept_by_the_next_trainer() -> None:
    """Places that were passed are, too."""
    plan = Plan(groups=4, shuffle=False)
    with exchanging("last", plan, world().rank) as (runner, exchange):
        again = RolloutExchange(runner, world().rank)
        assert (runner.place, runner.size) == ((0, 1) if runner.plays else (-1, 1), 1)
        runner.advance(0)
        assert [group.index for group in again.next_groups(timeout=30)] == [world().rank, world().rank + 2]
        assert again.runner_state() == exchange.runner_state()
    swapped = {"rank": 1 - world().rank, "size": 2}
    groups, _ = batches("all", plan, world().rank, range(1), **swapped)
    assert [index for _, index, _ in groups[0]] == [1 - world().rank, 3 - world().rank]
    options = {"rank": 0, "size": 1} if world().rank == 0 else {}
    groups, _ = batches("first", plan, world().rank, range(1), **options)
    assert [index for _, index, _ in groups[0]] == [world().rank, world().rank + 2]


# ---- training


@contextmanager
def generating(players: str, plan: Plan) -> Iterator[tuple[Runner, Sync]]:
    """Yield the runner of this rank, and a function that sends weights to its rollout or, without one, takes part in sending."""
    with ExitStack() as stack:
        rollout = None
        if plays(players):
            replica = AutoModelForCausalLM.from_pretrained(
                model_dir("qwen3"), dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
            rollout = stack.enter_context(LocalRollout(replica, max_context=32, max_requests=1, max_batch_tokens=16))
        runner = Runner(rollout and OneByOne(rollout), EPISODE, Prompts(), plan)
        stack.callback(runner.close)

        def sync(source: TensorSource, version: int) -> None:
            tensors = source.named_tensors()
            if rollout is not None:
                rollout.update(tensors, version)
            for _ in tensors:
                """Gathered by all ranks."""

        yield runner, sync


@contextmanager
def owned(
    servers: list[Process], folder: Path, plan: Plan, engine: TrainEngine
) -> Iterator[tuple[Runner, HTTPRollout]]:
    """Yield the runner of this rank, and the rollout on the servers of rank 0."""
    urls = engine.control.gather([server.url for server in servers])[0]
    with HTTPRollout(
        urls, VLLM(), folder=folder, control=engine.control, model=model_dir("qwen3"), deadline=60
    ) as rollout:
        runner = Runner(rollout, EPISODE, Prompts(), plan)
        try:
            yield runner, rollout
        finally:
            runner.close()


PLAN = Plan(groups=5, group_size=3, seed=11)


def grpo(backend: str, players: str, steps: int, folder: Path | None = None) -> tuple[Curve, dict[str, Tensor]]:
    """Run GRPO, from the newest checkpoint in a folder if there is one. Returns its curve and the weights at its end."""
    curve, optimizer = Curve(), OptimizerConfig(lr=8e-3, gradient_clipping=1.0, eps=1e-6)
    with (
        started(backend, path=model_dir("qwen3"), optimizer=optimizer) as engine,
        generating(players, PLAN) as (runner, sync),
    ):
        trainer = grpo_trainer(
            engine,
            runner,
            sync,
            updates=Updates(minibatches=2, epochs=2),
            tracker=curve,
            checkpoints=None if folder is None else Checkpoints(folder, every=2),
        )
        trainer.resume()
        trainer.train(steps)
        assert runner._trained == trainer.step == steps
        return curve, weights_of(engine)


def untimed(curve: Curve) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if not TIMES.search(name)} for step in curve.steps]


@pytest.mark.parametrize("backend", chosen("fsdp:d2", "fsdp:d2c2", "megatron:p2"))
def test_grpo_with_one_owner_has_the_bits_of_a_run_in_which_all_ranks_generate(backend: str) -> None:
    """Every logged number and every weight."""
    (all_ranks, expected), (one, actual) = (grpo(backend, players, 2) for players in ("all", "last"))
    assert untimed(one) == untimed(all_ranks)
    assert all(step["rollout/sequences"] == PLAN.groups * PLAN.group_size for step in one.steps)
    assert same_bits(actual, expected)


@pytest.mark.world(2)
@pytest.mark.parametrize(("before", "after"), [("all", "first")])
def test_grpo_resumes_with_other_ranks_that_generate(before: str, after: str, tmp_path: Path) -> None:
    whole, expected = grpo("fsdp:d2", "all", 4)
    grpo("fsdp:d2", before, 2, tmp_path)
    rest, actual = grpo("fsdp:d2", after, 4, tmp_path)
    assert untimed(rest) == untimed(whole)[2:]
    assert same_bits(actual, expected)


@pytest.mark.world(2)
@pytest.mark.parametrize("count", [1, 3])
def test_one_rank_owns_all_servers(count: int, tmp_path: Path) -> None:
    """For each update, a server gets one load, and one pause unless requests are running. No episode is lost, also ahead of the trainer."""
    steps = 4
    with ExitStack() as stack:
        servers = [Process(modern=count == 3) for _ in range(count if world().rank == 0 else 0)]
        for server in servers:
            stack.callback(server.kill)
        for staleness in (0, 1):
            plan, curve, folder = replace(PLAN, max_staleness=staleness), Curve(), tmp_path / str(staleness)
            with (
                started("fsdp:d2", path=model_dir("qwen3"), optimizer=OptimizerConfig(lr=8e-3)) as engine,
                owned(servers, folder, plan, engine) as (runner, rollout),
            ):
                for server in servers:
                    server.tell(reset=True)
                grpo_trainer(engine, runner, rollout.sync, tracker=curve).train(steps)
                for server in servers:
                    assert server.calls("/v1/completions") + server.calls("/inference/v1/generate")
                    assert server.calls("/collective_rpc") == server.calls("/resume") == steps + 1
                    assert staleness or server.calls("/pause") == steps + 1
            assert len(list(folder.iterdir())) == 2
            assert curve["rollout/sequences"] == [PLAN.groups * PLAN.group_size] * steps
            assert curve["rollout/failed"] == [0] * steps
            assert max(curve["rollout/staleness"]) <= staleness
            # A batch of older weights has other log-probs; the first has the weights of the start.
            assert max(curve["rollout/logprob_error"][: 1 if staleness else steps]) < 1e-5


@pytest.mark.world(2)
def test_update_that_the_owner_refuses_is_refused_on_all_ranks(tmp_path: Path) -> None:
    told = SimpleNamespace(served=SimpleNamespace(adapter="policy"))
    servers = [SimpleNamespace(routes=told, url="http://first")] if world().rank == 0 else []
    init_default_group()
    control, fleet = ControlPlane(), cast(Any, SimpleNamespace(servers=servers))
    updates = WeightUpdates(control, fleet, VLLM("policy"), tmp_path, None, None)
    for send in (updates.sync, updates.update):
        with raised(ValueError, "VLLM.model = 'policy' is an adapter", guilty=0):
            send(cast(Any, iter(())), 1)
    control.close()


def kill_twice(server: Process) -> None:
    """Kill and start a server while it generates, and while it loads weights."""
    tokens, load = "/inference/v1/generate", "/collective_rpc"
    server.tell(step_seconds=0.02)
    wait_until(lambda: server.calls(tokens) >= 2)
    server.restart()
    server.tell(load_seconds=1.0)
    loaded = server.calls(load)
    # The first load after the restart may be that of the weights which it lacks.
    wait_until(lambda: server.calls(load) >= loaded + 2)
    server.restart()


@pytest.mark.world(2)
def test_servers_killed_under_a_trainer(tmp_path: Path) -> None:
    """While they generate, and during an update: no sample has a wrong version, and none is lost."""
    steps, curve, killed = 0, Curve(), [False]
    with ExitStack() as stack:
        servers = [Process(modern=True) for _ in range(3 if world().rank == 0 else 0)]
        for server in servers:
            stack.callback(server.kill)
        with (
            started(f"fsdp:d{world().size}", path=model_dir("qwen3"), optimizer=OptimizerConfig(lr=8e-3)) as engine,
            owned(servers, tmp_path / "weights", PLAN, engine) as (runner, rollout),
            ThreadPoolExecutor(1) as pool,
        ):
            killer = pool.submit(kill_twice, servers[0]) if servers else None
            trainer = grpo_trainer(engine, runner, rollout.sync, tracker=curve)
            # While the server starts, the others answer: how many steps that takes depends on the machine.
            while not killed[0]:
                steps += 1
                trainer.train(steps)
                killed = [killer is not None and killer.done()]
                dist.broadcast_object_list(killed)
            if killer is not None:
                killer.result()
                record("servers killed under a trainer", f"{world().size} ranks, 3 servers", **rollout.counts)
    assert curve["rollout/sequences"] == [PLAN.groups * PLAN.group_size] * steps
    assert curve["rollout/failed"] == [0] * steps
    assert curve["rollout/staleness"] == [0] * steps
    assert max(curve["rollout/logprob_error"]) < 1e-5
