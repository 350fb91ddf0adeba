"""A rollout engine whose weights go over a process group."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.inference.http.group import GlooCarrier
from areal.tests.harness.limits import promptly
from areal.tests.harness.servers.group.server import GroupServer
from areal.tests.unit.inference.group.sent_weights import SHAPES, Weights, assert_has, interrupted_after
from areal.utils.distributed import ControlPlane


@pytest.fixture
def servers() -> Iterator[list[GroupServer]]:
    started = [GroupServer(SHAPES), GroupServer(SHAPES, workers=2)]
    yield started
    for server in started:
        server.die()


def test_updates_of_a_rollout_go_over_the_group(servers: list[GroupServer]) -> None:
    urls = [server.url for server in servers]
    with HTTPRollout(
        urls, VLLM(), carrier=GlooCarrier(), control=ControlPlane(alone=True), update_seconds=20
    ) as rollout:
        for version in (1, 2):
            rollout.update(Weights(version).named_tensors(), version)
            assert rollout.version == version
            for server in servers:
                assert_has(server, Weights(version))


def test_interrupted_update_leaves_servers_out_until_the_next(servers: list[GroupServer]) -> None:
    urls = [server.url for server in servers]
    with HTTPRollout(urls, VLLM(), carrier=GlooCarrier(), update_seconds=20, drain_seconds=1) as rollout:
        rollout.update(Weights(1).named_tensors(), 1)
        rollout._updates._transport._sender._memory.nbytes = 1  # one tensor at a time
        with pytest.raises(RuntimeError, match="the source broke"):
            rollout.update(Weights(2, interrupted_after("scale")).named_tensors(), 2)
        assert [server.version for server in rollout._fleet.servers] == [None, None]
        assert all("was interrupted in an update" in server.why for server in rollout._fleet.servers)
        rollout.update(Weights(3).named_tensors(), 3)
        assert [server.version for server in rollout._fleet.servers] == [3, 3]
        for server in servers:
            assert_has(server, Weights(3))


def test_server_that_dies_is_left_out_of_the_group(servers: list[GroupServer]) -> None:
    urls = [server.url for server in servers]
    with HTTPRollout(urls, VLLM(), carrier=GlooCarrier(), update_seconds=5, drain_seconds=1) as rollout:
        rollout.update(Weights(1).named_tensors(), 1)
        servers[1].die()
        rollout.update(Weights(2).named_tensors(), 2)
        assert_has(servers[0], Weights(2))
        assert [server.version for server in rollout._fleet.servers] == [2, None]


def failure_of_sync(rollout: HTTPRollout, weights: Weights, version: int) -> str:
    try:
        rollout.sync(weights, version)
    except RuntimeError as error:
        return str(error)
    return ""


MOMENTS = [
    *(("/get_world_size", 1), ("/pause", 1), ("/start_weight_update", 1)),
    *(("/update_weights", number) for number in (1, 3, 7)),
    *(("/weight_info", 1), ("/finish_weight_update", 1), ("/resume", 1)),
]
"""Routes of an update, and the number of the call that ends a server. Not that of the join: while it waits for a rank that never comes, gloo
has ended the process of a test, in which all ranks are threads.
"""


@pytest.mark.parametrize(("route", "number"), MOMENTS)
@pytest.mark.parametrize("dying", [0, 1])
def test_server_that_dies_in_an_update_does_not_take_the_others_with_it(
    servers: list[GroupServer], dying: int, route: str, number: int
) -> None:
    """At any moment: the others get the weights once more, and serve them when the update returns."""
    urls, left = [server.url for server in servers], servers[1 - dying]
    with HTTPRollout(urls, VLLM(), carrier=GlooCarrier(), update_seconds=5, drain_seconds=1) as rollout:
        rollout._updates._transport._sender._memory.nbytes = 1  # one tensor at a time
        servers[dying].calls.clear()
        servers[dying].dies_in[route] = number
        with promptly():
            assert failure_of_sync(rollout, Weights(2), 2) == ""
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", servers[dying].port), timeout=5)
        assert_has(left, Weights(2))
        assert [server.version for server in rollout._fleet.servers] == [None if n == dying else 2 for n in (0, 1)]
        assert not left.paused
        rollout.sync(Weights(3), 3)
        assert_has(left, Weights(3))


def test_servers_that_die_in_different_updates(servers: list[GroupServer]) -> None:
    urls = [server.url for server in servers]
    with HTTPRollout(urls, VLLM(), carrier=GlooCarrier(), update_seconds=5, drain_seconds=1) as rollout:
        servers[0].dies_in["/update_weights"] = 1
        assert failure_of_sync(rollout, Weights(2), 2) == ""
        assert failure_of_sync(rollout, Weights(3), 3) == ""
        servers[1].calls.clear()
        servers[1].dies_in["/update_weights"] = 1
        with promptly():
            assert "version 4 was not sent" in failure_of_sync(rollout, Weights(4), 4)


def test_update_of_which_all_servers_die_ends(servers: list[GroupServer]) -> None:
    urls = [server.url for server in servers]
    with HTTPRollout(urls, VLLM(), carrier=GlooCarrier(), update_seconds=5, drain_seconds=1) as rollout:
        for server in servers:
            server.die()
        with promptly(), pytest.raises(RuntimeError, match="version 2 was not sent"):
            rollout.sync(Weights(2), 2)


def test_weights_need_a_way(servers: list[GroupServer], tmp_path: Path) -> None:
    url = servers[0].url
    with HTTPRollout(url, VLLM()) as rollout, pytest.raises(ValueError, match=r"folder = None and carrier = None"):
        rollout.update(Weights(1).named_tensors(), 1)
