"""The processes of ranks in Ray, with stand-ins for Ray: their order, resources that are checked before any starts, and losses."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from areal.dispatch.ray import RayWorkers
from areal.dispatch.ray.actor import ProcessInfo, last_lines
from areal.dispatch.ray.cluster import (
    Demand,
    by_rank,
    check_bundles,
    default_resources,
    explain,
    local_ranks,
)
from areal.dispatch.ray.processes import Processes, Start


def process_info(node: str, bundle: int, *gpus: int, sees: tuple[str, ...] | None = None) -> ProcessInfo:
    """A process on a node, to which Ray has assigned these GPUs."""
    devices = tuple(f"{node} {gpu}" for gpu in gpus) if sees is None else sees
    return ProcessInfo(node, "10.0.0.1", 100 + bundle, bundle, devices, gpus, ())


def test_ranks_of_a_node_are_consecutive_in_the_order_of_their_gpus() -> None:
    process_infos = [process_info("b", 0, 1), process_info("a", 1, 0), process_info("b", 2, 0), process_info("a", 3, 1)]
    assert by_rank(process_infos) == [2, 0, 1, 3]
    assert by_rank([process_info("a", 0, 10), process_info("a", 1, 9)]) == [1, 0]
    assert by_rank([process_info("a", 0), process_info("b", 1), process_info("a", 2)]) == [0, 2, 1]


def test_local_ranks_number_the_processes_that_see_the_same_devices() -> None:
    own = [process_info("a", 0, 0), process_info("a", 1, 1)]
    assert local_ranks(own) == [(0, 1), (0, 1)]
    everything = ("gpu 0", "gpu 1")
    same = [process_info("a", 0, 0, sees=everything), process_info("a", 1, 1, sees=everything)]
    assert local_ranks(same) == [(0, 2), (1, 2)]
    cpus = [process_info("a", 0), process_info("a", 1), process_info("b", 2), process_info("a", 3)]
    assert local_ranks(cpus) == [(0, 3), (1, 3), (0, 1), (2, 3)]


class Process:
    """The actor of a rank that replies at once, or not at all. Its methods return futures in place of references."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.world: tuple[int, int] | None = None
        self.leave, self.open_store = Remote(None, hangs), Remote(29400)
        self.enter = SimpleNamespace(remote=self._enter)

    def _enter(self, rank: int, size: int, *_: object) -> Future[None]:
        self.world = (rank, size)
        return Remote(None).remote()


class Remote:
    """A method of an actor."""

    def __init__(self, value: Any, hangs: bool = False) -> None:
        self._value, self._hangs = value, hangs

    def remote(self, *_: object) -> Future[Any]:
        future: Future[Any] = Future()
        if not self._hangs:
            future.set_result(self._value)
        return future


def test_processes_that_reply_after_a_loss_make_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four, one is lost and one hangs: two go on, and the one that hangs is ended."""

    def wait(refs: list[Future[Any]], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if ref.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    ended: list[Any] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(
        ray, "get", lambda refs, **_: [ref.result(0) for ref in refs] if isinstance(refs, list) else refs.result(0)
    )
    monkeypatch.setattr(ray, "kill", ended.append)
    actors = [Process(hangs=rank == 0) for rank in range(4)]
    infos = [process_info("a" if rank < 2 else "b", rank) for rank in range(4)]
    started = Start(Demand(2, 1, {"CPU": 1}, "PACK"), 1.0, 1, None, None, {}, None, None)
    processes = Processes(tuple(actors), tuple(infos), None)

    assert processes.without(1, started, 3, 0.1) is None
    assert not any(actor.world for actor in actors)
    left = processes.without(1, started, 2, 0.1)
    assert left is not None
    assert (left.actors, left.process_infos) == (tuple(actors[2:]), tuple(infos[2:]))
    assert [actor.world for actor in actors] == [None, None, (0, 2), (1, 2)]
    assert ended == actors[:1]


def test_processes_that_are_left_by_two_losses_make_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second lost process answers at once, with an error; those that live take a moment to leave."""
    actors = [Process() for _ in range(4)]
    infos = [process_info("a" if rank < 2 else "b", rank) for rank in range(4)]

    def leave(rank: int) -> Future[Any]:
        future: Future[Any] = Future()
        if rank >= 2:
            future.set_exception(RayActorError())
        return future

    def wait(refs: list[Future[Any]], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if ref.done()][:num_returns]
        if not done:
            refs[0].set_result(None)
            done = refs[:1]
        return done, [ref for ref in refs if ref not in done]

    for rank, actor in enumerate(actors):
        actor.leave = SimpleNamespace(remote=partial(leave, rank))  # type: ignore[assignment]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(
        ray, "get", lambda refs, **_: [ref.result(0) for ref in refs] if isinstance(refs, list) else refs.result(0)
    )
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    started = Start(Demand(2, 1, {"CPU": 1}, "PACK"), 1.0, 1, None, None, {}, None, None)
    left = Processes(tuple(actors), tuple(infos), None).without(2, started, 2, 5.0)
    assert left is not None
    assert [actor.world for actor in actors] == [(0, 2), (1, 2), None, None]


def test_missing_resources_are_named() -> None:
    nodes = [
        {
            "Alive": True,
            "NodeID": "abcdef0123",
            "NodeManagerAddress": "10.0.0.1",
            "Resources": {"CPU": 8.0, "TPU": 4.0},
        },
        {"Alive": False, "NodeID": "0123456789", "NodeManagerAddress": "10.0.0.2", "Resources": {"TPU": 4.0}},
    ]
    text = explain(Demand(4, 2, {"TPU": 4}, "PACK"), nodes, {"CPU": 8.0, "TPU": 4.0})
    assert "requested {TPU: 16} in 2 bundles of {TPU: 8}, PACK, existing {TPU: 4}" in text
    assert "not in use {TPU: 4}, missing {TPU: 12}. Nodes: 10.0.0.1 (abcdef01) has {TPU: 4}." in text
    text = explain(Demand(2, 1, {"CPU": 2}, "STRICT_SPREAD"), nodes, {"CPU": 8.0})
    assert "missing nothing in sum, but no placement fits" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size = 0"),
        ({"size": 3, "processes_per_bundle": 2}, "size = 3 processes do not fill bundles of processes_per_bundle = 2"),
        ({"strategy": "NEAR"}, "strategy = 'NEAR': it must be one of PACK"),
        ({"resources": {"GPU": 0}}, "resources = {'GPU': 0}"),
        ({"start_seconds": 0}, "start_seconds = 0"),
        ({"hang_seconds": -1}, "hang_seconds = -1"),
        ({"max_result_bytes": 0}, "max_result_bytes = 0"),
        ({"port": 70000}, "port = 70000"),
        ({"ping_seconds": 0}, "ping_seconds = 0"),
        (
            {"environment": {"WORLD_SIZE": "3", "RANK": "0"}},
            "environment has RANK, WORLD_SIZE, which each process gets",
        ),
        ({"bundles": (1,)}, "bundles = .* without placement_group"),
    ],
)
def test_impossible_values_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayWorkers(**{"size": 2, **options})


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ((1, 1), r"bundles = \[1, 1\]: name each once, from 0 to 3"),
        ((1, 4), r"bundles = \[1, 4\]: name each once"),
        ((1,), "bundles names 1 bundles, and size = 2 with processes_per_bundle = 1 needs 2"),
        ((0, 3), r"bundle 3 has \{CPU: 1\}, and 1 processes with resources = \{GPU: 1\} each need"),
        ((0, 2), ""),
        (None, ""),
    ],
)
def test_executors_divide_the_bundles_of_a_placement_group(chosen: tuple[int, ...] | None, message: str) -> None:
    bundles = [{"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"CPU": 1.0}]
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_bundles(Demand(2, 1, {"GPU": 1}, "PACK"), bundles, chosen)


def test_process_uses_the_bundle_that_was_chosen_for_it() -> None:
    demand = Demand(4, 2, {"CPU": 1}, "PACK")
    assert [Start(demand, 1, 1, None, None, {}, None, (5, 3)).bundle(n) for n in range(4)] == [5, 5, 3, 3]
    assert [Start(demand, 1, 1, None, None, {}, None, None).bundle(n) for n in range(4)] == [0, 0, 1, 1]


def test_ranks_get_gpus_by_default_where_there_are_some() -> None:
    assert default_resources({"CPU": 8.0, "GPU": 2.0}) == {"CPU": 1, "GPU": 1}
    assert default_resources({"CPU": 8.0, "GPU": 0.0}) == default_resources({"CPU": 8.0}) == {"CPU": 1}


def test_lines_that_ray_writes_are_not_among_those_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(
        ":job_id:01000000\n:actor_name:RankProcess\nstep 1\n:actor_name:RankProcess\nstep 2\n"
    )
    assert last_lines((str(tmp_path / "out"),), lines=2) == "step 1\nstep 2"
