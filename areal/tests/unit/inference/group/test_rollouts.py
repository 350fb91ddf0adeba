"""A rollout engine whose weights go over a process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.inference.http import VLLM, HTTPRollout
from areal.inference.http.group import GlooCarrier
from areal.tests.harness.servers.group_server import GroupServer
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


def test_weights_need_a_way(servers: list[GroupServer], tmp_path: Path) -> None:
    url = servers[0].url
    with HTTPRollout(url, VLLM()) as rollout, pytest.raises(ValueError, match=r"folder = None and carrier = None"):
        rollout.update(Weights(1).named_tensors(), 1)
