"""Offload of the activations of layers: each layer's are moved to host memory while the next layer computes, and come back while the
backward of the next layer computes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from areal.engine.torch.activations.host_pool import HostPool
from areal.engine.torch.activations.layer_activations import KnownStorages, LayerActivations, OffloadTools
from areal.engine.torch.activations.saved_storage import ActivationBytes
from areal.utils import platform
from areal.utils.profiling.moved_bytes import MovedBytes

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Functions that pack a saved tensor, and unpack it."""


class ActivationOffload:
    """Moves what the layers of an engine save for their backward to host memory.

    Args:
        device: device of the engine.
        moved: metrics of the next step: bytes moved, and the peaks in host memory and on the device.
    """

    def __init__(self, device: torch.device, moved: MovedBytes) -> None:
        self.counts = ActivationBytes(moved)
        self._tools = OffloadTools(device, platform.side_copies(device), HostPool(device), self.counts)
        self._forward: _ModelForward | None = None  # that runs now
        self._leaving: LayerActivations | None = None  # whose copies to host memory are under way
        self._call: list[LayerActivations] = []  # of all forwards of the current call

    def attach(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        weights_of: Callable[[nn.Module], Iterable[Tensor]],
        factors: Callable[[], Iterable[Tensor]] = tuple,
        *,
        last_too: bool,
    ) -> None:
        """Offload the activations of a model or a pipeline stage, in place.

        Args:
            model: calls the layers, one after the other.
            layers: layers of the model.
            weights_of: returns the local tensors of weights and buffers that a layer has read. They are not moved, nor are views of them.
            factors: returns further such weights, of all layers.
            last_too: move the activations of the last layer, too. Without it they stay, because the backward begins with them.
        """
        model.forward = _Around(model.forward, lambda: self._model(factors, last_too))
        for layer in layers:
            layer.forward = _Around(layer.forward, functools.partial(self._layer, functools.partial(weights_of, layer)))

    def hooks(self) -> Hooks | None:
        """Return the functions that pack and unpack tensors of the layer that runs now; ``None`` outside of layers."""
        layer = None if self._forward is None else self._forward.running
        return None if layer is None else (layer.pack, layer.unpack)

    def end_call(self) -> None:
        """Release the host memory of a call, whose backwards are complete or will not come."""
        self._free()
        for layer in self._call:
            layer.release()
        self._call = []

    @contextlib.contextmanager
    def _model(self, factors: Callable[[], Iterable[Tensor]], last_too: bool) -> Iterator[None]:
        """Surround a forward of a model."""
        self._forward = _ModelForward(KnownStorages(self._tools), _keys(factors()))
        try:
            yield
            # The head, or the next stage, needs memory.
            self._free()
            if last_too:
                self._leave(self._forward.last)
        finally:
            self._forward = None

    @contextlib.contextmanager
    def _layer(self, weights: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Surround a forward of a layer."""
        if self._forward is None:
            yield
            return
        # Two layers are on the device: the one before, which leaves now, and this one.
        before = self._forward.last
        self._free()
        self._leave(before)
        layer = LayerActivations(self._tools, self._forward.known, before)
        self._forward.running = layer
        try:
            with saved_tensors_hooks(layer.pack, layer.unpack):
                yield
            layer.close(_keys(weights()) | self._forward.factors)
        finally:
            self._forward.running = None
        self._forward.last = layer
        self._call.append(layer)

    def _leave(self, layer: LayerActivations | None) -> None:
        if layer is not None:
            layer.leave()
            self._leaving = layer

    def _free(self) -> None:
        if self._leaving is not None:
            self._leaving.free()
            self._leaving = None


class _ModelForward:
    """A forward of a model.

    Attributes:
        known: storages that its layers have saved.
        factors: keys of the storages of weights outside of its layers.
        running: activations of the layer that runs now, or ``None``.
        last: activations of the last layer that has run, or ``None``.
    """

    def __init__(self, known: KnownStorages, factors: set[int]) -> None:
        self.known, self.factors = known, factors
        self.running: LayerActivations | None = None
        self.last: LayerActivations | None = None


def _keys(tensors: Iterable[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}


class _Around:
    """A forward inside of a context, if gradients are enabled."""

    def __init__(
        self, inner: Callable[..., Any], context: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._inner, self._context = inner, context

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._inner(*args, **options)
        with self._context():
            return self._inner(*args, **options)
