"""Weights that are sent to servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from areal.api.weights import NamedTensor
from areal.tests.harness.servers.group.server import GroupServer

Q = "layers.0.q_proj.weight"


SHAPES = {
    "embed.weight": torch.Size([12, 8]),
    Q: torch.Size([8, 8]),
    "layers.0.k_proj.weight": torch.Size([4, 8]),
    "layers.0.v_proj.weight": torch.Size([4, 8]),
    "layers.0.norm.weight": torch.Size([8]),
    "scale": torch.Size([]),
    "head.weight": torch.Size([12, 8]),
}


class Weights:
    """Random weights of a seed. ``then`` is called after a tensor was taken."""

    def __init__(self, seed: int, then: Callable[[str], None] = lambda name: None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self._then = then

    def named_tensors(self) -> Iterator[NamedTensor]:
        for name, tensor in self.tensors.items():
            shared = tensor.clone()
            yield NamedTensor(name, shared)
            self._then(name)
            shared.fill_(torch.nan)  # a source may overwrite a tensor when the next one is taken


def interrupted_after(name: str, error: BaseException | None = None) -> Callable[[str], None]:
    def then(taken: str) -> None:
        if taken == name:
            raise error or OSError("the source broke")

    return then


def assert_has(server: GroupServer, expected: Weights, dtype: torch.dtype = torch.float32) -> None:
    for worker in server.workers:
        assert not worker.active
        torch.testing.assert_close(
            worker.weights, {k: v.to(dtype) for k, v in expected.tensors.items()}, rtol=0, atol=0
        )
