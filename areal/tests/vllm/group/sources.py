"""Weights that are sent to a vLLM server, from sources that may break."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from areal.api.weights import NamedTensor
from areal.tests.vllm.server import replica
from areal.weight_sync.apply import ModuleSource


class Weights:
    """Weights of a seed. ``then`` is called with each name before the next tensor, and may return another name."""

    def __init__(self, seed: int, then: Callable[[str], str | None] = lambda name: None) -> None:
        self.model, self._then = replica(seed), then

    def named_tensors(self) -> Iterator[NamedTensor]:
        for name, tensor in ModuleSource(self.model).named_tensors():
            yield NamedTensor(self._then(name) or name, tensor)


def stop_after(ending: str) -> Callable[[str], str | None]:
    stopped = []

    def then(name: str) -> str | None:
        if stopped:
            raise OSError("the source broke")
        stopped.extend([name] if name.endswith(ending) else [])
        return None

    return then
