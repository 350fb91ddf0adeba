"""Sources of shards that refuse to give them, before the servers are told of the update."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from areal.api.weights import LocalTensor, NamedTensor
from areal.inference.http import VLLM
from areal.tests.harness.servers.group.resharding import GlooReshardCarrier
from areal.tests.harness.servers.group.sending import GroupSending
from areal.tests.harness.servers.group.server import GroupServer

SHAPES = {"embed.weight": torch.Size([8, 4]), "norm.weight": torch.Size([4])}


class Shards:
    """Tensors of ones. ``refuses`` as an adapter that cannot be merged."""

    refuses = False

    def named_tensors(self) -> Iterator[NamedTensor]:
        raise NotImplementedError

    def local_tensors(self) -> Iterator[LocalTensor]:
        if self.refuses:
            raise ValueError("the adapter cannot be merged")
        full = {name: tuple(slice(0, length) for length in shape) for name, shape in SHAPES.items()}
        return (LocalTensor(name, torch.ones(shape), full[name], tuple(shape)) for name, shape in SHAPES.items())


def test_servers_keep_their_weights_if_the_source_refuses() -> None:
    server, source = GroupServer(SHAPES), Shards()
    with GroupSending([server.url], VLLM(), GlooReshardCarrier()) as transport:
        transport.send(source, 1)
        server.calls.clear()
        source.refuses = True
        with pytest.raises(ValueError, match="cannot be merged"):
            transport.send(source, 2)
        assert not [call for call in server.calls if call.startswith(("/pause", "/start", "/update"))]
        assert not transport.faults
        assert not [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
        source.refuses = False
        transport.send(source, 3)
        assert not transport.faults
    server.die()
